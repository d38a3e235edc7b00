"""Maximal causes analysis: EM by enumeration, with and without missing data."""

from __future__ import annotations

import math

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.models import MaximalCauses
from pyro_truncated.states import Population
from tests.models.enumeration import assert_never_falls, expected_log_joint, free_energies, full_population, generate, log_joint

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


@pytest.mark.parametrize("with_missing", [False, True])
@pytest.mark.parametrize("shared_prior", [False, True])
@pytest.mark.parametrize("start", ["truth", "random", "data"])
def test_em_never_lowers_the_free_energy(with_missing: bool, shared_prior: bool, start: str) -> None:
    model = make_model(shared_prior)
    y = make_data(model, with_missing)
    if start != "truth":
        model.weight = torch.rand_like(model.weight)
    if start == "data":
        model.initialize(y)
    assert_never_falls(free_energies(model, y, num_iterations=40))


def test_steps_that_would_lower_the_free_energy_are_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyro_truncated.models import dictionary

    falls = []
    for rounding in (math.inf, 1e-12):
        monkeypatch.setattr(dictionary, "_ROUNDING", rounding)
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


@pytest.mark.parametrize("with_missing", [False, True])
def test_noise_and_prior_are_stationary(with_missing: bool) -> None:
    model = make_model()
    y = make_data(model, with_missing)
    population = full_population(model, y)
    model.maximize(model.sufficient_statistics(population, y))
    after = expected_log_joint(model, y, population)
    for gradient in torch.autograd.grad(after, [model.scale_unconstrained, model.prior_unconstrained]):
        assert gradient.abs().max() < 1e-8


def test_statistics_depend_on_the_population_only() -> None:
    model = make_model()
    y = make_data(model, with_missing=True)
    population = full_population(model, y)
    index = torch.arange(20, NUM_DATA)
    selected = Population(population.space, population.words[index], population.log_joint[index], index)
    by_rows = Population(population.space, population.words[index], population.log_joint[index])
    for name, value in model.sufficient_statistics(selected, y).items():
        torch.testing.assert_close(model.sufficient_statistics(by_rows, y[index])[name], value, rtol=1e-12, atol=1e-12)


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


def test_trains_through_svi() -> None:
    model = make_model()
    y = make_data(model, with_missing=True)
    expected = free_energies(model, y, num_iterations=5)
    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    model = make_model()
    svi = SVI(model, AutoTruncated(model, num_states=2**NUM_LATENTS), ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))
    assert [svi.step(y) for _ in range(5)] == pytest.approx([-value for value in expected[:5]], rel=1e-8)


def test_float32_parameters_follow_float64() -> None:
    double, single = make_model(), make_model(dtype=torch.float32)
    y = make_data(double, with_missing=False)
    for name in NAMES:
        setattr(single, name, getattr(double, name).detach().float())
    for model, data in ((double, y), (single, y.float())):
        model.maximize(model.sufficient_statistics(full_population(model, data), data))
    for name in NAMES:
        assert getattr(single, name).dtype == torch.float32
        torch.testing.assert_close(getattr(single, name).double(), getattr(double, name), rtol=1e-4, atol=1e-4)


def test_initialize_is_reproducible() -> None:
    y = make_data(make_model(), with_missing=True)
    weights = [make_model().initialize(y, torch.Generator().manual_seed(2)).weight.detach() for _ in range(2)]
    assert torch.equal(*weights)
    assert (weights[0] > 0).all()
