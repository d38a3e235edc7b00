"""Slabs of the active latents of a state that are correlated a priori, integrated out: what the compiled kernels are made of.

Slabs are written as ``mean + R c``, with a unit lower triangular ``R`` and independent ``c`` of variances ``D``: such factors take no
square roots, and divide by nothing but what tells slabs apart. All is done to whole rows, of so many entries as fill registers.
"""

from __future__ import annotations

import numpy as np

from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.compiled.lanes import add_row, add_square, clear_row, gather_square
from pyro_truncated.ops.compiled.walk import padded

_LARGE = 1e150
_TINY = 1e-14
# Rows of the matrix of vectors.
_VARIANCES, FIELD, SLABS = 0, 1, 2


@njit(cache=True, nogil=True)
def size_of(most):
    """Entries of the rows for states with at most so many active latents, and a column beyond them."""
    return padded(most + 1)


@njit(cache=True, nogil=True, forceinline=True, error_model="numpy")
def _from_the_left(prior, count, size, matrix):
    """Multiplies a matrix with ``R'`` from the left."""
    for a in range(1, count):
        for p in range(a):
            add_row(prior[p, a], matrix, a, matrix, p, 0, size)


@njit(cache=True, nogil=True, forceinline=True, error_model="numpy")
def _factorize_prior(covariance, active, count, size, prior, vectors):
    """Leaves the factor ``R'`` of the active latents' covariance above the diagonal of ``prior``, and ``D`` in ``vectors``."""
    gather_square(covariance, active, count, size, prior)
    for p in range(count):
        pivot = max(prior[p, p], _TINY * covariance[active[p], active[p]])
        vectors[_VARIANCES, p], inverse = pivot, 1.0 / pivot
        for a in range(p + 1, count):
            add_row(-prior[p, a] * inverse, prior, p, prior, a, p, size)
        for a in range(p + 1, count):
            prior[p, a] *= inverse


@njit(cache=True, nogil=True, forceinline=True, error_model="numpy")
def collapse(linear, table, mean, covariance, active, count, prior, joint, spare, vectors):
    """Writes the slabs of the active latents as ``mean + R c``, given the data.

    Leaves in ``prior`` and ``vectors`` the ``R'`` and ``D`` of their covariance, in ``joint`` the precision ``M = D^-1 + R' G R`` of ``c``
    given the data with ``R' (a - G mean)`` as a column beyond it, and in ``vectors`` ``a - G mean``. Returns ``mean (a - G mean / 2)``.
    """
    size = size_of(count)
    _factorize_prior(covariance, active, count, size, prior, vectors)
    gather_square(table, active, count, size, spare)
    for a in range(count):
        vectors[FIELD, a] = linear[active[a]]
    clear_row(vectors, FIELD, count, size)
    for a in range(count):
        add_row(-mean[active[a]], spare, a, vectors, FIELD, 0, size)
    energy = 0.0
    for a in range(count):
        field = vectors[FIELD, a]
        energy += 0.5 * mean[active[a]] * (linear[active[a]] + field)
        spare[a, count] = field
    _from_the_left(prior, count, size, spare)
    for a in range(count):
        for b in range(count):
            joint[a, b] = spare[b, a]
        clear_row(joint, a, count, size)
    _from_the_left(prior, count, size, joint)
    for a in range(count):
        joint[a, a] += 1.0 / vectors[_VARIANCES, a]
        joint[a, count] = spare[a, count]
    return energy


@njit(cache=True, nogil=True, forceinline=True, error_model="numpy")
def eliminate(joint, count, size, vectors):
    """Eliminates what is below the pivots of ``M``, in rows of so many entries; returns the rest of the log density."""
    energy, product = 0.0, 1.0
    for p in range(count):
        # The precision exceeds that of the prior, so a pivot below it is a rounding error.
        variance = vectors[_VARIANCES, p]
        pivot, x = max(joint[p, p], 1.0 / variance), joint[p, count]
        joint[p, p], inverse = pivot, 1.0 / pivot
        for a in range(p + 1, count):
            add_row(-joint[p, a] * inverse, joint, p, joint, a, p, size)
        energy += 0.5 * x * x * inverse
        # One logarithm for many pivots; no factor is below one, so the product can only overflow.
        product *= pivot * variance
        if product > _LARGE:
            energy -= 0.5 * np.log(product)
            product = 1.0
    return energy - 0.5 * np.log(product)


@njit(cache=True, nogil=True, forceinline=True, error_model="numpy")
def posterior(mean, active, prior, joint, count, size, vectors, covariance):
    """Posterior of the slabs after :func:`collapse`: their mean in ``vectors``, and the lower triangle of their covariance.

    Columns of ``joint`` from ``size`` on become those of ``E^-1 R'`` with the factor ``E`` of ``M``, whose pivots stay where they are.
    """
    for p in range(count):
        clear_row(joint, p, size, 2 * size)
        joint[p, size + p] = 1.0
        for a in range(p + 1, count):
            joint[p, size + a] = prior[p, a]
        clear_row(covariance, p, 0, size)
        vectors[SLABS, p] = mean[active[p]]
    clear_row(vectors, SLABS, count, size)
    eliminate(joint, count, 2 * size, vectors)
    for p in range(count):
        inverse = 1.0 / joint[p, p]
        add_row(joint[p, count] * inverse, joint, p, vectors, SLABS, 0, size, size)
        add_square(inverse, joint, p, size, count, covariance)


@njit(cache=True, nogil=True, forceinline=True, error_model="numpy")
def gradients(prior, joint, count, size, vectors, spare, products):
    """Gradients of the log density after :func:`posterior`, in the means and, twice that, in the covariances.

    With ``Q = E^-1 D^-1 R^-1`` and the pivots ``F`` of ``M`` they are ``r = Q' F^-1 E^-1 R' (a - G mean)``, which the field in ``vectors``
    becomes, and ``r r' + Q' F^-1 Q - R'^-1 D^-1 R^-1``, whose lower triangle is left in ``products``. In terms of the posterior's moments
    and ``G`` they would be small differences of large numbers where there is little noise.
    """
    for a in range(count):
        clear_row(spare, a, 0, size)
        clear_row(products, a, 0, size)
        spare[a, a] = 1.0
    clear_row(vectors, FIELD, 0, size)
    # The inverses are lower triangular: rows end at their diagonal.
    for p in range(count):
        for a in range(p + 1, count):
            add_row(-prior[p, a], spare, p, spare, a, 0, padded(p + 1))
        inverse = 1.0 / vectors[_VARIANCES, p]
        add_square(-inverse, spare, p, 0, p + 1, products)
        for a in range(p + 1):
            spare[p, a] *= inverse
    for p in range(count):
        inverse = 1.0 / joint[p, p]
        for a in range(p + 1, count):
            add_row(-joint[p, a] * inverse, spare, p, spare, a, 0, padded(p + 1))
        add_square(inverse, spare, p, 0, p + 1, products)
        add_row(joint[p, count] * inverse, spare, p, vectors, FIELD, 0, padded(p + 1))
    for a in range(count):
        add_row(vectors[FIELD, a], vectors, FIELD, products, a, 0, padded(a + 1))


@njit(cache=True, nogil=True, forceinline=True, error_model="numpy")
def log_prior(covariance, active, count, size, prior, moments, vectors):
    """Expected log density, up to a constant, of slabs with these second moments about the prior's mean; changes ``moments``."""
    _factorize_prior(covariance, active, count, size, prior, vectors)
    energy, product = 0.0, 1.0
    for p in range(count):
        variance = vectors[_VARIANCES, p]
        energy -= 0.5 * moments[p, p] / variance
        product *= variance
        if not 1.0 / _LARGE < product < _LARGE:
            energy -= 0.5 * np.log(product)
            product = 1.0
        # Moments of independent slabs are left: what is taken from a row is taken from a column as well.
        for a in range(p + 1, count):
            shared, factor = moments[a, p], prior[p, a]
            add_row(-factor, moments, p, moments, a, p, size)
            add_row(factor * moments[p, p] - shared, prior, p, moments, a, p, size)
    return energy - 0.5 * np.log(product)
