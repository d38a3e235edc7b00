"""Whether a fit explains the data, or calls everything noise."""

from __future__ import annotations

import warnings

from torch import Tensor

_EXPLAINED_BY_NOISE, _EXPLAINED_BY_CHANCE, _ONE_SIDED = 0.02, 0.05, 1.645


class AllNoiseWarning(UserWarning):
    """The fit explains nearly all of the data as noise.

    Example:
        >>> x = torch.randn(40, 3).double()
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     objective = SubsetGPRegression(smooth_rbf(x), torch.randn(40).double(), num_inducing=2).fit(max_epochs=3)
        >>> {warning.category.__name__ for warning in caught}
        {'AllNoiseWarning'}
    """


def explained_share(targets: Tensor, predicted: Tensor) -> tuple[float, float]:
    """The share of standardised targets ``(n, H)`` that predictions account for, and its standard error."""
    gains = (targets.square() - (targets - predicted).square()).mean(1)
    return float(gains.mean()), float(gains.std(correction=0)) / len(gains) ** 0.5


def warn_of_noise(targets: Tensor, predicted: Tensor, noise: float, num_inducing: int | None = None) -> None:
    """Looks at how much of standardised targets ``(n, H)`` the predictions of each data point from all others account for.

    Args:
        targets: the targets.
        predicted: their predictions.
        noise: noise variance.
        num_inducing: number of inducing inputs, of regressions that have any.

    Warns:
        AllNoiseWarning: if it is next to nothing, or below a twentieth and at the 5 % level not to be told from it.
    """
    explained, error = explained_share(targets, predicted)
    # Noise itself looks explained by chance, a little.
    if explained < min(_EXPLAINED_BY_CHANCE, _EXPLAINED_BY_NOISE + _ONE_SIDED * error):
        by, more = ("", "") if num_inducing is None else (f", by {num_inducing} inducing inputs,", "take more inducing inputs, ")
        warnings.warn(
            f"the fit explains the targets as noise, of variance {noise:.3g} (of 1): predictions of each data point from all others{by} "
            f"account for {max(0.0, explained):.3f} of the targets' variance. Start from more noise and other length-scales (as smooth_rbf "
            f"does), {more}or add an identity kernel (SumKernel(..., redundant_sum=True, identity=True))",
            AllNoiseWarning,
            stacklevel=3,
        )
