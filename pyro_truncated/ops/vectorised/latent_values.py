"""Unpacking and marginals in plain torch, for any device."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_truncated.ops.fields import Fields
from pyro_truncated.ops.vectorised import random
from pyro_truncated.utils.budget import row_slices


def unpack(words: Tensor, fields: Fields, dtype: torch.dtype) -> Tensor:
    """See :func:`pyro_truncated.ops.unpack`."""
    if fields.is_binary:
        return unpack_bits(words, fields.num_latents, dtype)
    word, shift, masks = (fields.on(words.device, name) for name in ("word", "shift", "masks"))
    return ((words[..., word] >> shift) & masks).to(dtype)


def unpack_bits(words: Tensor, num_latents: int, dtype: torch.dtype) -> Tensor:
    """Unpacks words ``(..., W)`` of binary latents into ``(..., num_latents)``."""
    # One byte per bit at the most: a shift of whole words would need eight.
    octets = words.contiguous().view(torch.uint8).unsqueeze(-1)
    bits = (octets >> _shifts(words.device)) & 1
    return bits.flatten(-2)[..., :num_latents].to(dtype)


@functools.cache
def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def first_beyond(words: Tensor, beyond: int) -> int:
    """Returns the first state whose last word has given bits.

    States are counted through all rows; -1 if there is none.
    """
    found = (words[..., -1] & beyond).flatten().nonzero()
    return int(found[0]) if len(found) else -1


def activation_probabilities(words: Tensor, weights: Tensor, fields: Fields) -> Tensor:
    """See :func:`pyro_truncated.ops.activation_probabilities`, of binary latents."""
    blocks = [
        torch.einsum("ns,nsl->nl", weights[rows], unpack(words[rows], fields, weights.dtype)) for rows in _blocks(words, fields.num_latents)
    ]
    return torch.cat(blocks) if blocks else weights.new_zeros(0, fields.num_latents)


def value_probabilities(words: Tensor, weights: Tensor, fields: Fields) -> tuple[Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.value_probabilities`; also how many values are none of their latents'."""
    out, num_invalid = weights.new_zeros(len(words), fields.num_latents, fields.num_values), words.new_zeros(())
    cardinality = fields.on(words.device, "cardinality").unsqueeze(-1)
    for rows in _blocks(words, fields.num_latents):
        values = unpack(words[rows], fields, torch.int64).mT
        num_invalid += (values >= cardinality).sum()
        out[rows].scatter_add_(2, values.minimum(cardinality - 1), weights[rows].unsqueeze(1).expand_as(values))
    return out, num_invalid


def draw_values(tails: Tensor, num_samples: int, fields: Fields, rows: Tensor, seed: int) -> Tensor:
    """See :func:`pyro_truncated.ops.draw_values`; given the probabilities ``P(value > v)``, ``(N, L, V - 1)``."""
    out = torch.empty(len(tails), num_samples, fields.num_words, dtype=torch.int64, device=tails.device)
    for block in row_slices(len(tails), 64 * num_samples * fields.num_latents):
        draws = random.numbers(random.stream(seed, rows[block]), num_samples * fields.num_latents)
        uniform = random.uniform(draws).view(len(draws), num_samples, fields.num_latents)
        values = torch.zeros(uniform.shape, dtype=torch.int64, device=tails.device)
        for tail in tails[block].unbind(-1):
            values += uniform < tail.unsqueeze(1)
        out[block] = _pack(values, fields)
    return out


def _pack(values: Tensor, fields: Fields) -> Tensor:
    """Packs values that are known to be those of their latents."""
    words = values.new_zeros(*values.shape[:-1], fields.num_words)
    return words.index_add_(-1, fields.on(values.device, "word"), values << fields.on(values.device, "shift"))


def _blocks(words: Tensor, num_latents: int) -> Iterator[slice]:
    return row_slices(len(words), 32 * words.shape[1] * num_latents)
