"""Poisson mixtures: exact EM."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Poisson

from pyro_truncated.models import PoissonMixture
from pyro_truncated.states import Population
from tests.models.enumeration import assert_never_falls, generate
from tests.models.mixture import free_energies, full_population, log_joint

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


@pytest.mark.parametrize("num_kept", [2, NUM_COMPONENTS])
def test_em_never_lowers_the_free_energy(num_kept: int) -> None:
    y = make_data()
    model = make_model().initialize(y)
    chosen = full_population(model, y).log_joint.topk(num_kept).indices
    assert_never_falls(free_energies(model, y, num_iterations=40, chosen=chosen))


def test_maximize_finds_the_stationary_point_of_q() -> None:
    y = make_data()
    model = make_model().initialize(y)
    population = full_population(model, y)
    model.maximize(model.sufficient_statistics(population, y))
    expected = (population.weights() * log_joint(model, y)).sum()
    for gradient in torch.autograd.grad(expected, [model.weights_unconstrained, model.rate_unconstrained]):
        assert gradient.abs().max() < 1e-9


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


def test_statistics_add_up_over_parts_of_the_data() -> None:
    model, y = make_model(), make_data()
    population = full_population(model, y)
    whole = model.sufficient_statistics(population, y)
    parts = []
    for index in (torch.arange(50), torch.arange(50, NUM_DATA)):
        part = Population(population.space, population.words[index], population.log_joint[index], index)
        parts.append(model.sufficient_statistics(part, y))
    for name, value in whole.items():
        torch.testing.assert_close(parts[0][name] + parts[1][name], value, rtol=1e-12, atol=1e-12)
