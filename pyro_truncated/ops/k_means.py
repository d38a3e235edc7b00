"""Clusters by k-means."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.utils.budget import rows_per_block

# Distances of so many bytes stay in a processor's cache.
_CACHED = 2**23


def k_means(points: Tensor, start: Tensor, steps: int = 20) -> Tensor:
    """Returns centres ``(K, D)`` of points ``(N, D)`` by Lloyd's algorithm.

    A centre that loses all its points stays where it is.

    Args:
        points: ``(N, D)``.
        start: centres to start from, ``(K, D)``, such as some of the points.
        steps: most iterations.
    """
    # Distances are differences of squares, which are smallest around the mean.
    mean = points.mean(0)
    points, centres = points - mean, start - mean
    for _ in range(steps):
        nearest = _nearest(points, centres, 1).squeeze(1)
        size = torch.bincount(nearest, minlength=len(centres)).to(points).unsqueeze(1)
        total = torch.zeros_like(centres).index_add_(0, nearest, points)
        moved = torch.where(size > 0, total / size.clamp(min=1), centres)
        if torch.equal(moved, centres):
            break
        centres = moved
    return centres + mean


def nearest_centres(points: Tensor, centres: Tensor, number: int = 1) -> Tensor:
    """Returns the nearest centres of ``(K, D)`` for points ``(N, D)``.

    They are ``(N, number)``, nearest first, or all if there are fewer.
    """
    mean = points.mean(0)
    return _nearest(points - mean, centres - mean, min(number, len(centres)))


def _nearest(points: Tensor, centres: Tensor, number: int) -> Tensor:
    power, bytes_per_row = 0.5 * centres.square().sum(1), 2 * len(centres) * points.element_size()
    rows = min(rows_per_block(bytes_per_row), rows_per_block(bytes_per_row, _CACHED))
    distances = (torch.addmm(power, block, centres.mT, alpha=-1.0) for block in points.split(rows))
    return torch.cat([_smallest(some, number) for some in distances])


def _smallest(distances: Tensor, number: int) -> Tensor:
    return distances.argmin(1, keepdim=True) if number == 1 else distances.topk(number, 1, largest=False).indices
