"""Which latents of two models are on for the same data points."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import normalize

# The correlation above which two models have found the same latent.
SHARED = 0.9
# The standard deviation of probabilities that do not differ: less than that of a latent which one of a million data points has.
ROUNDING = 1e-4


def matched(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Correlations ``(H, H)`` of the latents of two models, and the partner of each latent of the first.

    Args:
        one: probabilities ``(N, H)`` that its latents are on.
        other: those of the other model, of the same data points.
    """
    correlation = _correlation(one, other)
    return correlation, torch.from_numpy(linear_sum_assignment(correlation.numpy(), maximize=True)[1])


def are_shared(one: Tensor, other: Tensor) -> Tensor:
    """Whether each latent of the first model has a partner in the other one, ``(H,)``, that is on - or off - for the same data points."""
    correlation, partner = matched(one, other)
    return correlation.gather(1, partner.unsqueeze(1)).squeeze(1) > SHARED


def share_most(one: Tensor, other: Tensor, most_apart: float) -> bool:
    """Whether no larger part of the latents that are on for some data points is without a partner in the other model, either way."""
    apart = [(~are_shared(*pair), vary(pair[0])) for pair in ((one, other), (other, one))]
    return all(float((lost & varies).sum()) <= most_apart * float(varies.sum()) for lost, varies in apart)


def vary(code: Tensor) -> Tensor:
    """Whether each latent of probabilities ``(N, H)`` is on for some data points and off for others, ``(H,)``."""
    return code.std(0, correction=0) > ROUNDING


def _correlation(one: Tensor, other: Tensor) -> Tensor:
    """Absolute correlations ``(H, H)`` of probabilities ``(N, H)``; of such that are the same everywhere, but for rounding, 0."""
    parts = []
    for value in (one, other):
        deviation = value - value.mean(0)
        parts.append(normalize(deviation.where(deviation.square().mean(0).sqrt() > ROUNDING, 0.0), dim=0))
    return (parts[0].mT @ parts[1]).abs()
