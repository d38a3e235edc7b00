"""From packed states to values and back: unpacking, weighted marginals, and drawing independent latents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_truncated.ops.compiled import values as bits_cpu
from pyro_truncated.ops.evolution import draw_seed
from pyro_truncated.ops.selection import check_bits, check_words, uses_kernels

if TYPE_CHECKING:
    from pyro_truncated.states.space import StateSpace

_BLOCK_ENTRIES = 2**23
_COMPILED = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32, torch.float64)


def unpack(words: Tensor, space: StateSpace, dtype: torch.dtype) -> Tensor:
    """Values ``(..., L)`` of packed states ``(..., W)`` in the given type.

    Raises:
        ValueError: if ``words`` is not int64 or does not end in a dimension of the space's words.
    """
    if words.shape[-1:] != (space.num_words,) or words.dtype != torch.int64:
        raise ValueError(f"words must be int64 and end in a dimension of {space.num_words}; got {tuple(words.shape)} of {words.dtype}")
    if not uses_kernels(words) or dtype not in _COMPILED:
        return _unpack_dense(words, space, dtype)
    rows = words.contiguous().view(-1, space.num_words)
    out = torch.empty(len(rows), space.num_latents, dtype=dtype, device="cpu")
    if space.is_binary:
        bits_cpu.unpack_bits(rows.numpy(), out.numpy())
    else:
        bits_cpu.unpack_fields(rows.numpy(), space.word.numpy(), space.shift.numpy(), _field_masks(space).numpy(), out.numpy())
    return out.view(*words.shape[:-1], space.num_latents)


def activation_probabilities(words: Tensor, weights: Tensor, space: StateSpace) -> Tensor:
    r"""Probability :math:`\sum_s w_{ns} [s_l \ne 0]` that a latent is not zero.

    Args:
        words: packed states ``(N, S, W)``.
        weights: weights of the states, ``(N, S)``; probabilities if they sum to one.
        space: the state space.

    Returns:
        ``(N, L)`` in the type of the weights, accumulated in float64 on the CPU.

    Raises:
        ValueError: if the shapes do not fit or a state does not belong to the space.
    """
    if not space.is_binary:
        return value_probabilities(words, weights, space)[..., 1:].sum(-1)
    _check_weighted(words, weights, space)
    check_bits(words, space.num_latents)
    if not uses_kernels(words):
        blocks = [
            torch.einsum("ns,nsl->nl", weights[rows], _unpack_dense(words[rows], space, weights.dtype)) for rows in _blocks(words, space)
        ]
        return torch.cat(blocks) if blocks else weights.new_zeros(0, space.num_latents)
    out = torch.zeros(words.shape[0], space.num_latents, dtype=torch.float64, device="cpu")
    bits_cpu.add_weights_of_bits(words.contiguous().numpy(), weights.detach().contiguous().numpy(), out.numpy())
    return out.to(weights.dtype)


def value_probabilities(words: Tensor, weights: Tensor, space: StateSpace) -> Tensor:
    r"""Probability :math:`\sum_s w_{ns} [s_l = v]` of every value of every latent.

    Args:
        words: packed states ``(N, S, W)``.
        weights: weights of the states, ``(N, S)``; probabilities if they sum to one.
        space: the state space.

    Returns:
        ``(N, L, V)`` with ``V`` the largest cardinality; zero at values that a latent does not have.

    Raises:
        ValueError: if the shapes do not fit or a state does not belong to the space.
    """
    if space.is_binary:
        active = activation_probabilities(words, weights, space)
        return torch.stack([weights.sum(1, keepdim=True) - active, active], -1)
    _check_weighted(words, weights, space)
    num_data, num_values = words.shape[0], max(space.cardinalities)
    if uses_kernels(words):
        out = torch.zeros(num_data, space.num_latents, num_values, dtype=torch.float64, device="cpu")
        states, shares = words.contiguous().numpy(), weights.detach().contiguous().numpy()
        masks = _field_masks(space).numpy()
        fields = space.word.numpy(), space.shift.numpy(), masks, space.cardinality.numpy()
        _check_values(bits_cpu.add_weights_of_values(states, shares, *fields, out.numpy()))
        return out.to(weights.dtype)
    out = weights.new_zeros(num_data, space.num_latents, num_values)
    for rows in _blocks(words, space):
        values = _unpack_dense(words[rows], space, torch.int64).mT
        _check_values(int((values >= space.cardinality.to(values.device).unsqueeze(-1)).sum()))
        out[rows].scatter_add_(2, values, weights[rows].unsqueeze(1).expand_as(values))
    return out


def draw_values(probabilities: Tensor, num_samples: int, space: StateSpace, *, generator: torch.Generator | None = None) -> Tensor:
    """Draws states whose latents are independent.

    Args:
        probabilities: probability of every value of every latent, ``(N, L, V)`` with ``V`` the largest cardinality; each latent's
            sum to one and vanish at values that it does not have.
        num_samples: number of states per data point.
        space: the state space.
        generator: source of randomness.

    Returns:
        Packed states ``(N, num_samples, W)``.
    """
    if probabilities.dim() != 3 or probabilities.shape[1:] != (space.num_latents, max(space.cardinalities)):
        raise ValueError(
            f"probabilities must have the shape (N, {space.num_latents}, {max(space.cardinalities)}); got {tuple(probabilities.shape)}"
        )
    seed = draw_seed(generator)
    # Tail probabilities are summed from above, so a value of probability zero beyond the last one is never drawn.
    tails = probabilities.detach().double().flip(-1).cumsum(-1).flip(-1)[..., 1:].contiguous()
    if uses_kernels(tails):
        out = torch.empty(len(tails), num_samples, space.num_words, dtype=torch.int64, device="cpu")
        bits_cpu.draw_values(tails.numpy(), space.word.numpy(), space.shift.numpy(), seed, out.numpy())
        return out
    local = torch.Generator(tails.device).manual_seed(seed)
    block = max(1, _BLOCK_ENTRIES // max(1, len(tails) * space.num_latents))
    parts = []
    for start in range(0, max(1, num_samples), block):
        shape = (len(tails), min(block, num_samples - start), space.num_latents)
        uniform = torch.rand(shape, generator=local, device=tails.device, dtype=torch.double)
        values = sum((uniform < tail.unsqueeze(1)).long() for tail in tails.unbind(-1))
        parts.append(space.pack(values if isinstance(values, Tensor) else torch.zeros(shape, dtype=torch.long, device=tails.device)))
    return torch.cat(parts, 1)


def _check_weighted(words: Tensor, weights: Tensor, space: StateSpace) -> None:
    check_words("words", words)
    if words.shape[-1] != space.num_words or weights.shape != words.shape[:2]:
        given = f"{tuple(words.shape)} and {tuple(weights.shape)}"
        raise ValueError(f"words and weights must have the shapes (N, S, {space.num_words}) and (N, S); got {given}")


def _check_values(num_invalid: int) -> None:
    if num_invalid:
        raise ValueError(f"{num_invalid} latents of the states hold values that they do not have; the states belong to another state space")


def _unpack_dense(words: Tensor, space: StateSpace, dtype: torch.dtype) -> Tensor:
    """The torch version of :func:`unpack`."""
    if space.is_binary:
        # One byte per bit at the most: a shift of whole words would need eight.
        octets = words.contiguous().view(torch.uint8)
        bits = (octets.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=words.device)) & 1
        return bits.flatten(-2)[..., : space.num_latents].to(dtype)
    fields = words[..., space.word.to(words.device)] >> space.shift.to(words.device)
    return (fields & _field_masks(space).to(words.device)).to(dtype)


def _field_masks(space: StateSpace) -> Tensor:
    return (1 << space.bits) - 1


def _blocks(words: Tensor, space: StateSpace) -> list[slice]:
    size = max(1, _BLOCK_ENTRIES // max(1, words.shape[1] * space.num_latents))
    return [slice(start, start + size) for start in range(0, words.shape[0], size)]
