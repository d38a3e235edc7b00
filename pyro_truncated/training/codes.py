"""Which latents of two models are on for the same data points."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import normalize

# The correlation above which two models have found the same latent.
SHARED = 0.9
# Standard deviation below which probabilities are constant.
ROUNDING = 1e-4


def matched(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Returns correlations ``(H, H)`` of two models' latents, and partners.

    Args:
        one: probabilities ``(N, H)`` that its latents are on.
        other: those of the other model, of the same data points.
    """
    correlation = _correlation(one, other)
    return correlation, torch.from_numpy(linear_sum_assignment(correlation.numpy(), maximize=True)[1])


def are_shared(one: Tensor, other: Tensor) -> Tensor:
    """Whether each latent of the first model has a partner, ``(H,)``.

    Partners are active, or inactive, for the same data points.
    """
    correlation, partner = matched(one, other)
    return correlation.gather(1, partner.unsqueeze(1)).squeeze(1) > SHARED


def share_most(one: Tensor, other: Tensor, most_apart: float) -> bool:
    """Whether most latents of both models have a partner in the other.

    Latents that are the same for all data points do not count.
    """
    apart = [(~are_shared(*pair), vary(pair[0])) for pair in ((one, other), (other, one))]
    return all(float((lost & varies).sum()) <= most_apart * float(varies.sum()) for lost, varies in apart)


def vary(code: Tensor) -> Tensor:
    """Whether latents of probabilities ``(N, H)`` vary over data points, ``(H,)``."""
    return code.std(0, correction=0) > ROUNDING


def _correlation(one: Tensor, other: Tensor) -> Tensor:
    """Returns absolute correlations ``(H, H)`` of probabilities ``(N, H)``.

    They are 0 for constant latents.
    """
    parts = []
    for value in (one, other):
        deviation = value - value.mean(0)
        parts.append(normalize(deviation.where(deviation.square().mean(0).sqrt() > ROUNDING, 0.0), dim=0))
    return (parts[0].mT @ parts[1]).abs()
