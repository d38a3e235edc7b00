"""States to start from, when nothing is known about the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_truncated.ops.compiled import initial as initial_cpu
from pyro_truncated.ops.evolution import draw_seed, fields_of

if TYPE_CHECKING:
    from pyro_truncated.states.space import StateSpace

_SMALL_SPACE = 4096


def initial_states(space: StateSpace, num_data: int, num_states: int, generator: torch.Generator | None = None) -> Tensor:
    """See :func:`pyro_truncated.states.population.initial_population`, which moves the result to a device."""
    if not 1 <= num_states <= space.size:
        raise ValueError(f"num_states must be at least 1 and at most the number of states in the space, {space.size}; got {num_states}")
    seed = draw_seed(generator)
    singletons = _singletons(space)
    others = singletons[:0]
    if space.size <= max(_SMALL_SPACE, 4 * num_states):
        everything = space.enumerate("cpu")
        others = everything[(space.unpack(everything, torch.int64) != 0).sum(-1) > 1]
    out = torch.empty(num_data, num_states, space.num_words, dtype=torch.int64, device="cpu")
    zero = torch.zeros(space.num_words, dtype=torch.int64, device="cpu")
    initial_cpu.initial_states(zero.numpy(), singletons.numpy(), others.numpy(), fields_of(space, space.mutable), seed, out.numpy())
    return out


def _singletons(space: StateSpace) -> Tensor:
    """All states with exactly one latent off zero, ``(sum of (cardinality - 1), W)``."""
    latent = torch.arange(space.num_latents, device="cpu").repeat_interleave(space.cardinality - 1)
    first = torch.cumsum(space.cardinality - 1, 0) - (space.cardinality - 1)
    value = torch.arange(len(latent), device="cpu") - first[latent] + 1
    words = torch.zeros(len(latent), space.num_words, dtype=torch.int64, device="cpu")
    return words.scatter_(1, space.word[latent].unsqueeze(1), (value << space.shift[latent]).unsqueeze(1))
