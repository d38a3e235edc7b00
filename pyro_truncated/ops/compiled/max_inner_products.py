"""Compiled CPU kernels behind :mod:`pyro_truncated.ops.max_inner_products`.

If all functions are evaluated, torch multiplies matrices in blocks that stay in the cache. If some groups are evaluated, each data point's
products stay in the first cache.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from llvmlite import ir
from numba import errors, prange, types
from numba.extending import intrinsic
from torch import Tensor
from torch.nn.functional import pad

from pyro_truncated.ops.compiled.compilation import njit, parallel_kernel

# Entries that are worked on at a time.
LANES, HALF = 16, 8
# So many registers take turns.
_IN_TURN = 4
_INTEGER, _POSITION, _BIT = ir.IntType(32), ir.IntType(64), ir.IntType(1)
_INTEGERS = ir.VectorType(_INTEGER, LANES)


@intrinsic
def set_products(typing_context, features, coefficients, start, products, at):
    r"""Sets the entries of ``products`` from ``at`` on to :math:`c_{0j} + \sum_f x_f c_{1 + f, j}`.

    The table ``c (1 + F, 16)`` lies in the flat ``coefficients`` from ``start`` on.
    """
    _check(features, coefficients, products)

    def generate(context, builder, signature, arguments):
        features, coefficients, start, products, at = arguments
        array = context.make_array(signature.args[0])(context, builder, features)
        number = builder.extract_value(array.shape, 0)
        table = _place(context, builder, signature.args[1], coefficients, start)
        constant, before = builder.load(table, align=_size(signature.args[1])), builder.basic_block
        each, after = (builder.append_basic_block() for _ in range(2))
        none = ir.Constant(_POSITION, 0)
        builder.cbranch(builder.icmp_signed("<", none, number), each, after)
        builder.position_at_end(each)
        feature, total = builder.phi(_POSITION), builder.phi(constant.type)
        row = builder.add(feature, ir.Constant(_POSITION, 1))
        value = _everywhere(builder, builder.load(builder.gep(array.data, [feature])))
        own = builder.load(builder.gep(table, [row]), align=_size(signature.args[1]))
        # One rounding for product and sum where the machine can.
        more = builder.fadd(total, builder.fmul(value, own, flags=("contract",)), flags=("contract",))
        builder.cbranch(builder.icmp_signed("<", row, number), each, after)
        builder.position_at_end(after)
        found = builder.phi(constant.type)
        for entering, known, block in ((none, constant, before), (row, more, each)):
            feature.add_incoming(entering, block)
            total.add_incoming(known, block)
            found.add_incoming(known, block)
        _store(context, builder, found, signature.args[3], products, at)
        return context.get_dummy_value()

    return types.void(features, coefficients, types.int64, products, types.int64), generate


@intrinsic
def product(typing_context, features, coefficients, row):
    """Multiplies features by a row of coefficients ``(K, F)``, in whole registers."""
    _check(features, coefficients)

    def generate(context, builder, signature, arguments):
        features, coefficients, row = arguments
        array = context.make_array(signature.args[0])(context, builder, features)
        number = builder.extract_value(array.shape, 0)
        start, before = builder.mul(row, number), builder.basic_block
        nothing = ir.Constant(ir.VectorType(array.data.type.pointee, HALF), [0.0] * HALF)
        test, each, after = (builder.append_basic_block() for _ in range(3))
        builder.branch(test)
        builder.position_at_end(test)
        at, total = builder.phi(_POSITION), builder.phi(nothing.type)
        builder.cbranch(builder.icmp_signed("<", at, number), each, after)
        builder.position_at_end(each)
        value = _load(context, builder, signature.args[0], features, at, HALF)
        own = _load(context, builder, signature.args[1], coefficients, builder.add(start, at), HALF)
        more = builder.fadd(total, builder.fmul(value, own, flags=("contract",)), flags=("contract",))
        for entering, known, block in (
            (ir.Constant(_POSITION, 0), nothing, before),
            (builder.add(at, ir.Constant(_POSITION, HALF)), more, each),
        ):
            at.add_incoming(entering, block)
            total.add_incoming(known, block)
        builder.branch(test)
        builder.position_at_end(after)
        return _fold(builder, total, builder.fadd)

    return features.dtype(features, coefficients, types.int64), generate


@intrinsic
def set_peaks(typing_context, products, first, step, peaks, start):
    """Sets sixteen ``peaks`` to maxima over every ``step``-th sixteen ``products``."""
    _check(products, peaks)

    def generate(context, builder, signature, arguments):
        products, first, step, peaks, start = arguments
        array = context.make_array(signature.args[0])(context, builder, products)
        number, values = builder.extract_value(array.shape, 0), _place(context, builder, signature.args[0], products, first)
        lowest = ir.Constant(values.type.pointee, [-float("inf")] * LANES)
        before = builder.basic_block
        test, each, after = (builder.append_basic_block() for _ in range(3))
        builder.branch(test)
        builder.position_at_end(test)
        at, most = builder.phi(_POSITION), [builder.phi(lowest.type) for _ in range(_IN_TURN)]
        builder.cbranch(builder.icmp_signed("<", at, number), each, after)
        builder.position_at_end(each)
        value = _load(context, builder, signature.args[0], products, at)
        # The next one is held against another register, so that none is waited for.
        turned = [*most[1:], _larger(builder, value, most[0])]
        at.add_incoming(first, before)
        at.add_incoming(builder.add(at, builder.mul(step, ir.Constant(_POSITION, LANES))), each)
        for register, following in zip(most, turned, strict=True):
            register.add_incoming(lowest, before)
            register.add_incoming(following, each)
        builder.branch(test)
        builder.position_at_end(after)
        peak = functools.reduce(functools.partial(_larger, builder), most)
        _store(context, builder, peak, signature.args[3], peaks, start)
        return context.get_dummy_value()

    return types.void(products, types.int64, types.int64, peaks, types.int64), generate


@intrinsic
def ranked(typing_context, peaks, start, rank):
    """The ``rank``-th largest of sixteen values from ``start`` on."""
    _check(peaks)

    def generate(context, builder, signature, arguments):
        peaks, start, rank = arguments
        value = _load(context, builder, signature.args[0], peaks, start)
        count = ir.Constant(_INTEGERS, [0] * LANES)
        for lane in range(LANES):
            other = _everywhere(builder, builder.extract_element(value, ir.Constant(_INTEGER, lane)))
            # What is true is -1.
            count = builder.sub(count, builder.sext(builder.fcmp_ordered(">=", other, value), _INTEGERS))
        is_low_enough = builder.icmp_signed(">=", count, _everywhere(builder, builder.trunc(rank, _INTEGER)))
        value = builder.select(is_low_enough, value, ir.Constant(value.type, [-float("inf")] * LANES))
        return _fold(builder, value, functools.partial(_larger, builder))

    return peaks.dtype(peaks, types.int64, types.int64), generate


@intrinsic
def not_below(typing_context, products, at, bound):
    """Which sixteen ``products`` from ``at`` reach a bound, as bits."""
    _check(products)

    def generate(context, builder, signature, arguments):
        products, at, bound = arguments
        value = _load(context, builder, signature.args[0], products, at)
        is_high = builder.fcmp_unordered(">=", value, _everywhere(builder, bound))
        return builder.zext(builder.bitcast(is_high, ir.IntType(LANES)), _POSITION)

    return types.int64(products, types.int64, products.dtype), generate


@intrinsic
def lowest_bit(typing_context, bits):
    """The position of the lowest bit that is one; there is one."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(_BIT, 1))

    return types.int64(types.int64), generate


def _check(*kinds):
    """Refuses arrays that are not contiguous or differ in type."""
    if any(not isinstance(kind, types.Array) or kind.layout != "C" or kind.ndim > 2 or kind.dtype != kinds[0].dtype for kind in kinds):
        raise errors.TypingError(f"contiguous arrays of one type are needed; got {', '.join(map(str, kinds))}")


def _size(kind):
    return kind.dtype.bitwidth // 8


def _place(context, builder, kind, values, at, lanes=LANES):
    """Where so many entries of a contiguous array begin."""
    array = context.make_array(kind)(context, builder, values)
    register = ir.VectorType(context.get_value_type(kind.dtype), lanes)
    return builder.bitcast(builder.gep(array.data, [at]), register.as_pointer())


def _load(context, builder, kind, values, at, lanes=LANES):
    return builder.load(_place(context, builder, kind, values, at, lanes), align=_size(kind))


def _store(context, builder, value, kind, values, at):
    builder.store(value, _place(context, builder, kind, values, at), align=_size(kind))


def _fold(builder, value, joined):
    """Reduces a register to one value by joining halves."""
    lanes = value.type.count
    step = lanes // 2
    while step:
        turned = ir.Constant(ir.VectorType(_INTEGER, lanes), [(lane + step) % lanes for lane in range(lanes)])
        value, step = joined(value, builder.shuffle_vector(value, value, turned)), step // 2
    return builder.extract_element(value, ir.Constant(_INTEGER, 0))


def _everywhere(builder, value):
    """A register all of whose entries are a value."""
    nothing = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(_INTEGER, 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(_INTEGERS, [0] * LANES))


def _larger(builder, value, other):
    return builder.select(builder.fcmp_ordered(">", value, other), value, other)


_BLOCK, _FEWEST_ROWS = 2**18, 64
_BLOCKS = 16


def max_inner_products(features: Tensor, coefficients: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.max_inner_products.max_inner_products`."""
    value, index = _none(features, number)
    _enter_products(features.contiguous(), coefficients, value, index)
    _fill(index)
    return torch.from_numpy(value), torch.from_numpy(index)


def max_inner_products_in_groups(
    features: Tensor,
    coefficients: Tensor,
    group: Tensor,
    num_groups: int,
    visited: Tensor,
    number: int,
) -> tuple[Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.max_inner_products.max_inner_products_in_groups`: of each data point one group after the other."""
    value, index = _none(features, number)
    members, first = _group_members(group.contiguous().numpy(), num_groups)
    tables, start = _tables(coefficients.contiguous().numpy(), members, first)
    _enter_groups(features.contiguous().numpy(), tables, start, members, first, visited.contiguous().numpy(), value, index)
    _fill(index)
    return torch.from_numpy(value), torch.from_numpy(index)


def follow_neighbours(
    features: Tensor, coefficients: Tensor, neighbours: Tensor, value: Tensor, index: Tensor, depth: int, also: Tensor
) -> tuple[Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.max_inner_products.follow_neighbours`."""
    found, best = index.clone().numpy(), value.clone().numpy()
    # Products need whole registers.
    padded = (pad(tensor, (0, -tensor.shape[1] % HALF)) for tensor in (features, coefficients))
    arrays = (tensor.detach().contiguous().numpy() for tensor in (*padded, neighbours, also))
    _walk(*arrays, depth, best, found)
    return torch.from_numpy(best), torch.from_numpy(found)


def _none(features: Tensor, number: int) -> tuple[np.ndarray, np.ndarray]:
    value = torch.full((len(features), number), -torch.inf, dtype=features.dtype, device="cpu").numpy()
    return value, np.full((len(features), number), -1)


def _enter_products(features: Tensor, coefficients: Tensor, value: np.ndarray, index: np.ndarray) -> None:
    """Enters functions with coefficients ``(K, F)`` for data points with features ``(N, F)``."""
    width = len(coefficients)
    step = min(max(1, len(features)), max(_FEWEST_ROWS, _BLOCK // width))
    memory, across = features.new_full((step, -(-width // LANES) * LANES), -torch.inf), coefficients.mT
    for start in range(0, len(features), step):
        some = features[start : start + step]
        torch.mm(some, across, out=memory[: len(some), :width])
        _enter(memory[: len(some)].numpy(), np.arange(width), value[start : start + step], index[start : start + step])


@njit(cache=True, nogil=True)
def _fill(index):
    """Fills up with the first functions that are not there yet."""
    num_rows, number = index.shape
    for n in range(num_rows):
        other = 0
        for s in range(number):
            while index[n, s] < 0:
                is_there = False
                for t in range(number):
                    is_there |= index[n, t] == other
                if not is_there:
                    index[n, s] = other
                other += 1


@njit(cache=True, nogil=True)
def _is_above(x, other):
    """Whether a value is larger; NaN is the largest, as for ``topk``."""
    return x > other or (x != x and other == other)


@njit(cache=True, nogil=True)
def _insert(x, name, best, index):
    """Enters a value into the sorted best; returns its place."""
    s = len(best) - 1
    while s > 0 and _is_above(x, best[s - 1]):
        best[s] = best[s - 1]
        index[s] = index[s - 1]
        s -= 1
    best[s] = x
    index[s] = name
    return s


@njit(cache=True, nogil=True)
def _bound(products, peaks, number):
    """A lower bound of the values' given rank, from maxima of columns."""
    registers = len(peaks) // LANES
    rank = -(-number // registers)
    for place in range(0, len(peaks), LANES):
        set_peaks(products, place, registers, peaks, place)
    bound = ranked(peaks, 0, rank)
    for place in range(LANES, len(peaks), LANES):
        bound = min(bound, ranked(peaks, place, rank))
    return bound


@njit(cache=True, nogil=True)
def _enter_row(products, names, best, found, peaks):
    """Enters functions that are among the largest of a data point."""
    number = len(best)
    least = best[number - 1]
    # Where none is known yet, most of what would be entered would not stay.
    bound = _bound(products, peaks, number) if least == -np.inf else least
    for at in range(0, len(products), LANES):
        bits = not_below(products, at, bound)
        while bits:
            j = at + lowest_bit(bits)
            bits &= bits - 1
            # Even where features are NaN there are no more functions than names.
            if _is_above(products[j], least) and j < len(names):
                _insert(products[j], names[j], best, found)
                least = best[number - 1]
                bound = least if least > bound else bound


@parallel_kernel(cost=2)
def _enter(products, names, value, index):
    num_rows, number = value.shape
    num_blocks = min(num_rows, _BLOCKS)
    for block in prange(num_blocks):
        peaks = np.empty(_registers(number) * LANES, products.dtype)
        for i in range(num_rows * block // num_blocks, num_rows * (block + 1) // num_blocks):
            _enter_row(products[i], names, value[i], index[i], peaks)


@njit(cache=True, nogil=True)
def _registers(number):
    """Returns of how many half registers of columns the largest are taken."""
    return -(-2 * number // LANES)


@njit(cache=True, nogil=True)
def _group_members(group, num_groups):
    """The functions by group, and where each begins, ``(G + 1,)``."""
    start = np.zeros(num_groups + 1, np.int64)
    for g in group:
        start[g + 1] += 1
    for g in range(num_groups):
        start[g + 1] += start[g]
    free, members = start[:-1].copy(), np.empty(len(group), np.int64)
    for k in range(len(group)):
        members[free[group[k]]] = k
        free[group[k]] += 1
    return members, start


@njit(cache=True, nogil=True)
def _tables(coefficients, members, first):
    """Tables of sixteen functions' coefficients, group by group, and their positions.

    A table ``(1 + F, 16)`` begins with a constant, 0, and minus infinity for functions that are not there.
    """
    num_groups, num_features = len(first) - 1, coefficients.shape[1]
    start = np.zeros(num_groups + 1, np.int64)
    for g in range(num_groups):
        start[g + 1] = start[g] + (first[g + 1] - first[g] + LANES - 1) // LANES
    tables = np.zeros((start[-1], num_features + 1, LANES), coefficients.dtype)
    for g in range(num_groups):
        own = members[first[g] : first[g + 1]]
        if len(own):
            tables[start[g + 1] - 1, 0] = -np.inf
        for i in range(len(own)):
            table = tables[start[g] + i // LANES]
            table[0, i % LANES] = 0
            for f in range(num_features):
                table[f + 1, i % LANES] = coefficients[own[i], f]
    return tables.reshape(-1), start


@parallel_kernel(cost=64)
def _enter_groups(features, tables, start, members, first, visited, value, index):
    num_rows, num_features = features.shape
    number = value.shape[1]
    num_blocks, widest, size = min(num_rows, _BLOCKS), np.diff(start).max(), (num_features + 1) * LANES
    for block in prange(num_blocks):
        products, peaks = np.empty(widest * LANES, features.dtype), np.empty(_registers(number) * LANES, features.dtype)
        for n in range(num_rows * block // num_blocks, num_rows * (block + 1) // num_blocks):
            for g in visited[n]:
                own = products[: (start[g + 1] - start[g]) * LANES]
                for table in range(start[g], start[g + 1]):
                    set_products(features[n], tables, table * size, own, (table - start[g]) * LANES)
                _enter_row(own, members[first[g] : first[g + 1]], value[n], index[n], peaks)


@njit(cache=True, nogil=True)
def _look_at(others, features, coefficients, best, index):
    """Enters new functions that are above the least of the best ones."""
    number = len(best)
    for other in others:
        x = product(features, coefficients, other)
        if _is_above(x, best[number - 1]):
            is_there = False
            for t in range(number):
                is_there |= index[t] == other
            if not is_there:
                _insert(x, other, best, index)


@parallel_kernel(cost=64)
def _walk(features, coefficients, neighbours, also, depth, value, index):
    num_rows, number = index.shape
    num_blocks = min(num_rows, _BLOCKS)
    for block in prange(num_blocks):
        # The function at every place whose neighbours have been looked at.
        done = np.empty(number, np.int64)
        for n in range(num_rows * block // num_blocks, num_rows * (block + 1) // num_blocks):
            best, found, own = value[n], index[n], features[n]
            _look_at(also[n], own, coefficients, best, found)
            done[:] = -1
            count = 0
            s = 0
            while s < depth and count < number:
                k = found[s]
                is_done = False
                for t in range(count):
                    is_done |= done[t] == k
                if is_done:
                    s += 1
                    continue
                done[count] = k
                count += 1
                _look_at(neighbours[k], own, coefficients, best, found)
                s = 0
