"""Quadratic functions and moments of packed states in plain torch, for any device."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.vectorised.blocks import blocks_of_states


def pair_energy(words: Tensor, linear: Tensor, pairwise: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.pair_energy`."""
    energies = []
    for _, states in blocks_of_states(words, linear.shape[-1], linear.shape[-1], torch.promote_types(linear.dtype, pairwise.dtype)):
        field = linear.unsqueeze(-2) + states @ pairwise.to(states.dtype)
        energies.append((field * states).sum(-1))
    return torch.cat(energies, -1)


def moments(words: Tensor, weights: Tensor, num_latents: int, per_datum: bool) -> tuple[Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.moments`."""
    num_data = weights.shape[0]
    first = weights.new_zeros(num_data, num_latents, dtype=torch.float64)
    second = weights.new_zeros((*((num_data,) if per_datum else ()), num_latents, num_latents), dtype=torch.float64)
    for where, states in blocks_of_states(words, num_latents, num_latents, torch.float64):
        weighted = weights[:, where].double().unsqueeze(-1) * states
        first += weighted.sum(1)
        second += weighted.mT @ states if per_datum else weighted.flatten(0, 1).mT @ states.flatten(0, 1)
    return first, second
