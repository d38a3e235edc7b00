"""What is known of a damaged array before anything is learned: its noise, what is missing, and how large patches should be."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Normal
from torch.nn import functional as F

# Differences of which the median says something.
_ENOUGH = 100


def noise_level(image: Tensor, num_dims: int) -> float:
    """A first guess of the noise: the median of third differences along all dimensions, little affected by edges and not by slopes.

    Where few entries have all the neighbours that this takes, differences of lower order are taken.
    """
    least = max(1e-3 * float(deviation(image)), torch.finfo(image.dtype).tiny)
    for order in (3, 2, 1):
        left = image
        for dim in range(num_dims):
            left = left.diff(order, dim)
        seen = left[~left.isnan()]
        if len(seen) >= _ENOUGH:
            # The squares of binomial coefficients add up to a central one.
            return max(_level(seen) / math.sqrt(math.comb(2 * order, order) ** num_dims), least)
    left = torch.cat([image.diff(dim=dim).flatten() for dim in range(num_dims)])
    seen = left[~left.isnan()]
    return max(_level(seen) / 2**0.5 if len(seen) else 0.1 * float(deviation(image)), least)


def _level(differences: Tensor) -> float:
    """The standard deviation of normal numbers of which most of these are."""
    return float(differences.abs().median() / Normal(0.0, 1.0).icdf(torch.tensor(0.75)))


def deviation(image: Tensor) -> Tensor:
    """The standard deviation of the observed entries."""
    return (image - image.nanmean()).square().nanmean().sqrt()


def filled(image: Tensor, num_dims: int) -> Tensor:
    """The image with missing entries replaced by the mean of their observed neighbours, from near to far."""
    missing = image.isnan()
    if not bool(missing.any()):
        return image
    value, known = image.nan_to_num(0.0), (~missing).to(image.dtype)
    while bool((known == 0).any()):
        total, share = (_neighbours(array, num_dims) for array in (value * known, known))
        value = torch.where(known > 0, value, total / share.clamp(min=1e-9))
        known = torch.where(known > 0, known, (share > 0).to(known.dtype))
    return value


def _neighbours(array: Tensor, num_dims: int) -> Tensor:
    """Sums over the windows of side three around every entry."""
    for dim in range(num_dims):
        moved = array.movedim(dim, -1)
        rows = F.pad(moved.reshape(-1, moved.shape[-1]), (1, 1))
        array = rows.unfold(-1, 3, 1).sum(-1).reshape(moved.shape).movedim(-1, dim)
    return array
