"""What the plates around a distribution make of the log density of its active set."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from pyro.poutine.runtime import apply_stack

from pyro_truncated.distributed import world


class ActiveSetScaleWarning(UserWarning):
    """A plate that subsamples multiplies the log density of an active set, which should count once.

    Example:
        >>> def model(z, x):
        ...     with pyro.plate("data", 20, subsample_size=10) as index:
        ...         likelihood = ActiveSetGaussianProcess(z[index], pyro.contrib.gp.kernels.RBF(1), 0.1, 4, 2)  # no num_data=20
        ...         pyro.sample("x", likelihood, obs=x[index])
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     pyro.poutine.trace(model).get_trace(torch.randn(20, 1), torch.randn(20, 2)).compute_log_prob()
        >>> {warning.category.__name__ for warning in caught}
        {'ActiveSetScaleWarning'}
    """


def warn_if_scaled(num_active: int, batch_size: int, num_data: int | None = None) -> None:
    """Warns where the handlers that are open scale the active points of a minibatch like all others.

    A plate that takes ``B`` of ``N`` data points multiplies every log density by ``N / B``, also that of the active set, whose points are
    conditioned on and stand for no others. What is scaled on purpose, by :meth:`Split.weights` for example, differs between data points.

    Args:
        num_active: size of the active set.
        batch_size: number of data points of the distribution, ``B``.
        num_data: ``N`` as the distribution was told, which corrects the plate's scale if it is the plate's; or None.

    Warns:
        ActiveSetScaleWarning: if all data points have one scale other than 1 in a plate that subsamples, or the plate has another ``N``.
    """
    message = _message()
    apply_stack(message)
    frame = next((f for f in message["cond_indep_stack"] if f.vectorized and f.dim == -1), None)
    if num_active == 0 or frame is None or frame.size != batch_size or (frame.full_size or frame.size) == frame.size:
        return
    if num_data is not None:
        if num_data != frame.full_size:
            _warn(f"plate '{frame.name}' takes {frame.size} of {frame.full_size} data points, but the distribution has num_data={num_data}")
        return
    scales = torch.as_tensor(message["scale"], dtype=torch.float64)
    # Of data points that several processes share, each takes an equal share.
    first, once = scales.flatten()[0], torch.tensor([1.0, 1.0 / world.size()], dtype=torch.float64)
    if torch.allclose(scales, first.expand_as(scales)) and not bool(torch.isclose(first.cpu(), once).any()):
        _warn(
            f"plate '{frame.name}' takes {frame.size} of {frame.full_size} data points and so multiplies the log density of the active "
            f"set, too, by {frame.full_size / frame.size:g}. Pass num_data={frame.full_size} to the distribution, or, where other sites of "
            "the plate need the same weights, open poutine.scale(scale=split.weights(num_data)) around all of them before the distribution "
            "is made."
        )


def _warn(text: str) -> None:
    warnings.warn(text, ActiveSetScaleWarning, stacklevel=4)


def _message() -> Any:
    """A message that nobody answers, on which handlers leave their scale and plates."""
    return {
        "type": "active_set_scale",
        "name": "_active_set",
        "fn": lambda: None,
        "is_observed": False,
        "args": (),
        "kwargs": {},
        "value": None,
        "scale": 1.0,
        "mask": None,
        "cond_indep_stack": (),
        "done": False,
        "stop": False,
        "continuation": None,
        "infer": {},
    }
