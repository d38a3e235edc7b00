"""States and observations that tests of several likelihoods share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_truncated.states import StateSpace

NUM_DATA, NUM_STATES, NUM_OBSERVED = 5, 7, 11


def draw(space: StateSpace, num_data: int = NUM_DATA, activity: float = 0.3) -> tuple[Tensor, Tensor]:
    """Packed states, the all-zero and the all-one state among them, and their values in float64."""
    words = space.random((num_data, NUM_STATES), activity)
    words[0, 0], words[0, 1] = 0, space.pack(torch.ones(space.num_latents))
    return words, space.unpack(words, torch.float64)


def binary_data(missing: bool) -> Tensor:
    value = torch.bernoulli(torch.full((NUM_DATA, NUM_OBSERVED), 0.5, dtype=torch.float64))
    if missing:
        value[torch.rand(value.shape) < 0.3] = math.nan
        value[1] = math.nan
    return value
