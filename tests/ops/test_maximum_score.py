"""Packed scores of exponential families under a superposition by maximum, against loops, compiled and vectorised."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.states import StateSpace

NUM_DATA, NUM_STATES, NUM_OBSERVED = 5, 7, 6


def draw(num_latents: int, with_missing: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Packed states, their values, observations, and parameters that grow with the same means."""
    space = StateSpace([2] * num_latents)
    words = space.random((NUM_DATA, NUM_STATES), min(0.5, 6 / num_latents))
    words[0, 0], words[0, 1] = 0, space.pack(torch.ones(num_latents))
    value = 3 * torch.randn(NUM_DATA, NUM_OBSERVED).double()
    if with_missing:
        value[torch.rand(value.shape) < 0.3] = math.nan
        value[1] = math.nan
    means = torch.rand(NUM_OBSERVED, num_latents + 1).double()
    return words, space.unpack(words, torch.float64), value, means.log(), 2 * means


def winners(state: Tensor, natural: Tensor) -> Tensor:
    is_on = torch.cat([state, state.new_ones(1)]) > 0
    return torch.where(is_on, natural, -torch.inf).argmax(-1)


@pytest.mark.parametrize("num_latents", [1, 5, 70])
@pytest.mark.parametrize("with_missing", [False, True])
def test_scores_and_wins_are_those_of_the_largest(kind: str, num_latents: int, with_missing: bool) -> None:
    words, states, value, natural, partition = draw(num_latents, with_missing)
    weights, dimensions = torch.randn(NUM_DATA, NUM_STATES).double(), torch.arange(NUM_OBSERVED)
    expected = torch.zeros(NUM_DATA, NUM_STATES).double()
    largest, wins, sums = torch.zeros(NUM_DATA, NUM_OBSERVED).double(), torch.zeros_like(natural), torch.zeros_like(natural)
    for n in range(NUM_DATA):
        seen = ~value[n].isnan()
        for c in range(NUM_STATES):
            who = winners(states[n, c], natural)
            expected[n, c] = (value[n] * natural[dimensions, who] - partition[dimensions, who])[seen].sum()
            largest[n] += weights[n, c] * natural[dimensions, who]
            wins[dimensions[seen], who[seen]] += weights[n, c]
            sums[dimensions[seen], who[seen]] += weights[n, c] * value[n, seen]
    torch.testing.assert_close(ops.maximum_score(words, value, natural, partition), expected, rtol=1e-11, atol=1e-11)
    actual = ops.maximum_wins(words, weights, value, natural)
    active = torch.einsum("nc,nch->nh", weights, states)
    torch.testing.assert_close(actual, (active, largest, wins, sums), rtol=1e-11, atol=1e-11)


def test_what_little_the_background_wins_has_all_its_digits(kind: str) -> None:
    words = StateSpace([2]).pack(torch.tensor([[[1.0], [0.0]]]))
    value, natural = torch.tensor([[3.0]]).double(), torch.tensor([[1.0, 0.5]]).double()
    _, _, wins, sums = ops.maximum_wins(words, torch.tensor([[1.0, 1e-20]]).double(), value, natural)
    torch.testing.assert_close(wins, torch.tensor([[1.0, 1e-20]]).double(), rtol=1e-15, atol=0)
    torch.testing.assert_close(sums, 3 * wins, rtol=1e-15, atol=0)


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("with_missing", [False, True])
def test_gradients(kind: str, with_missing: bool) -> None:
    words, _, value, natural, partition = draw(4, with_missing)
    is_seen = ~value.isnan()
    inputs = [tensor.requires_grad_() for tensor in (value[is_seen], natural.exp())]

    def score(seen: Tensor, means: Tensor) -> Tensor:
        data = torch.full_like(value, math.nan).masked_scatter(is_seen, seen)
        return ops.maximum_score(words, data, means.log(), 2 * means)

    assert partition.shape == natural.shape
    assert torch.autograd.gradcheck(score, inputs)


def test_wrong_shapes_are_refused() -> None:
    words, _, value, natural, partition = draw(4, with_missing=False)
    with pytest.raises(ValueError, match=r"must both have shape \(D, H \+ 1\)"):
        ops.maximum_score(words, value, natural, partition[:, :3])
    with pytest.raises(ValueError, match="weights must have shape"):
        ops.maximum_wins(words, torch.zeros(NUM_DATA, 2), value, natural)
