"""Quadratic functions, moments and squared residuals in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.vectorised.latent_values import state_blocks, unpack_bits
from pyro_truncated.utils.budget import row_slices


def pair_energy(words: Tensor, linear: Tensor, pairwise: Tensor | None) -> Tensor:
    """See :func:`pyro_truncated.ops.pair_energy`."""
    energies, dtype = [], linear.dtype if pairwise is None else torch.promote_types(linear.dtype, pairwise.dtype)
    for _, states in state_blocks(words, linear.shape[-1], linear.shape[-1], dtype):
        field = linear.unsqueeze(-2)
        if pairwise is not None:
            field = field + states @ pairwise.to(dtype)
        energies.append((field * states).sum(-1))
    return torch.cat(energies, -1)


def flip_energy(words: Tensor, alone: Tensor, others: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.flip_energy`."""
    blocks = []
    for rows in row_slices(max(1, len(words)), 32 * len(others)):
        states = unpack_bits(words[rows], len(others), torch.float64)
        blocks.append((1 - 2 * states) * (alone[rows] + states @ others))
    return torch.cat(blocks)


def moments(words: Tensor, weights: Tensor, num_latents: int, per_datum: bool) -> tuple[Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.moments`."""
    num_data = weights.shape[0]
    first = weights.new_zeros(num_data, num_latents, dtype=torch.float64)
    second = weights.new_zeros((*((num_data,) if per_datum else ()), num_latents, num_latents), dtype=torch.float64)
    for where, states in state_blocks(words, num_latents, num_latents, torch.float64):
        weighted = weights[:, where].double().unsqueeze(-1) * states
        first += weighted.sum(1)
        second += weighted.mT @ states if per_datum else weighted.flatten(0, 1).mT @ states.flatten(0, 1)
    return first, second


def first_moments(words: Tensor, weights: Tensor, num_latents: int) -> Tensor:
    """The first of the two :func:`pyro_truncated.ops.moments`."""
    first = weights.new_zeros(len(weights), num_latents, dtype=torch.float64)
    for where, states in state_blocks(words, num_latents, num_latents, torch.float64):
        first += (weights[:, where].double().unsqueeze(-1) * states).sum(1)
    return first


def square_error(words: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.quadratic`."""
    errors = []
    for _, states in state_blocks(words, weight.shape[1], weight.shape[0], torch.float64):
        errors.append(_residual(states, value, weight).square() @ precision.double())
    return torch.cat(errors, -1)


def square_error_gradients(words: Tensor, grad: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``(grad * square_error).sum()`` with respect to value, weight and precision."""
    grad_value = torch.zeros_like(value, dtype=torch.float64)
    grad_weight = torch.zeros_like(weight, dtype=torch.float64)
    grad_precision = torch.zeros_like(precision, dtype=torch.float64)
    for where, states in state_blocks(words, weight.shape[1], weight.shape[0], torch.float64):
        residual = _residual(states, value, weight)
        slope = grad[:, where].double().unsqueeze(-1) * residual
        grad_precision += (slope * residual).sum((0, 1))
        slope *= 2 * precision.double()
        grad_value += slope.sum(1)
        grad_weight -= slope.flatten(0, 1).mT @ states.flatten(0, 1)
    return grad_value, grad_weight, grad_precision


def _residual(states: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    value = value.double().unsqueeze(1)
    return torch.where(value.isnan(), 0.0, value - states @ weight.double().mT)
