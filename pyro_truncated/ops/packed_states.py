"""Packed states: places of latents, checks, combinations."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np
import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend, is_vectorised
from pyro_truncated.ops.deferred_checks import on_success, raise_if
from pyro_truncated.ops.streams import Source, draw_seed, positions
from pyro_truncated.utils.budget import rows_per_block
from pyro_truncated.utils.devices import cached_answers

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
        # A product of millions of factors one by one would take time that is quadratic in their number.
        values, counts = self.cardinality.unique(return_counts=True)
        return math.prod(value**count for value, count in zip(values.tolist(), counts.tolist(), strict=True))

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
        tables = self._tables.get((device, name))
        if tables is None:
            tables = self._tables[device, name] = self._table(name).to(device)
        return tables

    def _table(self, name: str) -> Tensor:
        if name == "tails":  # masks (L - 1, W) of the bits from each latent but the first on
            position, word = torch.arange(self.num_words, device="cpu"), self.word[1:, None]
            rest = ~((1 << self.shift[1:, None]) - 1)
            return torch.where(position > word, -1, torch.where(position < word, 0, rest))
        what, _, kind = name.rpartition(" of ")
        if not what:
            return getattr(self, name)
        latents = getattr(self, kind)
        return self.rows(latents) if what == "rows" else self.masks[latents]

    def rows(self, latents: Tensor) -> Tensor:
        """Word, shift and cardinality of some latents, ``(3, M)``."""
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
        is_outside = (block < 0) | (block >= cardinality)
        raise_if(is_outside.any(), functools.partial(_outside_message, block, is_outside))
        # Fields are disjoint, so the sum is a bitwise or (wrapping into the sign bit where the last field needs it).
        words[start : start + size].index_add_(1, word, block << shift)
    return words.view(*values.shape[:-1], fields.num_words)


def _outside_message(values: Tensor, is_outside: Tensor) -> str:
    return f"values must lie in 0 .. cardinality - 1 of their latent; got {int(values[is_outside][0])}"


def enumerate_states(fields: Fields, device: torch.device | str | None = None) -> Tensor:
    """All states as words ``(size, W)``, the first latent varying fastest."""
    rest = torch.arange(fields.size, device=device)
    words = torch.zeros(fields.size, fields.num_words, dtype=torch.int64, device=device)
    for word, shift, cardinality in zip(fields.word.tolist(), fields.shift.tolist(), fields.cardinality.tolist(), strict=True):
        words[:, word] += (rest % cardinality) << shift
        rest = rest // cardinality
    return words


def single_states(fields: Fields, first: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Latent ``(P,)``, value ``(P,)`` and packed states ``(P, W)`` with one active latent.

    Values begin with ``first``; 0 counts the state of zeros once for each latent.
    """
    counts = fields.cardinality - first
    latent = torch.arange(fields.num_latents, device="cpu").repeat_interleave(counts)
    value = torch.arange(len(latent), device="cpu") - (counts.cumsum(0) - counts)[latent] + first
    words = torch.zeros(len(latent), fields.num_words, dtype=torch.int64, device="cpu")
    # A field never straddles words, so a single one is its value, shifted.
    return latent, value, words.scatter_(1, fields.word[latent].unsqueeze(1), (value << fields.shift[latent]).unsqueeze(1))


def gather_states(words: Tensor, positions: Tensor) -> Tensor:
    """The states ``(*batch, K, W)`` of each data point at positions ``(*batch, K)``, of ``(*batch, S, W)``."""
    *batch, num_states, num_words = words.shape
    is_matrix = num_words > 1 and words.is_cpu and words.is_contiguous() and [*positions.shape[:-1]] == batch
    if is_matrix and positions.dtype == torch.int64 and bool(((positions >= 0) & (positions < num_states)).all()):
        # Rows of a matrix are found in a third of the time.
        rows = num_states * torch.arange(math.prod(batch), device="cpu").view(*batch, 1) + positions
        return words.view(-1, num_words).index_select(0, rows.flatten()).view(*positions.shape, num_words)
    return words.gather(-2, positions.unsqueeze(-1).expand(*positions.shape, num_words))


def check_words(name: str, words: Tensor) -> None:
    """Refuses anything that is not ``(N, C, W)`` int64.

    Raises:
        ValueError: naming the argument.
    """
    if words.dim() != 3 or words.dtype != torch.int64:
        raise ValueError(f"{name} must be packed states (N, C, W) of type int64; got shape {tuple(words.shape)} of type {words.dtype}")


def check_bits(words: Tensor, num_latents: int) -> None:
    """Refuses states ``(N, C, W)`` without exactly ``num_latents`` binary latents.

    Raises:
        ValueError: if the number of words is another, or bits are set beyond those of the last latent.
    """
    num_words = (num_latents + WORD_BITS - 1) // WORD_BITS
    if words.shape[-1] != num_words:
        raise ValueError(f"a state of {num_latents} binary latents fills {num_words} words; got words of shape {tuple(words.shape)}")
    num_bits = num_latents - WORD_BITS * (num_words - 1)
    if num_bits == WORD_BITS:
        return
    # States shared by all data points (an expanded tensor) are looked at once.
    rows = words[:1] if words.shape[0] > 1 and words.stride(0) == 0 else words
    beyond = -1 << num_bits

    def complain() -> None:
        first = int((rows[..., -1] & beyond).flatten().nonzero()[0])
        raise ValueError(
            f"state {first % words.shape[1]} of row {first // words.shape[1]} has bits set beyond the last of its {num_latents} latents; "
            "it belongs to another state space"
        )

    if is_vectorised(rows):
        answers, question = cached_answers(rows), f"has at most {num_latents} latents"
        if question not in answers:
            raise_if((rows[..., -1] & beyond).any(), complain)
            on_success(lambda: answers.update({question: True}))
    elif int(np.bitwise_or.reduce(rows[..., -1].numpy(), axis=None)) & beyond:
        complain()


def check_rows(words: Tensor, companion: Tensor, name: str) -> tuple[int, int]:
    """Returns the shape ``(N, M)`` of a matrix by rows of words."""
    if words.dtype != torch.int64 or words.dim() != 3:
        raise ValueError(f"words must be int64 of shape (N, C, W); got {words.dtype} of shape {tuple(words.shape)}")
    if companion.dim() != 2 or len(companion) != len(words):
        raise ValueError(f"{name} must have one row for each of the {len(words)} rows of words; got shape {tuple(companion.shape)}")
    return companion.shape[0], companion.shape[1]


def check_weights(words: Tensor, weights: Tensor) -> None:
    """Refuses weights that are not ``(N, C)``, one per state."""
    check_rows(words, weights, "weights (N, C)")
    if weights.shape != words.shape[:2]:
        raise ValueError(f"weights must have shape {tuple(words.shape[:2])}, one per state; got {tuple(weights.shape)}")


def check_likelihood(words: Tensor, value: Tensor, weight: Tensor, offset: Tensor) -> None:
    """Refuses states, observations, dictionary and vector that do not fit."""
    _, num_observed = check_rows(words, value, "value (N, D)")
    if weight.dim() != 2 or len(weight) != num_observed or offset.shape != (num_observed,):
        expected = f"(D, H) and (D,) with D={num_observed}"
        raise ValueError(f"parameters must have shapes {expected}; got {tuple(weight.shape)} and {tuple(offset.shape)}")
    check_bits(words, weight.shape[1])


_MAX_STATES = 2**20


def combine(singles: Tensor, max_active: int | None = None) -> Tensor:
    r"""Unions ``(N, S, W)`` of at most ``max_active`` of each data point's single-latent states.

    Of ``singles (N, K, W)``, :math:`S = \sum_{k \le \mathrm{max\_active}} \binom Kk`, fewer active latents first. Every state extends one
    with one latent fewer, so building it takes one operation per word. More than 2**20 states are refused.
    """
    check_words("singles", singles)
    num_selected = singles.shape[1]
    limit = num_selected if max_active is None else min(max_active, num_selected)
    size = sum(math.comb(num_selected, k) for k in range(limit + 1))
    if size > _MAX_STATES:
        raise ValueError(
            f"{num_selected} selected latents with up to {limit} of them active make {size} states for a data point, above {_MAX_STATES}. "
            "Select fewer (num_selected) or lower max_active."
        )
    parent, last = _table(num_selected, limit, singles.device)
    out = singles.new_zeros(len(singles), size, singles.shape[2])
    start = 1
    for k in range(1, limit + 1):
        level = slice(start, start + math.comb(num_selected, k))
        out[:, level] = out[:, parent[level]] | singles[:, last[level]]
        start = level.stop
    return out


@functools.lru_cache(maxsize=16)
def _table(num_selected: int, max_active: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The combination that each extends, and the position it adds."""
    subsets = [subset for size in range(max_active + 1) for subset in itertools.combinations(range(num_selected), size)]
    position = {subset: i for i, subset in enumerate(subsets)}
    parent = torch.tensor([position[subset[:-1]] for subset in subsets], device=device)
    last = torch.tensor([subset[-1] if subset else 0 for subset in subsets], device=device)
    return parent, last


def unpack(words: Tensor, fields: Fields, dtype: torch.dtype) -> Tensor:
    """Values ``(..., L)`` of packed states ``(..., W)`` in the given type.

    Raises:
        ValueError: if ``words`` is not int64 or does not end in a dimension of the space's words.
    """
    if words.shape[-1:] != (fields.num_words,) or words.dtype != torch.int64:
        raise ValueError(f"words must be int64 and end in a dimension of {fields.num_words}; got {tuple(words.shape)} of {words.dtype}")
    # So many values torch unpacks as quickly as a kernel does.
    is_small = words.numel() * fields.num_latents <= 2**12
    return backend("latent_values", words, is_small=is_small).unpack(words, fields, dtype)


def activation_probabilities(words: Tensor, weights: Tensor, fields: Fields) -> Tensor:
    r"""Probability :math:`\sum_s w_{ns} [s_l \ne 0]` that a latent is not zero, ``(N, L)``.

    Of states ``(N, S, W)`` and weights ``(N, S)``, in whose type it is, accumulated in float64 on the CPU. Shapes that do not fit, and
    states of another space, raise ``ValueError``.
    """
    if not fields.is_binary:
        return value_probabilities(words, weights, fields)[..., 1:].sum(-1)
    _check_weights(words, weights, fields)
    check_bits(words, fields.num_latents)
    return backend("latent_values", words).activation_probabilities(words, weights, fields)


def value_probabilities(words: Tensor, weights: Tensor, fields: Fields) -> Tensor:
    r"""Probability :math:`\sum_s w_{ns} [s_l = v]` of every value of every latent, ``(N, L, V)``.

    As :func:`activation_probabilities`, with ``V`` the largest cardinality; zero at values that a latent does not have.
    """
    if fields.is_binary:
        active = activation_probabilities(words, weights, fields)
        return torch.stack([weights.sum(1, keepdim=True) - active, active], -1)
    _check_weights(words, weights, fields)
    out, num_invalid = backend("latent_values", words).value_probabilities(words, weights, fields)
    raise_if(
        torch.as_tensor(num_invalid > 0, device=words.device),
        lambda: f"the states hold {int(num_invalid)} values outside of 0 .. cardinality - 1; they belong to another state space",
    )
    return out


def draw_values(probabilities: Tensor, num_samples: int, fields: Fields, *, rows: Tensor | None = None, generator: Source = None) -> Tensor:
    """Draws states ``(N, num_samples, W)`` whose latents are independent.

    ``probabilities (N, L, V)`` are those of every value of every latent, see :func:`value_probabilities`. Random numbers are keyed by
    ``rows (N,)``.
    """
    if probabilities.dim() != 3 or probabilities.shape[1:] != (fields.num_latents, fields.num_values):
        raise ValueError(
            f"probabilities must have the shape (N, {fields.num_latents}, {fields.num_values}); got {tuple(probabilities.shape)}"
        )
    keys = positions(rows, len(probabilities), probabilities.device), draw_seed(generator)
    # Tail probabilities are summed from above, so a value of probability zero beyond the last one is never
    # drawn. Sums along the first axis: along a last one this short they are slow on a GPU.
    tails = probabilities.detach().double()[..., 1:].movedim(-1, 0).flip(0).cumsum(0).flip(0).movedim(0, -1).contiguous()
    return backend("latent_values", tails).draw_values(tails, num_samples, fields, *keys)


def _check_weights(words: Tensor, weights: Tensor, fields: Fields) -> None:
    check_words("words", words)
    if words.shape[-1] != fields.num_words or weights.shape != words.shape[:2]:
        shapes = f"{tuple(words.shape)} and {tuple(weights.shape)}"
        raise ValueError(f"words and weights must have the shapes (N, S, {fields.num_words}) and (N, S); got {shapes}")
