"""Compiled CPU kernels for slabs that are correlated a priori: two small Cholesky factors per state, over its active latents only.

As in :mod:`pyro_truncated.ops.compiled.spike_slab`, everything is float64 and sums do not depend on the number of threads.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.compiled.correlated_factors import (
    FIELD,
    NUM_VECTORS,
    SLABS,
    collapse,
    eliminate,
    gradients,
    log_prior,
    posterior,
    posterior_roots,
    size_of,
    transpose_roots,
)
from pyro_truncated.ops.compiled.slab_parts import gram_of, gram_of_row
from pyro_truncated.ops.compiled.threads import parallel_kernel
from pyro_truncated.ops.compiled.walk import (
    active_latents,
    as_array,
    as_words,
    count_blocks,
    ever_active,
    least_weight,
    most_active,
)

# Numbers in a cache line.
_LINE = 8


def log_prob(words: Tensor, linear: Tensor, scaled: Tensor, observed: Tensor | None, mean: Tensor, covariance: Tensor) -> Tensor:
    """As :func:`pyro_truncated.ops.compiled.spike_slab.log_prob`, with the covariance of the slabs, ``(H, H)``."""
    out = linear.new_empty(linear.shape[0], words.shape[1], dtype=torch.float64)
    packed, parameters = as_words(words), (as_array(linear), *gram_of(scaled, observed), as_array(mean), as_array(covariance))
    _log_prob(packed, *parameters, *_scratch(packed, len(linear), 0), out.numpy())
    return out


def moments(
    words: Tensor,
    weights: Tensor,
    linear: Tensor,
    scaled: Tensor,
    observed: Tensor | None,
    mean: Tensor,
    covariance: Tensor,
    per_datum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.correlated_slab_moments`; the other arguments are those of :func:`log_prob`."""
    num_data, num_latents = linear.shape
    active = linear.new_zeros(num_data, num_latents, dtype=torch.float64)
    first = torch.zeros_like(active)
    packed, parameters = as_words(words), (as_array(linear), *gram_of(scaled, observed), as_array(mean), as_array(covariance))
    scratch = _scratch(packed, num_data, 2 * num_latents**2)
    num_blocks = len(scratch[0])
    second = linear.new_zeros(num_data if per_datum else num_blocks, num_latents, num_latents, dtype=torch.float64)
    curvature = linear.new_zeros(num_blocks, num_latents, num_latents, dtype=torch.float64)
    slope = linear.new_zeros(num_blocks, num_latents, dtype=torch.float64)
    outputs = active.numpy(), first.numpy(), second.numpy(), slope.numpy(), curvature.numpy()
    _moments(packed, as_array(weights), *parameters, *scratch, *outputs)
    second, curvature = second if per_datum else second.sum(0), curvature.sum(0)
    return active, first, second + second.tril(-1).mT, slope.sum(0), curvature + curvature.tril(-1).mT


def expected_log_prior(
    words: Tensor,
    weights: Tensor,
    linear: Tensor,
    scaled: Tensor,
    observed: Tensor | None,
    mean: Tensor,
    covariance: Tensor,
    means: Tensor,
    covariances: Tensor,
) -> Tensor:
    """See :func:`pyro_truncated.ops.expected_log_slab_prior`; the other arguments are those of :func:`log_prob`."""
    packed, parameters = as_words(words), (as_array(linear), *gram_of(scaled, observed), as_array(mean), as_array(covariance))
    scratch, others = _scratch(packed, len(linear), len(means)), (as_array(means), as_array(covariances))
    out = linear.new_zeros(len(scratch[0]), len(means), dtype=torch.float64)
    _expected_log_prior(packed, as_array(weights), *parameters, *others, *scratch, out.numpy())
    return out.sum(0)


def _scratch(words: np.ndarray, num_data: int, accumulator_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Matrices and vectors that a state's active latents fit in, for each block: counting references to a kernel's own takes long.

    The wider the states, the fewer blocks, see :func:`.count_blocks`.
    """
    most = most_active(words)
    size = size_of(most)
    num_blocks = count_blocks(num_data, accumulator_size, 8 * most * size)
    return _aligned((num_blocks, 4, most, 2 * size)), _aligned((num_blocks, NUM_VECTORS, size))


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Zeros from the beginning of a cache line on: registers that lie across two lines take twice as long to read."""
    size = math.prod(shape)
    numbers = np.zeros(size + _LINE)
    start = -(numbers.ctypes.data // numbers.itemsize) % _LINE
    return numbers[start : start + size].reshape(shape)


@parallel_kernel(cost=24)
def _log_prob(words, linear, scaled, observed, gram, mean, covariance, matrices, vectors, out):
    num_rows, num_candidates, num_words = words.shape
    num_data, num_latents = linear.shape
    num_blocks = len(matrices)
    has_missing = observed.shape[0] > 0
    for block in prange(num_blocks):
        active = np.empty(64 * num_words, np.int64)
        union = np.empty((1, 1, num_words), np.int64)
        prior, joint, spare, work = matrices[block, 0], matrices[block, 1], matrices[block, 2], vectors[block]
        own = np.empty((num_latents, num_latents)) if has_missing else gram
        near = np.empty((num_latents if has_missing else 0, scaled.shape[1]))
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            row = n if num_rows > 1 else 0
            if has_missing:
                gram_of_row(scaled, observed[n], active, ever_active(words, row, union, active), near, own)
            for c in range(num_candidates):
                count = active_latents(words, row, c, active)
                energy = collapse(linear[n], own, mean, covariance, active, count, prior, joint, spare, work)
                out[n, c] = energy + eliminate(joint, count, size_of(count), work)


@parallel_kernel(cost=48)
def _moments(words, weights, linear, scaled, observed, gram, mean, covariance, matrices, vectors, total, first, second, slope, curvature):
    num_rows, num_candidates, num_words = words.shape
    num_data, num_latents = linear.shape
    num_blocks, is_apart = len(matrices), len(second) > len(matrices)
    has_missing = observed.shape[0] > 0
    for block in prange(num_blocks):
        active = np.empty(64 * num_words, np.int64)
        union = np.empty((1, 1, num_words), np.int64)
        prior, joint, spare, spread = matrices[block, 0], matrices[block, 1], matrices[block, 2], matrices[block, 3]
        work = vectors[block]
        own = np.empty((num_latents, num_latents)) if has_missing else gram
        near = np.empty((num_latents if has_missing else 0, scaled.shape[1]))
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            row, place = n if num_rows > 1 else 0, n if is_apart else np.int64(block)
            if has_missing:
                gram_of_row(scaled, observed[n], active, ever_active(words, row, union, active), near, own)
            least = least_weight(weights[n])
            for c in range(num_candidates):
                weight = weights[n, c]
                if abs(weight) <= least:
                    continue
                count = active_latents(words, row, c, active)
                size = size_of(count)
                collapse(linear[n], own, mean, covariance, active, count, prior, joint, spare, work)
                posterior(mean, active, prior, joint, count, size, work, spread)
                for a in range(count):
                    h, value = active[a], work[SLABS, a]
                    total[n, h] += weight
                    first[n, h] += weight * value
                    for b in range(a + 1):
                        second[place, h, active[b]] += weight * (spread[a, b] + value * work[SLABS, b])
                gradients(prior, joint, count, size, work, spare, spread)
                for a in range(count):
                    h = active[a]
                    slope[block, h] += weight * work[FIELD, a]
                    for b in range(a + 1):
                        curvature[block, h, active[b]] += weight * spread[a, b]


@parallel_kernel(cost=64)
def _expected_log_prior(words, weights, linear, scaled, observed, gram, mean, covariance, means, covariances, matrices, vectors, out):
    num_rows, num_candidates, num_words = words.shape
    num_data, num_latents = linear.shape
    num_blocks = len(matrices)
    has_missing = observed.shape[0] > 0
    for block in prange(num_blocks):
        active = np.empty(64 * num_words, np.int64)
        union = np.empty((1, 1, num_words), np.int64)
        prior, joint, roots, rows = matrices[block, 0], matrices[block, 1], matrices[block, 2], matrices[block, 3]
        work = vectors[block]
        own = np.empty((num_latents, num_latents)) if has_missing else gram
        near = np.empty((num_latents if has_missing else 0, scaled.shape[1]))
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            row = n if num_rows > 1 else 0
            if has_missing:
                gram_of_row(scaled, observed[n], active, ever_active(words, row, union, active), near, own)
            least = least_weight(weights[n])
            for c in range(num_candidates):
                weight = weights[n, c]
                if abs(weight) <= least:
                    continue
                count = active_latents(words, row, c, active)
                size = size_of(count)
                collapse(linear[n], own, mean, covariance, active, count, prior, joint, rows, work)
                posterior_roots(mean, active, prior, joint, count, size, work)
                transpose_roots(joint, count, size, roots)
                for t in range(len(means)):
                    out[block, t] += weight * log_prior(means[t], covariances[t], active, count, size, roots, work, rows)
