"""Minibatches with active sets: partitions, inclusion probabilities, weights."""

from __future__ import annotations

import itertools

import pytest
import torch
from pyro.contrib.gp import kernels

from pyro_truncated.gp import Split, UniformSplits, linear_growth
from pyro_truncated.gp.active_sets import least_variance, split_weights


def test_weights_undo_the_scale_of_a_plate():
    weights = split_weights(10, 4, 50) * 50 / 10
    torch.testing.assert_close(weights, torch.tensor([1.0] * 4 + [46 / 6] * 6))
    assert torch.equal(split_weights(10, 4, 10), torch.ones(10))
    assert torch.equal(split_weights(10, 10, 10), torch.ones(10))


def test_uniform_epoch_is_a_partition(generator):
    splits = list(UniformSplits(23, 6, 2, generator).epoch())
    assert [len(split.indices) for split in splits] == [6, 6, 6, 5]
    assert sorted(torch.cat([split.indices for split in splits]).tolist()) == list(range(23))
    last = list(UniformSplits(14, 6, 2, generator).epoch())[-1]
    assert len(set(last.indices.tolist())) == 6
    assert all(len(split.active) == 2 for split in splits)


def left(kernel, latents, active, noise):
    """Mean predictive variance of the function given these points, by dense inverses."""
    with torch.no_grad():
        C = kernel(latents[active]) + noise * torch.eye(len(active), dtype=latents.dtype)
        cross = kernel(latents[active], latents)
        return float((kernel(latents, diag=True) - (cross * torch.linalg.solve(C, cross)).sum(0)).mean())


@pytest.mark.slow
def test_least_variance_takes_the_best_point_at_every_step(generator):
    latents = torch.randn(30, 2, dtype=torch.float64, generator=generator)
    kernel = kernels.Matern52(2, lengthscale=torch.tensor(0.5)).double()
    chosen = least_variance(kernel, latents, 8, noise=0.05).tolist()
    for step, point in enumerate(chosen):
        others = [n for n in range(30) if n not in chosen[:step]]
        assert point == min(others, key=lambda n: left(kernel, latents, [*chosen[:step], n], 0.05))
    assert len(set(least_variance(kernel, latents, 30).tolist())) == 30


def test_least_variance_looks_at_rows_of_all_kinds_where_these_take_turns(generator):
    latents = torch.rand(40, 1, generator=generator) + 100.0 * (torch.arange(40) % 2).unsqueeze(1)
    chosen = least_variance(kernels.RBF(1), latents, 2, num_targets=20)
    assert latents[chosen].sort(0).values[0] < 50 < latents[chosen].sort(0).values[1]


def test_growing_sizes(generator):
    size = linear_growth(2, 6, 4)
    assert [size(epoch) for epoch in range(7)] == [2, 3, 4, 5, 6, 6, 6]
    splits = UniformSplits(40, 20, size, generator)
    assert [next(splits.epoch(number)).num_active for number in (0, 2, 9)] == [2, 4, 6]


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="batch_size must lie in"):
        UniformSplits(10, 11, 2)
    with pytest.raises(ValueError, match="num_active <= batch"):
        UniformSplits(10, 5, 6)
    with pytest.raises(ValueError, match="none stands for"):
        UniformSplits(10, 5, 5)
    with pytest.raises(ValueError, match="the number of candidates"):
        least_variance(kernels.RBF(1), torch.zeros(3, 1), 4)
    with pytest.raises(ValueError, match="sizes must satisfy"):
        linear_growth(5, 2, 3)


def test_rest_is_even_given_the_active_set(generator):
    """All 120 orders of a partition: every pair of active point and rest point is equally frequent."""
    counts = torch.zeros(5, 5)
    for order in itertools.permutations(range(5)):
        split = Split(torch.tensor(order[:3]), 1)
        counts[split.active, split.rest] += 1
    assert torch.equal(counts, 12 * (1 - torch.eye(5)))


def test_default_noise_of_least_variance_follows_the_scale_of_the_kernel(generator):
    z = torch.randn(40, 2, generator=generator)
    small, large = (least_variance(kernels.RBF(2, torch.tensor(variance)), z, 8) for variance in (1e-4, 1e4))
    assert torch.equal(small, large)
