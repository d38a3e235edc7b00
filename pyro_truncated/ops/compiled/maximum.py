"""Compiled CPU kernels for superpositions by maximum, walking over the active latents of packed states.

As in :mod:`pyro_truncated.ops.compiled.quadratic`, everything is float64 and sums do not depend on the number of threads.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.compiled.square_error import weighted_square
from pyro_truncated.ops.compiled.threads import parallel_kernel
from pyro_truncated.ops.compiled.walk import (
    MAX_BLOCKS,
    active_latents,
    as_array,
    as_words,
    count_blocks,
    ever_active,
    gather,
    padded,
    where_observed,
)


def maximum_error(words: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.maximum_error`; float64 ``(N, C)``."""
    out = value.new_empty(value.shape[0], words.shape[1], dtype=torch.float64)
    _maximum_error(as_words(words), as_array(value), as_array(weight.mT), as_array(precision), out.numpy())
    return out


def maximum_statistics(words: Tensor, weights: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.maximum_statistics`; wins and sums ``(D, H + 1)``, the last where no latent is above zero."""
    num_data, (num_observed, num_latents) = value.shape[0], weight.shape
    active = value.new_zeros(num_data, num_latents, dtype=torch.float64)
    prediction = value.new_zeros(num_data, num_observed, dtype=torch.float64)
    num_blocks = count_blocks(num_data, 2 * (num_latents + 1) * num_observed)
    # The last row counts where no latent is above zero.
    wins = value.new_zeros(num_blocks, num_latents + 1, num_observed, dtype=torch.float64)
    sums = torch.zeros_like(wins)
    inputs = as_words(words), as_array(weights), as_array(value), as_array(weight.mT)
    _maximum_statistics(*inputs, active.numpy(), prediction.numpy(), wins.numpy(), sums.numpy())
    return active, prediction, wins.sum(0).mT, sums.sum(0).mT


@njit(cache=True, nogil=True)
def _maximum(weight, active, count, size, out):
    for j in range(size):
        out[j] = 0.0
    for a in range(count):
        row = weight[active[a]]
        for j in range(size):
            out[j] = row[j] if row[j] > out[j] else out[j]


@parallel_kernel(cost=4)
def _maximum_error(words, value, weight, precision, out):
    num_rows, num_candidates, num_words = words.shape
    (num_data, num_observed), num_latents = value.shape, weight.shape[0]
    num_blocks = min(num_data, MAX_BLOCKS)
    for block in prange(num_blocks):
        active = np.empty(64 * num_words, np.int64)
        union = np.empty((1, 1, num_words), np.int64)
        index = np.empty(num_observed + 1, np.int64)
        near_weight = np.empty((num_latents, padded(num_observed)))
        near_value, near_precision = np.empty(padded(num_observed)), np.empty(padded(num_observed))
        residual = np.empty(padded(num_observed))
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            row = n if num_rows > 1 else 0
            num_used = ever_active(words, row, union, active)
            count = where_observed(value[n], index)
            size = padded(count)
            gather(value[n], index, count, 0.0, near_value)
            gather(precision, index, count, 0.0, near_precision)
            for a in range(num_used):
                gather(weight[active[a]], index, count, 0.0, near_weight[active[a]])
            for c in range(num_candidates):
                num_active = active_latents(words, row, c, active)
                _maximum(near_weight, active, num_active, size, residual)
                for j in range(size):
                    residual[j] -= near_value[j]
                out[n, c] = weighted_square(residual, near_precision, size)


@njit(cache=True, nogil=True)
def _winner(weight, active, count, size, out, winner):
    """Maxima as in :func:`_maximum`, and who attains them: the first such latent, or ``len(weight)`` where none is above zero."""
    for j in range(size):
        out[j] = 0.0
        winner[j] = len(weight)
    for a in range(count):
        h = active[a]
        row = weight[h]
        for j in range(size):
            if row[j] > out[j]:
                out[j] = row[j]
                winner[j] = h


@parallel_kernel(cost=4)
def _maximum_statistics(words, weights, value, weight, total, prediction, wins, sums):
    num_rows, num_candidates, num_words = words.shape
    num_data, num_observed = value.shape
    num_blocks = wins.shape[0]
    for block in prange(num_blocks):
        active = np.empty(64 * num_words, np.int64)
        top, winner = np.empty(num_observed), np.empty(num_observed, np.int64)
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            for c in range(num_candidates):
                share = weights[n, c]
                if share == 0.0:
                    continue
                count = active_latents(words, n if num_rows > 1 else 0, c, active)
                _winner(weight, active, count, num_observed, top, winner)
                for a in range(count):
                    total[n, active[a]] += share
                for d in range(num_observed):
                    prediction[n, d] += share * top[d]
                    if not np.isnan(value[n, d]):
                        wins[block, winner[d], d] += share
                        sums[block, winner[d], d] += share * value[n, d]
