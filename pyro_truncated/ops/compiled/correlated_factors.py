"""Slabs of the active latents of a state that are correlated a priori, integrated out: what the compiled kernels are made of.

Slabs are written as ``mean + R c``, with a unit lower triangular ``R`` and independent ``c`` of variances ``D``: such factors take no
square roots, and divide by nothing but what tells slabs apart. All is done to whole rows, of so many entries as fill registers.
"""

from __future__ import annotations

import numpy as np

from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.compiled.lanes import add_row, add_square, clear_row, gather_above, gather_square, square_of
from pyro_truncated.ops.compiled.walk import padded

_LARGE = 1e150
_TINY = 1e-14
# Rows of the matrix of vectors.
_VARIANCES, _PRECISIONS, FIELD, SLABS = 0, 1, 2, 3
NUM_VECTORS = 4


@njit(cache=True, nogil=True)
def size_of(most):
    """Entries of the rows for states with at most so many active latents, and a column beyond them."""
    return padded(most + 1)


@njit(cache=True, nogil=True, forceinline=True, error_model="numpy")
def _factorize_prior(covariance, active, count, size, prior, lower, vectors):
    """Leaves of the active latents' covariance ``R'`` above the diagonal of ``prior``, ``R`` below that of ``lower``, ``D`` in vectors."""
    gather_above(covariance, active, count, size, prior)
    for a in range(count):
        clear_row(lower, a, 0, size)
    for p in range(count):
        pivot = max(prior[p, p], _TINY * covariance[active[p], active[p]])
        inverse = 1.0 / pivot
        vectors[_VARIANCES, p], vectors[_PRECISIONS, p] = pivot, inverse
        for a in range(p + 1, count):
            add_row(-prior[p, a] * inverse, prior, p, prior, a, p, size)
        for a in range(p + 1, count):
            factor = prior[p, a] * inverse
            prior[p, a], lower[a, p] = factor, factor


@njit(cache=True, nogil=True, forceinline=True, error_model="numpy")
def collapse(linear, table, mean, covariance, active, count, prior, joint, lower, vectors):
    """Writes the slabs of the active latents as ``mean + R c``, given the data.

    Leaves in ``prior`` and ``vectors`` the ``R'`` and ``D`` of their covariance, in ``joint`` what is not below the diagonal of the
    precision ``M = D^-1 + R' G R`` of ``c`` given the data, with ``R' (a - G mean)`` as a column beyond it, and in ``vectors``
    ``a - G mean``. Returns ``mean (a - G mean / 2)``.
    """
    size = size_of(count)
    gather_square(table, active, count, size, joint)
    _factorize_prior(covariance, active, count, size, prior, lower, vectors)
    clear_row(vectors, FIELD, count, size)
    for a in range(count):
        vectors[FIELD, a] = linear[active[a]]
    for a in range(count):
        add_row(-mean[active[a]], joint, a, vectors, FIELD, 0, size)
    energy = 0.0
    for a in range(count):
        field = vectors[FIELD, a]
        energy += 0.5 * mean[active[a]] * (linear[active[a]] + field)
        joint[a, count] = field
    for a in range(1, count):
        for p in range(a):
            add_row(prior[p, a], joint, a, joint, p, 0, size)
    for a in range(count):
        # An entry of a row is changed by those after it only.
        for p in range(a + 1, count):
            add_row(joint[a, p], lower, p, joint, a, a, padded(p))
        joint[a, a] += vectors[_PRECISIONS, a]
    return energy


@njit(cache=True, nogil=True, forceinline=True, error_model="numpy")
def eliminate(joint, count, size, vectors):
    """Eliminates what is below the pivots of ``M``, in rows of so many entries; returns the rest of the log density."""
    energy, product = 0.0, 1.0
    for p in range(count):
        # The precision exceeds that of the prior, so a pivot below it is a rounding error.
        pivot, x = max(joint[p, p], vectors[_PRECISIONS, p]), joint[p, count]
        joint[p, p], inverse = pivot, 1.0 / pivot
        for a in range(p + 1, count):
            add_row(-joint[p, a] * inverse, joint, p, joint, a, p, size)
        energy += 0.5 * x * x * inverse
        # One logarithm for many pivots; no factor is below one, so the product can only overflow.
        product *= pivot * vectors[_VARIANCES, p]
        if product > _LARGE:
            energy -= 0.5 * np.log(product)
            product = 1.0
    return energy - 0.5 * np.log(product)


@njit(cache=True, nogil=True, forceinline=True, error_model="numpy")
def posterior_roots(mean, active, prior, joint, count, size, vectors):
    """Posterior of the slabs after :func:`collapse`: their mean in ``vectors``, and their covariance ``T' F^-1 T``.

    Columns of ``joint`` from ``size`` on become those of ``T = E^-1 R'`` with the factor ``E`` of ``M``, whose pivots ``F`` stay where they
    are.
    """
    clear_row(vectors, SLABS, count, size)
    for p in range(count):
        clear_row(joint, p, size, 2 * size)
        joint[p, size + p] = 1.0
        for a in range(p + 1, count):
            joint[p, size + a] = prior[p, a]
        vectors[SLABS, p] = mean[active[p]]
    eliminate(joint, count, 2 * size, vectors)
    for p in range(count):
        add_row(joint[p, count] / joint[p, p], joint, p, vectors, SLABS, 0, size, size)


@njit(cache=True, nogil=True, forceinline=True, error_model="numpy")
def posterior(mean, active, prior, joint, count, size, vectors, covariance):
    """As :func:`posterior_roots`, with the lower triangle of the covariance."""
    posterior_roots(mean, active, prior, joint, count, size, vectors)
    for p in range(count):
        clear_row(covariance, p, 0, size)
    for p in range(count):
        add_square(1.0 / joint[p, p], joint, p, size, count, covariance)


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
        inverse = vectors[_PRECISIONS, p]
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
def transpose_roots(joint, count, size, roots):
    """The columns of ``T' F^-1/2``, whose outer products add up to the posterior's covariance."""
    for p in range(count):
        scale = 1.0 / np.sqrt(joint[p, p])
        for a in range(count):
            roots[a, p] = scale * joint[p, size + a]


@njit(cache=True, nogil=True, forceinline=True, error_model="numpy")
def log_prior(mean, covariance, active, count, size, roots, vectors, rows):
    """Expected log density, up to a constant, of slabs with the posterior of these roots under another prior; ``rows`` are scratch.

    With the factor ``R D R'`` of that prior it takes the squares of ``R^-1`` times the roots, and times how far the means are apart.
    """
    gather_above(covariance, active, count, size, rows)
    for a in range(count):
        clear_row(rows, a, size + count, 2 * size)
        for p in range(count):
            rows[a, size + p] = roots[a, p]
        rows[a, size + count] = vectors[SLABS, a] - mean[active[a]]
    energy, product = 0.0, 1.0
    for p in range(count):
        pivot = max(rows[p, p], _TINY * covariance[active[p], active[p]])
        inverse = 1.0 / pivot
        energy -= 0.5 * inverse * square_of(rows, p, size, size + count + 1)
        product *= pivot
        if not 1.0 / _LARGE < product < _LARGE:
            energy -= 0.5 * np.log(product)
            product = 1.0
        for a in range(p + 1, count):
            add_row(-rows[p, a] * inverse, rows, p, rows, a, p, 2 * size)
    return energy - 0.5 * np.log(product)
