"""Packed spike-and-slab kernels against explicit Gaussians, on the CPU kernels and the dense torch versions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_truncated import ops
from pyro_truncated.states import StateSpace

NUM_DATA, NUM_STATES, NUM_OBSERVED = 5, 7, 6


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
    mean, deviation = torch.randn(num_latents).double(), 0.3 + torch.rand(num_latents).double()
    return words, space.unpack(words, torch.float64), value, [weight, precision, mean, deviation]


def collapsed(state: Tensor, value: Tensor, weight: Tensor, precision: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Log density of one observation by the covariance matrix of its observed entries."""
    is_seen = ~value.isnan()
    if not is_seen.any():
        return value.new_zeros(())
    weight = weight[is_seen] * state
    covariance = precision[is_seen].reciprocal().diag() + (weight * deviation.square()) @ weight.mT
    return MultivariateNormal(weight @ mean, covariance).log_prob(value[is_seen])


def conditioned(state: Tensor, value: Tensor, weight: Tensor, precision: Tensor, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """Posterior mean and covariance of ``s = b * z`` by conditioning the joint Gaussian of coefficients and observations."""
    is_seen = ~value.isnan()
    weight = weight[is_seen]
    prior = (state * deviation.square()).diag()
    gain = prior @ weight.mT @ (precision[is_seen].reciprocal().diag() + weight @ prior @ weight.mT).inverse()
    first = state * mean + gain @ (value[is_seen] - weight @ (state * mean))
    return first, prior - gain @ weight @ prior


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("num_latents", [1, 5, 64, 70])
@pytest.mark.parametrize("with_missing", [False, True])
def test_log_prob_is_that_of_the_marginal_gaussian(kind: str, num_latents: int, with_missing: bool) -> None:
    words, states, value, parameters = draw(num_latents, with_missing)
    expected = torch.stack([torch.stack([collapsed(state, y, *parameters) for state in row]) for row, y in zip(states, value, strict=True)])
    torch.testing.assert_close(ops.slab_log_prob(words, value, *parameters), expected, rtol=1e-9, atol=1e-9)
    linear = torch.randn(NUM_DATA, num_latents).double()
    actual = ops.slab_log_prob(words, value, *parameters, linear)
    torch.testing.assert_close(actual, expected + torch.einsum("nch,nh->nc", states, linear), rtol=1e-9, atol=1e-9)


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("num_latents", [1, 5, 70])
@pytest.mark.parametrize("with_missing", [False, True])
@pytest.mark.parametrize("per_datum", [False, True])
def test_moments_are_those_of_the_conditioned_gaussian(kind: str, num_latents: int, with_missing: bool, per_datum: bool) -> None:
    words, states, value, parameters = draw(num_latents, with_missing)
    weights = torch.randn(NUM_DATA, NUM_STATES).double()
    weights[2, 3] = 0
    first, second = torch.zeros(NUM_DATA, num_latents).double(), torch.zeros(NUM_DATA, num_latents, num_latents).double()
    for n in range(NUM_DATA):
        for c in range(NUM_STATES):
            mean, covariance = conditioned(states[n, c], value[n], *parameters)
            first[n] += weights[n, c] * mean
            second[n] += weights[n, c] * (covariance + mean.outer(mean))
    actual = ops.slab_moments(words, weights, value, *parameters, per_datum)
    expected = torch.einsum("nc,nch->nh", weights, states), first, second if per_datum else second.sum(0)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_moments_by_dimension(kind: str) -> None:
    words, _, value, parameters = draw(5, with_missing=True)
    weights = torch.rand(NUM_DATA, NUM_STATES).double()
    active, first, second = ops.slab_moments(words, weights, value, *parameters, per_datum=True)
    by_dimension = torch.einsum("nd,nhi->dhi", (~value.isnan()).double(), second)
    expected = active, first, by_dimension, second.diagonal(dim1=1, dim2=2).sum(0)
    for budget in (2**28, 2 * 16 * 25):
        with ops.memory_budget(budget):
            actual = ops.slab_moments_by_dimension(words, weights, value, *parameters)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("with_missing", [False, True])
def test_gradients(kind: str, with_missing: bool) -> None:
    words, _, value, parameters = draw(4, with_missing)
    is_seen = ~value.isnan()
    linear = torch.randn(NUM_DATA, 4).double()
    inputs = [tensor.requires_grad_() for tensor in (value[is_seen], *parameters, linear)]

    def log_prob(seen: Tensor, *rest: Tensor) -> Tensor:
        return ops.slab_log_prob(words, torch.full_like(value, math.nan).masked_scatter(is_seen, seen), *rest)

    assert torch.autograd.gradcheck(log_prob, inputs)


def test_shared_states_are_those_of_every_row(kind: str) -> None:
    _, _, value, parameters = draw(5)
    shared = StateSpace([2] * 5).enumerate().expand(NUM_DATA, -1, -1)
    actual = ops.slab_log_prob(shared, value, *parameters)
    torch.testing.assert_close(actual, ops.slab_log_prob(shared.clone(), value, *parameters), rtol=1e-13, atol=0)


def test_compiled_sums_do_not_depend_on_the_number_of_threads() -> None:
    import numba

    words, value, (weight, precision, mean, deviation) = draw_many(200)
    weights = torch.rand(words.shape[:2])
    results, before = [], numba.get_num_threads()
    try:
        for num_threads in (1, before):
            numba.set_num_threads(num_threads)
            results.append(ops.slab_moments(words, weights, value, weight, precision, mean, deviation))
    finally:
        numba.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def draw_many(num_data: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    words = StateSpace([2] * 20).random((num_data, 10), 0.2)
    parameters = [torch.randn(NUM_OBSERVED, 20), torch.rand(NUM_OBSERVED), torch.randn(20), torch.rand(20)]
    return words, torch.randn(num_data, NUM_OBSERVED), parameters


def test_slabs_of_almost_no_variance(kind: str) -> None:
    words, states, value, (weight, precision, mean, deviation) = draw(64)
    expected = torch.distributions.Normal((states * mean) @ weight.mT, precision.rsqrt()).log_prob(value.unsqueeze(1)).sum(-1)
    actual = ops.slab_log_prob(words, value, weight, precision, mean, 1e-12 * deviation)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_the_determinant_may_exceed_every_float(kind: str) -> None:
    words = torch.full((1, 1, 1), -1)
    ones, value = torch.ones(64).double(), torch.randn(1, 64).double()
    actual = ops.slab_log_prob(words, value, torch.eye(64).double(), ones, 0 * ones, 1e7 * ones)
    expected = torch.distributions.Normal(0 * ones, (1e14 + ones).sqrt()).log_prob(value).sum(-1, keepdim=True)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


def test_wrong_shapes_are_refused() -> None:
    words, _, value, (weight, precision, mean, deviation) = draw(5)
    with pytest.raises(ValueError, match="slabs must have means of shape"):
        ops.slab_log_prob(words, value, weight, precision, mean[:3], deviation)
    with pytest.raises(ValueError, match="linear must have shape"):
        ops.slab_log_prob(words, value, weight, precision, mean, deviation, torch.zeros(2, 5))
    with pytest.raises(ValueError, match="weights must have shape"):
        ops.slab_moments(words, torch.zeros(NUM_DATA, 2), value, weight, precision, mean, deviation)


class Factors(TorchDispatchMode):
    """Remembers of what shapes matrices are factorised."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "cholesky" in function.overloadpacket.__name__ and function.overloadpacket.__name__.startswith("linalg"):
            self.shapes.add(tuple(args[0].shape[-2:]))
        return function(*args, **(kwargs or {}))


def test_plain_torch_factorises_matrices_of_active_latents() -> None:
    words, _, value, parameters = draw(130)
    words[0, 1] = 0
    most = int(StateSpace([2] * 130).unpack(words).sum(-1).max())
    with ops.use_backend("vectorised"), Factors() as factors:
        ops.slab_log_prob(words, value, *parameters)
        ops.slab_moments(words, torch.ones(NUM_DATA, NUM_STATES).double(), value, *parameters)
    assert factors.shapes == {(most, most)}
    assert most < 20
    compiled = ops.slab_log_prob(words, value, *parameters)
    with ops.use_backend("vectorised"), ops.memory_budget(2**16):
        torch.testing.assert_close(ops.slab_log_prob(words, value, *parameters), compiled, rtol=1e-12, atol=1e-12)
