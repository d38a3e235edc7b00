"""Compiled CPU kernel for observations of an exponential family under a superposition by maximum.

As in :mod:`pyro_truncated.ops.compiled.maximum`, everything is float64 and sums do not depend on the number of threads.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.compiled.threads import parallel_kernel
from pyro_truncated.ops.compiled.walk import (
    MAX_BLOCKS,
    active_latents,
    as_array,
    as_words,
    ever_active,
    gather,
    padded,
    where_observed,
)


def maximum_score(words: Tensor, value: Tensor, natural: Tensor, partition: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.maximum_score`; float64 ``(N, C)``."""
    out = value.new_empty(value.shape[0], words.shape[1], dtype=torch.float64)
    _maximum_score(as_words(words), as_array(value), as_array(natural.mT), as_array(partition.mT), out.numpy())
    return out


@njit(cache=True, nogil=True)
def _largest(rows, active, count, size, out):
    """The largest of the active rows and the last one."""
    for j in range(size):
        out[j] = rows[-1, j]
    for a in range(count):
        row = rows[active[a]]
        for j in range(size):
            out[j] = row[j] if row[j] > out[j] else out[j]


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def _difference(value, natural, partition, size):
    total = 0.0
    for j in range(size):
        total += value[j] * natural[j] - partition[j]
    return total


@parallel_kernel(cost=6)
def _maximum_score(words, value, natural, partition, out):
    num_rows, num_candidates, num_words = words.shape
    (num_data, num_observed), num_latents = value.shape, natural.shape[0] - 1
    num_blocks = min(num_data, MAX_BLOCKS)
    for block in prange(num_blocks):
        active = np.empty(64 * num_words, np.int64)
        union = np.empty((1, 1, num_words), np.int64)
        index = np.empty(num_observed + 1, np.int64)
        near_natural = np.empty((num_latents + 1, padded(num_observed)))
        near_partition = np.empty((num_latents + 1, padded(num_observed)))
        near_value = np.empty(padded(num_observed))
        most_natural, most_partition = np.empty(padded(num_observed)), np.empty(padded(num_observed))
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            row = n if num_rows > 1 else 0
            num_used = ever_active(words, row, union, active)
            count = where_observed(value[n], index)
            size = padded(count)
            gather(value[n], index, count, 0.0, near_value)
            for a in range(num_used + 1):
                h = active[a] if a < num_used else num_latents
                gather(natural[h], index, count, 0.0, near_natural[h])
                gather(partition[h], index, count, 0.0, near_partition[h])
            for c in range(num_candidates):
                num_active = active_latents(words, row, c, active)
                _largest(near_natural, active, num_active, size, most_natural)
                _largest(near_partition, active, num_active, size, most_partition)
                out[n, c] = _difference(near_value, most_natural, most_partition, size)
