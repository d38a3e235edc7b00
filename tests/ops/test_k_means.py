"""Clusters by k-means."""

from __future__ import annotations

import torch

from pyro_truncated.ops.k_means import k_means

CENTRES = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]], dtype=torch.float64)


def test_separate_clusters_are_found():
    points = CENTRES.repeat(20, 1) + 0.1 * torch.randn(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = k_means(points, points[:3])
    torch.testing.assert_close(found, torch.stack([points[c::3].mean(0) for c in range(3)]))


def test_a_centre_without_points_stays():
    start = torch.cat([CENTRES, torch.full((1, 2), 100.0, dtype=torch.float64)])
    assert torch.equal(k_means(CENTRES.repeat(3, 1), start), start)
