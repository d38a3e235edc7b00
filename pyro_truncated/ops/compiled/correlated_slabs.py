"""Compiled CPU kernels for slabs that are correlated a priori: two small Cholesky factors per state, over its active latents only.

As in :mod:`pyro_truncated.ops.compiled.spike_slab`, everything is float64 and sums do not depend on the number of threads.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.compiled.correlated_factors import deviation_of, factorize, factorize_prior, posterior
from pyro_truncated.ops.compiled.slab_parts import gram_of, gram_of_row, invert
from pyro_truncated.ops.compiled.threads import parallel_kernel
from pyro_truncated.ops.compiled.walk import MAX_BLOCKS, active_latents, as_array, as_words, count_blocks, ever_active


def log_prob(words: Tensor, linear: Tensor, scaled: Tensor, observed: Tensor | None, mean: Tensor, covariance: Tensor) -> Tensor:
    """As :func:`pyro_truncated.ops.compiled.spike_slab.log_prob`, with the covariance of the slabs, ``(H, H)``."""
    out = linear.new_empty(linear.shape[0], words.shape[1], dtype=torch.float64)
    _log_prob(as_words(words), as_array(linear), *gram_of(scaled, observed), as_array(mean), as_array(covariance), out.numpy())
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
    num_blocks = num_data if per_datum else count_blocks(num_data, 2 * num_latents**2)
    second, curvature = (linear.new_zeros(num_blocks, num_latents, num_latents, dtype=torch.float64) for _ in range(2))
    slope = linear.new_zeros(num_blocks, num_latents, dtype=torch.float64)
    parameters = as_array(linear), *gram_of(scaled, observed), as_array(mean), as_array(covariance)
    outputs = active.numpy(), first.numpy(), second.numpy(), slope.numpy(), curvature.numpy()
    _moments(as_words(words), as_array(weights), *parameters, *outputs)
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
    out = linear.new_zeros(count_blocks(len(linear), len(means)), len(means), dtype=torch.float64)
    parameters = as_array(linear), *gram_of(scaled, observed), as_array(mean), as_array(covariance)
    _expected_log_prior(as_words(words), as_array(weights), *parameters, as_array(means), as_array(covariances), out.numpy())
    return out.sum(0)


@parallel_kernel(cost=24)
def _log_prob(words, linear, scaled, observed, gram, mean, covariance, out):
    num_rows, num_candidates, num_words = words.shape
    num_data, num_latents = linear.shape
    num_blocks = min(num_data, MAX_BLOCKS)
    has_missing = observed.shape[0] > 0
    for block in prange(num_blocks):
        active = np.empty(64 * num_words, np.int64)
        union = np.empty((1, 1, num_words), np.int64)
        work, vectors = np.empty((3, num_latents, num_latents)), np.empty((4, num_latents))
        variances, pivots, spare, solution = vectors[0], vectors[1], vectors[2], vectors[3]
        own = np.empty((num_latents, num_latents)) if has_missing else gram
        near = np.empty((num_latents if has_missing else 0, scaled.shape[1]))
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            row = n if num_rows > 1 else 0
            if has_missing:
                gram_of_row(scaled, observed[n], active, ever_active(words, row, union, active), near, own)
            for c in range(num_candidates):
                count = active_latents(words, row, c, active)
                out[n, c] = factorize(
                    linear[n], own, mean, covariance, active, count, work[0], work[1], work[2], variances, pivots, spare, solution
                )


@njit(cache=True, nogil=True)
def _add_moments(weight, mean, active, count, root, spread, solution, first, table):
    """Adds a state's weighted first and (lower triangle) second moments of the slabs."""
    for a in range(count):
        h = active[a]
        value = mean[h] + deviation_of(root, solution, a)
        first[h] += weight * value
        for b in range(a + 1):
            moment = value * (mean[active[b]] + deviation_of(root, solution, b))
            for j in range(count):
                moment += spread[a, j] * spread[b, j]
            table[h, active[b]] += weight * moment


@njit(cache=True, nogil=True)
def _add_gradient(weight, active, count, root, right, factor, solution, slope, curvature):
    """Adds a state's weighted gradients in means and (twice that, lower triangle) in covariances; ``root`` and ``right`` are overwritten.

    They are ``r = T'^-1 e`` and ``r r' + T'^-1 (M^-1 - I) T^-1``.
    """
    invert(root, count)
    for a in range(count):
        total = 0.0
        for j in range(a, count):
            total += root[j, a] * solution[j]
        # The solution is not needed below a.
        solution[a] = total
        for j in range(a, count):
            total = 0.0
            for i in range(a, j + 1):
                total += factor[j, i] * root[i, a]
            right[j, a] = total
    for a in range(count):
        h = active[a]
        slope[h] += weight * solution[a]
        for b in range(a + 1):
            entry = solution[a] * solution[b]
            for j in range(a, count):
                entry += right[j, a] * right[j, b] - root[j, a] * root[j, b]
            curvature[h, active[b]] += weight * entry


@parallel_kernel(cost=48)
def _moments(words, weights, linear, scaled, observed, gram, mean, covariance, total, first, second, slope, curvature):
    num_rows, num_candidates, num_words = words.shape
    num_data, num_latents = linear.shape
    num_blocks = second.shape[0]
    has_missing = observed.shape[0] > 0
    for block in prange(num_blocks):
        active = np.empty(64 * num_words, np.int64)
        union = np.empty((1, 1, num_words), np.int64)
        work, vectors = np.empty((3, num_latents, num_latents)), np.empty((4, num_latents))
        variances, pivots, spare, solution = vectors[0], vectors[1], vectors[2], vectors[3]
        own = np.empty((num_latents, num_latents)) if has_missing else gram
        near = np.empty((num_latents if has_missing else 0, scaled.shape[1]))
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            row = n if num_rows > 1 else 0
            if has_missing:
                gram_of_row(scaled, observed[n], active, ever_active(words, row, union, active), near, own)
            for c in range(num_candidates):
                weight = weights[n, c]
                if weight == 0.0:
                    continue
                count = active_latents(words, row, c, active)
                factorize(linear[n], own, mean, covariance, active, count, work[0], work[1], work[2], variances, pivots, spare, solution)
                posterior(work[0], work[2], variances, pivots, solution, count, work[1])
                for a in range(count):
                    total[n, active[a]] += weight
                _add_moments(weight, mean, active, count, work[0], work[1], solution, first[n], second[block])
                _add_gradient(weight, active, count, work[0], work[1], work[2], solution, slope[block], curvature[block])


@njit(cache=True, nogil=True)
def _square(root, variances, column, count):
    """Squared length of ``D^-1/2 R^-1 v`` for the column ``v``, which is overwritten."""
    total = 0.0
    for a in range(count):
        x = column[a]
        for j in range(a):
            x -= root[a, j] * column[j]
        column[a] = x
        total += x * x / variances[a]
    return total


@parallel_kernel(cost=64)
def _expected_log_prior(words, weights, linear, scaled, observed, gram, mean, covariance, means, covariances, out):
    num_rows, num_candidates, num_words = words.shape
    num_data, num_latents = linear.shape
    num_blocks = out.shape[0]
    has_missing = observed.shape[0] > 0
    for block in prange(num_blocks):
        active = np.empty(64 * num_words, np.int64)
        union = np.empty((1, 1, num_words), np.int64)
        work, vectors = np.empty((4, num_latents, num_latents)), np.empty((5, num_latents))
        variances, pivots, spare, solution, column = vectors[0], vectors[1], vectors[2], vectors[3], vectors[4]
        own = np.empty((num_latents, num_latents)) if has_missing else gram
        near = np.empty((num_latents if has_missing else 0, scaled.shape[1]))
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            row = n if num_rows > 1 else 0
            if has_missing:
                gram_of_row(scaled, observed[n], active, ever_active(words, row, union, active), near, own)
            for c in range(num_candidates):
                weight = weights[n, c]
                if weight == 0.0:
                    continue
                count = active_latents(words, row, c, active)
                factorize(linear[n], own, mean, covariance, active, count, work[0], work[1], work[2], variances, pivots, spare, solution)
                posterior(work[0], work[2], variances, pivots, solution, count, work[1])
                for t in range(means.shape[0]):
                    factorize_prior(covariances[t], active, count, work[3], variances, spare)
                    energy = 0.0
                    for a in range(count):
                        h = active[a]
                        energy -= 0.5 * np.log(variances[a])
                        column[a] = mean[h] + deviation_of(work[0], solution, a) - means[t, h]
                    energy -= 0.5 * _square(work[3], variances, column, count)
                    for j in range(count):
                        for a in range(count):
                            column[a] = work[1][a, j]
                        energy -= 0.5 * _square(work[3], variances, column, count)
                    out[block, t] += weight * energy
