"""Compiled CPU kernels for linear spike-and-slab likelihoods, in float64.

Factors are those of the active latents of a state alone. Independent slabs take one factor. Correlated ones take two: they are written as
``mean + R c``, with a unit lower triangular ``R`` and independent ``c`` of variances ``D``. Such factors take no square roots, and divide
by nothing but what tells slabs apart. All is done to whole rows, of so many entries as fill registers.
Plain torch takes 4 to 8 times as long for 2000 data points with 60 states of 64 latents, 2 times for moments with missing entries.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import njit, parallel_kernel
from pyro_truncated.ops.compiled.iterate_active import (
    MAX_BLOCKS,
    active_latents,
    as_array,
    as_words,
    count_blocks,
    ever_active,
    least_weight,
    most_active,
    round_up,
)
from pyro_truncated.ops.slabs import SlabTerms

# Entries of a row that are worked on at a time. Plain loops take 1.6 to 3.7 times as long, as rows may overlap for the compiler.
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
    """Keeps the compiler from unrolling the calling function's loops.

    Unrolled ones take up to 1.15 times as long.
    """

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
        add_row(factor * source[row, start + a], source, row, target, a, 0, round_up(a + 1), start)


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


def _arrays(terms: SlabTerms) -> tuple[np.ndarray | None, ...]:
    """The terms, with the whole Gram matrix behind the mask."""
    is_observed = None if terms.is_observed is None else terms.is_observed.contiguous().numpy()
    gram = terms.elements.mT @ terms.elements
    return as_array(terms.linear), as_array(terms.elements.mT), is_observed, *(as_array(part) for part in (gram, terms.mean, terms.spread))


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


@njit
def invert(factor, count):
    """Replaces a lower triangular matrix by its inverse."""
    for b in range(count):
        factor[b, b] = 1.0 / factor[b, b]
        for a in range(b + 1, count):
            total = 0.0
            for j in range(b, a):
                total += factor[a, j] * factor[j, b]
            factor[a, b] = -total / factor[a, a]


_LARGE = 1e150


def log_prob(words: Tensor, terms: SlabTerms) -> Tensor:
    """Log densities ``(N, C)``, up to constants, with slabs integrated out."""
    out = terms.linear.new_empty(len(terms.linear), words.shape[1])
    _log_prob(as_words(words), *_arrays(terms), out.numpy())
    return out


def moments(words: Tensor, weights: Tensor, terms: SlabTerms, per_datum: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.slab_moments`."""
    num_data, num_latents = terms.linear.shape
    active, first = (terms.linear.new_zeros(num_data, num_latents) for _ in range(2))
    num_blocks = num_data if per_datum else count_blocks(num_data, num_latents**2)
    second = active.new_zeros(num_blocks, num_latents, num_latents)
    _moments(as_words(words), as_array(weights), *_arrays(terms), active.numpy(), first.numpy(), second.numpy())
    second = second if per_datum else second.sum(0)
    return active, first, second + second.tril(-1).mT


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


@parallel_kernel(cost=16)
def _log_prob(words, linear, elements, is_observed, gram, mean, deviation, out):
    num_rows, num_candidates, num_words = words.shape
    num_data, num_latents = linear.shape
    num_blocks = min(num_data, MAX_BLOCKS)
    for block in prange(num_blocks):
        active = np.empty(64 * num_words, np.int64)
        factor, solution = np.empty((num_latents, num_latents)), np.empty(num_latents)
        own = gram
        if is_observed is not None:
            own, near = np.empty((num_latents, num_latents)), np.empty(elements.shape)
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            row = n if num_rows > 1 else 0
            if is_observed is not None:
                row_gram_matrix(elements, is_observed[n], active, ever_active(words, row, active), near, own)
            field = linear[n]
            for c in range(num_candidates):
                count = active_latents(words, row, c, active)
                out[n, c] = _factorize(field, own, mean, deviation, active, count, factor, solution)


@njit
def _add_moments(weight, mean, deviation, active, count, factor, solution, first, table):
    """Adds a state's weighted moments of the slabs, a lower triangle."""
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
def _moments(words, weights, linear, elements, is_observed, gram, mean, deviation, total, first, second):
    num_rows, num_candidates, num_words = words.shape
    num_data, num_latents = linear.shape
    num_blocks = second.shape[0]
    for block in prange(num_blocks):
        active = np.empty(64 * num_words, np.int64)
        factor, solution = np.empty((num_latents, num_latents)), np.empty(num_latents)
        own = gram
        if is_observed is not None:
            own, near = np.empty((num_latents, num_latents)), np.empty(elements.shape)
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            row = n if num_rows > 1 else 0
            if is_observed is not None:
                row_gram_matrix(elements, is_observed[n], active, ever_active(words, row, active), near, own)
            least = least_weight(weights[n])
            for c in range(num_candidates):
                weight = weights[n, c]
                if abs(weight) <= least:
                    continue
                count = active_latents(words, row, c, active)
                _factorize(linear[n], own, mean, deviation, active, count, factor, solution)
                for a in range(count):
                    total[n, active[a]] += weight
                _add_moments(weight, mean, deviation, active, count, factor, solution, first[n], second[block])


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
        inverse = 1.0 / pivot
        vectors[_VARIANCES, p], vectors[_PRECISIONS, p] = pivot, inverse
        for a in range(p + 1, count):
            add_row(-prior[p, a] * inverse, prior, p, prior, a, p, size)
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
            add_row(joint[a, p], lower, p, joint, a, a, round_up(p))
        joint[a, a] += vectors[_PRECISIONS, a]
    return energy


@njit(forceinline=True)
def eliminate(joint, count, size, vectors):
    """Eliminates what is below the pivots; returns the log density's rest."""
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


@njit(forceinline=True)
def posterior_roots(mean, active, prior, joint, count, size, vectors):
    """Computes the slabs' posterior after :func:`collapse`.

    The mean is left in ``vectors``; the covariance is ``T' F^-1 T``. Columns of ``joint`` from ``size`` on become those of ``T = E^-1 R'``
    with the factor ``E`` of ``M``, whose pivots ``F`` stay where they are.
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


@njit(forceinline=True)
def posterior(mean, active, prior, joint, count, size, vectors, covariance):
    """As :func:`posterior_roots`, with the lower triangle of the covariance."""
    posterior_roots(mean, active, prior, joint, count, size, vectors)
    for p in range(count):
        clear_row(covariance, p, 0, size)
    for p in range(count):
        add_square(1.0 / joint[p, p], joint, p, size, count, covariance)


@njit(forceinline=True)
def gradients(prior, joint, count, size, vectors, spare, products):
    """Computes gradients of the log density after :func:`posterior`.

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
            add_row(-prior[p, a], spare, p, spare, a, 0, round_up(p + 1))
        inverse = vectors[_PRECISIONS, p]
        add_square(-inverse, spare, p, 0, p + 1, products)
        for a in range(p + 1):
            spare[p, a] *= inverse
    for p in range(count):
        inverse = 1.0 / joint[p, p]
        for a in range(p + 1, count):
            add_row(-joint[p, a] * inverse, spare, p, spare, a, 0, round_up(p + 1))
        add_square(inverse, spare, p, 0, p + 1, products)
        add_row(joint[p, count] * inverse, spare, p, vectors, FIELD, 0, round_up(p + 1))
    for a in range(count):
        add_row(vectors[FIELD, a], vectors, FIELD, products, a, 0, round_up(a + 1))


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
        inverse = 1.0 / pivot
        energy -= 0.5 * inverse * row_square(rows, p, size, size + count + 1)
        product *= pivot
        if not 1.0 / _LARGE < product < _LARGE:
            energy -= 0.5 * np.log(product)
            product = 1.0
        for a in range(p + 1, count):
            add_row(-rows[p, a] * inverse, rows, p, rows, a, p, 2 * size)
    return energy - 0.5 * np.log(product)


def correlated_log_prob(words: Tensor, terms: SlabTerms) -> Tensor:
    """As :func:`log_prob`, with the covariance of the slabs, ``(H, H)``."""
    packed, out = as_words(words), terms.linear.new_empty(len(terms.linear), words.shape[1])
    _correlated_log_prob(packed, *_arrays(terms), *_scratch(packed, len(out), 0), out.numpy())
    return out


def correlated_moments(words: Tensor, weights: Tensor, terms: SlabTerms, per_datum: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.slab_moments`."""
    packed, (num_data, num_latents) = as_words(words), terms.linear.shape
    active, first = (terms.linear.new_zeros(num_data, num_latents) for _ in range(2))
    scratch = _scratch(packed, num_data, 2 * num_latents**2)
    num_blocks = len(scratch[0])
    second = active.new_zeros(num_data if per_datum else num_blocks, num_latents, num_latents)
    slope, curvature = active.new_zeros(num_blocks, num_latents), active.new_zeros(num_blocks, num_latents, num_latents)
    outputs = active.numpy(), first.numpy(), second.numpy(), slope.numpy(), curvature.numpy()
    _correlated_moments(packed, as_array(weights), *_arrays(terms), *scratch, *outputs)
    second, curvature = second if per_datum else second.sum(0), curvature.sum(0)
    return active, first, second + second.tril(-1).mT, slope.sum(0), curvature + curvature.tril(-1).mT


def expected_log_prior(words: Tensor, weights: Tensor, terms: SlabTerms, means: Tensor, covariances: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.expected_log_slab_prior`."""
    packed, others = as_words(words), (as_array(means), as_array(covariances))
    scratch = _scratch(packed, len(terms.linear), len(means))
    out = terms.linear.new_zeros(len(scratch[0]), len(means))
    _expected_log_prior(packed, as_array(weights), *_arrays(terms), *others, *scratch, out.numpy())
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


@parallel_kernel(cost=24)
def _correlated_log_prob(words, linear, elements, is_observed, gram, mean, covariance, matrices, vectors, out):
    num_rows, num_candidates, num_words = words.shape
    num_data, num_latents = linear.shape
    num_blocks = len(matrices)
    for block in prange(num_blocks):
        _keep_rolled()
        active = np.empty(64 * num_words, np.int64)
        prior, joint, spare, work = matrices[block, 0], matrices[block, 1], matrices[block, 2], vectors[block]
        own = gram
        if is_observed is not None:
            own, near = np.empty((num_latents, num_latents)), np.empty(elements.shape)
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            row = n if num_rows > 1 else 0
            if is_observed is not None:
                row_gram_matrix(elements, is_observed[n], active, ever_active(words, row, active), near, own)
            for c in range(num_candidates):
                count = active_latents(words, row, c, active)
                energy = collapse(linear[n], own, mean, covariance, active, count, prior, joint, spare, work)
                out[n, c] = energy + eliminate(joint, count, row_sizes(count), work)


@parallel_kernel(cost=48)
def _correlated_moments(
    words, weights, linear, elements, is_observed, gram, mean, covariance, matrices, vectors, total, first, second, slope, curvature
):
    num_rows, num_candidates, num_words = words.shape
    num_data, num_latents = linear.shape
    num_blocks, is_apart = len(matrices), len(second) > len(matrices)
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
            least = least_weight(weights[n])
            for c in range(num_candidates):
                weight = weights[n, c]
                if abs(weight) <= least:
                    continue
                count = active_latents(words, row, c, active)
                size = row_sizes(count)
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


# Plain torch sums in another order, but only the largest of a few sums is looked for.
@parallel_kernel(cost=64, has_plain=lambda words, *others: words.size <= 2**16)
def _expected_log_prior(words, weights, linear, elements, is_observed, gram, mean, covariance, means, covariances, matrices, vectors, out):
    num_rows, num_candidates, num_words = words.shape
    num_data, num_latents = linear.shape
    num_blocks = len(matrices)
    for block in prange(num_blocks):
        _keep_rolled()
        active = np.empty(64 * num_words, np.int64)
        prior, joint, roots, rows = matrices[block, 0], matrices[block, 1], matrices[block, 2], matrices[block, 3]
        work = vectors[block]
        own = gram
        if is_observed is not None:
            own, near = np.empty((num_latents, num_latents)), np.empty(elements.shape)
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            row = n if num_rows > 1 else 0
            if is_observed is not None:
                row_gram_matrix(elements, is_observed[n], active, ever_active(words, row, active), near, own)
            least = least_weight(weights[n])
            for c in range(num_candidates):
                weight = weights[n, c]
                if abs(weight) <= least:
                    continue
                count = active_latents(words, row, c, active)
                size = row_sizes(count)
                collapse(linear[n], own, mean, covariance, active, count, prior, joint, rows, work)
                posterior_roots(mean, active, prior, joint, count, size, work)
                transpose_roots(joint, count, size, roots)
                for t in range(len(means)):
                    out[block, t] += weight * log_prior(means[t], covariances[t], active, count, size, roots, work, rows)
