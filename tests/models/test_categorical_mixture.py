"""Latent classes: exact EM on binary and categorical columns."""

from __future__ import annotations

import math

import pytest
import torch
from pyro.infer import SVI
from torch import Tensor
from torch.distributions import Categorical

from pyro_truncated import AutoTruncated, ClosedForm, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.models import CategoricalMixture
from pyro_truncated.states import Population
from tests.models.enumeration import generate
from tests.models.mixture import full_population, log_joint

NUM_DATA, NUM_OBSERVED, NUM_CLASSES, NUM_VALUES = 150, 5, 3, 4
D64 = torch.float64


def make_model() -> CategoricalMixture:
    return CategoricalMixture(NUM_OBSERVED, NUM_CLASSES, NUM_VALUES, dtype=D64)


def make_data() -> Tensor:
    return generate(make_model(), NUM_DATA)


def test_log_joint_is_its_definition() -> None:
    model, y = make_model(), make_data()
    expected = model.weights.log() + Categorical(model.probs).log_prob(y.unsqueeze(1)).sum(-1)
    torch.testing.assert_close(log_joint(model, y), expected, rtol=1e-12, atol=1e-12)


def test_an_m_step_counts() -> None:
    model, y = make_model(), make_data()
    population = full_population(model, y)
    shares = log_joint(model, y).detach().softmax(1)
    model.maximize(model.sufficient_statistics(population, y))
    for k in range(NUM_CLASSES):
        for d in range(NUM_OBSERVED):
            expected = torch.stack([shares[y[:, d] == value, k].sum() for value in range(NUM_VALUES)]) / shares[:, k].sum()
            torch.testing.assert_close(model.probs[k, d].detach(), expected, rtol=1e-6, atol=3e-6)
    torch.testing.assert_close(model.weights.detach(), shares.mean(0))


def test_values_that_do_not_occur_and_classes_without_data() -> None:
    y = make_data()
    y[:, 2] = 1
    model = make_model().initialize(y)
    population = full_population(model, y)
    log_joints = population.log_joint.clone()
    log_joints[:, 1] = -math.inf
    before = model.probs[1].detach().clone()
    model.maximize(model.sufficient_statistics(Population(population.space, population.words, log_joints), y))
    torch.testing.assert_close(model.probs[1], before, rtol=1e-12, atol=0)
    torch.testing.assert_close(model.probs[0, 2], torch.tensor([1e-6, 1 - 3e-6, 1e-6, 1e-6], dtype=D64), rtol=1e-5, atol=0)
    assert full_population(model, y).free_energy().isfinite().all()


@pytest.mark.slow
def test_two_binary_columns_are_learned_exactly() -> None:
    # Two classes reach any table of two binary columns: the maximum of the likelihood is minus the entropy of the table.
    table = torch.tensor([[30.0, 10.0], [5.0, 55.0]], dtype=D64)
    y = torch.cat([torch.tensor([[a, b]]).expand(int(table[a, b]), -1) for a in (0, 1) for b in (0, 1)]).to(D64)
    model = CategoricalMixture(2, 2, 2, dtype=D64).initialize(y, torch.Generator().manual_seed(0))
    svi = SVI(model, AutoTruncated(model, num_states=2), ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))
    losses = [svi.step(y) for _ in range(120)]
    assert losses[-1] == pytest.approx(-float((table * (table / table.sum()).log()).sum()), rel=1e-4)


@pytest.mark.parametrize("value", [4.0, -1.0, 0.5, math.nan, math.inf])
def test_what_is_no_category_is_refused(value: float) -> None:
    y = make_data().to(D64)
    y[3, 1] = value
    with pytest.raises(ValueError, match="data point 3, entry"):
        make_model().initialize(y)
