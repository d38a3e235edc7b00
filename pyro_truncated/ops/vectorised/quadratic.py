"""Quadratic functions and moments of packed states in plain torch, for any device."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.vectorised.blocks import blocks_of_states
from pyro_truncated.ops.vectorised.values import unpack_bits
from pyro_truncated.utils.budget import blocks_of_rows


def pair_energy(words: Tensor, linear: Tensor, pairwise: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.pair_energy`."""
    energies = []
    for _, states in blocks_of_states(words, linear.shape[-1], linear.shape[-1], torch.promote_types(linear.dtype, pairwise.dtype)):
        field = linear.unsqueeze(-2) + states @ pairwise.to(states.dtype)
        energies.append((field * states).sum(-1))
    return torch.cat(energies, -1)


def flip_energy(words: Tensor, alone: Tensor, others: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.flip_energy`, given what a latent adds alone ``(N, H)`` and beside others ``(H, H)``."""
    blocks = []
    for rows in blocks_of_rows(max(1, len(words)), 32 * len(others)):
        states = unpack_bits(words[rows], len(others), torch.float64)
        blocks.append((1 - 2 * states) * (alone[rows] + states @ others))
    return torch.cat(blocks)


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
