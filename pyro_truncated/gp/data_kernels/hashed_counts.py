"""Objects as bags of counted features, keyed by 64-bit hashes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_truncated.utils.arguments import check_count, names_arguments
from pyro_truncated.utils.arrays import as_tensors

# Two odd constants with well spread bits (of the golden ratio, and of a published 64-bit finaliser), as signed 64-bit integers.
_GOLDEN = -7046029254386353131
_FINALISER = -4658895280553007687


def mix(words: Tensor) -> Tensor:
    """Scrambles 64-bit words one-to-one.

    Sums of scrambled words serve as hashes of multisets.
    """
    words = (words ^ _logical_shift(words, 32)) * _GOLDEN
    words = (words ^ _logical_shift(words, 29)) * _FINALISER
    return words ^ _logical_shift(words, 32)


def combine(*parts: Tensor | int) -> Tensor:
    """A hash of several words, in their order."""
    total = torch.zeros((), dtype=torch.int64)
    for part in parts:
        total = mix(total * _GOLDEN + part + 1)
    return total


def _logical_shift(words: Tensor, bits: int) -> Tensor:
    return (words >> bits) & ((1 << (64 - bits)) - 1)


@dataclasses.dataclass(frozen=True)
class HashedCounts:
    """How often each feature occurs in each of ``num`` objects.

    Only counts above zero are listed, sorted by object and key.

    Example:
        >>> counts = HashedCounts.of(2, rows=torch.tensor([0, 0, 1]), keys=torch.tensor([7, 7, 5]))  # 7 twice; 5 once
        >>> counts.squared_norms
        tensor([4., 1.], dtype=torch.float64)

    Attributes:
        num: number of objects.
        rows: object of each entry, ``(E,)`` int64.
        keys: feature of each entry, ``(E,)`` int64.
        counts: how often it occurs, ``(E,)`` float64.
    """

    num: int
    rows: Tensor
    keys: Tensor
    counts: Tensor

    def __len__(self) -> int:
        return self.num

    @staticmethod
    def of(num: int, rows: Tensor, keys: Tensor, counts: Tensor | None = None) -> HashedCounts:
        """Adds up occurrences: entries of the same object and feature become one.

        Args:
            num: number of objects.
            rows: object of each occurrence, ``(E,)``.
            keys: feature of each occurrence, ``(E,)``.
            counts: weight of each occurrence, ``(E,)``. Default: one.
        """
        counts = torch.ones(len(rows), dtype=torch.float64, device=rows.device) if counts is None else counts.double()
        order = keys.argsort(stable=True)
        order = order[rows[order].argsort(stable=True)]
        rows, keys, counts = rows[order], keys[order], counts[order]
        first = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        first[1:] = (rows[1:] != rows[:-1]) | (keys[1:] != keys[:-1])
        group = first.cumsum(0) - 1
        total = counts.new_zeros(int(first.sum())).index_add_(0, group, counts)
        return HashedCounts(num, rows[first], keys[first], total)

    @staticmethod
    def from_csr(indptr: Tensor, indices: Tensor, data: Tensor) -> HashedCounts:
        """Returns counts from arrays of a compressed sparse row matrix.

        Each row is an object.


        Raises:
            ValueError: if the arrays do not fit each other or a count is not positive.
        """
        indptr, indices, data = as_tensors((indptr, indices, data))
        if len(indices) != len(data) or int(indptr[-1]) != len(indices):
            raise ValueError(f"indptr ends at {int(indptr[-1])}, but there are {len(indices)} indices and {len(data)} counts")
        if bool((data <= 0).any()):
            raise ValueError("data must be positive counts")
        num = len(indptr) - 1
        rows = torch.repeat_interleave(torch.arange(num), indptr.long().diff())
        return HashedCounts.of(num, rows, mix(indices.long()), data)

    @staticmethod
    def from_matrix(features: Tensor) -> HashedCounts:
        """Returns counts from a matrix ``(n, F)``, one row per object.

        They are those of its compressed sparse rows.

        Raises:
            TypeError: if it is no matrix of real numbers.
            ValueError: if a count is negative or not finite.
        """
        features = as_tensors(features)
        if not isinstance(features, Tensor) or features.dim() != 2 or features.is_complex():
            told = f"{features.dtype} of shape {tuple(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
            raise TypeError(f"features must be a matrix (n, F) of real counts; got {told}")
        if not bool((features >= 0).all()) or not bool(features.isfinite().all()):
            raise ValueError("features must be counts, finite and not negative")
        rows, columns = features.nonzero(as_tuple=True)
        return HashedCounts.of(len(features), rows, mix(columns), features[rows, columns])

    def to(self, device: torch.device | str) -> HashedCounts:
        """The same counts on a device."""
        return HashedCounts(self.num, *(part.to(device) for part in (self.rows, self.keys, self.counts)))

    def __getitem__(self, index: Tensor) -> HashedCounts:
        """Returns the objects at distinct positions ``index`` ``(b,)``, in that order."""
        place = torch.full((self.num,), -1, dtype=torch.int64, device=self.rows.device)
        place[index] = torch.arange(len(index), device=self.rows.device)
        kept = place[self.rows] >= 0
        return HashedCounts.of(len(index), place[self.rows[kept]], self.keys[kept], self.counts[kept])

    def __add__(self, other: HashedCounts) -> HashedCounts:
        """All features of both, of the same objects."""
        if self.num != other.num:
            raise ValueError(f"counts of {self.num} and of {other.num} objects cannot be joined")
        joined = ((getattr(self, name), getattr(other, name)) for name in ("rows", "keys", "counts"))
        return HashedCounts.of(self.num, *(torch.cat(pair) for pair in joined))

    def unary(self) -> HashedCounts:
        r"""Replaces a count :math:`c` by ``c`` features of count one.

        They mean "at least one", ..., "at least c".

        Inner products of these are :math:`\sum_f \min(c_f, c'_f)`.

        Raises:
            ValueError: if a count is no integer.
        """
        repeats = self.counts.round().long()
        if not bool(torch.equal(repeats.double(), self.counts)):
            raise ValueError("counts must be integers")
        start = torch.repeat_interleave(repeats.cumsum(0) - repeats, repeats)
        level = torch.arange(int(repeats.sum()), device=self.rows.device) - start
        keys = mix(torch.repeat_interleave(self.keys, repeats) + level * _GOLDEN)
        return HashedCounts.of(self.num, torch.repeat_interleave(self.rows, repeats), keys)

    def matrix(self, vocabulary: Tensor) -> Tensor:
        """Returns the sparse matrix ``(num, V)`` of counts by vocabulary.

        Features that are not in the sorted vocabulary ``(V,)`` are left out.
        """
        column = torch.searchsorted(vocabulary, self.keys)
        known = (column < len(vocabulary)) & (torch.cat([vocabulary, vocabulary.new_zeros(1)])[column] == self.keys)
        index = torch.stack([self.rows[known], column[known]])
        # Entries are sorted by object and key, which is what a coalesced matrix needs.
        return torch.sparse_coo_tensor(index, self.counts[known], (self.num, len(vocabulary)), is_coalesced=True, check_invariants=False)

    @property
    def squared_norms(self) -> Tensor:
        """Sum of squared counts of each object, ``(num,)``."""
        return self.counts.new_zeros(self.num).index_add_(0, self.rows, self.counts.square())


@names_arguments
def spectrum(strings: Sequence[str], length: int, *, shorter: bool = False) -> HashedCounts:
    """Returns counts of all substrings of a length.

    Inner products of these counts are the spectrum kernel.

    Example:
        >>> counts = spectrum(["CCO", "CC"], 2)  # CC and CO; CC
        >>> counts.squared_norms
        tensor([2., 1.], dtype=torch.float64)

    Args:
        strings: the strings.
        length: number of characters ``k`` of a substring.
        shorter: whether substrings of 1 to ``k - 1`` characters count as well.

    Raises:
        ValueError: if ``length`` is not positive.

    Reference:
        Leslie, Eskin and Noble, "The spectrum kernel: a string kernel for SVM protein classification", PSB 2002.
    """
    length = check_count("length", length)
    text = "".join(strings)
    letters = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32).long() if text else torch.zeros(0, dtype=torch.int64)
    sizes = torch.tensor([len(string) for string in strings], dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(len(strings)), sizes)
    end = sizes.cumsum(0)[owner]
    position = torch.arange(len(letters))
    rows, keys = [], []
    for size in range(1 if shorter else length, length + 1):
        start = position[position + size <= end]
        windows = letters[start[:, None] + torch.arange(size)]
        rows.append(owner[start])
        keys.append(combine(*windows.unbind(1), size))
    return HashedCounts.of(len(strings), torch.cat(rows), torch.cat(keys))
