"""Intervals for means of skewed importance weights, and their tails' heaviness."""

from __future__ import annotations

import math

import torch
from scipy import stats
from torch import Tensor

from pyro_truncated.utils.arviz_compat import pareto_shapes


def interval_of_mean(shares: Tensor, confidence: float) -> tuple[Tensor, Tensor]:
    """Returns confidence limits for means of skewed non-negative weights ``(N, M)``.

    Lower and upper ends are ``(N,)``.

    It is the union of two. Hall's comes from a monotone cubic transformation of the t-statistic
    that removes its skewness (Hall 1992). The other is symmetric for the logarithm of the mean.
    Both take as degrees of freedom half the number of effective draws, less one.
    """
    number, mean, deviation = shares.shape[1], shares.mean(-1), shares.std(-1).clamp(min=1e-300)
    error = deviation / number**0.5
    effective = shares.sum(-1).square() / shares.square().sum(-1).clamp(min=1e-300)
    degrees = (0.5 * effective - 1).clamp(min=1.0)
    quantile = torch.from_numpy(stats.t.ppf(0.5 + confidence / 2, degrees.cpu().numpy())).to(shares)
    skewness = ((shares - mean.unsqueeze(-1)) / deviation.unsqueeze(-1)).pow(3).mean(-1)
    slope = (skewness / number**0.5).abs().clamp(min=1e-6) * skewness.sign()
    slope = torch.where(slope == 0, 1e-6, slope)

    def statistic(target: Tensor) -> Tensor:
        """The t-statistic whose transform is the target."""
        cube = 1 + slope * (target - slope / 6)
        return 3 / slope * (cube.sign() * cube.abs() ** (1 / 3) - 1)

    relative = quantile * error / mean.clamp(min=1e-300)
    lower = torch.minimum(mean - error * statistic(quantile), mean * (-relative).exp())
    upper = torch.maximum(mean - error * statistic(-quantile), mean * relative.clamp(max=700.0).exp())
    # Where no draw has any weight there is nothing to extrapolate from.
    is_none = mean == 0
    return lower.clamp(min=0.0).masked_fill(is_none, 0.0), upper.masked_fill(is_none, 0.0)


def tail_indices(ratios: Tensor) -> Tensor:
    """Returns tail indices ``(N,)`` of log ratios ``(N, M)``.

    They are NaN where the tail holds too many equal values.
    """
    num_samples = ratios.shape[1]
    tail = ratios.sort(-1).values[:, -math.ceil(min(0.2 * num_samples, 3 * num_samples**0.5)) :]
    # Draws of zero weight differ by NaN, which exceeds nothing.
    distinct = (tail.diff(dim=-1) > 1e-9).double().mean(-1) > 0.5
    shapes = torch.full((len(ratios),), math.nan, dtype=torch.float64)
    if bool(distinct.any()):
        shapes[distinct] = torch.from_numpy(pareto_shapes(ratios[distinct].numpy()))
    return shapes
