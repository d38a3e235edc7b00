"""The active latents of packed states in plain torch: as many places for each state as the state with most of them has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_truncated.ops.checks import afterwards, refuse, soon
from pyro_truncated.ops.most_active import most_active, note_most_active
from pyro_truncated.ops.vectorised.values import unpack_bits
from pyro_truncated.utils.budget import rows_per_block


class ActiveLatents(NamedTuple):
    """The active latents of a block of states.

    Attributes:
        where: the states of the block among all of their data points.
        latents: which ones, ``(N, c, K)``; zero in places that are not taken.
        is_taken: which places are, ``(N, c, K)`` in float64.
    """

    where: slice
    latents: Tensor
    is_taken: Tensor

    def rows(self, values: Tensor) -> Tensor:
        """Of numbers ``(N, H)`` those of the active latents, ``(N, c, K)``."""
        return values[torch.arange(len(values), device=values.device).view(-1, 1, 1), self.latents]

    def pairs(self, matrix: Tensor) -> Tensor:
        """Of a matrix ``(1, H, H)``, or one for every data point, the entries of pairs of active latents, ``(N, c, K, K)``."""
        rows = torch.arange(len(matrix), device=matrix.device).view(-1, 1, 1, 1)
        return matrix[rows, self.latents.unsqueeze(-1), self.latents.unsqueeze(-2)]

    def add_rows_(self, total: Tensor, values: Tensor) -> None:
        """Adds numbers ``(N, c, K)`` of the active latents to sums over the states, ``(N, H)``."""
        total.scatter_add_(1, self.latents.flatten(1), values.flatten(1))

    def add_pairs_(self, total: Tensor, values: Tensor, num_latents: int) -> None:
        """Adds numbers ``(N, c, K, K)`` of pairs of active latents to sums over the states ``(N, H H)``, or also over data ``(1, H H)``."""
        place = self.latents.unsqueeze(-1) * num_latents + self.latents.unsqueeze(-2)
        total.scatter_add_(1, place.reshape(len(total), -1), values.reshape(len(total), -1))


def blocks_of_active(words: Tensor, num_latents: int, num_matrices: int, *, is_final: bool = False) -> Iterator[ActiveLatents]:
    """Blocks of states with their active latents; at least one, empty if need be.

    Args:
        words: packed states, ``(N, C, W)``.
        num_latents: number of binary latents ``H``.
        num_matrices: how many matrices ``(K, K)`` of every state the temporaries hold.
        is_final: whether others will be made of these states: then it is asked how many latents they have exactly.
    """
    num_data, num_states, _ = words.shape
    known = most_active(words)
    asked = _asked(words, num_latents) if known is None or (is_final and most_active(words, 0) is None) else None
    most = int(asked()[0]) if known is None and asked is not None else known or 0
    most = max(1, min(most, num_latents))
    size = rows_per_block(num_data * (32 * num_latents + 8 * num_matrices * most**2))
    for start in range(0, max(1, num_states), size):
        where = slice(start, start + size)
        bits = unpack_bits(words[:, where], num_latents, torch.bool)
        number = bits.sum(-1, keepdim=True)
        if known is not None and number.numel():
            refuse((number > most).any(), _complain)
        # Idle latents all go to one place more, which is left out.
        place = torch.where(bits, bits.cumsum(-1) - 1, most)
        latents = torch.arange(num_latents, device=words.device).expand_as(place)
        index = torch.zeros(*bits.shape[:2], most + 1, dtype=torch.int64, device=words.device).scatter_(-1, place, latents)[..., :most]
        is_taken = torch.arange(most, device=words.device) < number
        yield ActiveLatents(where, index.masked_fill(~is_taken, 0), is_taken.double())


def gram_of(scaled: Tensor, observed: Tensor | None) -> Tensor:
    """Gram matrices ``(1, H, H)``, or ``(N, H, H)`` over each data point's observed entries."""
    scaled = scaled.double()
    if observed is None:
        return (scaled.mT @ scaled).unsqueeze(0)
    num_latents = scaled.shape[1]
    squares = (scaled.unsqueeze(-1) * scaled.unsqueeze(-2)).flatten(1)
    gram: Tensor = observed.double() @ squares
    return gram.reshape(-1, num_latents, num_latents)


def _asked(words: Tensor, num_latents: int) -> Callable[[], list[float]]:
    """The largest number of active latents, which comes with the next look."""
    owner = words._base
    if owner is not None and owner.dim() == words.dim() and owner.shape[1:] == words.shape[1:]:
        # The states of other data points will be asked for next.
        words = owner
    size = rows_per_block(16 * words.shape[0] * num_latents)
    counts = [unpack_bits(part, num_latents, torch.uint8).sum(-1).amax() for part in words.split(size, 1) if part.numel()]
    most = soon(torch.stack(counts).amax() if counts else words.new_zeros(()))
    if words._base is None:
        afterwards(lambda: note_most_active(words, int(most()[0])))
    return most


def _complain() -> None:
    raise RuntimeError("states have more active latents than those that they were made of let expect")
