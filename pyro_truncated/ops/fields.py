"""Where latents lie in packed states."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

from pyro_truncated.ops.deferred_checks import raise_if
from pyro_truncated.utils.budget import rows_per_block

WORD_BITS = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Fields:
    """The bits of each latent in a packed state.

    Operations on states know nothing else of a state space.

    Attributes:
        word: word of each latent's field, ``(L,)`` int64.
        shift: lowest bit in that word, ``(L,)``.
        bits: width of each latent's field, ``(L,)``.
        cardinality: number of values of each latent, ``(L,)``.
    """

    word: Tensor
    shift: Tensor
    bits: Tensor
    cardinality: Tensor

    @functools.cached_property
    def num_latents(self) -> int:
        """Number of latents ``L``."""
        return len(self.word)

    @functools.cached_property
    def num_words(self) -> int:
        """Number of words ``W`` of a state."""
        return int(self.word[-1]) + 1

    @functools.cached_property
    def num_bits(self) -> int:
        """Number of bits of a state up to its last latent."""
        return WORD_BITS * (self.num_words - 1) + int(self.shift[-1] + self.bits[-1])

    @functools.cached_property
    def num_values(self) -> int:
        """The largest number of values of a latent, ``V``."""
        return int(self.cardinality.max())

    @functools.cached_property
    def size(self) -> int:
        """Number of states, a Python integer of any size."""
        return math.prod(self.cardinality.tolist())

    @functools.cached_property
    def is_binary(self) -> bool:
        """Whether every latent has two values."""
        return len(self.binary) == self.num_latents

    @functools.cached_property
    def mutable(self) -> Tensor:
        """Positions of the latents of more than one value, int64."""
        return (self.cardinality > 1).nonzero().squeeze(-1)

    @functools.cached_property
    def binary(self) -> Tensor:
        """Positions of the latents of two values, int64."""
        return (self.cardinality == 2).nonzero().squeeze(-1)

    @functools.cached_property
    def binary_bits(self) -> Tensor:
        """The bits of the latents of two values, ``(W,)`` int64."""
        bits = torch.zeros(self.num_words, dtype=torch.int64, device="cpu")
        return bits.index_add_(0, self.word[self.binary], 1 << self.shift[self.binary])

    @functools.cached_property
    def several(self) -> Tensor:
        """Positions of the latents of more than two values, int64."""
        return (self.cardinality > 2).nonzero().squeeze(-1)

    @functools.cached_property
    def masks(self) -> Tensor:
        """The lowest bits, as many as each latent's field has, ``(L,)`` int64."""
        return (1 << self.bits) - 1

    @functools.cached_property
    def _tables(self) -> dict[tuple[torch.device, str], Tensor]:
        return {}

    def on(self, device: torch.device, name: str) -> Tensor:
        """A tensor of these on a device, copied there once.

        Args:
            device: the device.
            name: an attribute; or ``"rows of"`` a kind of latents (``"binary"``, ``"several"``, ``"mutable"``), see :meth:`rows`; or their
                ``"masks of"``; or the ``"tails"`` of states.
        """
        found = self._tables.get((device, name))
        if found is None:
            found = self._tables[device, name] = self._table(name).to(device)
        return found

    def _table(self, name: str) -> Tensor:
        if name == "tails":
            return self._tails()
        what, _, kind = name.rpartition(" of ")
        if not what:
            return getattr(self, name)  # type: ignore[no-any-return]
        latents = getattr(self, kind)
        return self.rows(latents) if what == "rows" else self.masks[latents]

    def _tails(self) -> Tensor:
        """Returns suffix masks of latents, ``(L - 1, W)``.

        They have the bits from each latent but the first on, with all bits behind them in their
        words.
        """
        position, word = torch.arange(self.num_words, device="cpu"), self.word[1:, None]
        rest = ~((1 << self.shift[1:, None]) - 1)
        return torch.where(position > word, -1, torch.where(position < word, 0, rest))

    def rows(self, latents: Tensor) -> Tensor:
        """Returns word, shift and cardinality of some latents, ``(3, M)``.

        Compiled kernels take them so.
        """
        return torch.stack([self.word[latents], self.shift[latents], self.cardinality[latents]])


def pack(values: Tensor, fields: Fields) -> Tensor:
    """Packs integer (or boolean) values ``(..., L)`` into words ``(..., W)`` of type int64.

    Raises:
        ValueError: if the last dimension is not the number of latents or a value lies outside its latent's range.
    """
    if values.shape[-1:] != (fields.num_latents,):
        raise ValueError(f"values must end in a dimension of {fields.num_latents} latents; got shape {tuple(values.shape)}")
    rows = values.reshape(-1, fields.num_latents)
    words = torch.zeros(len(rows), fields.num_words, dtype=torch.int64, device=values.device)
    cardinality, shift, word = (fields.on(values.device, name) for name in ("cardinality", "shift", "word"))
    # In blocks, because eight bytes per value, and as many for their place, are many times what the packed states need.
    size = rows_per_block(32 * fields.num_latents)
    for start in range(0, len(rows), size):
        block = rows[start : start + size].long()
        raise_if(((block < 0) | (block >= cardinality)).any(), _complain_of_values)
        # Fields are disjoint, so the sum is a bitwise or (wrapping into the sign bit where the last field needs it).
        words[start : start + size].index_add_(1, word, block << shift)
    return words.view(*values.shape[:-1], fields.num_words)


def enumerate_states(fields: Fields, device: torch.device | str | None = None) -> Tensor:
    """All states as words ``(size, W)``, the first latent varying fastest."""
    rest = torch.arange(fields.size, device=device)
    words = torch.zeros(fields.size, fields.num_words, dtype=torch.int64, device=device)
    for word, shift, cardinality in zip(fields.word.tolist(), fields.shift.tolist(), fields.cardinality.tolist(), strict=True):
        words[:, word] += (rest % cardinality) << shift
        rest = rest // cardinality
    return words


def single_states(fields: Fields, first: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the states in which one latent has a non-zero value.

    All other latents are zero. They are on the CPU.

    Args:
        fields: where the latents lie.
        first: the lowest value that a latent takes; 0 counts the state of zeros once for each.

    Returns:
        The latent of each state ``(P,)``, its value ``(P,)``, latent by latent, and the packed states ``(P, W)``.
    """
    counts = fields.cardinality - first
    latent = torch.arange(fields.num_latents, device="cpu").repeat_interleave(counts)
    value = torch.arange(len(latent), device="cpu") - (counts.cumsum(0) - counts)[latent] + first
    words = torch.zeros(len(latent), fields.num_words, dtype=torch.int64, device="cpu")
    # A field never straddles words, so a single one is its value, shifted.
    return latent, value, words.scatter_(1, fields.word[latent].unsqueeze(1), (value << fields.shift[latent]).unsqueeze(1))


def _complain_of_values() -> None:
    raise ValueError("values must lie in 0 .. cardinality - 1 of their latent")
