"""Squared residuals of packed states against their definition."""

from __future__ import annotations

import math

import torch

from pyro_truncated import ops
from pyro_truncated.states import StateSpace
from tests.ops.problems import NUM_DATA, NUM_OBSERVED, draw


def test_square_error_skips_missing_entries(kind: str, space: StateSpace) -> None:
    words, states = draw(space)
    value = torch.randn(NUM_DATA, NUM_OBSERVED, dtype=torch.float64)
    value[torch.rand(value.shape) < 0.3] = math.nan
    weight, precision = torch.randn(NUM_OBSERVED, space.num_latents).double(), torch.rand(NUM_OBSERVED).double()
    residual = (value.unsqueeze(1) - states @ weight.mT).nan_to_num(nan=0.0)
    expected = (residual.square() * precision).sum(-1)
    torch.testing.assert_close(ops.square_error(words, value, weight, precision), expected, rtol=1e-11, atol=1e-11)


def test_square_error_gradients(kind: str) -> None:
    words, _ = draw(StateSpace([2] * 6))
    is_missing = torch.rand(NUM_DATA, NUM_OBSERVED) < 0.3
    inputs = [
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((NUM_DATA, NUM_OBSERVED), (NUM_OBSERVED, 6), (NUM_OBSERVED,))
    ]
    assert torch.autograd.gradcheck(lambda y, w, p: ops.square_error(words, y.masked_fill(is_missing, math.nan), w, p), inputs)
