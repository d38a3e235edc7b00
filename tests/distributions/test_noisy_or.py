"""NoisyOrSuperposition against Pyro's Bernoulli of the same probability, dense and packed, with and without missing entries."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor

from pyro_truncated.distributions import NoisyOrSuperposition
from pyro_truncated.states import StateSpace
from pyro_truncated.utils.budget import memory_budget

NUM_DATA, NUM_CANDIDATES, NUM_OBSERVED, NUM_LATENTS = 4, 6, 9, 5
RELATIVE = {torch.float32: 1e-5, torch.float64: 1e-10}


def draw(dtype: torch.dtype, leak_dim: int = 1) -> tuple[Tensor, list[Tensor], Tensor]:
    """States ``(C, N, H)``, parameters that take gradients, and observations."""
    states = torch.bernoulli(torch.full((NUM_CANDIDATES, NUM_DATA, NUM_LATENTS), 0.4, dtype=dtype))
    weight = 0.1 + 0.8 * torch.rand(NUM_OBSERVED, NUM_LATENTS, dtype=dtype)
    leak = 0.1 + 0.3 * torch.rand((NUM_OBSERVED,) * leak_dim, dtype=dtype)
    value = torch.bernoulli(torch.full((NUM_DATA, NUM_OBSERVED), 0.5, dtype=dtype))
    return states, [weight.requires_grad_(), leak.requires_grad_()], value


def hide(value: Tensor) -> Tensor:
    value = value.masked_fill(torch.rand(value.shape) < 0.3, math.nan)
    value[1] = math.nan
    return value


def naive(states: Tensor, weight: Tensor, leak: Tensor, value: Tensor) -> Tensor:
    probability = 1 - (1 - leak) * (1 - weight * states.unsqueeze(-2)).prod(-1)
    return torch.where(value.isnan(), 0.0, dist.Bernoulli(probability).log_prob(value.nan_to_num())).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("leak_dim", [0, 1])
@pytest.mark.parametrize("with_missing", [False, True])
def test_log_prob_and_gradients_are_those_of_a_bernoulli(dtype: torch.dtype, leak_dim: int, with_missing: bool) -> None:
    states, parameters, value = draw(dtype, leak_dim)
    value = hide(value) if with_missing else value
    actual = NoisyOrSuperposition(states, *parameters).log_prob(value)
    expected = naive(states, *parameters, value)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=RELATIVE[dtype], atol=RELATIVE[dtype])
    weights = torch.randn_like(actual)
    ours, theirs = (torch.autograd.grad(result, parameters, weights) for result in (actual, expected))
    torch.testing.assert_close(ours, theirs, rtol=2 * RELATIVE[dtype], atol=10 * RELATIVE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_missing", [False, True])
@pytest.mark.parametrize("logits_shape", [None, (NUM_LATENTS,), (NUM_DATA, NUM_LATENTS)])
def test_packed_equals_dense(dtype: torch.dtype, with_missing: bool, logits_shape: tuple[int, ...] | None) -> None:
    states, parameters, value = draw(dtype)
    value = hide(value) if with_missing else value
    words = StateSpace([2] * NUM_LATENTS).pack(states.transpose(0, 1))
    likelihood = NoisyOrSuperposition(states, *parameters)
    logits = None if logits_shape is None else torch.randn(logits_shape, dtype=dtype, requires_grad=True)
    assert likelihood.has_packed_log_prob
    actual = likelihood.packed_log_prob(words, value, logits)
    expected = naive(states, *parameters, value).mT
    if logits is not None:
        expected = expected + torch.einsum("cnh,nh->nc", states, logits.expand(NUM_DATA, NUM_LATENTS))
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=RELATIVE[dtype], atol=RELATIVE[dtype])
    weights = torch.randn_like(actual)
    inputs = parameters if logits is None else [*parameters, logits]
    ours, theirs = (torch.autograd.grad(result, inputs, weights) for result in (actual, expected))
    torch.testing.assert_close(ours, theirs, rtol=2 * RELATIVE[dtype], atol=10 * RELATIVE[dtype])


def test_certain_causes_and_impossible_observations_are_exact() -> None:
    states = StateSpace([2, 2]).unpack(StateSpace([2, 2]).enumerate(), torch.float64).requires_grad_(False)
    weight = torch.tensor([[1.0, 0.5]], dtype=torch.float64, requires_grad=True)
    likelihood = NoisyOrSuperposition(states.unsqueeze(1), weight)
    on = likelihood.log_prob(torch.ones(1, 1).double())[:, 0]
    off = likelihood.log_prob(torch.zeros(1, 1).double())[:, 0]
    torch.testing.assert_close(on, torch.tensor([0.0, 1.0, 0.5, 1.0]).double().log())
    torch.testing.assert_close(off, torch.tensor([1.0, 0.0, 0.5, 0.0]).double().log())
    words = StateSpace([2, 2]).enumerate().unsqueeze(0)
    torch.testing.assert_close(likelihood.packed_log_prob(words, torch.ones(1, 1).double())[0], on)
    torch.testing.assert_close(likelihood.packed_log_prob(words, torch.zeros(1, 1).double())[0], off)


def test_impossible_states_do_not_spoil_dense_gradients() -> None:
    states = StateSpace([2, 2]).unpack(StateSpace([2, 2]).enumerate(), torch.float64)
    weight = torch.tensor([[0.3, 0.5]], dtype=torch.float64, requires_grad=True)
    total = NoisyOrSuperposition(states.unsqueeze(1), weight).log_prob(torch.ones(1, 1).double()).logsumexp(0).sum()
    first, second = weight.detach()[0].requires_grad_().unbind()
    expected = torch.autograd.grad((first + second + 1 - (1 - first) * (1 - second)).log(), (first, second))
    torch.testing.assert_close(torch.autograd.grad(total, weight)[0][0], torch.stack(expected), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int64, torch.bool])
def test_observations_may_be_integers(dtype: torch.dtype) -> None:
    states, parameters, value = draw(torch.float64)
    words = StateSpace([2] * NUM_LATENTS).pack(states.transpose(0, 1))
    likelihood = NoisyOrSuperposition(states, *parameters)
    torch.testing.assert_close(*(likelihood.packed_log_prob(words, some, None) for some in (value.to(dtype), value)))


def test_missing_entries_in_blocks() -> None:
    states, parameters, value = draw(torch.float64)
    value = hide(value)
    results = []
    for budget in (2**28, 8 * NUM_DATA * NUM_OBSERVED):
        with memory_budget(budget):
            log_prob = NoisyOrSuperposition(states, *parameters).log_prob(value)
            results.append((log_prob, *torch.autograd.grad(log_prob.sum(), parameters)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


def test_missing_entries_are_summed_out() -> None:
    states, (weight, leak), value = draw(torch.float64)
    options = [value.index_fill(1, torch.tensor([0, 3]), 0.0) for _ in range(4)]
    for index, option in enumerate(options):
        option[:, 0], option[:, 3] = index % 2, index // 2
    likelihood = NoisyOrSuperposition(states, weight, leak)
    expected = torch.stack([likelihood.log_prob(option) for option in options]).logsumexp(0)
    actual = likelihood.log_prob(value.index_fill(1, torch.tensor([0, 3]), math.nan))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_batched_parameters() -> None:
    weight, leak = torch.rand(3, 1, NUM_OBSERVED, NUM_LATENTS).double(), torch.rand(3, 1, 1).double()
    states = torch.bernoulli(torch.full((3, NUM_DATA, NUM_LATENTS), 0.4)).double()
    likelihood = NoisyOrSuperposition(states, weight, leak)
    assert likelihood.batch_shape == (3, NUM_DATA)
    assert not likelihood.has_packed_log_prob
    value = hide(torch.bernoulli(torch.full((NUM_DATA, NUM_OBSERVED), 0.5)).double())
    expected = torch.stack([naive(s, w[0], c[0], value) for s, w, c in zip(states, weight, leak, strict=True)])
    torch.testing.assert_close(likelihood.log_prob(value), expected, rtol=1e-10, atol=1e-10)


def test_distribution_contract() -> None:
    states, (weight, leak), _ = draw(torch.float64)
    likelihood = NoisyOrSuperposition(states[0], weight.detach(), leak.detach())
    assert (likelihood.batch_shape, likelihood.event_shape, likelihood.event_dim) == ((NUM_DATA,), (NUM_OBSERVED,), 1)
    assert likelihood.expand([NUM_DATA]) is likelihood
    expanded = likelihood.expand([2, NUM_DATA])
    assert expanded.mean.shape == expanded.variance.shape == expanded.sample().shape == (2, NUM_DATA, NUM_OBSERVED)
    assert expanded.sample((3,)).shape == (3, 2, NUM_DATA, NUM_OBSERVED)
    assert expanded.log_prob(expanded.sample()).shape == (2, NUM_DATA)
    torch.testing.assert_close(likelihood.variance, likelihood.mean * (1 - likelihood.mean))
    single = NoisyOrSuperposition(states[0, 0], weight)
    assert single.log_prob(single.sample()).shape == ()


def test_samples_have_the_probabilities() -> None:
    # 4 standard errors of 36 means: false alarm rate 2e-3 over all seeds, none at this one.
    states, parameters, _ = draw(torch.float64)
    likelihood = NoisyOrSuperposition(states[0], *(tensor.detach() for tensor in parameters))
    error = (likelihood.sample((20_000,)).mean(0) - likelihood.mean) / (likelihood.variance / 20_000).sqrt()
    assert error.abs().max() < 4


def test_in_a_pyro_model_with_missing_entries() -> None:
    value = hide(torch.ones(NUM_DATA, NUM_OBSERVED))

    def model() -> None:
        with pyro.plate("data", NUM_DATA):
            states = pyro.sample("s", dist.Bernoulli(0.5).expand([NUM_LATENTS]).to_event(1))
            pyro.sample("y", NoisyOrSuperposition(states, torch.full((NUM_OBSERVED, NUM_LATENTS), 0.5), 0.1), obs=value)

    trace = poutine.trace(model).get_trace()
    trace.compute_log_prob()
    assert trace.nodes["y"]["fn"].states is trace.nodes["s"]["value"]
    assert trace.nodes["y"]["log_prob"].isfinite().all()
    assert trace.nodes["y"]["log_prob"][1] == 0


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="must share H"):
        NoisyOrSuperposition(torch.zeros(2, 3), torch.zeros(5, 4))
    with pytest.raises(ValueError, match="weight"):
        NoisyOrSuperposition(torch.zeros(2, 3), torch.full((5, 3), 1.5))
    with pytest.raises(ValueError, match="within the support"):
        NoisyOrSuperposition(torch.zeros(2, 3), torch.zeros(5, 3)).log_prob(torch.full((2, 5), 0.5))
