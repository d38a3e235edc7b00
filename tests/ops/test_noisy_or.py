"""Noisy-OR likelihoods of packed states against their definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.states import StateSpace
from tests.ops.problems import NUM_DATA, NUM_OBSERVED, NUM_STATES, binary_data, draw


def naive_noisy_or(states: Tensor, value: Tensor, weight: Tensor, leak: Tensor) -> Tensor:
    off = (1 - leak) * (1 - weight * states.unsqueeze(-2)).prod(-1)
    probability = torch.where(value.unsqueeze(1) == 1, 1 - off, off)
    return torch.where(value.unsqueeze(1).isnan(), torch.ones(()), probability).log().sum(-1)


@pytest.mark.slow
@pytest.mark.parametrize("missing", [False, True])
def test_noisy_or_log_prob_is_its_definition(kind: str, space: StateSpace, missing: bool) -> None:
    words, states = draw(space, activity=min(0.3, 4 / space.num_latents))
    value = binary_data(missing)
    weight, leak = torch.rand(NUM_OBSERVED, space.num_latents, dtype=torch.float64), torch.rand(NUM_OBSERVED, dtype=torch.float64)
    linear = torch.randn(NUM_DATA, space.num_latents, dtype=torch.float64)
    actual = ops.noisy_or_log_prob(words, value, torch.log1p(-weight), torch.log1p(-leak), linear)
    # The naive product underflows for states with very many active latents only.
    expected = naive_noisy_or(states, value, weight, leak) + torch.einsum("nch,nh->nc", states, linear)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("missing", [False, True])
def test_noisy_or_gradients(kind: str, missing: bool) -> None:
    words, _ = draw(StateSpace([2] * 6))
    value = binary_data(missing)
    log_complement = -(0.1 + torch.rand(NUM_OBSERVED, 6, dtype=torch.float64)).requires_grad_()
    log_leak_complement = -(0.1 + torch.rand(NUM_OBSERVED, dtype=torch.float64)).requires_grad_()
    linear = torch.randn(NUM_DATA, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda a, b, c: ops.noisy_or_log_prob(words, value, a, b, c), (log_complement, log_leak_complement, linear)
    )


@pytest.mark.parametrize("num_observed", [25, 100])
def test_noisy_or_keeps_tiny_probabilities_and_exact_zeros(kind: str, num_observed: int) -> None:
    space = StateSpace([2, 2])
    words = space.pack(torch.tensor([[[0, 0], [1, 0], [0, 1], [1, 1]]]))
    value = torch.ones(1, num_observed, dtype=torch.float64)
    weight, leak = torch.tensor([1e-15, 1.0], dtype=torch.float64).expand(num_observed, 2), torch.zeros(num_observed).double()
    actual = ops.noisy_or_log_prob(words, value, torch.log1p(-weight), leak)
    # A product of so many factors 1e-15 is far below the smallest float64.
    expected = torch.tensor([[-math.inf, num_observed * math.log(1e-15), 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    off = ops.noisy_or_log_prob(words, 1 - value, torch.log1p(-weight), leak)
    expected = torch.tensor([[0.0, -num_observed * 1e-15, -math.inf, -math.inf]], dtype=torch.float64)
    torch.testing.assert_close(off, expected, rtol=1e-12, atol=1e-25)


def test_impossible_states_of_weight_zero_do_not_spoil_gradients(kind: str) -> None:
    space = StateSpace([2, 2])
    words = space.enumerate().unsqueeze(0)
    log_complement = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    value, leak = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    ops.noisy_or_log_prob(words, value, log_complement, leak).logsumexp(-1).sum().backward()
    l1, l2 = (log_complement.detach()[0].requires_grad_()).unbind()
    expected = torch.autograd.grad((3 - l1.exp() - l2.exp() - (l1 + l2).exp()).log(), (l1, l2))
    torch.testing.assert_close(log_complement.grad, torch.stack(expected).unsqueeze(0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("missing", [False, True])
def test_noisy_or_statistics_are_expected_causes(kind: str, space: StateSpace, missing: bool) -> None:
    words, states = draw(space)
    value, weights = binary_data(missing), torch.rand(NUM_DATA, NUM_STATES, dtype=torch.float64)
    log_complement, log_leak = -torch.rand(NUM_OBSERVED, space.num_latents).double(), -torch.rand(NUM_OBSERVED).double()
    first, ratio, leak_ratio = ops.noisy_or_statistics(words, weights, value, log_complement, log_leak)
    inverse = 1 / -torch.expm1(log_leak + states @ log_complement.mT)
    share = torch.where(value.unsqueeze(1) == 1, weights.unsqueeze(-1) * inverse, 0.0)
    torch.testing.assert_close(first, (weights.unsqueeze(-1) * states).sum(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ratio, torch.einsum("ncd,nch->dh", share, states), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(leak_ratio, share.sum((0, 1)), rtol=1e-11, atol=1e-11)


def test_an_unlikely_state_counts_where_only_the_leak_explains_it(kind: str) -> None:
    # The first state has a weight that rounding loses in sums, but divided by the leak it is the larger part of the ratio.
    words = StateSpace([2]).pack(torch.tensor([[[0.0], [1.0]]]))
    weights, weight, leak = (
        torch.tensor([[1e-26, 1.0]], dtype=torch.float64),
        torch.tensor([[0.5]]),
        torch.tensor([1e-30], dtype=torch.float64),
    )
    first, ratio, leak_ratio = ops.noisy_or_statistics(words, weights, torch.ones(1, 1), torch.log1p(-weight.double()), torch.log1p(-leak))
    torch.testing.assert_close(first, torch.ones(1, 1).double(), rtol=1e-12, atol=0)
    torch.testing.assert_close(ratio, torch.tensor([[2.0]]).double(), rtol=1e-12, atol=0)
    torch.testing.assert_close(leak_ratio, torch.tensor([1e4 + 2.0]).double(), rtol=1e-12, atol=0)


def test_wrong_inputs_are_refused() -> None:
    words = torch.zeros(3, 2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="0, 1 or, where missing, NaN"):
        ops.noisy_or_log_prob(words, torch.full((3, 2), 0.5), torch.zeros(2, 4), torch.zeros(2))
    with pytest.raises(ValueError, match="parameters must have shapes"):
        ops.noisy_or_log_prob(words, torch.zeros(3, 2), torch.zeros(3, 4), torch.zeros(2))
    with pytest.raises(ValueError, match="linear must have shape"):
        ops.noisy_or_log_prob(words, torch.zeros(3, 2), torch.zeros(2, 4), torch.zeros(2), torch.zeros(3, 5))
