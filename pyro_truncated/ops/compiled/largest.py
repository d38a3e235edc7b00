"""Compiled CPU kernels behind :mod:`pyro_truncated.ops.largest`.

Where all functions are looked at, products of matrices are torch's, in blocks that stay in the cache and in memory that is used again: new
memory costs several times as much as what is written to it. Where some groups are, each data point's products stay in the first cache: to
bring together the data points of every group costs more than the products.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.compiled.grouped import rows_of_groups
from pyro_truncated.ops.compiled.threads import parallel_kernel

_BLOCK, _FEWEST_ROWS = 2**18, 64
# Of so many values at a time the largest is looked for first, in vector registers.
_FOLD = 4
_BLOCKS = 16


def largest_of_all(features: Tensor, coefficients: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.largest.largest_of_all`."""
    value, index = _none(features, number)
    _enter_products(features.contiguous(), coefficients, value, index)
    _fill(index)
    return torch.from_numpy(value), torch.from_numpy(index)


def largest_of_groups(
    features: Tensor,
    coefficients: Tensor,
    group: Tensor,
    num_groups: int,
    asked: Tensor,
    number: int,
) -> tuple[Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.largest.largest_of_groups`: of each data point one group after the other."""
    value, index = _none(features, number)
    members, first = rows_of_groups(group.reshape(-1, 1).numpy(), num_groups)
    by_feature = _by_feature(coefficients.contiguous().numpy(), members, first)
    _enter_groups(
        features.contiguous().numpy(), by_feature, members, first, int(np.diff(first).max()), asked.contiguous().numpy(), value, index
    )
    _fill(index)
    return torch.from_numpy(value), torch.from_numpy(index)


def walked(
    features: Tensor, coefficients: Tensor, neighbours: Tensor, value: Tensor, index: Tensor, depth: int, also: Tensor
) -> tuple[Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.largest.walked`."""
    found, best = index.clone().numpy(), value.clone().numpy()
    arrays = (tensor.detach().contiguous().numpy() for tensor in (features, coefficients, neighbours, also))
    _walk(*arrays, depth, best, found)
    return torch.from_numpy(best), torch.from_numpy(found)


def _none(features: Tensor, number: int) -> tuple[np.ndarray, np.ndarray]:
    value = torch.full((len(features), number), -torch.inf, dtype=features.dtype, device="cpu").numpy()
    return value, np.full((len(features), number), -1)


def _enter_products(features: Tensor, coefficients: Tensor, value: np.ndarray, index: np.ndarray) -> None:
    """Enters the functions of such coefficients ``(K, F)`` for the data points with such features ``(N, F)``."""
    width = len(coefficients)
    step = min(max(1, len(features)), max(_FEWEST_ROWS, _BLOCK // width))
    memory, across = features.new_empty(step, width), coefficients.mT
    for start in range(0, len(features), step):
        some = features[start : start + step]
        products = torch.mm(some, across, out=memory[: len(some)])
        _enter(products.numpy(), np.arange(width), value[start : start + step], index[start : start + step])


@njit(cache=True, nogil=True)
def _fill(index):
    """Where no value was above minus infinity, the first functions that are not there yet."""
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
    """Whether a value is larger; NaN is the largest of all, as for ``topk``, so that nothing hides it."""
    return x > other or (x != x and other == other)


@njit(cache=True, nogil=True)
def _insert(x, name, best, index):
    """Enters a value that is above the least of the best ones, which stay sorted; returns its place."""
    s = len(best) - 1
    while s > 0 and _is_above(x, best[s - 1]):
        best[s] = best[s - 1]
        index[s] = index[s - 1]
        s -= 1
    best[s] = x
    index[s] = name
    return s


@njit(cache=True, nogil=True)
def _bound(most, peak, top):
    """What so many of some values as ``top`` has places are at least: that many are the largest of columns that have nothing in common."""
    width = len(peak)
    for j in range(width):
        # NaN is above any bound.
        peak[j] = most[j] if most[j] == most[j] else -np.inf
    for start in range(width, len(most) - width + 1, width):
        for j in range(width):
            peak[j] = most[start + j] if most[start + j] > peak[j] else peak[j]
    top[:] = -np.inf
    for x in peak:
        if x > top[-1]:
            s = len(top) - 1
            while s > 0 and x > top[s - 1]:
                top[s] = top[s - 1]
                s -= 1
            top[s] = x
    return top[-1]


@njit(cache=True, nogil=True)
def _enter_row(products, names, best, found, most, peak, top):
    """Enters those of some functions that are among the largest of a data point; the last three are memory."""
    width, number = len(products), len(best)
    size, least = width // _FOLD, best[number - 1]
    most = most[:size]
    for j in range(size):
        most[j] = products[j]
    for r in range(1, _FOLD):
        for j in range(size):
            x = products[r * size + j]
            # NaN stays.
            most[j] = x if x > most[j] or x != x else most[j]
    # Where none is known yet, most of what would be entered would not stay.
    bound = _bound(most, peak, top) if least == -np.inf and size >= len(peak) else least
    for j in range(size):
        if _is_above(most[j], least) and not most[j] < bound:
            for r in range(_FOLD):
                x = products[r * size + j]
                if _is_above(x, least) and not x < bound:
                    _insert(x, names[r * size + j], best, found)
                    least = best[number - 1]
    for j in range(_FOLD * size, width):
        if _is_above(products[j], least) and not products[j] < bound:
            _insert(products[j], names[j], best, found)
            least = best[number - 1]


@parallel_kernel(cost=2)
def _enter(products, names, value, index):
    num_rows, width = products.shape
    number = value.shape[1]
    num_blocks = min(num_rows, _BLOCKS)
    for block in prange(num_blocks):
        most, peak, top = np.empty(width, products.dtype), np.empty(2 * number, products.dtype), np.empty(number, products.dtype)
        for i in range(num_rows * block // num_blocks, num_rows * (block + 1) // num_blocks):
            _enter_row(products[i], names, value[i], index[i], most, peak, top)


@njit(cache=True, nogil=True)
def _by_feature(coefficients, members, first):
    """The coefficients of the functions of one group after the other, those of one feature side by side."""
    num_features = coefficients.shape[1]
    found = np.empty(len(members) * num_features, coefficients.dtype)
    for g in range(len(first) - 1):
        own, part = members[first[g] : first[g + 1]], found[first[g] * num_features :]
        width = len(own)
        for f in range(num_features):
            for i in range(width):
                part[f * width + i] = coefficients[own[i], f]
    return found


@njit(cache=True, nogil=True, fastmath={"contract", "nsz"})
def _multiply(features, coefficients, products):
    """Sets the values of a group's functions; of their coefficients those of one feature lie side by side."""
    width, num_features = len(products), len(features)
    products[:] = 0
    # Four features at a time: what is added to is read and written less often.
    last = num_features // 4 * 4
    for f in range(0, last, 4):
        own, a, b, c, d = coefficients[f * width :], features[f], features[f + 1], features[f + 2], features[f + 3]
        for j in range(width):
            products[j] += a * own[j] + b * own[width + j] + c * own[2 * width + j] + d * own[3 * width + j]
    for f in range(last, num_features):
        own, a = coefficients[f * width :], features[f]
        for j in range(width):
            products[j] += a * own[j]


@parallel_kernel(cost=64)
def _enter_groups(features, coefficients, members, first, widest, asked, value, index):
    num_rows, num_features = features.shape
    number = value.shape[1]
    num_blocks = min(num_rows, _BLOCKS)
    for block in prange(num_blocks):
        products, most = np.empty(widest, features.dtype), np.empty(widest, features.dtype)
        peak, top = np.empty(2 * number, features.dtype), np.empty(number, features.dtype)
        for n in range(num_rows * block // num_blocks, num_rows * (block + 1) // num_blocks):
            for g in asked[n]:
                start, end = first[g], first[g + 1]
                own = products[: end - start]
                _multiply(features[n], coefficients[start * num_features :], own)
                _enter_row(own, members[start:end], value[n], index[n], most, peak, top)


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"})
def _product(features, coefficients):
    total = features[0] * 0
    for f in range(len(features)):
        total += features[f] * coefficients[f]
    return total


@njit(cache=True, nogil=True)
def _look_at(others, features, coefficients, best, index):
    """Enters those functions that are above the least of the best ones, and not there yet."""
    number = len(best)
    for other in others:
        x = _product(features, coefficients[other])
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
