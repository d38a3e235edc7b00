"""Compiled CPU kernels for linear spike-and-slab likelihoods, in float64.

Factors are those of the active latents of a state alone. Independent slabs take one factor. Correlated ones take two: they are written as
``mean + R c``, with a unit lower triangular ``R`` and independent ``c`` of variances ``D``. Such factors take no square roots, and divide
by nothing but what tells slabs apart. All is done to whole rows, of so many entries as fill registers.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import njit, parallel_kernel
from pyro_truncated.ops.compiled.iterate_active import (
    active_latents,
    as_array,
    as_words,
    count_blocks,
    ever_active,
    least_weight,
    most_active,
    round_up,
)

# Entries of a row that are worked on at a time. A plain loop takes twice as long, as its rows may overlap for all that the compiler knows.
_LANES = 8
_VECTOR, _INTEGER = ir.VectorType(ir.DoubleType(), _LANES), ir.IntType(32)


@intrinsic
def _add_lanes(typing_context, factor, source, row, start, target, other, column):
    """Adds a multiple of a register of a row to another matrix."""

    def generate(context, builder, signature, arguments):
        factor, source, row, start, target, other, column = arguments

        def place(kind, matrix, row, column):
            array = context.make_array(kind)(context, builder, matrix)
            position = builder.add(builder.mul(row, builder.extract_value(array.shape, 1)), column)
            return builder.bitcast(builder.gep(array.data, [position]), _VECTOR.as_pointer())

        nothing = ir.Constant(_VECTOR, ir.Undefined)
        factor = builder.insert_element(nothing, factor, ir.Constant(_INTEGER, 0))
        factors = builder.shuffle_vector(factor, nothing, ir.Constant(ir.VectorType(_INTEGER, _LANES), [0] * _LANES))
        source = place(signature.args[1], source, row, builder.add(start, column))
        target = place(signature.args[4], target, other, column)
        # One rounding for product and sum where the machine can.
        product = builder.fmul(factors, builder.load(source, align=8), flags=("contract",))
        builder.store(builder.fadd(builder.load(target, align=8), product, flags=("contract",)), target, align=8)
        return context.get_dummy_value()

    position = types.int64
    return types.void(types.float64, source, position, position, target, position, position), generate


@intrinsic
def _clear_lanes(typing_context, matrix, row, column):
    """Sets a register of a row to zero."""

    def generate(context, builder, signature, arguments):
        matrix, row, column = arguments
        array = context.make_array(signature.args[0])(context, builder, matrix)
        position = builder.add(builder.mul(row, builder.extract_value(array.shape, 1)), column)
        place = builder.bitcast(builder.gep(array.data, [position]), _VECTOR.as_pointer())
        builder.store(ir.Constant(_VECTOR, [0.0] * _LANES), place, align=8)
        return context.get_dummy_value()

    return types.void(matrix, types.int64, types.int64), generate


@intrinsic
def _keep_rolled(typing_context):
    """Keeps the compiler from unrolling the calling function's loops."""

    def generate(context, builder, signature, arguments):
        builder.function.attributes.add("optsize")
        return context.get_dummy_value()

    return types.void(), generate


@njit(forceinline=True)
def add_row(factor, source, row, target, other, first, size, start=0):
    """Adds a multiple of a row to a row of another matrix."""
    for column in range(first // _LANES * _LANES, size, _LANES):
        _add_lanes(factor, source, row, start, target, other, column)


@njit(forceinline=True)
def add_square(factor, source, row, start, count, target):
    """Adds a multiple of a row's outer product to a lower triangle."""
    for a in range(count):
        add_row(factor * source[row, start + a], source, row, target, a, 0, a + 1, start)


@njit(fastmath={"reassoc", "contract"})
def row_square(matrix, row, first, last):
    """The sum of the squares of some entries of a row."""
    total = 0.0
    for j in range(first, last):
        total += matrix[row, j] * matrix[row, j]
    return total


@njit(forceinline=True)
def clear_row(matrix, row, first, size):
    """Sets entries of a row to zero, in whole registers."""
    for column in range(first // _LANES * _LANES, size, _LANES):
        _clear_lanes(matrix, row, column)


@njit(forceinline=True)
def gather_square(table, active, count, size, out):
    """Copies a table's padded rows and columns of the active latents."""
    for a in range(count):
        h = active[a]
        clear_row(out, a, count, size)
        for b in range(count):
            out[a, b] = table[h, active[b]]


@njit(forceinline=True)
def gather_above(table, active, count, size, out):
    """As :func:`gather_square`, with zeros below the diagonal."""
    for a in range(count):
        h = active[a]
        clear_row(out, a, 0, size)
        for b in range(a, count):
            out[a, b] = table[h, active[b]]


@njit(forceinline=True)
def eliminate_below(matrix, p, pivot, count, size):
    """Eliminates a column below its pivot; returns the pivot's inverse."""
    inverse = 1.0 / pivot
    for a in range(p + 1, count):
        add_row(-matrix[p, a] * inverse, matrix, p, matrix, a, p, size)
    return inverse


def gram_matrix(elements: Tensor, is_observed: Tensor | None) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """The dictionary by latents, observed entries, and the whole Gram matrix."""
    elements = elements.detach().double()
    return as_array(elements.mT), None if is_observed is None else is_observed.contiguous().numpy(), as_array(elements.mT @ elements)


@njit(fastmath={"reassoc", "contract"})
def _dot(one, other, size):
    total = 0.0
    for j in range(size):
        total += one[j] * other[j]
    return total


@njit
def row_gram_matrix(elements, is_observed, active, count, near, table):
    """Computes the Gram matrix over observed entries, for the latents in use."""
    for a in range(count):
        row, source = near[a], elements[active[a]]
        for d in range(len(is_observed)):
            row[d] = source[d] if is_observed[d] else 0.0
        for b in range(a + 1):
            product = _dot(row, near[b], len(is_observed))
            table[active[a], active[b]] = product
            table[active[b], active[a]] = product


_LARGE = 1e150
# What a call does not ask for.
_NO_MATRIX, _NO_TABLES = np.empty((0, 0)), np.empty((0, 0, 0))
_NO_MOMENTS = _NO_MATRIX, _NO_MATRIX, _NO_TABLES, _NO_MATRIX, _NO_TABLES


def log_prob(words: Tensor, linear: Tensor, elements: Tensor, is_observed: Tensor | None, mean: Tensor, deviation: Tensor) -> Tensor:
    """Log densities ``(N, C)``, up to constants, with slabs integrated out.

    ``linear (N, H)`` are products of data and dictionary over the noise variance, ``elements (D, H)`` is the dictionary over the noise
    deviation, ``is_observed (N, D)`` may be ``None``.
    """
    out = linear.new_empty(linear.shape[0], words.shape[1], dtype=torch.float64)
    packed, parameters = as_words(words), (as_array(linear), *gram_matrix(elements, is_observed), as_array(mean), as_array(deviation))
    _independent(packed, _NO_MATRIX, *parameters, *_scratch(packed, len(linear), 0), out.numpy(), *_NO_MOMENTS[:3])
    return out


def moments(
    words: Tensor,
    weights: Tensor,
    linear: Tensor,
    elements: Tensor,
    is_observed: Tensor | None,
    mean: Tensor,
    deviation: Tensor,
    per_datum: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.slab_moments`; the other arguments are those of :func:`log_prob`."""
    num_data, num_latents = linear.shape
    active = linear.new_zeros(num_data, num_latents, dtype=torch.float64)
    first = torch.zeros_like(active)
    packed, parameters = as_words(words), (as_array(linear), *gram_matrix(elements, is_observed), as_array(mean), as_array(deviation))
    scratch = _scratch(packed, num_data, num_latents**2)
    second = linear.new_zeros(num_data if per_datum else len(scratch[0]), num_latents, num_latents, dtype=torch.float64)
    _independent(packed, as_array(weights), *parameters, *scratch, _NO_MATRIX, active.numpy(), first.numpy(), second.numpy())
    second = second if per_datum else second.sum(0)
    return active, first, second + second.tril(-1).mT


_TINY = 1e-14
# Rows of the matrix of vectors.
_VARIANCES, _PRECISIONS, FIELD, SLABS = 0, 1, 2, 3
NUM_VECTORS = 4


@njit
def row_sizes(most):
    """Row sizes for at most so many active latents and a column."""
    return round_up(most + 1)


@njit(forceinline=True)
def _factorize_prior(covariance, active, count, size, prior, lower, vectors):
    """Computes ``R'`` and ``D`` of the active latents' covariance."""
    gather_above(covariance, active, count, size, prior)
    for a in range(count):
        clear_row(lower, a, 0, size)
    for p in range(count):
        pivot = max(prior[p, p], _TINY * covariance[active[p], active[p]])
        inverse = eliminate_below(prior, p, pivot, count, size)
        vectors[_VARIANCES, p], vectors[_PRECISIONS, p] = pivot, inverse
        for a in range(p + 1, count):
            factor = prior[p, a] * inverse
            prior[p, a], lower[a, p] = factor, factor


@njit(forceinline=True)
def collapse(linear, table, mean, covariance, active, count, prior, joint, lower, vectors):
    """Writes the slabs of the active latents as ``mean + R c``, given the data.

    It leaves ``R'`` and ``D`` of their covariance in ``prior`` and ``vectors``, and ``a - G mean`` in ``vectors``. In ``joint`` it leaves
    the precision ``M = D^-1 + R' G R`` of ``c`` given the data, without what is below the diagonal. A column beyond it is ``R' (a - G
    mean)``. Returns ``mean (a - G mean / 2)``.
    """
    size = row_sizes(count)
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
            add_row(joint[a, p], lower, p, joint, a, a, p)
        joint[a, a] += vectors[_PRECISIONS, a]
    return energy


@njit(forceinline=True)
def eliminate(joint, count, size, vectors):
    """Eliminates what is below the pivots; returns the log density's rest."""
    energy, product = 0.0, 1.0
    for p in range(count):
        # The precision exceeds that of the prior, so a pivot below it is a rounding error.
        pivot, x = max(joint[p, p], vectors[_PRECISIONS, p]), joint[p, count]
        joint[p, p] = pivot
        energy += 0.5 * x * x * eliminate_below(joint, p, pivot, count, size)
        # One logarithm for many pivots; no factor is below one, so the product can only overflow.
        product *= pivot * vectors[_VARIANCES, p]
        if product > _LARGE:
            energy -= 0.5 * np.log(product)
            product = 1.0
    return energy - 0.5 * np.log(product)


@njit(forceinline=True)
def append_root(prior, joint, count, size):
    """Writes ``R'`` behind the columns of ``joint``, to be eliminated with them.

    These columns become those of ``T = E^-1 R'`` with the factor ``E`` of ``M``, whose pivots ``F`` stay where they are. The covariance of
    the slabs given the data is ``T' F^-1 T``.
    """
    for p in range(count):
        clear_row(joint, p, size, 2 * size)
        joint[p, size + p] = 1.0
        for a in range(p + 1, count):
            joint[p, size + a] = prior[p, a]


@njit(forceinline=True)
def posterior_mean(mean, active, joint, count, size, vectors):
    """Leaves the slabs' mean given the data in ``vectors``."""
    clear_row(vectors, SLABS, count, size)
    for p in range(count):
        vectors[SLABS, p] = mean[active[p]]
    for p in range(count):
        add_row(joint[p, count] / joint[p, p], joint, p, vectors, SLABS, 0, size, size)


@njit(forceinline=True)
def second_moments(joint, count, size, vectors, moments):
    """Computes the lower triangle of the slabs' second moments given the data."""
    for p in range(count):
        clear_row(moments, p, 0, size)
    for p in range(count):
        add_square(1.0 / joint[p, p], joint, p, size, count, moments)
    for a in range(count):
        add_row(vectors[SLABS, a], vectors, SLABS, moments, a, 0, a + 1)


@njit(forceinline=True)
def gradients(prior, joint, count, size, vectors, spare, products):
    """Computes gradients of the log density after :func:`append_root`.

    They are those in the means and, twice that, in the covariances. Let ``Q = E^-1 D^-1 R^-1`` and ``F`` the pivots of ``M``. The first is
    ``r = Q' F^-1 E^-1 R' (a - G mean)``, which replaces the field in ``vectors``. The second is ``r r' + Q' F^-1 Q - R'^-1 D^-1 R^-1``,
    whose lower triangle is left in ``products``. In terms of the posterior's moments and ``G`` they would be small differences of large
    numbers where there is little noise.
    """
    for a in range(count):
        clear_row(spare, a, 0, size)
        clear_row(products, a, 0, size)
        spare[a, a] = 1.0
    clear_row(vectors, FIELD, 0, size)
    # The inverses are lower triangular: rows end at their diagonal.
    for p in range(count):
        for a in range(p + 1, count):
            add_row(-prior[p, a], spare, p, spare, a, 0, p + 1)
        inverse = vectors[_PRECISIONS, p]
        add_square(-inverse, spare, p, 0, p + 1, products)
        for a in range(p + 1):
            spare[p, a] *= inverse
    for p in range(count):
        inverse = 1.0 / joint[p, p]
        for a in range(p + 1, count):
            add_row(-joint[p, a] * inverse, spare, p, spare, a, 0, p + 1)
        add_square(inverse, spare, p, 0, p + 1, products)
        add_row(joint[p, count] * inverse, spare, p, vectors, FIELD, 0, p + 1)
    for a in range(count):
        add_row(vectors[FIELD, a], vectors, FIELD, products, a, 0, a + 1)


@njit(forceinline=True)
def add_weighted(weight, vectors, row, triangle, active, count, sums, table):
    """Adds a weighted row and lower triangle to sums of all latents."""
    for a in range(count):
        h = active[a]
        sums[h] += weight * vectors[row, a]
        for b in range(a + 1):
            table[h, active[b]] += weight * triangle[a, b]


@njit(forceinline=True)
def transpose_roots(joint, count, size, roots):
    """The columns of ``T' F^-1/2``, whose outer products sum to the covariance."""
    for p in range(count):
        scale = 1.0 / np.sqrt(joint[p, p])
        for a in range(count):
            roots[a, p] = scale * joint[p, size + a]


@njit(forceinline=True)
def log_prior(mean, covariance, active, count, size, roots, vectors, rows):
    """Expected log densities of slabs under another prior, without constants.

    With the factor ``R D R'`` of that prior it takes the squares of ``R^-1`` times the posterior's roots, and times how far the means are
    apart.
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
        inverse = eliminate_below(rows, p, pivot, count, 2 * size)
        energy -= 0.5 * inverse * row_square(rows, p, size, size + count + 1)
        product *= pivot
        if not 1.0 / _LARGE < product < _LARGE:
            energy -= 0.5 * np.log(product)
            product = 1.0
    return energy - 0.5 * np.log(product)


@njit
def _factorize(linear, table, mean, deviation, active, count, factor, solution):
    """Collapses the slabs ``mean + deviation * e`` of the active latents.

    Leaves in ``factor`` the Cholesky factor ``L`` of the posterior precision of ``e``, ``M = I + T G T`` with ``T = diag(deviation)``. In
    ``solution`` it leaves the vector ``x`` with ``L x = T (a - G mean)``. Returns the log density up to terms that do not depend on the
    state.
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


@njit(forceinline=True)
def collapse_independent(linear, table, mean, deviation, active, count, size, joint, vectors):
    """As :func:`collapse`, of independent slabs ``mean + T e`` with ``T = diag(deviation)``.

    It leaves ``M = I + T G T`` and the column ``T (a - G mean)``: nothing is divided by deviations.
    """
    energy = 0.0
    for a in range(count):
        h = active[a]
        field = linear[h]
        clear_row(joint, a, count, size)
        for b in range(count):
            field -= table[h, active[b]] * mean[active[b]]
            joint[a, b] = deviation[h] * table[h, active[b]] * deviation[active[b]]
        joint[a, a] += 1.0
        joint[a, count] = deviation[h] * field
        energy += 0.5 * mean[h] * (linear[h] + field)
        vectors[_VARIANCES, a] = vectors[_PRECISIONS, a] = 1.0
    return energy


@parallel_kernel(cost=16)
def _independent(words, weights, linear, elements, is_observed, gram, mean, deviation, matrices, vectors, out, total, first, second):
    """Log densities, or moments with weights: what they share is compiled once."""
    num_rows, num_candidates, num_words = words.shape
    num_data, num_latents = linear.shape
    num_blocks, is_apart = len(matrices), len(second) > len(matrices)
    has_weights = len(weights) > 0
    for block in prange(num_blocks):
        _keep_rolled()
        active = np.empty(64 * num_words, np.int64)
        joint, moments, work = matrices[block, 0], matrices[block, 1], vectors[block]
        own = gram
        if is_observed is not None:
            own, near = np.empty((num_latents, num_latents)), np.empty(elements.shape)
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            row, place = n if num_rows > 1 else 0, n if is_apart else np.int64(block)
            if is_observed is not None:
                row_gram_matrix(elements, is_observed[n], active, ever_active(words, row, active), near, own)
            least = least_weight(weights[n]) if has_weights else 0.0
            for c in range(num_candidates):
                weight = weights[n, c] if has_weights else 1.0
                if abs(weight) <= least:
                    continue
                count = active_latents(words, row, c, active)
                size = row_sizes(count)
                if not has_weights:
                    # Without registers, which wait for the numbers that are gathered one by one.
                    out[n, c] = _factorize(linear[n], own, mean, deviation, active, count, joint, work[FIELD])
                    continue
                collapse_independent(linear[n], own, mean, deviation, active, count, size, joint, work)
                for a in range(count):
                    total[n, active[a]] += weight
                    clear_row(joint, a, size, 2 * size)
                    joint[a, size + a] = deviation[active[a]]
                eliminate(joint, count, 2 * size, work)
                posterior_mean(mean, active, joint, count, size, work)
                second_moments(joint, count, size, work, moments)
                add_weighted(weight, work, SLABS, moments, active, count, first[n], second[place])


def correlated_log_prob(
    words: Tensor, linear: Tensor, elements: Tensor, is_observed: Tensor | None, mean: Tensor, covariance: Tensor
) -> Tensor:
    """As :func:`log_prob`, with the covariance of the slabs, ``(H, H)``."""
    out = linear.new_empty(linear.shape[0], words.shape[1], dtype=torch.float64)
    packed, parameters = as_words(words), (as_array(linear), *gram_matrix(elements, is_observed), as_array(mean), as_array(covariance))
    _correlated(packed, _NO_MATRIX, *parameters, _NO_MATRIX, _NO_TABLES, *_scratch(packed, len(linear), 0), out.numpy(), *_NO_MOMENTS)
    return out


def correlated_moments(
    words: Tensor,
    weights: Tensor,
    linear: Tensor,
    elements: Tensor,
    is_observed: Tensor | None,
    mean: Tensor,
    covariance: Tensor,
    per_datum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.slab_moments`; the other arguments are those of :func:`log_prob`."""
    num_data, num_latents = linear.shape
    active = linear.new_zeros(num_data, num_latents, dtype=torch.float64)
    first = torch.zeros_like(active)
    packed, parameters = as_words(words), (as_array(linear), *gram_matrix(elements, is_observed), as_array(mean), as_array(covariance))
    scratch = _scratch(packed, num_data, 2 * num_latents**2)
    num_blocks = len(scratch[0])
    second = linear.new_zeros(num_data if per_datum else num_blocks, num_latents, num_latents, dtype=torch.float64)
    curvature = linear.new_zeros(num_blocks, num_latents, num_latents, dtype=torch.float64)
    slope = linear.new_zeros(num_blocks, num_latents, dtype=torch.float64)
    outputs = active.numpy(), first.numpy(), second.numpy(), slope.numpy(), curvature.numpy()
    _correlated(packed, as_array(weights), *parameters, _NO_MATRIX, _NO_TABLES, *scratch, _NO_MATRIX, *outputs)
    second, curvature = second if per_datum else second.sum(0), curvature.sum(0)
    return active, first, second + second.tril(-1).mT, slope.sum(0), curvature + curvature.tril(-1).mT


def expected_log_prior(
    words: Tensor,
    weights: Tensor,
    linear: Tensor,
    elements: Tensor,
    is_observed: Tensor | None,
    mean: Tensor,
    covariance: Tensor,
    means: Tensor,
    covariances: Tensor,
) -> Tensor:
    """See :func:`pyro_truncated.ops.expected_log_slab_prior`; the other arguments are those of :func:`log_prob`."""
    packed, parameters = as_words(words), (as_array(linear), *gram_matrix(elements, is_observed), as_array(mean), as_array(covariance))
    scratch, others = _scratch(packed, len(linear), len(means)), (as_array(means), as_array(covariances))
    out = linear.new_zeros(len(scratch[0]), len(means), dtype=torch.float64)
    _correlated(packed, as_array(weights), *parameters, *others, *scratch, out.numpy(), *_NO_MOMENTS)
    return out.sum(0)


def _scratch(words: np.ndarray, num_data: int, accumulator_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Allocates matrices and vectors for active latents, for each block."""
    most = most_active(words)
    size = row_sizes(most)
    num_blocks = count_blocks(num_data, accumulator_size, 8 * most * size)
    return _aligned_zeros((num_blocks, 4, most, 2 * size)), _aligned_zeros((num_blocks, NUM_VECTORS, size))


def _aligned_zeros(shape: tuple[int, ...]) -> np.ndarray:
    """Zeros that begin at a cache line, as registers read fastest."""
    size = math.prod(shape)
    numbers = np.zeros(size + _LANES)
    start = -(numbers.ctypes.data // numbers.itemsize) % _LANES
    return numbers[start : start + size].reshape(shape)


@parallel_kernel(cost=48)
def _correlated(
    words,
    weights,
    linear,
    elements,
    is_observed,
    gram,
    mean,
    covariance,
    means,
    covariances,
    matrices,
    vectors,
    out,
    total,
    first,
    second,
    slope,
    curvature,
):
    """Log densities; with weights expected ones under other priors, or moments.

    What they share is compiled once: three kernels would take a quarter longer.
    """
    num_rows, num_candidates, num_words = words.shape
    num_data, num_latents = linear.shape
    num_blocks, is_apart = len(matrices), len(second) > len(matrices)
    has_weights, num_priors = len(weights) > 0, len(means)
    for block in prange(num_blocks):
        _keep_rolled()
        active = np.empty(64 * num_words, np.int64)
        prior, joint, spare, spread = matrices[block, 0], matrices[block, 1], matrices[block, 2], matrices[block, 3]
        work = vectors[block]
        own = gram
        if is_observed is not None:
            own, near = np.empty((num_latents, num_latents)), np.empty(elements.shape)
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            row, place = n if num_rows > 1 else 0, n if is_apart else np.int64(block)
            if is_observed is not None:
                row_gram_matrix(elements, is_observed[n], active, ever_active(words, row, active), near, own)
            least = least_weight(weights[n]) if has_weights else 0.0
            for c in range(num_candidates):
                weight = weights[n, c] if has_weights else 1.0
                if abs(weight) <= least:
                    continue
                count = active_latents(words, row, c, active)
                size = row_sizes(count)
                energy = collapse(linear[n], own, mean, covariance, active, count, prior, joint, spare, work)
                if not has_weights:
                    out[n, c] = energy + eliminate(joint, count, size, work)
                    continue
                append_root(prior, joint, count, size)
                eliminate(joint, count, 2 * size, work)
                posterior_mean(mean, active, joint, count, size, work)
                if num_priors > 0:
                    transpose_roots(joint, count, size, spare)
                    for t in range(num_priors):
                        out[block, t] += weight * log_prior(means[t], covariances[t], active, count, size, spare, work, spread)
                    continue
                for a in range(count):
                    total[n, active[a]] += weight
                second_moments(joint, count, size, work, spread)
                add_weighted(weight, work, SLABS, spread, active, count, first[n], second[place])
                gradients(prior, joint, count, size, work, spare, spread)
                add_weighted(weight, work, FIELD, spread, active, count, slope[block], curvature[block])
