"""Poisson mixtures: exact EM."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Poisson

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
