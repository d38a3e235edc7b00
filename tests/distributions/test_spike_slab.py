"""SpikeSlabSuperposition against explicit Gaussians, quadrature and the model with explicit slabs."""

from __future__ import annotations

import math

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_truncated.distributions import SpikeSlabSuperposition
from pyro_truncated.states import StateSpace
from pyro_truncated.utils.budget import memory_budget

NUM_DATA, NUM_CANDIDATES, NUM_OBSERVED, NUM_LATENTS = 4, 6, 7, 5
RELATIVE = {torch.float32: 1e-4, torch.float64: 1e-9}


def draw(dtype: torch.dtype = torch.float64, is_scalar: bool = False) -> tuple[Tensor, list[Tensor], Tensor]:
    """States ``(C, N, H)``, parameters that take gradients, and observations."""
    states = torch.bernoulli(torch.full((NUM_CANDIDATES, NUM_DATA, NUM_LATENTS), 0.5, dtype=dtype))
    weight = torch.randn(NUM_OBSERVED, NUM_LATENTS, dtype=dtype)
    scale = 0.5 + torch.rand(() if is_scalar else (NUM_OBSERVED,), dtype=dtype)
    mean = torch.randn(() if is_scalar else (NUM_LATENTS,), dtype=dtype)
    deviation = 0.5 + torch.rand(() if is_scalar else (NUM_LATENTS,), dtype=dtype)
    bias = 2 * torch.randn(NUM_OBSERVED, dtype=dtype)
    value = 3 * torch.randn(NUM_DATA, NUM_OBSERVED, dtype=dtype)
    return states, [tensor.requires_grad_() for tensor in (weight, scale, mean, deviation, bias)], value


def hide(value: Tensor) -> Tensor:
    value = value.masked_fill(torch.rand(value.shape) < 0.3, math.nan)
    value[1] = math.nan
    return value


def marginal(states: Tensor, weight: Tensor, scale: Tensor, mean: Tensor, deviation: Tensor, bias: Tensor | float, value: Tensor) -> Tensor:
    """Log density by the covariance matrix; missing entries get a row of the identity and the value of their mean."""
    is_seen = ~value.isnan()
    loadings = (weight * states.unsqueeze(-2)) * is_seen.unsqueeze(-1)
    noise = torch.where(is_seen, scale.square(), 1 / (2 * math.pi))
    covariance = torch.diag_embed(noise.expand(loadings.shape[:-1])) + (loadings * deviation.square()) @ loadings.mT
    loc = (loadings * mean).sum(-1) + bias * is_seen
    return dist.MultivariateNormal(loc, covariance).log_prob(value.nan_to_num(0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_scalar", [False, True])
@pytest.mark.parametrize("with_missing", [False, True])
def test_dense_and_packed_are_the_marginal_gaussian(dtype: torch.dtype, is_scalar: bool, with_missing: bool) -> None:
    states, parameters, value = draw(dtype, is_scalar)
    value = hide(value) if with_missing else value
    likelihood = SpikeSlabSuperposition(states, *parameters)
    assert likelihood.has_packed_log_prob
    expected = marginal(states.double(), *(tensor.double() for tensor in parameters), value.double())
    words = StateSpace([2] * NUM_LATENTS).pack(states.transpose(0, 1))
    logits = torch.randn(NUM_LATENTS, dtype=dtype, requires_grad=True)
    dense, sparse = likelihood.log_prob(value), likelihood.packed_log_prob(words, value).mT
    with_logits = likelihood.packed_log_prob(words, value, logits).mT
    weights = torch.randn_like(dense)
    gradients = torch.autograd.grad(expected, parameters, weights.double(), retain_graph=True)
    for actual, offset in ((dense, 0.0), (sparse, 0.0), (with_logits, states @ logits)):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected + offset, rtol=RELATIVE[dtype], atol=RELATIVE[dtype])
        for ours, theirs in zip(torch.autograd.grad(actual, parameters, weights, retain_graph=True), gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=RELATIVE[dtype], atol=RELATIVE[dtype] * theirs.abs().max().item())
    (slope,) = torch.autograd.grad(with_logits, logits, weights)
    torch.testing.assert_close(slope, torch.einsum("cn,cnh->h", weights, states), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_log_prob_is_the_integral_over_the_slabs() -> None:
    states, parameters, value = draw()
    weight, scale, mean, deviation, bias = (tensor.detach() for tensor in parameters)
    states, weight, mean, deviation = torch.tensor([1.0, 1.0]).double(), weight[:, :2], mean[:2], deviation[:2]
    # The trapezoidal rule converges faster than any power for such integrands.
    grid = torch.linspace(-14, 14, 801, dtype=torch.float64)
    slabs = torch.cartesian_prod(grid, grid)
    prior = dist.Normal(mean, deviation).log_prob(slabs).sum(-1)
    likelihood = dist.Normal((states * slabs) @ weight.mT + bias, scale).log_prob(value[0]).sum(-1)
    expected = (prior + likelihood).logsumexp(0) + 2 * (grid[1] - grid[0]).log()
    actual = SpikeSlabSuperposition(states, weight, scale, mean, deviation, bias).log_prob(value[0])
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("with_missing", [False, True])
def test_joint_over_slab_posterior_is_the_marginal_for_every_slab(with_missing: bool) -> None:
    states, parameters, value = draw()
    value = hide(value) if with_missing else value
    weight, scale, mean, deviation, bias = (tensor.detach() for tensor in parameters)
    likelihood = SpikeSlabSuperposition(states, weight, scale, mean, deviation, bias)
    posterior = likelihood.slab_posterior(value)
    assert posterior.batch_shape == (NUM_CANDIDATES, NUM_DATA)
    slabs = posterior.sample()
    noise = dist.Normal((states * slabs) @ weight.mT + bias, scale).log_prob(value.nan_to_num(0.0)).masked_fill(value.isnan(), 0.0).sum(-1)
    joint = noise + dist.Normal(mean, deviation).log_prob(slabs).sum(-1)
    torch.testing.assert_close(joint - posterior.log_prob(slabs), likelihood.log_prob(value), rtol=1e-9, atol=1e-9)


def test_slabs_that_are_off_keep_their_prior() -> None:
    states, parameters, value = draw()
    weight, scale, mean, deviation, bias = (tensor.detach() for tensor in parameters)
    posterior = SpikeSlabSuperposition(0 * states, weight, scale, mean, deviation, bias).slab_posterior(value)
    torch.testing.assert_close(posterior.mean, mean.expand_as(posterior.mean))
    torch.testing.assert_close(posterior.covariance_matrix, deviation.square().diag().expand_as(posterior.covariance_matrix))


def test_one_state_of_many_data_points_is_cut_into_blocks_too() -> None:
    # A dimension of size one in front, as where a guide scores one state of every data point.
    evaluated = []

    class Watched(SpikeSlabSuperposition):
        def _log_prob(self, states: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            evaluated.append(states.shape)
            return super()._log_prob(states, value)

    generator = torch.Generator().manual_seed(0)
    states = torch.randint(2, (1, NUM_DATA, NUM_LATENTS), generator=generator).double()
    weight, value = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((5, NUM_LATENTS), (NUM_DATA, 5)))
    likelihood = Watched(states, weight, 0.5, 1.0, 0.3)
    whole = likelihood.log_prob(value)
    with memory_budget(2 * 8 * 4 * NUM_LATENTS**2):
        torch.testing.assert_close(likelihood.log_prob(value), whole)
    assert evaluated[0] == states.shape
    assert all(shape[1] <= 2 for shape in evaluated[1:])


def test_values_and_gradients_in_blocks() -> None:
    states, parameters, value = draw()
    results = []
    for budget in (2**28, NUM_DATA * 8 * 4 * NUM_LATENTS**2):
        with memory_budget(budget):
            log_prob = SpikeSlabSuperposition(states, *parameters).log_prob(value)
            results.append((log_prob, *torch.autograd.grad(log_prob.sum(), parameters)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


def test_batched_parameters() -> None:
    weight, scale = torch.randn(3, 1, NUM_OBSERVED, NUM_LATENTS).double(), 0.5 + torch.rand(3, 1, 1).double()
    mean, deviation = torch.randn(3, 1, NUM_LATENTS).double(), 0.5 + torch.rand(3, 1, 1).double()
    states = torch.bernoulli(torch.full((3, NUM_DATA, NUM_LATENTS), 0.4)).double()
    likelihood = SpikeSlabSuperposition(states, weight, scale, mean, deviation)
    assert likelihood.batch_shape == (3, NUM_DATA)
    assert not likelihood.has_packed_log_prob
    value = torch.randn(NUM_DATA, NUM_OBSERVED).double()
    for data in (value, hide(value)):
        expected = marginal(states, weight, scale, mean.unsqueeze(-2), deviation.unsqueeze(-2), 0.0, data)
        torch.testing.assert_close(likelihood.log_prob(data), expected, rtol=1e-9, atol=1e-9)


def test_distribution_contract() -> None:
    states, parameters, _ = draw()
    parameters = [tensor.detach() for tensor in parameters]
    likelihood = SpikeSlabSuperposition(states[0], *parameters)
    assert (likelihood.batch_shape, likelihood.event_shape, likelihood.event_dim) == ((NUM_DATA,), (NUM_OBSERVED,), 1)
    assert likelihood.expand([NUM_DATA]) is likelihood
    expanded = likelihood.expand([2, NUM_DATA])
    assert expanded.mean.shape == expanded.variance.shape == expanded.sample().shape == (2, NUM_DATA, NUM_OBSERVED)
    assert expanded.rsample((3,)).shape == (3, 2, NUM_DATA, NUM_OBSERVED)
    value = expanded.sample()
    assert expanded.log_prob(value).shape == (2, NUM_DATA)
    torch.testing.assert_close(expanded.log_prob(value)[1], likelihood.log_prob(value[1]))
    assert SpikeSlabSuperposition(states[0, 0], *parameters).log_prob(value[0, 0]).shape == ()


def test_samples_have_the_moments() -> None:
    # 4 standard errors of 28 means: false alarm rate 2e-3 over all seeds, none at this one.
    states, parameters, _ = draw()
    likelihood = SpikeSlabSuperposition(states[0], *(tensor.detach() for tensor in parameters))
    samples = likelihood.sample((20_000,))
    assert ((samples.mean(0) - likelihood.mean) / (likelihood.variance / 20_000).sqrt()).abs().max() < 4
    torch.testing.assert_close(samples.var(0), likelihood.variance, rtol=6 * math.sqrt(2 / 20_000), atol=0)


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="must share H"):
        SpikeSlabSuperposition(torch.zeros(2, 3), torch.zeros(5, 4), 1.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="slab_scale"):
        SpikeSlabSuperposition(torch.zeros(2, 3), torch.zeros(5, 3), 1.0, 0.0, -1.0)
    with pytest.raises(ValueError, match="states"):
        SpikeSlabSuperposition(torch.full((2, 3), 0.5), torch.zeros(5, 3), 1.0, 0.0, 1.0)
