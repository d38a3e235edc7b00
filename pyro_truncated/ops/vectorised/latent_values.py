"""Unpacking, marginals and active latents in plain torch, for any device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_truncated.ops.deferred_checks import read_number
from pyro_truncated.ops.packed_states import Fields
from pyro_truncated.ops.vectorised import random
from pyro_truncated.utils.budget import row_slices, rows_per_block


def unpack(words: Tensor, fields: Fields, dtype: torch.dtype) -> Tensor:
    """See :func:`pyro_truncated.ops.unpack`."""
    if fields.is_binary:
        return unpack_bits(words, fields.num_latents, dtype)
    word, shift, masks = (fields.on(words.device, name) for name in ("word", "shift", "masks"))
    return ((words[..., word] >> shift) & masks).to(dtype)


def unpack_bits(words: Tensor, num_latents: int, dtype: torch.dtype) -> Tensor:
    """Unpacks words ``(..., W)`` of binary latents into ``(..., num_latents)``."""
    # One byte per bit at the most: a shift of whole words would need eight.
    # Of a single word torch may keep any stride.
    octets = words.contiguous().unsqueeze(-1).view(torch.uint8).unsqueeze(-1)
    bits = (octets >> _shifts(words.device)) & 1
    return bits.flatten(-3)[..., :num_latents].to(dtype)


@functools.cache
def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


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


def state_blocks(words: Tensor, num_latents: int, width: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yields blocks of candidates: their places and states ``(N, c, H)``."""
    # Of the size of a block's states that are held at once: bits on the way, states, a product with
    # them, and a product of both.
    size = rows_per_block(4 * 8 * words.shape[0] * max(num_latents, width))
    for start in range(0, max(1, words.shape[1]), size):
        where = slice(start, start + size)
        yield where, unpack_bits(words[:, where], num_latents, dtype)


class ActiveLatents(NamedTuple):
    """The active latents of a block of states, ``(N, c)`` or ``(M, 1)``."""

    # The states of the block among all: a slice of those of every data point, or positions (M,) in the flattened (N, C).
    where: slice | Tensor
    data: Tensor  # the data point of each state, (N, 1) or (M, 1)
    latents: Tensor  # which ones, (n, c, K). Zero in places that are not taken.
    is_active: Tensor  # which places are, (n, c, K) in float64

    def select_block(self, values: Tensor) -> Tensor:
        """Of numbers of all states ``(N, C)`` those of the block, ``(n, c)``."""
        return values[:, self.where] if isinstance(self.where, slice) else values.reshape(-1, 1)[self.where]

    def put_(self, out: Tensor, values: Tensor) -> None:
        """Writes numbers of the block's states ``(n, c)`` to all ``(N, C)``."""
        if isinstance(self.where, slice):
            out[:, self.where] = values
        else:
            out.view(-1, 1)[self.where] = values

    def rows(self, values: Tensor) -> Tensor:
        """Of numbers ``(N, H)`` those of the active latents, ``(n, c, K)``."""
        return values[self.data.unsqueeze(-1), self.latents]

    def pairs(self, matrix: Tensor) -> Tensor:
        """Entries of pairs of active latents, ``(n, c, K, K)``."""
        latents = self.latents.unsqueeze(-1), self.latents.unsqueeze(-2)
        return matrix[0][latents] if len(matrix) == 1 else matrix[self.data[..., None, None], *latents]

    def add_rows_(self, total: Tensor, values: Tensor) -> None:
        """Adds numbers ``(n, c, K)`` of active latents to ``(N, H)``."""
        place = self.data.unsqueeze(-1) * total.shape[1] + self.latents
        total.view(-1).scatter_add_(0, place.flatten(), values.flatten())

    def add_pairs_(self, total: Tensor, values: Tensor, num_latents: int) -> None:
        """Adds numbers ``(n, c, K, K)`` of pairs to ``(N, H H)`` or ``(1, H H)``."""
        place = self.latents.unsqueeze(-1) * num_latents + self.latents.unsqueeze(-2)
        place = place if len(total) == 1 else self.data[..., None, None] * num_latents**2 + place
        total.view(-1).scatter_add_(0, place.flatten(), values.flatten())


def active_blocks(words: Tensor, num_latents: int, num_matrices: int) -> Iterator[ActiveLatents]:
    """Yields blocks of states with their active latents.

    If it fits the budget, all states have room for as many latents as the largest has. Else they are taken by their number. The temporaries
    hold ``num_matrices`` matrices ``(K, K)`` of every state.
    """

    def numbers(places: int) -> int:
        return num_matrices * places**2

    most = max(1, int(read_number(count_active(words).amax()))) if words.numel() else 1
    if words.shape[0] * words.shape[1] <= rows_per_block(_bytes_per_state(num_latents, numbers(most))):
        data = torch.arange(len(words), device=words.device).unsqueeze(1)
        yield ActiveLatents(slice(None), data, *_places(words, num_latents, most))
    else:
        yield from by_number(words, num_latents, numbers)


def _bytes_per_state(num_latents: int, numbers: int) -> int:
    return 32 * num_latents + 8 * numbers


def by_number(words: Tensor, num_latents: int, numbers: Callable[[int], int]) -> Iterator[ActiveLatents]:
    """Yields blocks of states with similar numbers of active latents."""
    flat = words.reshape(-1, 1, words.shape[-1])
    bounds = [bound for bound in _bounds() if bound < num_latents] + [num_latents]
    for bound, some in sort_by_number(words, bounds):
        for where in some.split(rows_per_block(_bytes_per_state(num_latents, numbers(bound)))):
            yield ActiveLatents(where, (where // words.shape[1]).unsqueeze(1), *_places(flat[where], num_latents, bound))


def sort_by_number(words: Tensor, bounds: list[int]) -> list[tuple[int, Tensor]]:
    """Sorts binary states ``(N, C, W)`` by their numbers of active latents.

    Returns for every bound that one needs the positions in the flattened ``(N, C)`` of states with at most so many. No state has more than
    the last bound.
    """
    kind = torch.bucketize(count_active(words).flatten(), torch.tensor(bounds, device=words.device), out_int32=True).to(torch.uint8)
    order = kind.argsort(stable=True)
    parts = order.split(torch.bincount(kind, minlength=len(bounds)).tolist())
    return [(bound, part) for bound, part in zip(bounds, parts, strict=True) if len(part)]


def count_active(words: Tensor) -> Tensor:
    """Numbers of active latents of binary states ``(..., W)``."""
    # Sums of pairs of bits, of four, of eight, and of all bytes in the uppermost one.
    sums = words - ((words >> 1) & 0x5555555555555555)
    sums = (sums & 0x3333333333333333) + ((sums >> 2) & 0x3333333333333333)
    sums = (sums + (sums >> 4)) & 0x0F0F0F0F0F0F0F0F
    # Sums along a short last axis are slow on a GPU.
    return ((sums * 0x0101010101010101) >> 56).movedim(-1, 0).sum(0)


def _bounds() -> list[int]:
    """Returns numbers of places, growing by at most half each time."""
    return sorted({1, 2, *(number << power for power in range(1, 16) for number in (2, 3))})


def _places(words: Tensor, num_latents: int, most: int) -> tuple[Tensor, Tensor]:
    """Active latents ``(n, c, most)`` and, in float64, which of the places are taken."""
    bits = unpack_bits(words, num_latents, torch.bool)
    number = bits.sum(-1, keepdim=True)
    # Idle latents all go to one place more, which is left out.
    place = torch.where(bits, bits.movedim(-1, 0).cumsum(0).movedim(0, -1) - 1, most).clamp(max=most)
    latents = torch.arange(num_latents, device=words.device).expand_as(place)
    index = torch.zeros(*bits.shape[:2], most + 1, dtype=torch.int64, device=words.device).scatter_(-1, place, latents)[..., :most]
    is_active = torch.arange(most, device=words.device) < number
    return index.masked_fill(~is_active, 0), is_active.double()


def gram_matrix(elements: Tensor, is_observed: Tensor | None) -> Tensor:
    """Gram matrices ``(1, H, H)``, or ``(N, H, H)`` over each data point's observed entries."""
    elements = elements.double()
    if is_observed is None:
        return (elements.mT @ elements).unsqueeze(0)
    num_latents = elements.shape[1]
    squares = (elements.unsqueeze(-1) * elements.unsqueeze(-2)).flatten(1)
    gram: Tensor = is_observed.double() @ squares
    return gram.reshape(-1, num_latents, num_latents)
