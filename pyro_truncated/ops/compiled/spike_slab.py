"""Compiled CPU kernels for linear spike-and-slab likelihoods: one small Cholesky factor per state, over its active latents only.

As in :mod:`pyro_truncated.ops.compiled.quadratic`, everything is float64 and sums do not depend on the number of threads.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.compiled.slab_parts import gram_of, gram_of_row, invert
from pyro_truncated.ops.compiled.threads import parallel_kernel
from pyro_truncated.ops.compiled.walk import MAX_BLOCKS, active_latents, as_array, as_words, count_blocks, ever_active, least_weight

_LARGE = 1e150


def log_prob(words: Tensor, linear: Tensor, scaled: Tensor, observed: Tensor | None, mean: Tensor, deviation: Tensor) -> Tensor:
    """Log density up to a term that does not depend on the state, float64 ``(N, C)``.

    Args:
        words: packed states, ``(N, C, W)``.
        linear: products of the data with the dictionary over the noise variance, ``(N, H)``.
        scaled: dictionary over the noise deviation, ``(D, H)``.
        observed: which entries are observed ``(N, D)``, or ``None`` for all.
        mean: means of the slabs, ``(H,)``.
        deviation: standard deviations of the slabs, ``(H,)``.
    """
    out = linear.new_empty(linear.shape[0], words.shape[1], dtype=torch.float64)
    _log_prob(as_words(words), as_array(linear), *gram_of(scaled, observed), as_array(mean), as_array(deviation), out.numpy())
    return out


def moments(
    words: Tensor,
    weights: Tensor,
    linear: Tensor,
    scaled: Tensor,
    observed: Tensor | None,
    mean: Tensor,
    deviation: Tensor,
    per_datum: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.spike_slab_moments`; the other arguments are those of :func:`log_prob`."""
    num_data, num_latents = linear.shape
    active = linear.new_zeros(num_data, num_latents, dtype=torch.float64)
    first = torch.zeros_like(active)
    num_blocks = num_data if per_datum else count_blocks(num_data, num_latents**2)
    second = linear.new_zeros(num_blocks, num_latents, num_latents, dtype=torch.float64)
    parameters = as_array(linear), *gram_of(scaled, observed), as_array(mean), as_array(deviation)
    _moments(as_words(words), as_array(weights), *parameters, active.numpy(), first.numpy(), second.numpy())
    second = second if per_datum else second.sum(0)
    return active, first, second + second.tril(-1).mT


@njit(cache=True, nogil=True)
def _factorize(linear, table, mean, deviation, active, count, factor, solution):
    """Collapses the slabs of the active latents, written as ``mean + deviation * e`` with standard normal ``e``.

    Leaves in ``factor`` the Cholesky factor ``L`` of ``M = I + T G T`` (``T = diag(deviation)``), the posterior precision of ``e``, and in
    ``solution`` the vector ``x`` with ``L x = T (a - G mean)``. Returns the log density up to terms that do not depend on the state.
    """
    energy = 0.0
    for a in range(count):
        h = active[a]
        field = linear[h]
        for b in range(count):
            field -= table[h, active[b]] * mean[active[b]]
        energy += 0.5 * mean[h] * (linear[h] + field)
        solution[a] = deviation[h] * field
    pivots = 1.0
    for a in range(count):
        h = active[a]
        row = factor[a]
        for b in range(a):
            other = factor[b]
            entry = deviation[h] * table[h, active[b]] * deviation[active[b]]
            for j in range(b):
                entry -= row[j] * other[j]
            row[b] = entry / other[b]
        pivot = 1.0 + deviation[h] * table[h, h] * deviation[h]
        x = solution[a]
        for j in range(a):
            pivot -= row[j] * row[j]
            x -= row[j] * solution[j]
        # The precision exceeds the identity, so a pivot below one is a rounding error.
        row[a] = np.sqrt(max(pivot, 1.0))
        solution[a] = x / row[a]
        energy += 0.5 * solution[a] * solution[a]
        # One logarithm for many pivots; none is below one, so the product can only overflow.
        pivots *= row[a]
        if pivots > _LARGE:
            energy -= np.log(pivots)
            pivots = 1.0
    return energy - np.log(pivots)


@parallel_kernel(cost=16)
def _log_prob(words, linear, scaled, observed, gram, mean, deviation, out):
    num_rows, num_candidates, num_words = words.shape
    num_data, num_latents = linear.shape
    num_blocks = min(num_data, MAX_BLOCKS)
    has_missing = observed.shape[0] > 0
    for block in prange(num_blocks):
        active = np.empty(64 * num_words, np.int64)
        union = np.empty((1, 1, num_words), np.int64)
        factor, solution = np.empty((num_latents, num_latents)), np.empty(num_latents)
        own = np.empty((num_latents, num_latents)) if has_missing else gram
        near = np.empty((num_latents if has_missing else 0, scaled.shape[1]))
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            row = n if num_rows > 1 else 0
            if has_missing:
                gram_of_row(scaled, observed[n], active, ever_active(words, row, union, active), near, own)
            for c in range(num_candidates):
                count = active_latents(words, row, c, active)
                out[n, c] = _factorize(linear[n], own, mean, deviation, active, count, factor, solution)


@njit(cache=True, nogil=True)
def _add_moments(weight, mean, deviation, active, count, factor, solution, first, table):
    """Adds a state's weighted first and (lower triangle) second moments of the slabs; ``factor`` and ``solution`` are overwritten."""
    invert(factor, count)
    for a in range(count):
        # Row a of the transposed inverse starts at a, so what is overwritten is not needed any more.
        total = 0.0
        for j in range(a, count):
            total += factor[j, a] * solution[j]
        solution[a] = mean[active[a]] + deviation[active[a]] * total
    for a in range(count):
        h = active[a]
        first[h] += weight * solution[a]
        for b in range(a + 1):
            covariance = 0.0
            for j in range(a, count):
                covariance += factor[j, a] * factor[j, b]
            covariance *= deviation[h] * deviation[active[b]]
            table[h, active[b]] += weight * (covariance + solution[a] * solution[b])


@parallel_kernel(cost=16)
def _moments(words, weights, linear, scaled, observed, gram, mean, deviation, total, first, second):
    num_rows, num_candidates, num_words = words.shape
    num_data, num_latents = linear.shape
    num_blocks = second.shape[0]
    has_missing = observed.shape[0] > 0
    for block in prange(num_blocks):
        active = np.empty(64 * num_words, np.int64)
        union = np.empty((1, 1, num_words), np.int64)
        factor, solution = np.empty((num_latents, num_latents)), np.empty(num_latents)
        own = np.empty((num_latents, num_latents)) if has_missing else gram
        near = np.empty((num_latents if has_missing else 0, scaled.shape[1]))
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            row = n if num_rows > 1 else 0
            if has_missing:
                gram_of_row(scaled, observed[n], active, ever_active(words, row, union, active), near, own)
            least = least_weight(weights[n])
            for c in range(num_candidates):
                weight = weights[n, c]
                # Infinite weights and NaN go on.
                if abs(weight) <= least:
                    continue
                count = active_latents(words, row, c, active)
                _factorize(linear[n], own, mean, deviation, active, count, factor, solution)
                for a in range(count):
                    total[n, active[a]] += weight
                _add_moments(weight, mean, deviation, active, count, factor, solution, first[n], second[block])
