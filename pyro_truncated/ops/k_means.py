"""Clusters by k-means."""

from __future__ import annotations

import torch
from torch import Tensor


def k_means(points: Tensor, start: Tensor, steps: int = 20) -> Tensor:
    """Centres ``(K, D)`` of clusters of points ``(N, D)`` by Lloyd's algorithm; a centre that loses all its points stays where it is.

    Args:
        points: ``(N, D)``.
        start: centres to start from, ``(K, D)``, such as some of the points.
        steps: most iterations.
    """
    centres = start.clone()
    for _ in range(steps):
        nearest = torch.cdist(points, centres).argmin(1)
        size = torch.bincount(nearest, minlength=len(centres)).to(points).unsqueeze(1)
        total = torch.zeros_like(centres).index_add_(0, nearest, points)
        moved = torch.where(size > 0, total / size.clamp(min=1), centres)
        if torch.equal(moved, centres):
            break
        centres = moved
    return centres
