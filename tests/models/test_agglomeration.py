"""Where components start: clusters that become one, against brute force, and where k-means goes wrong."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_truncated.models import GaussianMixture
from pyro_truncated.models.covariances import make_covariances
from pyro_truncated.models.gaussians import Agglomeration, ClusterMerger
from tests.models.mixture import free_energies

D64 = torch.float64
KINDS = ("full", "diag", "spherical", "tied", "low-rank")
FLOOR = torch.tensor(1e-6, dtype=D64)
PRIOR = 10


def rank_of(covariance: str) -> int | None:
    return 1 if covariance == "low-rank" else None


def some_data(size: int = 80, dims: int = 3, seed: int = 0) -> Tensor:
    y = torch.randn(size, dims, dtype=D64, generator=torch.Generator().manual_seed(seed)).cumsum(0)
    return y - y.mean(0)


def likeliest(covariance: str, rows: Tensor, within: Tensor) -> MultivariateNormal:
    """The likeliest normal distribution of rows and of ten more, spread as is known beforehand."""
    around = rows - rows.mean(0)
    found = (around.mT @ around + PRIOR * within) / (len(rows) + PRIOR)
    identity = torch.eye(rows.shape[1], dtype=D64)
    if covariance == "diag":
        found = found.diagonal().diag()
    elif covariance == "spherical":
        found = found.diagonal().mean() * identity
    elif covariance == "tied":
        found = within
    elif covariance == "low-rank":
        values, vectors = torch.linalg.eigh(found)
        noise = values[:-1].mean()
        found = noise * identity + (values[-1] - noise) * torch.outer(vectors[:, -1], vectors[:, -1])
    return MultivariateNormal(rows.mean(0), found)


def brute_force(covariance: str, x: Tensor, owner: Tensor, within: Tensor, number: int) -> Tensor:
    """Clusters of which the two that cost least become one, until so many are left."""

    def log_density(*clusters: int) -> float:
        rows = x[torch.isin(owner, torch.tensor(clusters))]
        return float(likeliest(covariance, rows, within).log_prob(rows).sum())

    owner = owner.clone()
    while len(left := owner.unique().tolist()) > number:
        pairs = list(itertools.combinations(left, 2))
        one, other = min(pairs, key=lambda pair: log_density(pair[0]) + log_density(pair[1]) - log_density(*pair))
        owner[owner == other] = one
    return owner.unique(return_inverse=True)[1]


@pytest.mark.slow
@pytest.mark.parametrize("covariance", KINDS)
def test_clusters_become_one_in_the_order_of_what_that_costs(covariance: str) -> None:
    x = some_data()
    owner = torch.arange(8).repeat_interleave(10)
    kind = make_covariances(covariance, 3, rank_of(covariance), False)
    clusters = Agglomeration(kind, x, FLOOR)
    around = x - torch.stack([rows.mean(0) for rows in x.split(10)])[owner]
    within = around.mT @ around / (80 - 8)
    # One at a time, as a third of no more than three is.
    for number in (7, 6, 5):
        merging = ClusterMerger(
            kind, lambda some: clusters.likeliest(some, within), clusters.statistics(owner, 8), torch.combinations(torch.arange(8))
        )
        found = merging.merge_to(number)[owner].unique(return_inverse=True)[1]
        assert torch.equal(found, brute_force(covariance, x, owner, within, number))


@pytest.mark.parametrize("covariance", KINDS)
def test_costs_are_those_of_two_components_that_become_one(covariance: str) -> None:
    x = some_data()
    owner = torch.arange(8).repeat_interleave(10)
    kind = make_covariances(covariance, 3, rank_of(covariance), False)
    clusters, pairs, within = Agglomeration(kind, x, FLOOR), torch.combinations(torch.arange(8)), torch.cov(x.mT) / 50
    costs = ClusterMerger(kind, lambda some: clusters.likeliest(some, within), clusters.statistics(owner, 8), pairs).costs(pairs)
    alone = [likeliest(covariance, rows, within).log_prob(rows).sum() for rows in x.split(10)]
    for pair, cost in zip(pairs.tolist(), costs, strict=True):
        both = x[torch.isin(owner, torch.tensor(pair))]
        expected = alone[pair[0]] + alone[pair[1]] - likeliest(covariance, both, within).log_prob(both).sum()
        torch.testing.assert_close(cost, expected)


@pytest.mark.parametrize("covariance", ["full", "low-rank"])
@pytest.mark.parametrize("dtype", [torch.float32, D64])
def test_long_clusters_that_cross_are_told_apart(covariance: str, dtype: torch.dtype) -> None:
    """Which k-means cannot: their means are the same."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    member = torch.arange(600) % 3
    y = 10 * directions[member] * torch.randn(600, 1, generator=generator) + 0.3 * torch.randn(600, 3, generator=generator)
    model = GaussianMixture(3, 3, covariance=covariance, rank=rank_of(covariance), pseudo_data=0, dtype=dtype)
    truth = MultivariateNormal(torch.zeros(3, 3), 0.09 * torch.eye(3) + 100 * directions.unsqueeze(-1) * directions.unsqueeze(-2))
    best = float((truth.log_prob(y.unsqueeze(1)) - torch.tensor(3.0).log()).logsumexp(1).sum())
    model.initialize(y.to(dtype), torch.Generator().manual_seed(1))
    assert free_energies(model, y.to(dtype), num_iterations=20)[-1] >= best


@pytest.mark.parametrize("covariance", KINDS)
@pytest.mark.parametrize("number", [1, 2, 9])
def test_few_data_points_and_few_different_ones(covariance: str, number: int) -> None:
    corners = torch.tensor([[0.0, 0.0, 0.0], [4.0, 0.0, 0.0], [0.0, 4.0, 1.0]], dtype=D64)
    for y in (corners.repeat(5, 1), corners, corners[:1], corners[:1].repeat(7, 1)):
        model = GaussianMixture(3, number, covariance=covariance, rank=rank_of(covariance), dtype=D64).initialize(y)
        assert float(model.weights.detach().sum()) == pytest.approx(1.0)
        assert bool((model.weights > 0).all())
        assert len(model.loc.detach().unique(dim=0)) == number
        values = free_energies(model, y, num_iterations=3)
        assert all(later >= earlier - 1e-6 * abs(earlier) for earlier, later in itertools.pairwise(values))


def test_a_generator_is_all_that_chance_depends_on() -> None:
    y = some_data(500)
    starts: list[Any] = [GaussianMixture(3, 20).initialize(y.float(), torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(starts[0].loc, starts[1].loc)
    assert not torch.equal(starts[0].loc, starts[2].loc)


@pytest.mark.slow
def test_many_dimensions_are_looked_at_in_the_main_directions() -> None:
    """Clusters that differ in few of 200 dimensions: full covariances are of all of them nevertheless."""
    generator = torch.Generator().manual_seed(0)
    y = 0.1 * torch.randn(400, 200, dtype=D64, generator=generator)
    member = torch.arange(400) % 4
    y[:, :4] += 5 * torch.eye(4, dtype=D64)[member]
    model = GaussianMixture(200, 4, dtype=D64).initialize(y, torch.Generator().manual_seed(1))
    assert model.scale.shape == (4, 200, 200)
    assert len(model.likeliest_components(y, 1)[:4].unique()) == 4
    assert torch.equal(model.likeliest_components(y, 1)[:, 0], model.likeliest_components(y, 1)[member, 0])


@pytest.mark.parametrize("seed", range(3))
def test_noise_that_all_share_says_nothing_about_who_belongs_together(seed: int) -> None:
    # Shared by whatever clusters are compared at once, it would make what two of them cost depend on the others.
    generator = torch.Generator().manual_seed(seed)
    widths = torch.rand(20, 1, dtype=D64, generator=generator).repeat_interleave(20, 0)
    x = some_data(20, 4, seed).repeat_interleave(20, 0) + 3 * widths * torch.randn(400, 4, dtype=D64, generator=generator)
    found = [
        Agglomeration(make_covariances("low-rank", 4, 1, shared_noise=is_shared), x, FLOOR).components(8, torch.Generator().manual_seed(0))
        for is_shared in (False, True)
    ]
    torch.testing.assert_close(found[0].loc, found[1].loc)


def test_sorted_data_have_components_everywhere() -> None:
    # Of more rows than the first clusters are sought among, the last ones are a cluster of their own.
    centres = 20.0 * torch.cartesian_prod(torch.arange(5.0, dtype=D64), torch.arange(5.0, dtype=D64))[:22]
    x = centres.repeat_interleave(1000, 0) + torch.randn(22_000, 2, dtype=D64, generator=torch.Generator().manual_seed(0))
    found = Agglomeration(make_covariances("diag", 2, None, shared_noise=False), x, FLOOR).components(22, torch.Generator().manual_seed(0))
    assert (torch.cdist(centres, found.loc).amin(1) < 1.0).all()
