"""Bits, padded rows and blocks for kernels over active latents."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.utils.budget import current_budget

# Data points are split into blocks whose number does not depend on that of the threads, so sums come out the same however many there are.
MAX_BLOCKS = 64
# Rows are padded to whole vector registers, so the compiler's inner loops have no scalar remainder.
_LANES = 8
# Of a state so much less likely than the likeliest one no digit is left in a sum, whatever its moments.
_ROUNDED = 1e-24


def as_words(words: Tensor) -> np.ndarray:
    """Packed states as a kernel takes them: shared ones stay one row."""
    shared = words.shape[0] > 1 and words.stride(0) == 0
    return (words[:1] if shared else words).contiguous().numpy()


def as_array(tensor: Tensor) -> np.ndarray:
    """The tensor's values in float64."""
    return tensor.detach().double().contiguous().numpy()


def count_blocks(num_data: int, accumulator_size: int, scratch_size: int = 0) -> int:
    """The number of blocks with accumulator and scratch in the memory budget."""
    budget = current_budget() // 8
    most = min(budget // 32 // max(1, accumulator_size), budget // 4 // max(1, scratch_size))
    return max(1, min(num_data, MAX_BLOCKS, max(4, most)))


@njit(forceinline=True)
def count_ones(word):
    """The number of one bits of an int64."""
    # The compiler knows this sum of pairs, fours and bytes: one instruction.
    sums = np.uint64(word)
    sums -= (sums >> np.uint64(1)) & np.uint64(0x5555555555555555)
    sums = (sums & np.uint64(0x3333333333333333)) + ((sums >> np.uint64(2)) & np.uint64(0x3333333333333333))
    sums = (sums + (sums >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((sums * np.uint64(0x0101010101010101)) >> np.uint64(56))


@njit(forceinline=True)
def trailing_zeros(word):
    """Zero bits below an int64's lowest set bit; 64 without one."""
    return count_ones(~word & (word - 1))


@njit(forceinline=True)
def active_latents(words, n, c, active):
    """Writes a state's active latents, in ascending order; returns their number."""
    count = 0
    for w in range(words.shape[2]):
        word = words[n, c, w]
        while word != 0:
            active[count] = 64 * w + trailing_zeros(word)
            word &= word - 1
            count += 1
    return count


@njit(forceinline=True)
def first_active(words, n, c, none):
    """A state's first five active latents, with ``none`` for those it lacks.

    There is no branch on the bits of a word, which processors would predict wrongly.
    """
    last = words.shape[2] - 1
    w, word = 0, words[n, c, 0]
    i = j = k = m = r = none
    for _ in range(5):
        while w < last and word == 0:
            w += 1
            word = words[n, c, w]
        i, j, k, m, r = j, k, m, r, min(64 * w + trailing_zeros(word), none)
        word &= word - 1
    return i, j, k, m, r


@njit
def least_weight(weights):
    """The largest weight that rounding loses beside the largest finite one.

    Infinite weights and NaN are not below it.
    """
    largest = 0.0
    for weight in weights:
        if largest < abs(weight) < np.inf:
            largest = abs(weight)
    return _ROUNDED * largest


@njit(cache=True, nogil=True)
def most_active(words):
    """The largest number of active latents of a state."""
    most = 0
    for n in range(words.shape[0]):
        for c in range(words.shape[1]):
            count = 0
            for w in range(words.shape[2]):
                count += count_ones(words[n, c, w])
            most = max(most, count)
    return most


@njit
def ever_active(words, n, active):
    """Like :func:`active_latents` for the union of a row's states."""
    count = 0
    for w in range(words.shape[2]):
        union = np.int64(0)
        for c in range(words.shape[1]):
            union |= words[n, c, w]
        while union != 0:
            active[count] = 64 * w + trailing_zeros(union)
            union &= union - 1
            count += 1
    return count


@njit
def round_up(count):
    """The number of entries of whole vectors that hold so many."""
    return (count + _LANES - 1) // _LANES * _LANES


@njit
def gather(row, index, count, padding, out):
    """Copies ``row[index[:count]]`` to ``out`` and pads whole vectors."""
    for j in range(count):
        out[j] = row[index[j]]
    for j in range(count, round_up(count)):
        out[j] = padding


@njit
def copy(source, target):
    """Copies a vector.

    An assignment to a slice compiles ten times as long, as its error message does, too.
    """
    for j in range(target.shape[0]):
        target[j] = source[j]


@njit
def add_to_rows(table, rows, num_rows, addend, size):
    """Adds a vector to some rows of a table."""
    for a in range(num_rows):
        row = table[rows[a]]
        for j in range(size):
            row[j] += addend[j]


@njit
def find_observed_entries(row, index):
    """Writes positions of entries that are not NaN; returns their number."""
    count = 0
    for d in range(row.shape[0]):
        index[count] = d
        count += not np.isnan(row[d])
    return count
