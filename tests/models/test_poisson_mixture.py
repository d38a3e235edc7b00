"""Poisson mixtures: exact EM."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Poisson

from pyro_truncated import AutoTruncated
from pyro_truncated.models import PoissonMixture
from pyro_truncated.states import Population
from tests.models.enumeration import generate
from tests.models.mixture import full_population, log_joint

NUM_DATA, NUM_OBSERVED, NUM_COMPONENTS = 150, 6, 4


def make_model() -> PoissonMixture:
    model = PoissonMixture(NUM_OBSERVED, NUM_COMPONENTS, dtype=torch.float64)
    model.rate = 8 * torch.rand(NUM_COMPONENTS, NUM_OBSERVED).double()
    return model


def make_data() -> Tensor:
    return generate(make_model(), NUM_DATA)


def test_log_joint_is_its_definition() -> None:
    model, y = make_model(), make_data()
    expected = model.weights.log() + Poisson(model.rate).log_prob(y.unsqueeze(1)).sum(-1)
    torch.testing.assert_close(log_joint(model, y), expected, rtol=1e-12, atol=1e-12)


def test_dimensions_and_components_without_counts() -> None:
    y = make_data()
    y[:, 2] = 0
    model = make_model().initialize(y)
    population = full_population(model, y)
    log_joints = population.log_joint.clone()
    log_joints[:, 1] = -math.inf
    before = model.rate[1].detach().clone()
    model.maximize(model.sufficient_statistics(Population(population.space, population.words, log_joints), y))
    torch.testing.assert_close(model.rate[1], before, rtol=1e-14, atol=0)
    torch.testing.assert_close(model.rate[:, 2], torch.full((NUM_COMPONENTS,), 1e-6).double(), rtol=1e-6, atol=0)
    assert full_population(model, y).free_energy().isfinite().all()


def test_starts_from_clusters_of_the_counts() -> None:
    generator = torch.Generator().manual_seed(0)
    rate = 30 * torch.rand(5, 8, generator=generator, dtype=torch.float64) + 1
    number = torch.arange(500) % 5
    y = torch.poisson(rate[number], generator=generator)
    model = PoissonMixture(8, 5, dtype=torch.float64).initialize(y, generator)
    nearest = torch.cdist(model.rate.detach(), rate).argmin(1)
    assert nearest.sort().values.tolist() == [0, 1, 2, 3, 4]
    # A mean of a hundred counts of at most 31, and one more: within 4.5 standard deviations, in all forty entries but in one of 3000 runs.
    torch.testing.assert_close(model.rate.detach(), rate[nearest], rtol=0, atol=4.5 * 31**0.5 / 10 + 0.3)
    # A data point belongs to the nearest of five of them, whose own noise moves the boundaries: shares within a quarter.
    torch.testing.assert_close(model.weights.detach(), torch.full((5,), 0.2).double(), rtol=0, atol=0.05)


def test_dimensions_without_counts_can_be_counted_later() -> None:
    y = torch.zeros(4, NUM_OBSERVED, dtype=torch.float64)
    model = PoissonMixture(NUM_OBSERVED, 7, dtype=torch.float64).initialize(y)
    assert (model.rate > 0).all()
    assert (model.weights > 0).all()


def test_large_counts_in_single_precision() -> None:
    """Terms of the density that are millions cancel; data of one component at a time are told apart."""
    generator = torch.Generator().manual_seed(0)
    exact = PoissonMixture(200, 3, dtype=torch.float64)
    exact.rate = 50_000 * (1 + 0.01 * torch.rand(3, 200, dtype=torch.float64, generator=generator))
    single = PoissonMixture(200, 3)
    single.rate = exact.rate.detach().float()
    exact.rate = single.rate.detach().double()
    y = torch.poisson(exact.rate.detach()[torch.arange(30) % 3], generator=generator)
    posteriors = [AutoTruncated(model, num_states=3).infer(y.to(model.rate.dtype)).marginals()["z"] for model in (single, exact)]
    torch.testing.assert_close(posteriors[0].double(), posteriors[1], rtol=0.0, atol=0.01)
