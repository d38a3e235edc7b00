"""Packed energies and moments against their definitions, and what holds of all kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.states import StateSpace
from tests.ops.problems import NUM_DATA, NUM_OBSERVED, NUM_STATES, binary_data, draw


@pytest.mark.parametrize("per_datum", [False, True])
def test_pair_energy_is_the_quadratic_form(kind: str, space: StateSpace, per_datum: bool) -> None:
    words, states = draw(space)
    num_latents = space.num_latents
    linear = torch.randn(NUM_DATA, num_latents, dtype=torch.float64)
    pairwise = torch.randn(*(NUM_DATA,) * per_datum, num_latents, num_latents, dtype=torch.float64)
    expected = torch.einsum("nch,nh->nc", states, linear) + torch.einsum(f"nch,{'n' * per_datum}hi,nci->nc", states, pairwise, states)
    torch.testing.assert_close(ops.pair_energy(words, linear, pairwise), expected, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("num_latents", [1, 4, 5, 10, 20, 21])
def test_pair_energy_of_few_latents(kind: str, num_latents: int) -> None:
    words, states = draw(StateSpace([2] * num_latents))
    linear, pairwise = torch.randn(NUM_DATA, num_latents).double(), torch.randn(num_latents, num_latents).double()
    expected = torch.einsum("nch,nh->nc", states, linear)
    torch.testing.assert_close(ops.linear_energy(words, linear), expected, rtol=1e-12, atol=1e-12)
    expected += ((states @ pairwise) * states).sum(-1)
    torch.testing.assert_close(ops.pair_energy(words, linear, pairwise), expected, rtol=1e-12, atol=1e-11)


def test_pair_energy_of_no_latents(kind: str) -> None:
    nothing = torch.zeros(2, 0, dtype=torch.float64)
    assert torch.equal(ops.pair_energy(torch.zeros(2, 3, 0, dtype=torch.int64), nothing, nothing[:0]), torch.zeros(2, 3).double())


@pytest.mark.parametrize("kind", ["compiled"], indirect=True)
def test_infinite_energies_count_where_latents_are_active(kind: str) -> None:
    words, states = draw(StateSpace([2] * 6))
    linear, pairwise = torch.randn(NUM_DATA, 6).double(), torch.randn(6, 6).double()
    linear[:, 1], pairwise[2, 3] = -torch.inf, -torch.inf
    expected = torch.einsum("nch,nh->nc", states, linear.masked_fill(linear.isinf(), 0.0))
    expected += ((states @ pairwise.masked_fill(pairwise.isinf(), 0.0)) * states).sum(-1)
    expected[(states[..., 1] > 0) | (states[..., 2] * states[..., 3] > 0)] = -torch.inf
    torch.testing.assert_close(ops.pair_energy(words, linear, pairwise), expected, rtol=1e-12, atol=1e-11)


def test_flips_change_the_energy_by_as_much_as_scoring_them_says(kind: str, space: StateSpace) -> None:
    words, _ = draw(space)
    num_latents = space.num_latents
    linear, pairwise = torch.randn(NUM_DATA, num_latents).double(), torch.randn(num_latents, num_latents).double()
    flips = space.pack(torch.eye(num_latents, dtype=torch.int64))
    for state in words[:, :2].unbind(1):
        before = ops.pair_energy(state.unsqueeze(1), linear, pairwise)
        expected = ops.pair_energy(state.unsqueeze(1) ^ flips, linear, pairwise) - before
        torch.testing.assert_close(ops.flip_energy(state, linear, pairwise), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("per_datum", [False, True])
def test_pair_energy_gradients(kind: str, per_datum: bool) -> None:
    space = StateSpace([2] * 6)
    words, _ = draw(space)
    linear = torch.randn(NUM_DATA, 6, dtype=torch.float64, requires_grad=True)
    pairwise = torch.randn(*(NUM_DATA,) * per_datum, 6, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: ops.pair_energy(words, a, b), (linear, pairwise))
    assert torch.autograd.gradgradcheck(lambda a, b: ops.pair_energy(words, a, b).logsumexp(-1), (linear, pairwise))


def test_linear_energy_is_pair_energy_without_pairs(kind: str, space: StateSpace) -> None:
    words, _ = draw(space)
    linear = torch.randn(NUM_DATA, space.num_latents, dtype=torch.float64, requires_grad=True)
    energy, zeros = ops.linear_energy(words, linear), torch.zeros(space.num_latents, space.num_latents).double()
    expected = ops.pair_energy(words, linear, zeros.requires_grad_())
    torch.testing.assert_close(energy, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(NUM_DATA, NUM_STATES).double()
    torch.testing.assert_close(*(torch.autograd.grad(one, linear, weights) for one in (energy, expected)), rtol=1e-12, atol=1e-12)


def test_linear_energy_gradients(kind: str) -> None:
    words, _ = draw(StateSpace([2] * 6))
    linear = torch.randn(NUM_DATA, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: ops.linear_energy(words, a), (linear,))
    assert torch.autograd.gradgradcheck(lambda a: ops.linear_energy(words, a).logsumexp(-1), (linear,))


def test_pair_energy_sums_in_float64_on_the_cpu() -> None:
    space = StateSpace([2] * 3)
    words = space.pack(torch.ones(1, 1, 3))
    linear = torch.tensor([[1e8, 1.0, -1e8]])
    assert ops.pair_energy(words, linear, torch.zeros(3, 3)).item() == 1.0
    assert ops.pair_energy(words, linear, torch.zeros(3, 3)).dtype == torch.float32


def test_shared_states_are_those_of_every_row(kind: str) -> None:
    space = StateSpace([2] * 5)
    shared = space.enumerate().expand(NUM_DATA, -1, -1)
    linear, pairwise = torch.randn(NUM_DATA, 5, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)
    weights = torch.rand(NUM_DATA, 32, dtype=torch.float64)
    assert torch.equal(ops.pair_energy(shared, linear, pairwise), ops.pair_energy(shared.clone(), linear, pairwise))
    torch.testing.assert_close(ops.moments(shared, weights, 5), ops.moments(shared.clone(), weights, 5))


@pytest.mark.parametrize("per_datum", [False, True])
def test_moments_are_weighted_sums(kind: str, space: StateSpace, per_datum: bool) -> None:
    words, states = draw(space)
    weights = torch.randn(NUM_DATA, NUM_STATES, dtype=torch.float64)
    weights[0, 0] = 0
    first, second = ops.moments(words, weights, space.num_latents, per_datum)
    expected = torch.einsum(f"nc,nch,nci->{'n' * per_datum}hi", weights, states, states)
    torch.testing.assert_close(first, torch.einsum("nc,nch->nh", weights, states), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(second, expected, rtol=1e-12, atol=1e-12)


def test_a_latent_of_unlikely_states_keeps_its_moments(kind: str) -> None:
    # Weights fall to 1e-20: each state has a latent of its own, whose moments are relative to themselves.
    space, exponents = StateSpace([2] * 20), torch.arange(20).double()
    words, weights = space.pack(torch.eye(20)).unsqueeze(0), (10.0**-exponents).unsqueeze(0)
    first, second = ops.moments(words, weights, 20)
    torch.testing.assert_close(first, weights, rtol=1e-12, atol=0)
    torch.testing.assert_close(second, torch.diag(weights[0]), rtol=1e-12, atol=0)


def test_sums_do_not_depend_on_the_number_of_threads() -> None:
    import numba

    space = StateSpace([2] * 20)
    words, weights = space.random((200, 30), 0.2), torch.rand(200, 30)
    value = torch.bernoulli(torch.full((200, NUM_OBSERVED), 0.5))
    parameters = -torch.rand(NUM_OBSERVED, 20), -torch.rand(NUM_OBSERVED)
    results = []
    before = numba.get_num_threads()
    try:
        for num_threads in (1, before):
            numba.set_num_threads(num_threads)
            results.append((*ops.moments(words, weights, 20), *ops.noisy_or_statistics(words, weights, value, *parameters)))
    finally:
        numba.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 8 * NUM_DATA * NUM_OBSERVED * 2])
def test_the_memory_budget_changes_rounding_only(kind: str, budget: int) -> None:
    space = StateSpace([2] * 9)
    words, _ = draw(space)
    value, weights = binary_data(missing=True), torch.rand(NUM_DATA, NUM_STATES, dtype=torch.float64)
    log_complement, log_leak = -torch.rand(NUM_OBSERVED, 9).double(), -torch.rand(NUM_OBSERVED).double()
    linear, pairwise = torch.randn(NUM_DATA, 9).double(), torch.randn(9, 9).double()

    def results() -> list[Tensor]:
        inputs = [tensor.clone().requires_grad_() for tensor in (value.nan_to_num(0.0), log_complement, log_leak)]
        ops.square_error(words, *inputs).mul(weights).sum().backward()
        return [
            ops.pair_energy(words, linear, pairwise),
            ops.noisy_or_log_prob(words, value, log_complement, log_leak, linear),
            ops.square_error(words, value, log_complement, log_leak),
            *ops.moments(words, weights, 9, per_datum=False),
            *ops.noisy_or_statistics(words, weights, value, log_complement, log_leak),
            *(tensor.grad for tensor in inputs if tensor.grad is not None),
        ]

    whole = results()
    with ops.memory_budget(budget):
        parts = results()
    for part, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_agrees_with_cpu() -> None:
    words, _ = draw(StateSpace([2] * 70))
    value = binary_data(missing=True)
    log_complement, log_leak = -torch.rand(NUM_OBSERVED, 70).double(), -torch.rand(NUM_OBSERVED).double()
    linear, pairwise = torch.randn(NUM_DATA, 70).double(), torch.randn(70, 70).double()
    inputs = (words, value, log_complement, log_leak, linear)
    on_gpu = ops.noisy_or_log_prob(*(tensor.cuda() for tensor in inputs)).cpu()
    torch.testing.assert_close(on_gpu, ops.noisy_or_log_prob(*inputs), rtol=1e-10, atol=1e-10)
    on_gpu = ops.pair_energy(words.cuda(), linear.cuda(), pairwise.cuda()).cpu()
    torch.testing.assert_close(on_gpu, ops.pair_energy(words, linear, pairwise), rtol=1e-10, atol=1e-10)


def test_wrong_inputs_are_refused() -> None:
    words = torch.zeros(3, 2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="int64 of shape"):
        ops.pair_energy(words.float(), torch.zeros(3, 4), torch.zeros(4, 4))
    with pytest.raises(ValueError, match="one row for each of the 3"):
        ops.pair_energy(words, torch.zeros(2, 4), torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"linear \(N, H\) must have one row for each of the 3"):
        ops.linear_energy(words, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="fills 2 words"):
        ops.pair_energy(words, torch.zeros(3, 65), torch.zeros(65, 65))
    with pytest.raises(ValueError, match=r"pairwise must have shape .* got \(4, 3\)"):
        ops.pair_energy(words, torch.zeros(3, 4), torch.zeros(4, 3))
    with pytest.raises(ValueError, match="one per state"):
        ops.moments(words, torch.zeros(3, 4), 4)
