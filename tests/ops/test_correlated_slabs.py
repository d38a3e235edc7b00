"""Packed kernels for slabs that are correlated a priori against explicit Gaussians, compiled and vectorised."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyro_truncated import ops
from pyro_truncated.states import StateSpace

NUM_DATA, NUM_STATES, NUM_OBSERVED = 5, 7, 6


def covariance_matrix(num_latents: int) -> Tensor:
    root = torch.randn(num_latents, num_latents).double() / num_latents**0.5
    return root @ root.mT + 0.1 * torch.eye(num_latents).double()


def draw(num_latents: int, with_missing: bool = False) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Packed states, the all-zero and the all-one state among them, their values, observations and parameters."""
    space = StateSpace([2] * num_latents)
    words = space.random((NUM_DATA, NUM_STATES), min(0.5, 6 / num_latents))
    words[0, 0], words[0, 1] = 0, space.pack(torch.ones(num_latents))
    value = 3 * torch.randn(NUM_DATA, NUM_OBSERVED).double()
    if with_missing:
        value[torch.rand(value.shape) < 0.3] = math.nan
        value[1] = math.nan
    weight, precision = torch.randn(NUM_OBSERVED, num_latents).double(), 0.5 + torch.rand(NUM_OBSERVED).double()
    return (
        words,
        space.unpack(words, torch.float64),
        value,
        [weight, precision, torch.randn(num_latents).double(), covariance_matrix(num_latents)],
    )


def collapsed(state: Tensor, value: Tensor, weight: Tensor, precision: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """Log density of one observation by the covariance matrix of its observed entries."""
    is_seen = ~value.isnan()
    if not is_seen.any():
        return value.new_zeros(())
    weight = weight[is_seen] * state
    return MultivariateNormal(weight @ mean, precision[is_seen].reciprocal().diag() + weight @ covariance @ weight.mT).log_prob(
        value[is_seen]
    )


def conditioned(state: Tensor, value: Tensor, weight: Tensor, precision: Tensor, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Posterior mean and covariance of ``s = b * z`` by conditioning the joint Gaussian of coefficients and observations."""
    is_seen = ~value.isnan()
    weight = weight[is_seen]
    prior = state.outer(state) * covariance
    gain = prior @ weight.mT @ (precision[is_seen].reciprocal().diag() + weight @ prior @ weight.mT).inverse()
    first = state * mean + gain @ (value[is_seen] - weight @ (state * mean))
    return first, prior - gain @ weight @ prior


@pytest.mark.parametrize("num_latents", [1, 5, 64, 70])
@pytest.mark.parametrize("with_missing", [False, True])
def test_log_prob_is_that_of_the_marginal_gaussian(kind: str, num_latents: int, with_missing: bool) -> None:
    words, states, value, parameters = draw(num_latents, with_missing)
    expected = torch.stack([torch.stack([collapsed(state, y, *parameters) for state in row]) for row, y in zip(states, value, strict=True)])
    torch.testing.assert_close(ops.slab_log_prob(words, value, *parameters), expected, rtol=1e-9, atol=1e-9)
    linear = torch.randn(NUM_DATA, num_latents).double()
    actual = ops.slab_log_prob(words, value, *parameters, linear)
    torch.testing.assert_close(actual, expected + torch.einsum("nch,nh->nc", states, linear), rtol=1e-9, atol=1e-9)


def test_plain_torch_works_with_the_active_latents_alone() -> None:
    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(tensor.numel() for tensor in tree_leaves(out) if isinstance(tensor, Tensor))
            return out

    sizes: list[int] = []
    num_latents, num_active = 130, 5
    words = torch.zeros(NUM_DATA, 40, 3, dtype=torch.int64)
    words[:, :, 1] = 2**num_active - 1
    value, weight = torch.randn(NUM_DATA, NUM_OBSERVED).double(), torch.randn(NUM_OBSERVED, num_latents).double()
    parameters = weight, torch.ones(NUM_OBSERVED).double(), torch.randn(num_latents).double(), covariance_matrix(num_latents)
    weights = torch.rand(NUM_DATA, 40).double()
    others = parameters[2].expand(2, -1), parameters[3].expand(2, -1, -1)
    with ops.use_backend("vectorised"), Largest():
        ops.slab_log_prob(words, value, *parameters)
        ops.slab_moments(words, weights, value, *parameters)
        ops.expected_log_slab_prior(words, weights, value, *parameters, *others)
    # Unpacked states are the largest.
    assert max(sizes) <= NUM_DATA * 40 * 64 * words.shape[-1]


@pytest.mark.parametrize("with_missing", [False, True])
def test_without_correlations_all_is_as_for_independent_slabs(kind: str, with_missing: bool) -> None:
    words, _, value, (weight, precision, mean, _) = draw(9, with_missing)
    deviation, weights = 0.3 + torch.rand(9).double(), torch.randn(NUM_DATA, NUM_STATES).double()
    given = words, value, weight, precision, mean
    torch.testing.assert_close(
        ops.slab_log_prob(*given, deviation.square().diag()), ops.slab_log_prob(*given, deviation), rtol=1e-11, atol=1e-11
    )
    given = words, weights, *given[1:]
    found = ops.slab_moments_by_dimension(*given, deviation.square().diag())
    expected = ops.slab_moments_by_dimension(*given, deviation)
    for one, other in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("num_latents", [1, 5, 70])
@pytest.mark.parametrize("with_missing", [False, True])
@pytest.mark.parametrize("per_datum", [False, True])
def test_moments_are_those_of_the_conditioned_gaussian(kind: str, num_latents: int, with_missing: bool, per_datum: bool) -> None:
    words, states, value, parameters = draw(num_latents, with_missing)
    weights = torch.randn(NUM_DATA, NUM_STATES).double()
    weights[2, 3] = 0
    first, second = torch.zeros(NUM_DATA, num_latents).double(), torch.zeros(NUM_DATA, num_latents, num_latents).double()
    slope, curvature = torch.zeros(num_latents).double(), torch.zeros(num_latents, num_latents).double()
    for n in range(NUM_DATA):
        for c in range(NUM_STATES):
            mean, spread = conditioned(states[n, c], value[n], *parameters)
            first[n] += weights[n, c] * mean
            second[n] += weights[n, c] * (spread + mean.outer(mean))
            on = states[n, c].nonzero().squeeze(-1)
            block = on.unsqueeze(-1), on
            inverse, above = parameters[3][block].inverse(), (mean - parameters[2])[on]
            slope[on] += weights[n, c] * inverse @ above
            curvature[block] += weights[n, c] * (inverse @ (spread[block] + above.outer(above)) @ inverse - inverse)
    actual = ops.slab_moments(words, weights, value, *parameters, per_datum)
    expected = torch.einsum("nc,nch->nh", weights, states), first, second if per_datum else second.sum(0), slope, curvature
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("with_missing", [False, True])
@pytest.mark.parametrize("num_latents", [5, 9, 20])
def test_expected_log_prior_is_that_of_the_posterior(kind: str, num_latents: int, with_missing: bool) -> None:
    words, states, value, parameters = draw(num_latents, with_missing)
    weights = torch.rand(NUM_DATA, NUM_STATES).double()
    means, covariances = torch.randn(3, num_latents).double(), torch.stack([covariance_matrix(num_latents) for _ in range(3)])
    expected = torch.zeros(3).double()
    for n in range(NUM_DATA):
        for c in range(NUM_STATES):
            mean, spread = conditioned(states[n, c], value[n], *parameters)
            on = states[n, c].nonzero().squeeze(-1)
            block = on.unsqueeze(-1), on
            for t in range(3):
                prior, above = covariances[t][block], (mean - means[t])[on]
                moment = spread[block] + above.outer(above)
                expected[t] -= 0.5 * weights[n, c] * (prior.logdet() + (prior.inverse() @ moment).trace())
    actual = ops.expected_log_slab_prior(words, weights, value, *parameters, means, covariances)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_moments_by_dimension(kind: str) -> None:
    words, _, value, parameters = draw(5, with_missing=True)
    weights = torch.rand(NUM_DATA, NUM_STATES).double()
    active, first, second, *gradients = ops.slab_moments(words, weights, value, *parameters, per_datum=True)
    expected = active, first, torch.einsum("nd,nhi->dhi", (~value.isnan()).double(), second), *gradients
    for budget in (2**28, 2 * 32 * 25):
        with ops.memory_budget(budget):
            actual = ops.slab_moments_by_dimension(words, weights, value, *parameters)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("with_missing", [False, True])
def test_gradients(kind: str, with_missing: bool) -> None:
    words, _, value, (weight, precision, mean, covariance) = draw(4, with_missing)
    is_seen, root = ~value.isnan(), torch.linalg.cholesky(covariance)
    linear = torch.randn(NUM_DATA, 4).double()
    inputs = [tensor.requires_grad_() for tensor in (value[is_seen], weight, precision, mean, root, linear)]

    def log_prob(seen: Tensor, weight: Tensor, precision: Tensor, mean: Tensor, root: Tensor, linear: Tensor) -> Tensor:
        data = torch.full_like(value, math.nan).masked_scatter(is_seen, seen)
        return ops.slab_log_prob(words, data, weight, precision, mean, root @ root.mT, linear)

    assert torch.autograd.gradcheck(log_prob, inputs)


def test_compiled_sums_do_not_depend_on_the_number_of_threads() -> None:
    import numba

    words, weights = StateSpace([2] * 20).random((200, 10), 0.2), torch.rand(200, 10)
    parameters = (
        torch.randn(200, NUM_OBSERVED),
        torch.randn(NUM_OBSERVED, 20),
        torch.rand(NUM_OBSERVED),
        torch.randn(20),
        covariance_matrix(20),
    )
    results, before = [], numba.get_num_threads()
    try:
        for num_threads in (1, before):
            numba.set_num_threads(num_threads)
            results.append(ops.slab_moments(words, weights, *parameters))
    finally:
        numba.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_slabs_that_are_nearly_one(kind: str) -> None:
    # Two latents that share nearly all of their slab: the kernels divide by no more than what tells them apart.
    words, states, value, (weight, precision, mean, _) = draw(2)
    covariance = torch.tensor([[1.0, 1.0], [1.0, 1.0 + 1e-9]], dtype=torch.float64)
    expected = torch.stack(
        [
            torch.stack([collapsed(state, y, weight, precision, mean, covariance) for state in row])
            for row, y in zip(states, value, strict=True)
        ]
    )
    found = ops.slab_log_prob(words, value, weight, precision, mean, covariance)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("noise", [1.0, 1e-3, 1e-6])
def test_gradients_keep_their_digits_where_there_is_little_noise(kind: str, noise: float) -> None:
    # Of the dictionary and the residual nothing is lost beside the noise: they are Psi + noise^2 (W' W)^-1 and what least squares find.
    words, size = torch.tensor([[[31]]]), 5
    value, weight = torch.randn(1, 8).double(), torch.randn(8, size).double() + 2 * torch.eye(8, size).double()
    mean, covariance, precision = torch.randn(size).double(), covariance_matrix(size), torch.full((8,), noise**-2, dtype=torch.float64)
    slope, curvature = ops.slab_moments(words, torch.ones(1, 1), value, weight, precision, mean, covariance)[3:]
    inverse = (covariance + noise**2 * (weight.mT @ weight).inverse()).inverse()
    expected = inverse @ (torch.linalg.lstsq(weight, value[0].unsqueeze(-1)).solution.squeeze(-1) - mean)
    for found, exact in ((slope, expected), (curvature, expected.outer(expected) - inverse)):
        assert (found - exact).norm() < 1e-9 * exact.norm()


def test_an_infinite_weight_skips_no_state(kind: str) -> None:
    words, _, value, parameters = draw(3)
    words[:] = torch.tensor([1, 2, 4, 4, 4, 4, 4]).unsqueeze(-1)
    weights = torch.tensor([math.inf, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]).expand(NUM_DATA, NUM_STATES)
    active, first, *_ = ops.slab_moments(words, weights, value, *parameters)
    assert (active[:, :2] == torch.tensor([math.inf, 1.0])).all()
    assert first[:, 0].isinf().all()
    assert first[:, 1].isfinite().all()
    assert (first[:, 1] != 0).all()
    one, other = ops.slab_moments(words, weights, value, *parameters[:3], parameters[3].diagonal().sqrt())[:2]
    assert torch.equal(one, active)
    assert torch.equal(other.isinf(), first.isinf())


def test_scratch_of_wide_states_keeps_to_the_budget() -> None:
    num_latents = 200
    words = torch.zeros(64, 2, 4, dtype=torch.int64)
    words[0, 0] = StateSpace([2] * num_latents).pack(torch.ones(num_latents))
    parameters = torch.randn(64, 3), torch.randn(3, num_latents), torch.ones(3), torch.zeros(num_latents), torch.eye(num_latents)
    budget = 2**25
    tracemalloc.start()
    with ops.memory_budget(budget):
        ops.slab_log_prob(words, *parameters)
        ops.slab_moments(words, torch.ones(64, 2), *parameters)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < budget


def test_wrong_shapes_are_refused() -> None:
    words, _, value, (weight, precision, mean, covariance) = draw(5)
    weights = torch.zeros(NUM_DATA, NUM_STATES)
    with pytest.raises(ValueError, match="slabs must have means"):
        ops.slab_log_prob(words, value, weight, precision, mean, covariance[:2])
    with pytest.raises(ValueError, match="linear must have shape"):
        ops.slab_log_prob(words, value, weight, precision, mean, covariance, torch.zeros(2, 5))
    with pytest.raises(ValueError, match="weights must have shape"):
        ops.slab_moments(words, torch.zeros(NUM_DATA, 2), value, weight, precision, mean, covariance)
    for given in (covariance, covariance.diagonal()):
        with pytest.raises(ValueError, match="do not fit"):
            ops.expected_log_slab_prior(words, weights, value, weight, precision, mean, given, mean, covariance)
