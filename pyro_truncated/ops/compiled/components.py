"""Compiled sums over components: 1.1 to 1.5 times faster EM steps of small mixtures."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import BLOCKS, parallel_kernel


def component_sums(component: Tensor, weight: Tensor, rows: Tensor, number: int) -> Tensor:
    """See :func:`pyro_truncated.ops.components.component_sums`."""
    num_blocks = max(1, min(BLOCKS, component.numel() // (2 * number)))
    total = torch.zeros(num_blocks, number, rows.shape[1], dtype=torch.float64, device="cpu")
    _add(component.contiguous().numpy(), weight.detach().contiguous().numpy(), rows.detach().contiguous().numpy(), total.numpy())
    return total.sum(0)


@parallel_kernel()
def _add(component, weight, rows, total):
    num_rows, num_states = component.shape
    num_blocks, _, size = total.shape
    for block in prange(num_blocks):
        for n in range(num_rows * block // num_blocks, num_rows * (block + 1) // num_blocks):
            for s in range(num_states):
                k, share = component[n, s], weight[n, s]
                for d in range(size):
                    total[block, k, d] += share * rows[n, d]


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
