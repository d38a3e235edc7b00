"""Spaces of joint discrete states, packed into 64-bit words."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.ops.packed_states import WORD_BITS
from pyro_truncated.utils.arguments import check_count, names_arguments
from pyro_truncated.utils.budget import rows_per_block

_MAX_ENUMERATED = 2**22


class StateSpace:
    r"""All joint configurations of ``L`` discrete latents.

    Latent ``l`` takes the values ``0`` to ``cardinality_l - 1``.

    A state is stored in ``num_words`` words of 64 bits. Latent ``l`` occupies a field of
    :math:`\lceil\log_2 \mathrm{cardinality}_l\rceil` bits (at least one) at bit ``shift[l]`` of
    word ``word[l]``. Fields are laid out in order and never straddle two words. So a space of ``H``
    binary latents needs :math:`\lceil H/64\rceil` words. Bits that belong to no field are zero, so
    equal states have equal words.

    Example:
        >>> space = StateSpace([2, 3])
        >>> space.unpack(space.enumerate()).tolist()
        [[0, 0], [1, 0], [0, 1], [1, 1], [0, 2], [1, 2]]
        >>> StateSpace([2] * 100).num_words
        2

    Attributes:
        cardinalities: number of values of each latent, as a tuple.
        fields: all that operations on packed states need to know, see :class:`pyro_truncated.ops.Fields`.
        cardinality: the same as an int64 tensor.
        mutable: positions of the latents of more than one value, int64.
        word: word of each latent's field, int64.
        shift: lowest bit of each latent's field, int64.
        bits: width of each latent's field, int64.
        num_latents: number of latents ``L``.
        num_words: number of words ``W`` of a state.
        is_binary: whether every latent has two values.
        size: number of states, a Python integer of any size.

    Args:
        cardinalities: number of values of each latent, from 1 to 2**31 each.

    Raises:
        ValueError: if there is no latent or a cardinality is out of range.
    """

    @names_arguments
    def __init__(self, cardinalities: Sequence[int]) -> None:
        self.cardinalities = tuple(check_count("in cardinalities the number of values of a latent", v) for v in cardinalities)
        if not self.cardinalities or max(self.cardinalities) > 2**31:
            raise ValueError(f"cardinalities must be numbers of values from 1 to 2**31, one per latent; got {tuple(cardinalities)!r}")
        word, shift, bits = [], [], []
        num_bits = 0
        for cardinality in self.cardinalities:
            width = max(1, (cardinality - 1).bit_length())
            if num_bits % WORD_BITS + width > WORD_BITS:
                num_bits += WORD_BITS - num_bits % WORD_BITS
            word.append(num_bits // WORD_BITS)
            shift.append(num_bits % WORD_BITS)
            bits.append(width)
            num_bits += width
        fields = ops.Fields(*(torch.tensor(numbers, device="cpu") for numbers in (word, shift, bits, self.cardinalities)))
        self.fields, self.mutable = fields, fields.mutable
        self.word, self.shift, self.bits, self.cardinality = fields.word, fields.shift, fields.bits, fields.cardinality
        self.num_latents, self.num_words = fields.num_latents, fields.num_words
        self.is_binary, self.size = fields.is_binary, fields.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateSpace) and self.cardinalities == other.cardinalities

    def __hash__(self) -> int:
        return hash(self.cardinalities)

    def __repr__(self) -> str:
        return f"StateSpace({self.num_latents} latents, {self.num_words} words, {self.readable_size} states)"

    @property
    def readable_size(self) -> str:
        """Returns the number of states as text for messages.

        Above a million it is a power of two, as it may exceed every float.
        """
        return str(self.size) if self.size <= 10**6 else f"2^{sum(math.log2(v) for v in self.cardinalities):.1f}"

    @property
    def value_dtype(self) -> torch.dtype:
        """The smallest integer type that holds every latent's values."""
        largest = max(self.cardinalities)
        return torch.uint8 if largest <= 2**8 else torch.int32

    def pack(self, values: Tensor) -> Tensor:
        """Packs integer (or boolean) values ``(..., L)`` into words ``(..., num_words)`` of type int64.

        Raises:
            ValueError: if the last dimension is not ``num_latents`` or a value lies outside its latent's range.
        """
        return ops.pack(values, self.fields)

    def unpack(self, words: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Unpacks words ``(..., num_words)`` into values ``(..., L)`` of the given type (default: :attr:`value_dtype`)."""
        return ops.unpack(words, self.fields, self.value_dtype if dtype is None else dtype)

    def check(self, words: Tensor) -> None:
        """Refuses words ``(N, C, num_words)`` that are no states of this space.

        Raises:
            ValueError: if bits are set beyond a latent's values.
        """
        if self.is_binary:
            ops.check_bits(words, self.num_latents)
            return
        for rows in words.split(rows_per_block(64 * words.shape[1] * self.num_latents)):
            if not torch.equal(self.pack(self.unpack(rows)), rows):
                raise ValueError(
                    f"states have bits set beyond the fields of their {self.num_latents} latents; they belong to another state space"
                )

    def enumerate(self, device: torch.device | str | None = None) -> Tensor:
        """All states as words ``(size, num_words)``, the first latent varying fastest.

        Raises:
            ValueError: if the space holds more than 2**22 states.
        """
        self._check_enumerable()
        return ops.enumerate_states(self.fields, device)

    def _check_enumerable(self) -> None:
        if self.size > _MAX_ENUMERATED:
            raise ValueError(f"a space of {self.readable_size} states is too large to enumerate (limit {_MAX_ENUMERATED})")

    def positions(self, words: Tensor) -> Tensor:
        """Positions ``(...)`` of states ``(..., num_words)`` in :meth:`enumerate`.

        Raises:
            ValueError: if the space holds more than 2**22 states.
        """
        self._check_enumerable()
        levels = self.unpack(words, torch.int64)
        steps = torch.tensor([1, *self.cardinalities[:-1]], device=words.device).cumprod(0)
        return (levels * steps).sum(-1)

    def random(
        self,
        shape: Sequence[int],
        activity: float | Tensor,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Draws states ``(*shape, num_words)``.

        Each latent is non-zero with probability ``activity``, with all its non-zero values alike.
        """
        others = (self.cardinality - 1).to(device or "cpu")
        on = torch.rand((*shape, self.num_latents), generator=generator, device=device) < activity
        value = torch.rand((*shape, self.num_latents), generator=generator, device=device, dtype=torch.double) * others
        return self.pack(torch.where(on, torch.minimum(1 + value.long(), others), 0))

    def distinguish(self, words: Tensor) -> Tensor:
        """Changes the second of states ``(N, C, num_words)`` where it is the first.

        All its latents take their next value.
        """
        first, second = words[:, :1], words[:, 1:2]
        others = self.pack((self.unpack(first, torch.int64) + 1) % torch.tensor(self.cardinalities, device=words.device))
        is_same = (first == second).all(-1, keepdim=True)
        return torch.cat([first, torch.where(is_same, others[:, : second.shape[1]], second), words[:, 2:]], 1)
