"""Compiled distances of data points and components of mixtures.

Plain torch takes 1.4 to 4 times as long for 20000 data points in 16 dimensions, and 2 to 3 times for 2000 in 4.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import BLOCKS, parallel_kernel


def square_distances(rows: Tensor, row: Tensor, component: Tensor, loc: Tensor, whitening: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.components.square_distances`."""
    out = torch.empty(len(row), dtype=rows.dtype, device="cpu")
    _measure(*(tensor.detach().contiguous().numpy() for tensor in (rows, row, component, loc, whitening)), out.numpy())
    return out


@parallel_kernel(cost=64, fastmath={"reassoc", "contract", "nsz"})
def _measure(rows, row, component, loc, whitening, out):
    num_entries, size = len(row), rows.shape[1]
    num_blocks = min(num_entries, BLOCKS)
    for block in prange(num_blocks):
        white = np.empty(size, rows.dtype)
        for e in range(num_entries * block // num_blocks, num_entries * (block + 1) // num_blocks):
            n, k = row[e], component[e]
            white[:] = 0
            for i in range(size):
                distance = rows[n, i] - loc[k, i]
                # Zeros included: loops of one length run in vector registers.
                for j in range(size):
                    white[j] += distance * whitening[k, i, j]
            total = white[0] * 0
            for j in range(size):
                total += white[j] * white[j]
            out[e] = total
