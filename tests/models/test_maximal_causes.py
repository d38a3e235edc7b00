"""Maximal causes analysis: EM by enumeration, with and without missing data."""

from __future__ import annotations

import math

import pyro
import pytest
import torch
from torch import Tensor

from pyro_truncated.models import MaximalCauses
from pyro_truncated.states import Population
from tests.models.enumeration import expected_log_joint, free_energies, full_population, generate, log_joint

NUM_DATA, NUM_OBSERVED, NUM_LATENTS = 60, 7, 4
NAMES = ("weight", "scale", "prior")


def make_model(shared_prior: bool = True, dtype: torch.dtype = torch.float64, num_latents: int = NUM_LATENTS) -> MaximalCauses:
    model = MaximalCauses(NUM_OBSERVED, num_latents, shared_prior=shared_prior, dtype=dtype)
    model.weight = 4 * torch.rand(NUM_OBSERVED, num_latents, dtype=dtype)
    model.scale = torch.tensor(0.7, dtype=dtype)
    return model


def make_data(model: MaximalCauses, with_missing: bool) -> Tensor:
    return generate(model, NUM_DATA, with_missing)


def test_model_is_bernoulli_times_normal_of_the_maximum() -> None:
    model = make_model()
    y = make_data(model, with_missing=False)
    states = torch.bernoulli(torch.full((5, NUM_LATENTS), 0.5)).double()
    prior = torch.distributions.Bernoulli(model.prior).log_prob(states).sum(-1)
    mean = (model.weight * states.unsqueeze(-2)).amax(-1)
    likelihood = torch.distributions.Normal(mean, model.scale).log_prob(y.unsqueeze(1)).sum(-1)
    torch.testing.assert_close(log_joint(model, y, states), prior + likelihood, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_steps_that_would_lower_the_free_energy_are_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyro_truncated.models import dictionary

    falls = []
    for rounding in (math.inf, 1e-12):
        monkeypatch.setattr(dictionary, "_ERROR_RTOL", rounding)
        lost = 0
        for seed in range(6):
            pyro.set_rng_seed(seed)
            truth = make_model()
            y = make_data(truth, with_missing=False)
            model = make_model()
            values = torch.tensor(free_energies(model, y, num_iterations=15))
            lost += int((values.diff() < -1e-8 * values[:-1].abs()).sum())
        falls.append(lost)
    assert falls[0] > 0
    assert falls[1] == 0


@pytest.mark.parametrize("with_missing", [False, True])
def test_maximize_is_the_mean_of_what_is_won(with_missing: bool) -> None:
    model = make_model()
    y = make_data(model, with_missing)
    population = full_population(model, y)
    states, weights, weight = population.states(torch.float64)[0], population.weights(), model.weight.detach()
    is_winner = torch.nn.functional.one_hot((weight * states.unsqueeze(-2)).argmax(-1), NUM_LATENTS) * states.unsqueeze(-2)
    wins = torch.einsum("nd,nt,tdh->dh", (~y.isnan()).double(), weights, is_winner)
    sums = torch.einsum("nd,nt,tdh->dh", y.nan_to_num(0.0), weights, is_winner)
    mean = (sums / wins).clamp(min=1e-6)
    before = expected_log_joint(model, y, population)
    model.maximize(model.sufficient_statistics(population, y))
    progress = (model.weight - weight) / (mean - weight)
    # In every dimension the whole step, or half of it some times over, or none.
    assert (progress.amax(1) - progress.amin(1)).max() < 1e-9
    halvings = -progress[:, 0].log2()
    assert ((halvings - halvings.round()).abs() < 1e-6).all()
    assert (halvings < 1e-6).sum() >= NUM_OBSERVED // 2
    assert expected_log_joint(model, y, population) > before


def test_latents_that_are_never_active_keep_their_element() -> None:
    model = make_model()
    y = make_data(model, with_missing=False)
    population = full_population(model, y)
    is_off = population.states()[..., 2] == 0
    population = Population(population.space, population.words, population.log_joint.masked_fill(~is_off, -math.inf))
    before = model.weight.detach().clone()
    model.maximize(model.sufficient_statistics(population, y))
    torch.testing.assert_close(model.weight[:, 2], before[:, 2], rtol=1e-13, atol=0)
    assert model.weight.isfinite().all()


def test_reconstruction_is_the_posterior_mean() -> None:
    model = make_model()
    y = make_data(model, with_missing=True)
    population = full_population(model, y)
    states = population.states(torch.float64)[0]
    expected = population.weights() @ (model.weight * states.unsqueeze(-2)).amax(-1)
    torch.testing.assert_close(model.reconstruct(population, y), expected.detach(), rtol=1e-12, atol=1e-12)
