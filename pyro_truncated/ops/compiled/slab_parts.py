"""What the compiled kernels for spike-and-slab likelihoods share: Gram matrices of the dictionary, and inverses of small factors."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.compiled.walk import as_array


def gram_of(scaled: Tensor, observed: Tensor | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The dictionary by latents, which entries are observed (no rows if all are), and the Gram matrix (empty if it differs by row)."""
    scaled = scaled.detach().double()
    if observed is None:
        return as_array(scaled.mT), np.empty((0, scaled.shape[0]), np.bool_), as_array(scaled.mT @ scaled)
    return as_array(scaled.mT), observed.contiguous().numpy(), np.empty((0, 0))


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def _dot(one, other, size):
    total = 0.0
    for j in range(size):
        total += one[j] * other[j]
    return total


@njit(cache=True, nogil=True)
def gram_of_row(scaled, observed, used, num_used, near, table):
    """Writes the Gram matrix over the observed entries into ``table``, for the latents in use only."""
    for a in range(num_used):
        row, source = near[a], scaled[used[a]]
        for d in range(len(observed)):
            row[d] = source[d] if observed[d] else 0.0
        for b in range(a + 1):
            product = _dot(row, near[b], len(observed))
            table[used[a], used[b]] = product
            table[used[b], used[a]] = product


@njit(cache=True, nogil=True)
def invert(factor, count):
    """Replaces a lower triangular matrix by its inverse."""
    for b in range(count):
        factor[b, b] = 1.0 / factor[b, b]
        for a in range(b + 1, count):
            total = 0.0
            for j in range(b, a):
                total += factor[a, j] * factor[j, b]
            factor[a, b] = -total / factor[a, a]
