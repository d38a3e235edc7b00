"""Compiled CPU kernels for spike-and-slab causes that superpose by maximum.

As in :mod:`pyro_truncated.ops.compiled.quadratic`, everything is float64 and sums do not depend on the number of threads. Every data
point has its own stream of random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.compiled.random import STEP, below, stream, uniform
from pyro_truncated.ops.compiled.threads import HEAVY, parallel_kernel
from pyro_truncated.ops.compiled.truncated_normal import LOG_2PI, log_interval, truncated_standard_normal
from pyro_truncated.ops.compiled.walk import MAX_BLOCKS, as_array, count_blocks

# Segments this many nats below the best one are never drawn.
_NEGLIGIBLE = 40.0
_SMALLEST = 1e-300


def gibbs(
    value: Tensor,
    weight: Tensor,
    precision: Tensor,
    prior: Sequence[Tensor],
    selected: Tensor,
    start: Tensor,
    burn_in: int,
    sweeps: int,
    rows: Tensor,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.maximum_slab_gibbs`; ``prior`` and ``start`` are those of the selected causes, ``(N, K)`` each."""
    draws = start.new_empty(len(start), sweeps, start.shape[1])
    probabilities = torch.zeros_like(start)
    log_odds, mean, deviation = (as_array(parameter) for parameter in prior)
    parameters = as_array(value), as_array(weight.mT), as_array(precision), log_odds, mean, deviation
    _gibbs(*parameters, selected.contiguous().numpy(), as_array(start), burn_in, rows.numpy(), seed, draws.numpy(), probabilities.numpy())
    return draws, probabilities / sweeps


def statistics(value: Tensor, selected: Tensor, draws: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.maximum_slab_statistics`; sums over the draws instead of means."""
    num_observed, num_latents = weight.shape
    num_blocks = count_blocks(len(value), 2 * num_latents * num_observed)
    products = value.new_zeros(num_blocks, num_latents, num_observed)
    squares, errors = torch.zeros_like(products), value.new_zeros(num_blocks, num_observed)
    inputs = as_array(value), selected.contiguous().numpy(), as_array(draws), as_array(weight.mT)
    _statistics(*inputs, products.numpy(), squares.numpy(), errors.numpy())
    return products.sum(0).mT, squares.sum(0).mT, errors.sum(0)


@njit(cache=True, nogil=True)
def _sorted(keys, count, order):
    """Writes the positions of the first ``count`` keys in ascending order into ``order``: by insertion, as they are few."""
    if count > 64:
        order[:count] = np.argsort(keys[:count])
        return
    for i in range(count):
        j = i
        while j > 0 and keys[order[j - 1]] > keys[i]:
            order[j] = order[j - 1]
            j -= 1
        order[j] = i


@njit(cache=True, nogil=True)
def _won(value, others, element, precision, terms):
    """What winning a dimension adds to the log density: rows of ``terms`` hold its threshold, constant, slope and curvature.

    Dimensions that no other cause claims share the threshold zero and are summed up in the first place, which has none (infinity) without
    them. Returns the number of places.
    """
    count = 1
    terms[0, 0] = np.inf
    terms[1, 0] = terms[2, 0] = terms[3, 0] = 0.0
    for d in range(len(value)):
        y, m, w = value[d], others[d], element[d]
        if np.isnan(y) or w <= 0.0:
            continue
        place = 0
        if m > 0.0:
            place = count
            count += 1
            terms[0, place] = m / w
            terms[1, place] = terms[2, place] = terms[3, place] = 0.0
        else:
            terms[0, 0] = 0.0
        scaled = precision[d] * w
        terms[1, place] -= 0.5 * precision[d] * m * (2.0 * y - m)
        terms[2, place] += scaled * y
        terms[3, place] += scaled * w
    return count


@njit(cache=True, nogil=True)
def _masses(terms, order, count, log_odds, mean, inverse_variance, segments):
    """Log masses of the slab's segments over that of the spike, the rows of ``segments``: upper edge, mean, root precision, log mass.

    Returns the largest of the log masses, that of the spike (zero) among them. Negligible segments are not evaluated.
    """
    normalizer = 0.5 * (LOG_2PI - math.log(inverse_variance))
    constant = log_odds - normalizer - 0.5 * inverse_variance * mean * mean
    linear, precision = inverse_variance * mean, inverse_variance
    lower, best = -np.inf, 0.0
    for j in range(count + 1):
        upper = terms[0, order[j]] if j < count else np.inf
        loc = linear / precision
        segments[0, j], segments[1, j], segments[3, j] = upper, loc, -np.inf
        if upper > lower:
            peak = min(max(loc, lower), upper)
            # The precision is at least the prior's, so this bounds the mass.
            if constant + peak * (linear - 0.5 * precision * peak) + normalizer > best - _NEGLIGIBLE:
                root = math.sqrt(precision)
                inside = log_interval((lower - loc) * root, (upper - loc) * root)
                mass = constant + 0.5 * linear * loc + 0.5 * LOG_2PI - math.log(root) + inside
                segments[2, j], segments[3, j] = root, mass
                best = max(best, mass)
        lower = upper
        if j < count:
            constant += terms[1, order[j]]
            linear += terms[2, order[j]]
            precision += terms[3, order[j]]
    return best


@njit(cache=True, nogil=True)
def _draw(segments, count, best, first, second):
    """Draws a coefficient (zero for the spike), and returns the probability of the slab, too."""
    spike, slab = math.exp(-best), 0.0
    for j in range(count + 1):
        slab += math.exp(segments[3, j] - best)
    rest = first * (spike + slab) - spike
    if rest < 0.0 or slab == 0.0:
        return 0.0, slab / (spike + slab)
    chosen = 0
    for j in range(count + 1):
        share = math.exp(segments[3, j] - best)
        if share > 0.0:
            chosen = j
            rest -= share
            if rest < 0.0:
                break
    lower = segments[0, chosen - 1] if chosen > 0 else -np.inf
    upper, loc, root = segments[0, chosen], segments[1, chosen], segments[2, chosen]
    z = loc + truncated_standard_normal((lower - loc) * root, (upper - loc) * root, second) / root
    z = min(max(z, lower), upper)
    return (z if z != 0.0 else _SMALLEST), slab / (spike + slab)


@njit(cache=True, nogil=True)
def _offers(weight, selected, coefficients, without, others):
    """What the other causes offer in every dimension; coefficients that are not positive win nothing."""
    others[:] = 0.0
    for k in range(len(selected)):
        s = coefficients[k]
        if k == without or s <= 0.0:
            continue
        row = weight[selected[k]]
        for d in range(len(others)):
            offer = s * row[d]
            others[d] = offer if offer > others[d] else others[d]


@parallel_kernel(cost=HEAVY)
def _gibbs(value, weight, precision, log_odds, mean, deviation, selected, start, burn_in, rows, seed, draws, probabilities):
    num_data, num_observed = value.shape
    num_selected, sweeps = selected.shape[1], draws.shape[1]
    num_blocks = min(num_data, MAX_BLOCKS)
    for block in prange(num_blocks):
        others, terms = np.empty(num_observed), np.empty((4, num_observed + 1))
        order, segments = np.empty(num_observed + 1, np.int64), np.empty((4, num_observed + 2))
        places, chain = np.arange(num_selected), np.empty(num_selected)
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            state = stream(seed, rows[n])
            chain[:] = start[n]
            for k in range(num_selected):
                places[k] = k
            for sweep in range(burn_in + sweeps):
                for i in range(num_selected):
                    state += STEP
                    j = i + below(state, num_selected - i)
                    places[i], places[j] = places[j], places[i]
                    k = places[i]
                    _offers(weight, selected[n], chain, k, others)
                    count = _won(value[n], others, weight[selected[n, k]], precision, terms)
                    _sorted(terms[0], count, order)
                    best = _masses(terms, order, count, log_odds[n, k], mean[n, k], 1.0 / deviation[n, k] ** 2, segments)
                    state += STEP
                    first = uniform(state)
                    state += STEP
                    chain[k], chance = _draw(segments, count, best, first, uniform(state))
                    if sweep >= burn_in:
                        probabilities[n, k] += chance
                if sweep >= burn_in:
                    draws[n, sweep - burn_in] = chain


@parallel_kernel(cost=HEAVY)
def _statistics(value, selected, draws, weight, products, squares, errors):
    num_data, num_observed = value.shape
    num_blocks = products.shape[0]
    for block in prange(num_blocks):
        top, winner = np.empty(num_observed), np.empty(num_observed, np.int64)
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            for c in range(draws.shape[1]):
                top[:] = 0.0
                winner[:] = -1
                for k in range(selected.shape[1]):
                    s = draws[n, c, k]
                    if s <= 0.0:
                        continue
                    row = weight[selected[n, k]]
                    for d in range(num_observed):
                        if s * row[d] > top[d]:
                            top[d] = s * row[d]
                            winner[d] = k
                for d in range(num_observed):
                    y = value[n, d]
                    if np.isnan(y):
                        continue
                    errors[block, d] += (y - top[d]) ** 2
                    if winner[d] >= 0:
                        s, h = draws[n, c, winner[d]], selected[n, winner[d]]
                        products[block, h, d] += y * s
                        squares[block, h, d] += s * s
