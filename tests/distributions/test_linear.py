"""LinearSuperposition against Pyro's Normal of the same mean, dense and packed, with and without missing entries."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor

from pyro_truncated.distributions import LinearSuperposition, linear
from pyro_truncated.states import StateSpace
from pyro_truncated.utils.budget import memory_budget

NUM_DATA, NUM_CANDIDATES, NUM_OBSERVED, NUM_LATENTS = 4, 6, 9, 5
RELATIVE = {torch.float32: 1e-5, torch.float64: 1e-10}


def draw(dtype: torch.dtype, scale_dim: int = 1) -> tuple[Tensor, list[Tensor], Tensor]:
    """States ``(C, N, H)``, parameters that take gradients, and observations."""
    states = torch.bernoulli(torch.full((NUM_CANDIDATES, NUM_DATA, NUM_LATENTS), 0.4, dtype=dtype))
    weight = 3 * torch.randn(NUM_OBSERVED, NUM_LATENTS, dtype=dtype)
    scale = 0.5 + torch.rand((NUM_OBSERVED,) * scale_dim, dtype=dtype)
    bias = torch.randn(NUM_OBSERVED, dtype=dtype)
    value = 3 * torch.randn(NUM_DATA, NUM_OBSERVED, dtype=dtype)
    return states, [tensor.requires_grad_() for tensor in (weight, scale, bias)], value


def hide(value: Tensor) -> Tensor:
    value = value.masked_fill(torch.rand(value.shape) < 0.3, math.nan)
    value[1] = math.nan
    return value


def naive(states: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, value: Tensor) -> Tensor:
    normal = dist.Normal(states @ weight.mT + bias, scale)
    return torch.where(value.isnan(), 0.0, normal.log_prob(value.nan_to_num())).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale_dim", [0, 1])
@pytest.mark.parametrize("with_missing", [False, True])
def test_log_prob_and_gradients_are_those_of_a_normal(dtype: torch.dtype, scale_dim: int, with_missing: bool) -> None:
    states, parameters, value = draw(dtype, scale_dim)
    value = hide(value) if with_missing else value
    states.requires_grad_()
    actual = LinearSuperposition(states, *parameters).log_prob(value)
    expected = naive(states, *parameters, value)
    assert actual.shape == (NUM_CANDIDATES, NUM_DATA)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=RELATIVE[dtype], atol=RELATIVE[dtype])
    weights = torch.randn_like(actual)
    inputs = [states, *parameters]
    for ours, theirs in zip(torch.autograd.grad(actual, inputs, weights), torch.autograd.grad(expected, inputs, weights), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=RELATIVE[dtype], atol=RELATIVE[dtype] * theirs.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_missing", [False, True])
@pytest.mark.parametrize("logits_shape", [None, (NUM_LATENTS,), (NUM_DATA, NUM_LATENTS)])
def test_packed_equals_dense(dtype: torch.dtype, with_missing: bool, logits_shape: tuple[int, ...] | None) -> None:
    states, parameters, value = draw(dtype)
    value = hide(value) if with_missing else value
    words = StateSpace([2] * NUM_LATENTS).pack(states.transpose(0, 1))
    likelihood = LinearSuperposition(states, *parameters)
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
    for ours, theirs in zip(torch.autograd.grad(actual, inputs, weights), torch.autograd.grad(expected, inputs, weights), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=RELATIVE[dtype], atol=RELATIVE[dtype] * theirs.abs().max().item())


def test_float32_does_not_cancel() -> None:
    # The expanded square is a difference of numbers 10^9 times as large as the result.
    weight = 1000.0 * torch.randn(50, 4, generator=torch.Generator().manual_seed(3))
    states = torch.ones(1, 4)
    value = states @ weight.mT + 0.1
    expected = dist.Normal((states.double() @ weight.double().mT), 0.1).log_prob(value.double()).sum(-1)
    likelihood = LinearSuperposition(states, weight, 0.1)
    torch.testing.assert_close(likelihood.log_prob(value).double(), expected, rtol=1e-5, atol=0)
    words = StateSpace([2] * 4).pack(states.unsqueeze(1))
    torch.testing.assert_close(likelihood.packed_log_prob(words, value).double()[:, 0], expected, rtol=1e-5, atol=0)


def test_missing_entries_are_integrated_out() -> None:
    # The marginal of the observed entries of a Gaussian is the Gaussian of the observed rows of the dictionary.
    states, (weight, scale, bias), value = draw(torch.float64)
    is_seen = torch.tensor([True, False] * 4 + [True])
    expected = LinearSuperposition(states, weight[is_seen], scale[is_seen], bias[is_seen]).log_prob(value[:, is_seen])
    actual = LinearSuperposition(states, weight, scale, bias).log_prob(value.masked_fill(~is_seen, math.nan))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_missing_entries_in_blocks() -> None:
    states, parameters, value = draw(torch.float64)
    value = hide(value)
    results = []
    for budget in (2**28, 8 * NUM_DATA * NUM_OBSERVED):
        with memory_budget(budget):
            log_prob = LinearSuperposition(states, *parameters).log_prob(value)
            results.append((log_prob, *torch.autograd.grad(log_prob.sum(), parameters)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


def test_states_are_not_expanded_to_observations(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    original = linear.product

    def spy(matrix: Tensor, vectors: Tensor) -> Tensor:
        nonlocal largest
        result = original(matrix, vectors)
        largest = max(largest, result.numel())
        return result

    monkeypatch.setattr(linear, "product", spy)
    states = torch.ones(100, 10, 3)
    LinearSuperposition(states, torch.randn(500, 3), 1.0).log_prob(torch.randn(10, 500))
    assert largest == states.numel()


def test_kept_products_follow_the_value() -> None:
    states, parameters, value = draw(torch.float64)
    words = StateSpace([2] * NUM_LATENTS).pack(states.transpose(0, 1))
    likelihood = LinearSuperposition(states, *parameters)
    with torch.no_grad():
        for _ in range(2):
            first = likelihood.packed_log_prob(words, value[:2].contiguous().repeat(2, 1))
            torch.testing.assert_close(likelihood.packed_log_prob(words, value[:]), naive(states, *parameters, value).mT)
            torch.testing.assert_close(first[:2], naive(states, *parameters, value).mT[:2])
        value.mul_(2)
        torch.testing.assert_close(likelihood.packed_log_prob(words, value), naive(states, *parameters, value).mT)


def test_batched_parameters() -> None:
    weight, scale = torch.randn(3, 1, NUM_OBSERVED, NUM_LATENTS).double(), 0.5 + torch.rand(3, 1, 1).double()
    states = torch.bernoulli(torch.full((3, NUM_DATA, NUM_LATENTS), 0.4)).double()
    likelihood = LinearSuperposition(states, weight, scale)
    assert likelihood.batch_shape == (3, NUM_DATA)
    assert not likelihood.has_packed_log_prob
    value = torch.randn(NUM_DATA, NUM_OBSERVED).double()
    for data in (value, hide(value)):
        expected = torch.stack([naive(s, w[0], c[0], torch.zeros(1), data) for s, w, c in zip(states, weight, scale, strict=True)])
        torch.testing.assert_close(likelihood.log_prob(data), expected, rtol=1e-12, atol=1e-12)


def test_distribution_contract() -> None:
    states, (weight, scale, bias), _ = draw(torch.float64)
    likelihood = LinearSuperposition(states[0], weight.detach(), scale.detach(), bias.detach())
    assert (likelihood.batch_shape, likelihood.event_shape, likelihood.event_dim) == ((NUM_DATA,), (NUM_OBSERVED,), 1)
    assert likelihood.expand([NUM_DATA]) is likelihood
    expanded = likelihood.expand([2, NUM_DATA])
    assert expanded.batch_shape == (2, NUM_DATA)
    assert expanded.mean.shape == expanded.variance.shape == expanded.sample().shape == (2, NUM_DATA, NUM_OBSERVED)
    assert expanded.rsample((3,)).shape == (3, 2, NUM_DATA, NUM_OBSERVED)
    value = expanded.sample()
    assert expanded.log_prob(value).shape == (2, NUM_DATA)
    torch.testing.assert_close(expanded.log_prob(value)[1], likelihood.log_prob(value[1]))
    torch.testing.assert_close(likelihood.mean, states[0] @ weight.mT + bias)
    torch.testing.assert_close(likelihood.variance[2], scale.square())
    single = LinearSuperposition(states[0, 0], weight, scale)
    assert single.log_prob(value[0, 0]).shape == ()


def test_samples_have_the_moments() -> None:
    # 4 standard errors of 45 means: false alarm rate 3e-3 over all seeds, none at this one.
    states, parameters, _ = draw(torch.float64)
    likelihood = LinearSuperposition(states[0], *(tensor.detach() for tensor in parameters))
    samples = likelihood.sample((20_000,))
    error = (samples.mean(0) - likelihood.mean) / (likelihood.variance / 20_000).sqrt()
    assert error.abs().max() < 4
    torch.testing.assert_close(samples.var(0), likelihood.variance, rtol=6 * math.sqrt(2 / 20_000), atol=0)


def test_in_a_pyro_model_with_missing_entries() -> None:
    value = hide(torch.randn(NUM_DATA, NUM_OBSERVED))

    def model() -> None:
        with pyro.plate("data", NUM_DATA):
            states = pyro.sample("s", dist.Bernoulli(0.5).expand([NUM_LATENTS]).to_event(1))
            pyro.sample("y", LinearSuperposition(states, torch.ones(NUM_OBSERVED, NUM_LATENTS), 1.0), obs=value)

    trace = poutine.trace(model).get_trace()
    trace.compute_log_prob()
    assert trace.nodes["y"]["fn"].states is trace.nodes["s"]["value"]
    assert trace.nodes["y"]["log_prob"].isfinite().all()
    assert trace.nodes["y"]["log_prob"][1] == 0


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="must share H"):
        LinearSuperposition(torch.zeros(2, 3), torch.zeros(5, 4), 1.0)
    with pytest.raises(ValueError, match="scale"):
        LinearSuperposition(torch.zeros(2, 3), torch.zeros(5, 3), -1.0)
    with pytest.raises(ValueError, match="right-most size"):
        LinearSuperposition(torch.zeros(2, 3), torch.zeros(5, 3), 1.0).log_prob(torch.zeros(2, 4))


class AnyScale(LinearSuperposition):
    """A class of one's own whose scale depends on something else."""

    arg_constraints = LinearSuperposition.arg_constraints | {"scale": dist.constraints.dependent}


def test_parameters_of_subclasses_may_depend_on_something_else() -> None:
    states, (weight, scale, bias), value = draw(torch.float64)
    found = AnyScale(states, weight, scale, bias)
    assert found.has_packed_log_prob
    torch.testing.assert_close(found.log_prob(value), naive(states, weight, scale, bias, value))
