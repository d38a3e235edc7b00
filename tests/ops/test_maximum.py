"""Packed superpositions by maximum against their definition, on the CPU kernels and the dense torch versions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.states import StateSpace

NUM_DATA, NUM_STATES, NUM_OBSERVED = 5, 7, 9


def draw(num_latents: int, with_missing: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Packed states, the all-zero and the all-one state among them, their values, observations and parameters."""
    space = StateSpace([2] * num_latents)
    words = space.random((NUM_DATA, NUM_STATES), min(0.5, 6 / num_latents))
    words[0, 0], words[0, 1] = 0, space.pack(torch.ones(num_latents))
    value = torch.randn(NUM_DATA, NUM_OBSERVED).double()
    if with_missing:
        value[torch.rand(value.shape) < 0.3] = math.nan
        value[1] = math.nan
    # Negative entries never win.
    weight = torch.randn(NUM_OBSERVED, num_latents).double()
    return words, space.unpack(words, torch.float64), value, weight, 0.5 + torch.rand(NUM_OBSERVED).double()


def naive(states: Tensor, weight: Tensor) -> Tensor:
    return (weight * states.unsqueeze(-2)).amax(-1).clamp(min=0.0)


@pytest.mark.parametrize("num_latents", [1, 5, 64, 70])
@pytest.mark.parametrize("with_missing", [False, True])
def test_error_is_its_definition(kind: str, num_latents: int, with_missing: bool) -> None:
    words, states, value, weight, precision = draw(num_latents, with_missing)
    residual = (value.unsqueeze(1) - naive(states, weight)).nan_to_num(0.0)
    actual = ops.maximum_error(words, value, weight, precision)
    torch.testing.assert_close(actual, residual.square() @ precision, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_latents", [1, 5, 70])
@pytest.mark.parametrize("with_missing", [False, True])
def test_statistics_are_their_definition(kind: str, num_latents: int, with_missing: bool) -> None:
    words, states, value, weight, _ = draw(num_latents, with_missing)
    weights = torch.randn(NUM_DATA, NUM_STATES).double()
    weights[2, 3] = 0
    wins, sums = torch.zeros_like(weight), torch.zeros_like(weight)
    for n in range(NUM_DATA):
        for c in range(NUM_STATES):
            for d in range(NUM_OBSERVED):
                terms = states[n, c] * weight[d]
                if terms.max() > 0 and not value[n, d].isnan():
                    wins[d, terms.argmax()] += weights[n, c]
                    sums[d, terms.argmax()] += weights[n, c] * value[n, d]
    prediction = torch.einsum("nc,ncd->nd", weights, naive(states, weight))
    expected = torch.einsum("nc,nch->nh", weights, states), prediction, wins, sums
    torch.testing.assert_close(ops.maximum_statistics(words, weights, value, weight), expected, rtol=1e-12, atol=1e-12)


def test_ties_go_to_the_first(kind: str) -> None:
    words = StateSpace([2] * 3).pack(torch.ones(1, 1, 3))
    value, one = torch.ones(1, 1).double(), torch.ones(1, 1).double()
    weight = torch.tensor([[0.5, 2.0, 2.0]]).double()
    assert ops.maximum_statistics(words, one, value, weight)[2].tolist() == [[0, 1, 0]]
    assert ops.maximum_statistics(words, one, value, 0 * weight)[2].tolist() == [[0, 0, 0]]


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("with_missing", [False, True])
def test_gradients(kind: str, with_missing: bool) -> None:
    words, _, value, weight, precision = draw(5, with_missing)
    is_seen = ~value.isnan()
    inputs = [tensor.requires_grad_() for tensor in (value[is_seen], weight, precision)]

    def error(seen: Tensor, *rest: Tensor) -> Tensor:
        return ops.maximum_error(words, torch.full_like(value, math.nan).masked_scatter(is_seen, seen), *rest)

    assert torch.autograd.gradcheck(error, inputs)


def test_shared_states_are_those_of_every_row(kind: str) -> None:
    _, _, value, weight, precision = draw(5)
    shared = StateSpace([2] * 5).enumerate().expand(NUM_DATA, -1, -1)
    weights = torch.rand(NUM_DATA, 32)
    assert torch.equal(ops.maximum_error(shared, value, weight, precision), ops.maximum_error(shared.clone(), value, weight, precision))
    actual, expected = (ops.maximum_statistics(words, weights, value, weight) for words in (shared, shared.clone()))
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=0)


def test_wrong_shapes_are_refused() -> None:
    words, _, value, weight, precision = draw(5)
    with pytest.raises(ValueError, match="parameters must have shapes"):
        ops.maximum_error(words, value, weight, precision[:3])
    with pytest.raises(ValueError, match="weights must have shape"):
        ops.maximum_statistics(words, torch.zeros(NUM_DATA, 2), value, weight)
