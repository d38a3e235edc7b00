"""Noisy-OR: exact EM by enumeration, with and without missing data."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_truncated.models import BinarySparseCoding, MaximalCauses, NoisyOr
from pyro_truncated.states import Population
from tests.models.enumeration import assert_never_falls, free_energies, full_population, generate, log_joint

NUM_DATA, NUM_OBSERVED, NUM_LATENTS = 60, 7, 4


def make_model(dtype: torch.dtype = torch.float64, leak: float = 0.01, **options: Any) -> NoisyOr:
    return NoisyOr(NUM_OBSERVED, NUM_LATENTS, leak=leak, dtype=dtype, **options)


def make_data(model: NoisyOr, with_missing: bool) -> Tensor:
    return generate(model, NUM_DATA, with_missing)


def gradient(model: NoisyOr, y: Tensor, name: str) -> Tensor:
    """Gradient of the log likelihood in a parameter's logit."""
    states = full_population(model, y).states(y.dtype)[0]
    total = log_joint(model, y, states).logsumexp(-1).sum()
    return torch.autograd.grad(total, getattr(model, f"{name}_unconstrained"))[0]


def test_model_is_bernoulli_times_noisy_or() -> None:
    model = make_model()
    y = make_data(model, with_missing=False)
    states = torch.bernoulli(torch.full((5, NUM_LATENTS), 0.5)).double()
    probability = 1 - (1 - model.leak) * (1 - states.unsqueeze(-2) * model.weight).prod(-1)
    prior = torch.distributions.Bernoulli(model.prior).log_prob(states).sum(-1)
    likelihood = torch.distributions.Bernoulli(probability).log_prob(y.unsqueeze(1)).sum(-1)
    torch.testing.assert_close(log_joint(model, y, states), prior + likelihood, rtol=1e-10, atol=1e-10)


def test_without_a_leak() -> None:
    model = make_model(leak=0.0)
    y = make_data(model, with_missing=False)
    values = free_energies(model, y, num_iterations=40)
    assert_never_falls(values)
    assert math.isfinite(values[0])
    assert (full_population(model, y).log_joint == -math.inf).any()


@pytest.mark.parametrize("with_missing", [False, True])
def test_updates_are_proportional_to_the_gradient_of_the_log_likelihood(with_missing: bool) -> None:
    # Each step is the gradient in the logit over the number of trials, so EM stands still exactly where the likelihood does.
    model = make_model(learn_leak=True)
    y = make_data(model, with_missing)
    model.initialize(y)
    gradients = {name: gradient(model, y, name) for name in ("weight", "leak", "prior")}
    before = {name: getattr(model, name).detach().clone() for name in gradients}
    statistics = model.sufficient_statistics(full_population(model, y), y)
    model.maximize(statistics)
    for name, count in (("weight", "trials"), ("leak", "observed"), ("prior", "num_data")):
        expected = before[name] + gradients[name] / statistics[count]
        torch.testing.assert_close(getattr(model, name), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("with_missing", [False, True])
def test_maximize_is_the_expected_share_of_the_hidden_causes(with_missing: bool) -> None:
    model = make_model(learn_leak=True)
    y = make_data(model, with_missing)
    population = full_population(model, y)
    states, weights = population.states(torch.float64)[0], population.weights()
    weight, leak = model.weight.detach(), model.leak.detach()
    on, trials = torch.zeros_like(weight), torch.zeros_like(weight)
    for n in range(NUM_DATA):
        for state, q in zip(states, weights[n], strict=True):
            probability = 1 - (1 - leak) * (1 - weight * state).prod(-1)
            for d in range(NUM_OBSERVED):
                if not y[n, d].isnan():
                    on[d] += q * y[n, d] * state * weight[d] / probability[d]
                    trials[d] += q * state
    model.maximize(model.sufficient_statistics(population, y))
    torch.testing.assert_close(model.weight, on / trials, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model.prior, (weights.unsqueeze(-1) * states).sum(1).mean(0), rtol=1e-9, atol=1e-9)


def test_fixed_point_update_is_the_published_equation() -> None:
    model = make_model(leak=0.0, update="fixed_point")
    y = make_data(model, with_missing=False)
    population = full_population(model, y)
    states, weights, weight = population.states(torch.float64)[0], population.weights(), model.weight.detach()
    silence = 1 - weight * states.unsqueeze(-2)
    others = torch.stack([silence[..., [j for j in range(NUM_LATENTS) if j != h]].prod(-1) for h in range(NUM_LATENTS)], -1)
    probability = 1 - silence.prod(-1, keepdim=True)
    share = (others * states.unsqueeze(-2) / (probability * (1 - probability))).nan_to_num(0.0)
    numerator = torch.einsum("nd,ns,sdh->dh", y - 1, weights, share)
    denominator = torch.einsum("ns,sdh->dh", weights, others * share)
    model.maximize(model.sufficient_statistics(population, y))
    torch.testing.assert_close(model.weight, (1 + numerator / denominator).clamp(1e-6, 1 - 1e-6), rtol=1e-8, atol=1e-8)


def test_both_updates_move_in_the_same_direction() -> None:
    # So they have the same fixed points; the published one takes other, possibly too long, steps.
    model = make_model(update="fixed_point")
    y = make_data(model, with_missing=True)
    model.initialize(y)
    before, slope = model.weight.detach().clone(), gradient(model, y, "weight")
    statistics = model.sufficient_statistics(full_population(model, y), y)
    step = slope * (1 - before) / (before * (statistics["claims"] - statistics["trials"]))
    model.maximize(statistics)
    torch.testing.assert_close(model.weight, (before + step).clamp(1e-6, 1 - 1e-6), rtol=1e-9, atol=1e-9)


def test_statistics_add_up_over_parts_of_the_data() -> None:
    model = make_model(update="fixed_point")
    y = make_data(model, with_missing=True)
    population = full_population(model, y)
    whole = model.sufficient_statistics(population, y)
    parts = []
    for index in (torch.arange(20), torch.arange(20, NUM_DATA)):
        parts.append(
            model.sufficient_statistics(Population(population.space, population.words[index], population.log_joint[index], index), y)
        )
    for name, value in whole.items():
        torch.testing.assert_close(parts[0][name] + parts[1][name], value, rtol=1e-12, atol=1e-12)


def test_latents_that_are_never_active_keep_their_weights() -> None:
    model = make_model()
    y = make_data(model, with_missing=False)
    population = full_population(model, y)
    is_off = population.states()[..., 2] == 0
    population = Population(population.space, population.words, population.log_joint.masked_fill(~is_off, -math.inf))
    before = model.weight.detach().clone()
    model.maximize(model.sufficient_statistics(population, y))
    torch.testing.assert_close(model.weight[:, 2], before[:, 2], rtol=1e-12, atol=0)
    assert model.weight.isfinite().all()
    assert model.prior[2].item() == pytest.approx(1e-6)


def test_initialize_is_reproducible() -> None:
    y = make_data(make_model(), with_missing=True)
    weights = [make_model().initialize(y, torch.Generator().manual_seed(2)).weight.detach() for _ in range(2)]
    assert torch.equal(*weights)
    assert ((weights[0] > 0.19) & (weights[0] < 0.71)).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("kind", [NoisyOr, BinarySparseCoding, MaximalCauses])
def test_starts_take_data_of_any_type(kind: Any, dtype: torch.dtype) -> None:
    y = torch.rand(40, NUM_OBSERVED) < 0.4
    found, expected = (kind(NUM_OBSERVED, 3).initialize(data, torch.Generator().manual_seed(0)) for data in (y.to(dtype), y.float()))
    assert torch.equal(found.weight, expected.weight)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="'exact' or 'fixed_point'"):
        make_model(update="newton")
    with pytest.raises(ValueError, match="leak must be a probability"):
        make_model(leak=1.0)
    with pytest.raises(ValueError, match="positive if it is learnt"):
        make_model(leak=0.0, learn_leak=True)
    model, y = make_model(), torch.zeros(3, NUM_OBSERVED).double()
    population = full_population(model, y)
    with pytest.raises(ValueError, match="0, 1 or, where missing, NaN"):
        model.sufficient_statistics(population, y + 0.5)
