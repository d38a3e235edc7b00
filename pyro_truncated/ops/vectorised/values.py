"""From packed states to values and back in plain torch, for any device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_truncated.ops.fields import Fields, pack
from pyro_truncated.utils.budget import blocks_of_rows, rows_per_block


def unpack(words: Tensor, fields: Fields, dtype: torch.dtype) -> Tensor:
    """See :func:`pyro_truncated.ops.unpack`."""
    if fields.is_binary:
        return unpack_bits(words, fields.num_latents, dtype)
    rows = words[..., fields.word.to(words.device)] >> fields.shift.to(words.device)
    return (rows & fields.masks.to(words.device)).to(dtype)


def unpack_bits(words: Tensor, num_latents: int, dtype: torch.dtype) -> Tensor:
    """Unpacks words ``(..., W)`` of binary latents into ``(..., num_latents)``."""
    # One byte per bit at the most: a shift of whole words would need eight.
    octets = words.contiguous().view(torch.uint8).unsqueeze(-1)
    bits = (octets >> torch.arange(8, dtype=torch.uint8, device=words.device)) & 1
    return bits.flatten(-2)[..., :num_latents].to(dtype)


def first_beyond(words: Tensor, beyond: int) -> int:
    """Position of the first state, counted through all rows, whose last word has any of the given bits; -1 if there is none."""
    found = (words[..., -1] & beyond).flatten().nonzero()
    return int(found[0]) if len(found) else -1


def activation_probabilities(words: Tensor, weights: Tensor, fields: Fields) -> Tensor:
    """See :func:`pyro_truncated.ops.activation_probabilities`, of binary latents."""
    blocks = [
        torch.einsum("ns,nsl->nl", weights[rows], unpack(words[rows], fields, weights.dtype)) for rows in _blocks(words, fields.num_latents)
    ]
    return torch.cat(blocks) if blocks else weights.new_zeros(0, fields.num_latents)


def value_probabilities(words: Tensor, weights: Tensor, fields: Fields) -> tuple[Tensor, int]:
    """See :func:`pyro_truncated.ops.value_probabilities`; also how many values are none of their latents'."""
    out, num_invalid = weights.new_zeros(len(words), fields.num_latents, fields.num_values), 0
    cardinality = fields.cardinality.to(words.device).unsqueeze(-1)
    for rows in _blocks(words, fields.num_latents):
        values = unpack(words[rows], fields, torch.int64).mT
        num_invalid += int((values >= cardinality).sum())
        out[rows].scatter_add_(2, values.minimum(cardinality - 1), weights[rows].unsqueeze(1).expand_as(values))
    return out, num_invalid


def draw_values(tails: Tensor, num_samples: int, fields: Fields, seed: int) -> Tensor:
    """See :func:`pyro_truncated.ops.draw_values`; given the probabilities ``P(value > v)``, ``(N, L, V - 1)``."""
    generator = torch.Generator(tails.device).manual_seed(seed)
    parts = []
    block = rows_per_block(32 * len(tails) * fields.num_latents)
    for start in range(0, max(1, num_samples), block):
        shape = (len(tails), min(block, num_samples - start), fields.num_latents)
        uniform = torch.rand(shape, generator=generator, device=tails.device, dtype=torch.double)
        values = torch.zeros(shape, dtype=torch.long, device=tails.device)
        for tail in tails.unbind(-1):
            values += uniform < tail.unsqueeze(1)
        parts.append(pack(values, fields))
    return torch.cat(parts, 1)


def _blocks(words: Tensor, num_latents: int) -> Iterator[slice]:
    return blocks_of_rows(len(words), 32 * words.shape[1] * num_latents)
