"""Compiled CPU kernels behind :mod:`pyro_truncated.ops.max_inner_products`.

If all functions are evaluated, torch multiplies matrices in blocks that stay in the cache. Their
memory is used again, as new memory costs several times as much as writing to it. If some groups are
evaluated, each data point's products stay in the first cache. Collecting the data points of every
group would cost more than the products.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor
from torch.nn.functional import pad

from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.compiled.simd_topk import HALF, LANES, lowest_bit, not_below, product, ranked, set_peaks, set_products
from pyro_truncated.ops.compiled.threads import parallel_kernel

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
    members, first = _members_of_groups(group.contiguous().numpy(), num_groups)
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
    """Fills up with the first functions that are not there yet.

    This happens if no value was above minus infinity.
    """
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
    """Whether a value is larger.

    NaN is the largest of all, as for ``topk``, so that nothing hides it.
    """
    return x > other or (x != x and other == other)


@njit(cache=True, nogil=True)
def _insert(x, name, best, index):
    """Enters a value above the least of the sorted best ones.

    It returns its place.
    """
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
    """Returns a lower bound of the values' given rank.

    That many are the largest of columns that have nothing in common.

    Every sixteen of the ``peaks`` are the maxima of sixteen columns, and hold their part of that many.
    """
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
    """Enters functions that are among the largest of a data point.

    Of ``products`` whole registers are there, filled up with minus infinity; ``peaks`` are memory.
    """
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
def _members_of_groups(group, num_groups):
    """Returns the functions by group, and where each begins, ``(G + 1,)``.

    They are counted, not compared.
    """
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
    """Returns the functions' coefficients group by group.

    Sixteen functions stand together, and those of one feature are side by side.

    A table ``(1 + F, 16)`` begins with a constant, 0, and minus infinity for functions that are not there. Returns all tables, and the
    position of the first of every group, ``(G + 1,)``.
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
