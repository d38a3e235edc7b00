"""Factors of slabs that are correlated a priori, and of their posteriors: what the compiled kernels are made of.

Slabs of the active latents are written as ``mean + R c``, with a unit lower triangular ``R`` and independent ``c`` of variances ``D``. Such
factors take no square roots, which would be most of the time for few latents.
"""

from __future__ import annotations

import numpy as np

from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.compiled.slab_parts import invert

_LARGE = 1e150
_TINY = 1e-14


@njit(cache=True, nogil=True)
def factorize_prior(covariance, active, count, root, variances, work):
    """Writes ``R`` (without its diagonal) and ``D`` of the active latents' covariance; ``work`` is a vector."""
    for a in range(count):
        row, source = root[a], covariance[active[a]]
        pivot = source[active[a]]
        floor = _TINY * pivot
        for b in range(a):
            other = root[b]
            entry = source[active[b]]
            for j in range(b):
                entry -= work[j] * other[j]
            work[b] = entry
            row[b] = entry / variances[b]
            pivot -= entry * row[b]
        variances[a] = max(pivot, floor)


@njit(cache=True, nogil=True)
def _project(linear, table, mean, active, count, root, dense, right, solution):
    """Leaves in ``right`` the transpose of ``G R``, in ``solution`` ``R' (a - G mean)``; returns ``mean (a - G mean / 2)``."""
    energy = 0.0
    for a in range(count):
        h = active[a]
        field, row, source = linear[h], dense[a], table[h]
        for b in range(count):
            row[b] = source[active[b]]
            field -= row[b] * mean[active[b]]
        energy += 0.5 * mean[h] * (linear[h] + field)
        solution[a] = field
    for a in range(count):
        target, row = solution[a], right[a]
        for b in range(count):
            row[b] = dense[a, b]
        for j in range(a + 1, count):
            factor = root[j, a]
            target += factor * solution[j]
            for b in range(count):
                row[b] += factor * dense[j, b]
        solution[a] = target
    return energy


@njit(cache=True, nogil=True)
def factorize(linear, table, mean, covariance, active, count, root, right, factor, variances, pivots, work, solution):
    """Collapses the slabs of the active latents.

    Leaves in ``root`` and ``variances`` the ``R`` and ``D`` of their covariance, in ``factor`` and ``pivots`` the same of
    ``M = D^-1 + R' G R``, the posterior precision of ``c``, and in ``solution`` the vector ``x`` with ``E x = R' (a - G mean)`` for the
    factor ``E``. Returns the log density up to terms that do not depend on the state.
    """
    factorize_prior(covariance, active, count, root, variances, work)
    energy = _project(linear, table, mean, active, count, root, factor, right, solution)
    product = 1.0
    for a in range(count):
        row, x = factor[a], solution[a]
        for b in range(a + 1):
            work[b] = right[b, a]
        for j in range(a + 1, count):
            weight = root[j, a]
            for b in range(a + 1):
                work[b] += weight * right[b, j]
        floor = 1.0 / variances[a]
        pivot = floor + work[a]
        for b in range(a):
            other = factor[b]
            entry = work[b]
            for j in range(b):
                entry -= work[j] * other[j]
            work[b] = entry
            row[b] = entry / pivots[b]
            pivot -= entry * row[b]
            x -= row[b] * solution[b]
        # The precision exceeds that of the prior, so a pivot below it is a rounding error.
        pivot = max(pivot, floor)
        pivots[a] = pivot
        solution[a] = x
        energy += 0.5 * x * x / pivot
        # One logarithm for many pivots; no factor is below one, so the product can only overflow.
        product *= pivot * variances[a]
        if product > _LARGE:
            energy -= 0.5 * np.log(product)
            product = 1.0
    return energy - 0.5 * np.log(product)


@njit(cache=True, nogil=True)
def posterior(root, factor, variances, pivots, solution, count, spread):
    """Posterior of the slabs, which :func:`factorize` has factorised.

    With Cholesky factors ``T = R D^1/2`` of the prior covariance and ``L`` of the posterior precision of ``e`` in ``mean + T e``, leaves in
    ``root`` the factor ``T``, in ``factor`` ``L^-1``, in ``solution`` the posterior mean of ``e``, and in ``spread`` a root of the
    posterior covariance.
    """
    for a in range(count):
        variances[a], pivots[a] = np.sqrt(variances[a]), np.sqrt(pivots[a])
        root[a, a], factor[a, a] = variances[a], variances[a] * pivots[a]
        solution[a] /= pivots[a]
        for b in range(a):
            root[a, b] *= variances[b]
            factor[a, b] *= variances[a] * pivots[b]
    invert(factor, count)
    for a in range(count):
        # Column a of the inverse starts at a, so what is overwritten is not needed any more.
        total = 0.0
        for j in range(a, count):
            total += factor[j, a] * solution[j]
        solution[a] = total
    for a in range(count):
        for j in range(count):
            total = 0.0
            for i in range(min(a, j) + 1):
                total += root[a, i] * factor[j, i]
            spread[a, j] = total


@njit(cache=True, nogil=True)
def deviation_of(root, solution, a):
    """How far the posterior mean of an active slab is from its prior mean."""
    total = 0.0
    for j in range(a + 1):
        total += root[a, j] * solution[j]
    return total
