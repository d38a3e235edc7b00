"""Inducing inputs that leave the training set and follow the gradient of the objective.

The likelihood of the projected process, no bound, lets them go to where they fit the noise: then every data point that it looks at is
predicted too well, and none of these tells how wide intervals have to be. Some are kept out of sight for that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.gp.data_kernels import InputKernel
from pyro_truncated.gp.optimization import minimize
from pyro_truncated.gp.subset.alternation import hyper_parameters
from pyro_truncated.gp.subset.basis import FreeBasis
from pyro_truncated.gp.subset.fit_record import FitRecord
from pyro_truncated.gp.subset.gradient import backward
from pyro_truncated.gp.subset.subset_search import random_subset

_HELD_OUT, _MOST_HELD_OUT = 0.1, 1000


class SomeInputs(InputKernel):
    """A kernel of numeric inputs on some of its training inputs; the kernel keeps its parameters.

    Args:
        kernel: the kernel.
        rows: positions of the inputs.
    """

    def __init__(self, kernel: InputKernel, rows: Tensor) -> None:
        super().__init__(kernel.inputs[rows])
        self._lent = (kernel,)

    def between(self, first: Tensor, second: Tensor) -> Tensor:
        """Covariances ``(a, b)`` of points ``(a, D)`` and ``(b, D)``, differentiable in both."""
        return self._lent[0].between(first, second)

    def variances(self, points: Tensor) -> Tensor:
        """Variances ``(a,)`` of points ``(a, D)``."""
        return self._lent[0].variances(points)


def held_out_rows(num_data: int, members: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A tenth of the data, 1000 at most, at random from those that are no members of the subset."""
    order = random_subset(num_data, num_data, generator, members.device)
    return order[~torch.isin(order, members)][: min(_MOST_HELD_OUT, int(_HELD_OUT * num_data))]


def polish(
    kernel: InputKernel, inputs: Tensor, targets: Tensor, log_noise: Tensor, objective: str, held_out: Tensor, most: int, record: FitRecord
) -> float:
    """Moves inducing inputs, and with them the kernel's parameters and the noise; returns the objective of all data.

    Args:
        kernel: the kernel on the training inputs.
        inputs: the inducing inputs ``(m, D)``, changed in place.
        targets: ``(n, H)`` float64.
        log_noise: the noise as a free parameter.
        objective: ``"vfe"``, ``"pp"`` or ``"fitc"``.
        held_out: positions of the data points that it does not look at.
        most: most evaluations of the objective.
        record: takes each improvement, or the objective of all data where it does not look at all of them.
    """
    rows = torch.ones(len(targets), dtype=torch.bool, device=targets.device).index_fill(0, held_out, False)
    seen, learned = (SomeInputs(kernel, rows) if len(held_out) else kernel), [*hyper_parameters(kernel, log_noise), inputs]
    value = minimize(
        lambda: backward(FreeBasis(seen, inputs), targets[rows], log_noise, objective),
        learned,
        max_evaluations=most,
        is_spent=lambda: record.seconds_left() <= 0,
        on_better=lambda better: None if len(held_out) else record.note("polish", better),
    ).value
    if len(held_out):
        value = backward(FreeBasis(kernel, inputs), targets, log_noise, objective)
        record.note("polish", value)
        for parameter in learned:
            parameter.grad = None
    return value
