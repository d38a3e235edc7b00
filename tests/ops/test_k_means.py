"""Clusters by k-means."""

from __future__ import annotations

import torch

from pyro_truncated.ops.components import k_means, nearest_centres
from pyro_truncated.utils.budget import memory_budget

CENTRES = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]], dtype=torch.float64)


def test_separate_clusters_are_found():
    points = CENTRES.repeat(20, 1) + 0.1 * torch.randn(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = k_means(points, points[:3])
    torch.testing.assert_close(found, torch.stack([points[c::3].mean(0) for c in range(3)]))


def test_a_centre_without_points_stays():
    start = torch.cat([CENTRES, torch.full((1, 2), 100.0, dtype=torch.float64)])
    assert torch.equal(k_means(CENTRES.repeat(3, 1), start), start)


def test_nearest_centres_are_those_of_all_distances_far_from_the_origin_too():
    points = 1e4 + torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    centres = points[:20] + 0.5
    with memory_budget(10_000):
        found = nearest_centres(points, centres, 4)
    assert torch.equal(found, torch.cdist(points.double(), centres.double()).topk(4, largest=False).indices)
    assert torch.equal(nearest_centres(points, centres)[:, 0], found[:, 0])
    assert nearest_centres(points[:2], centres[:1], 4).tolist() == [[0], [0]]
