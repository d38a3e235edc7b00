"""MaximumSuperposition against Pyro's Normal of the same mean, dense and packed, with and without missing entries."""

from __future__ import annotations

import math

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_truncated.distributions import LinearSuperposition, MaximumSuperposition, PoissonMaximum, Superposition
from pyro_truncated.states import Population, StateSpace
from pyro_truncated.utils.budget import memory_budget
from tests.program.test_factor_graph import LargestTensor

NUM_DATA, NUM_CANDIDATES, NUM_OBSERVED, NUM_LATENTS = 4, 6, 7, 5
RELATIVE = {torch.float32: 1e-5, torch.float64: 1e-10}


def draw(dtype: torch.dtype = torch.float64, scale_dim: int = 1) -> tuple[Tensor, list[Tensor], Tensor]:
    """States ``(C, N, H)``, parameters that take gradients, and observations."""
    states = torch.bernoulli(torch.full((NUM_CANDIDATES, NUM_DATA, NUM_LATENTS), 0.5, dtype=dtype))
    weight = torch.randn(NUM_OBSERVED, NUM_LATENTS, dtype=dtype)
    scale = 0.5 + torch.rand((NUM_OBSERVED,) * scale_dim, dtype=dtype)
    value = torch.randn(NUM_DATA, NUM_OBSERVED, dtype=dtype)
    return states, [weight.requires_grad_(), scale.requires_grad_()], value


def hide(value: Tensor) -> Tensor:
    value = value.masked_fill(torch.rand(value.shape) < 0.3, math.nan)
    value[1] = math.nan
    return value


def naive(states: Tensor, weight: Tensor, scale: Tensor, value: Tensor) -> Tensor:
    normal = dist.Normal((weight * states.unsqueeze(-2)).amax(-1).clamp(min=0.0), scale)
    return torch.where(value.isnan(), 0.0, normal.log_prob(value.nan_to_num())).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale_dim", [0, 1])
@pytest.mark.parametrize("with_missing", [False, True])
def test_dense_and_packed_are_a_normal(dtype: torch.dtype, scale_dim: int, with_missing: bool) -> None:
    states, parameters, value = draw(dtype, scale_dim)
    value = hide(value) if with_missing else value
    likelihood = MaximumSuperposition(states, *parameters)
    assert likelihood.has_packed_log_prob
    expected = naive(states, *parameters, value)
    words = StateSpace([2] * NUM_LATENTS).pack(states.transpose(0, 1))
    logits = torch.randn(NUM_LATENTS, dtype=dtype, requires_grad=True)
    dense, sparse = likelihood.log_prob(value), likelihood.packed_log_prob(words, value).mT
    with_logits = likelihood.packed_log_prob(words, value, logits).mT
    weights = torch.randn_like(dense)
    gradients = torch.autograd.grad(expected, parameters, weights, retain_graph=True)
    for actual, offset in ((dense, 0.0), (sparse, 0.0), (with_logits, states @ logits)):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, expected + offset, rtol=RELATIVE[dtype], atol=RELATIVE[dtype])
        for ours, theirs in zip(torch.autograd.grad(actual, parameters, weights, retain_graph=True), gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=RELATIVE[dtype], atol=RELATIVE[dtype] * theirs.abs().max().item())
    (slope,) = torch.autograd.grad(with_logits, logits, weights)
    torch.testing.assert_close(slope, torch.einsum("cn,cnh->h", weights, states), rtol=RELATIVE[dtype], atol=RELATIVE[dtype])


def not_quadratic(number: int) -> dict[str, tuple[Superposition, Tensor]]:
    """Likelihoods that are not quadratic in the states, and data."""
    none, weight = torch.zeros(number), torch.rand(2, number)
    value = torch.rand(1, 2).round()
    return {
        "maximum": (MaximumSuperposition(none, weight, 1.0), value),
        "maximum of counts": (PoissonMaximum(none, weight + 1, 0.5), value),
        "sum": (LinearSuperposition(none, weight, 1.0), torch.tensor([[1.0, math.nan]])),
    }


@pytest.mark.parametrize("name", not_quadratic(1))
def test_independent_priors_take_no_matrix_of_all_pairs_of_latents(name: str) -> None:
    number = 2000
    likelihood, value = not_quadratic(number)[name]
    words = StateSpace([2] * number).pack(torch.bernoulli(torch.full((1, 5, number), 3 / number)))
    logits = torch.randn(number, requires_grad=True)
    with LargestTensor() as largest:
        log_prob = likelihood.packed_log_prob(words, value, logits)
        log_prob.sum().backward()
    assert largest.number < number**2


def test_values_and_gradients_in_blocks() -> None:
    states, parameters, value = draw()
    results = []
    for budget in (2**28, NUM_DATA * 8 * 2 * NUM_LATENTS * NUM_OBSERVED):
        with memory_budget(budget):
            log_prob = MaximumSuperposition(states, *parameters).log_prob(value)
            results.append((log_prob, *torch.autograd.grad(log_prob.sum(), parameters)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


def test_batched_parameters() -> None:
    weight, scale = torch.randn(3, 1, NUM_OBSERVED, NUM_LATENTS).double(), 0.5 + torch.rand(3, 1, 1).double()
    states = torch.bernoulli(torch.full((3, NUM_DATA, NUM_LATENTS), 0.4)).double()
    likelihood = MaximumSuperposition(states, weight, scale)
    assert likelihood.batch_shape == (3, NUM_DATA)
    assert not likelihood.has_packed_log_prob
    value = hide(torch.randn(NUM_DATA, NUM_OBSERVED).double())
    torch.testing.assert_close(likelihood.log_prob(value), naive(states, weight, scale, value), rtol=1e-12, atol=1e-12)


def test_distribution_contract() -> None:
    states, (weight, scale), _ = draw()
    likelihood = MaximumSuperposition(states[0], weight.detach(), scale.detach())
    assert (likelihood.batch_shape, likelihood.event_shape, likelihood.event_dim) == ((NUM_DATA,), (NUM_OBSERVED,), 1)
    assert likelihood.expand([NUM_DATA]) is likelihood
    expanded = likelihood.expand([2, NUM_DATA])
    assert expanded.mean.shape == expanded.variance.shape == expanded.sample().shape == (2, NUM_DATA, NUM_OBSERVED)
    assert expanded.rsample((3,)).shape == (3, 2, NUM_DATA, NUM_OBSERVED)
    value = expanded.sample()
    assert expanded.log_prob(value).shape == (2, NUM_DATA)
    torch.testing.assert_close(expanded.log_prob(value)[1], likelihood.log_prob(value[1]))
    assert (MaximumSuperposition(torch.zeros(NUM_LATENTS), weight, scale).mean == 0).all()


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="must share H"):
        MaximumSuperposition(torch.zeros(2, 3), torch.zeros(5, 4), 1.0)
    with pytest.raises(ValueError, match="scale"):
        MaximumSuperposition(torch.zeros(2, 3), torch.zeros(5, 3), -1.0)


def test_wins_alone_are_those_of_the_statistics_of_every_dimension():
    _, (weight, scale), value = draw()
    value = hide(value)
    space = StateSpace([2] * NUM_LATENTS)
    words = space.enumerate().expand(NUM_DATA, -1, -1)
    population = Population(space, words, torch.randn(words.shape[:2], dtype=torch.float64))
    whole = MaximumSuperposition(torch.zeros(NUM_LATENTS), weight, scale).statistics(population, value)
    some = torch.tensor([5, 0, 2])
    part = MaximumSuperposition(torch.zeros(NUM_LATENTS), weight[some], scale[some]).wins(words, population.weights(), value[:, some])
    assert part.keys() == {"wins", "won"}
    for name, sums in part.items():
        torch.testing.assert_close(sums, whole[name][some])
