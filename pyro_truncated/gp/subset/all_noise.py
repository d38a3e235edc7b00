"""Whether a fit explains the data, or calls everything noise."""

from __future__ import annotations

import warnings

from torch import Tensor

_EXPLAINED_BY_NOISE = 0.02


class AllNoiseWarning(UserWarning):
    """The fit explains nearly all of the data as noise.

    Example:
        >>> x = torch.randn(40, 3).double()
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     objective = SubsetGPRegression(smooth_rbf(x), torch.randn(40).double(), num_inducing=2).fit(max_epochs=3)
        >>> {warning.category.__name__ for warning in caught}
        {'AllNoiseWarning'}
    """


def warn_of_noise(fitted: Tensor, noise: float, num_inducing: int) -> None:
    """Looks at how much of standardised targets the predictions ``(n, H)`` at the training inputs account for.

    Warns:
        AllNoiseWarning: if it is next to nothing.
    """
    # Of the mean, not of the prior: a kernel that has become a constant has all the prior variance one could want.
    explained = float((fitted - fitted.mean(0)).square().mean())
    if explained < _EXPLAINED_BY_NOISE:
        warnings.warn(
            f"the fit explains the targets as noise of variance {noise:.3g} (of 1): predictions from the {num_inducing} "
            f"inducing inputs account for {explained:.2g} of the targets' variance. Start from more noise and other "
            "length-scales (as smooth_rbf does), take more inducing inputs, or add an identity kernel "
            "(SumKernel(..., redundant_sum=True, identity=True))",
            AllNoiseWarning,
            stacklevel=3,
        )
