"""Compiled CPU kernels that score packed binary states by walking over their set bits.

Every function takes and returns tensors on the CPU, computes in float64, and splits the data points into blocks whose number does not
depend on the number of threads, so sums come out the same however many threads there are.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.compiled.threads import parallel_kernel
from pyro_truncated.ops.compiled.walk import MAX_BLOCKS, active_latents, as_array, as_words, count_blocks


def pair_energy(words: Tensor, linear: Tensor, pairwise: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.pair_energy`; float64 ``(N, C)``."""
    pairwise = pairwise.double()
    # Each unordered pair is visited once: fold the matrix into its lower triangle.
    folded = (pairwise + pairwise.mT).tril(-1) + torch.diag_embed(pairwise.diagonal(dim1=-2, dim2=-1))
    out = linear.new_empty(linear.shape[0], words.shape[1], dtype=torch.float64)
    _pair_energy(as_words(words), as_array(linear), as_array(folded.reshape(-1, *pairwise.shape[-2:])), out.numpy())
    return out


def flip_energy(words: Tensor, alone: Tensor, others: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.vectorised.quadratic.flip_energy`."""
    out = alone.clone()
    _flip_energy(as_words(words.unsqueeze(1)), as_array(others), out.numpy())
    return out


def moments(words: Tensor, weights: Tensor, num_latents: int, per_datum: bool) -> tuple[Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.moments`."""
    num_data = weights.shape[0]
    first = weights.new_zeros(num_data, num_latents, dtype=torch.float64)
    num_blocks = num_data if per_datum else count_blocks(num_data, num_latents**2)
    second = weights.new_zeros(num_blocks, num_latents, num_latents, dtype=torch.float64)
    _moments(as_words(words), as_array(weights), first.numpy(), second.numpy())
    second = second if per_datum else second.sum(0)
    return first, second + second.tril(-1).mT


@parallel_kernel()
def _pair_energy(words, linear, folded, out):
    num_rows, num_candidates, num_words = words.shape
    total = linear.shape[0] * num_candidates
    for block in prange(MAX_BLOCKS):
        active = np.empty(64 * num_words, np.int64)
        for i in range(total * block // MAX_BLOCKS, total * (block + 1) // MAX_BLOCKS):
            n = i // num_candidates
            c = i - n * num_candidates
            table = folded[n if folded.shape[0] > 1 else 0]
            count = active_latents(words, n if num_rows > 1 else 0, c, active)
            energy = 0.0
            for a in range(count):
                h = active[a]
                energy += linear[n, h]
                for b in range(a + 1):
                    energy += table[h, active[b]]
            out[n, c] = energy


@parallel_kernel()
def _flip_energy(words, others, out):
    num_rows, _, num_words = words.shape
    total = out.shape[0]
    for block in prange(MAX_BLOCKS):
        active = np.empty(64 * num_words, np.int64)
        for n in range(total * block // MAX_BLOCKS, total * (block + 1) // MAX_BLOCKS):
            count = active_latents(words, n if num_rows > 1 else 0, 0, active)
            for a in range(count):
                out[n] += others[active[a]]
            for a in range(count):
                out[n, active[a]] = -out[n, active[a]]


@parallel_kernel()
def _moments(words, weights, first, second):
    num_rows, num_candidates, num_words = words.shape
    num_data, num_blocks = weights.shape[0], second.shape[0]
    for block in prange(num_blocks):
        active = np.empty(64 * num_words, np.int64)
        table = second[block]
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            for c in range(num_candidates):
                weight = weights[n, c]
                if weight == 0.0:
                    continue
                count = active_latents(words, n if num_rows > 1 else 0, c, active)
                for a in range(count):
                    h = active[a]
                    first[n, h] += weight
                    for b in range(a + 1):
                        table[h, active[b]] += weight
