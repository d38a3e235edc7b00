"""Compiled kernels behind :mod:`pyro_truncated.ops.mixture_products`.

Columns are processed in strips that stay in the fastest cache. The exponential is written out, because a library call would keep the
compiler from using vector registers. Plain torch takes 9 times as long for 1000 rows, 10 dimensions and 1275 columns, 15 for gradients.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import BLOCKS, HEAVY, njit, parallel_kernel
from pyro_truncated.ops.compiled.iterate_active import copy

_STRIP = 64
# Sums may be reordered, but NaN and infinity keep their meaning.
_REORDER = {"reassoc", "contract", "nsz"}
_LOG2E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 6.93145751953125e-1, 1.42860682030941723212e-6
# exp of less than this is not a normal number.
_LOWEST = -708.0


def products(factors: tuple[Tensor, ...], num_sharp: int, sum_rows: bool) -> Tensor:
    """See :func:`pyro_truncated.ops.mixture_products.mixture_products`; float64 ``(N, P)``, or ``(P,)`` if ``sum_rows``."""
    arrays = _arrays(factors)
    num_rows, num_columns = arrays[0].shape[0], arrays[4].shape[1]
    blocks = min(BLOCKS, max(1, num_rows))
    out = np.zeros((blocks if sum_rows else num_rows, num_columns))
    _forward(*arrays, num_sharp, sum_rows, blocks, out)
    parts = torch.from_numpy(out)[:, : factors[4].shape[1]]
    return parts.sum(0) if sum_rows else parts


def gradients(factors: tuple[Tensor, ...], num_sharp: int, weight: Tensor) -> tuple[Tensor, ...]:
    """Returns gradients of ``sum(weight * products)`` in all seven factors."""
    arrays = _arrays(factors)
    num_rows, num_dims = arrays[0].shape
    blocks = min(BLOCKS, max(1, num_rows))
    rows = np.zeros((4, num_rows, num_dims))
    columns = np.zeros((blocks, 3, num_dims, arrays[4].shape[1]))
    weights = _pad(weight.reshape(-1, weight.shape[-1]))
    _backward(*arrays, weights, num_sharp, blocks, rows, columns)
    found = torch.from_numpy(columns)[..., : factors[4].shape[1]].sum(0)
    return (*torch.from_numpy(rows).unbind(), *found.unbind())


def _arrays(factors: tuple[Tensor, ...]) -> tuple[np.ndarray, ...]:
    rows = (np.ascontiguousarray(factor.detach().double().numpy()) for factor in factors[:4])
    return (*rows, *(_pad(factor) for factor in factors[4:]))


def _pad(columns: Tensor) -> np.ndarray:
    """Pads columns with zeros to strips of known length."""
    return torch.nn.functional.pad(columns.detach().double(), (0, -columns.shape[1] % _STRIP)).contiguous().numpy()


@njit(fastmath={"contract"}, inline="always")
def _exp(x):
    # x = n log 2 + r with |r| < 0.35, where twelve terms of the series leave less than half a unit in the last place.
    x = max(x, _LOWEST)
    n = np.rint(x * _LOG2E)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = 1 / 479001600.0
    p = p * r + 1 / 39916800.0
    p = p * r + 1 / 3628800.0
    p = p * r + 1 / 362880.0
    p = p * r + 1 / 40320.0
    p = p * r + 1 / 5040.0
    p = p * r + 1 / 720.0
    p = p * r + 1 / 120.0
    p = p * r + 1 / 24.0
    p = p * r + 1 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    # 2^n, put together from its bits.
    power = np.int64((np.int64(n) + np.int64(1023)) << np.int64(52))
    return p * np.int64(power).view(np.float64)


@njit(fastmath=_REORDER, inline="always")
def _sharp_product(n, start, num_sharp, height, center, rate, point, decay, out):
    """Returns the product of bumps without constants, by one exponential."""
    amplitude = 1.0
    for p in range(_STRIP):
        out[p] = 0.0
    for q in range(num_sharp):
        amplitude *= height[n, q]
        m, c = center[n, q], rate[n, q]
        x, d = point[q, start : start + _STRIP], decay[q, start : start + _STRIP]
        for p in range(_STRIP):
            t = m - x[p]
            out[p] -= c * t * t + d[p]
    for p in range(_STRIP):
        out[p] = amplitude * _exp(out[p])


@parallel_kernel(cost=HEAVY, fastmath=_REORDER)
def _forward(height, center, rate, share, point, decay, base, num_sharp, sum_rows, blocks, out):
    num_rows, num_dims = height.shape
    num_columns = point.shape[1]
    for block in prange(blocks):
        first, last = np.int64(block) * num_rows // blocks, (np.int64(block) + 1) * num_rows // blocks
        product = np.empty(_STRIP)
        for start in range(0, num_columns, _STRIP):
            for n in range(first, last):
                _sharp_product(n, start, num_sharp, height, center, rate, point, decay, product)
                for q in range(num_sharp, num_dims):
                    a, m, c, h = height[n, q], center[n, q], rate[n, q], share[n, q]
                    x, d, b = point[q, start : start + _STRIP], decay[q, start : start + _STRIP], base[q, start : start + _STRIP]
                    for p in range(_STRIP):
                        t = m - x[p]
                        product[p] *= a * _exp(-(c * t * t + d[p])) + h * b[p]
                total = out[np.int64(block) if sum_rows else n, start : start + _STRIP]
                for p in range(_STRIP):
                    total[p] += product[p]


@njit(fastmath=_REORDER, inline="always")
def _products_up_to(n, start, num_sharp, height, center, rate, share, point, decay, base, bump, before):
    """Computes bumps of dimensions with constants, and products before each."""
    _sharp_product(n, start, num_sharp, height, center, rate, point, decay, before[0])
    for q in range(num_sharp, height.shape[1]):
        j = q - num_sharp
        a, m, c, h = height[n, q], center[n, q], rate[n, q], share[n, q]
        x, d, b = point[q, start : start + _STRIP], decay[q, start : start + _STRIP], base[q, start : start + _STRIP]
        for p in range(_STRIP):
            t = m - x[p]
            e = _exp(-(c * t * t + d[p]))
            bump[j, p] = e
            before[j + 1, p] = before[j, p] * (a * e + h * b[p])


@njit(fastmath=_REORDER, inline="always")
def _mixed_gradients(n, start, num_sharp, height, center, rate, share, point, base, bump, before, behind, rows, columns):
    """Gradients of dimensions with a constant part; their factors go into ``behind``."""
    for back in range(height.shape[1] - num_sharp):
        q = height.shape[1] - 1 - back
        a, m, c, h = height[n, q], center[n, q], rate[n, q], share[n, q]
        x, b = point[q, start : start + _STRIP], base[q, start : start + _STRIP]
        grad_point = columns[0, q, start : start + _STRIP]
        grad_decay = columns[1, q, start : start + _STRIP]
        grad_base = columns[2, q, start : start + _STRIP]
        e, ahead = bump[q - num_sharp], before[q - num_sharp]
        grad_height, grad_center, grad_rate, grad_share = 0.0, 0.0, 0.0, 0.0
        for p in range(_STRIP):
            t = m - x[p]
            others = ahead[p] * behind[p]
            g = others * e[p]
            grad_height += g
            g *= a
            slope = g * c * t
            grad_center -= slope
            grad_rate -= g * t * t
            grad_share += others * b[p]
            grad_point[p] += 2.0 * slope
            grad_decay[p] -= g
            grad_base[p] += others * h
            behind[p] *= a * e[p] + h * b[p]
        rows[0, n, q] += grad_height
        rows[1, n, q] += 2.0 * grad_center
        rows[2, n, q] += grad_rate
        rows[3, n, q] += grad_share


@njit(fastmath=_REORDER, inline="always")
def _sharp_gradients(n, start, num_sharp, height, center, rate, point, product, rows, columns):
    """Gradients of dimensions without constants; ``product`` is all factors' and the weight's."""
    total = 0.0
    for p in range(_STRIP):
        total += product[p]
    for q in range(num_sharp):
        m, c, x = center[n, q], rate[n, q], point[q, start : start + _STRIP]
        grad_point = columns[0, q, start : start + _STRIP]
        grad_decay = columns[1, q, start : start + _STRIP]
        grad_center, grad_rate = 0.0, 0.0
        for p in range(_STRIP):
            t = m - x[p]
            slope = product[p] * c * t
            grad_center -= slope
            grad_rate -= product[p] * t * t
            grad_point[p] += 2.0 * slope
            grad_decay[p] -= product[p]
        rows[0, n, q] += total / height[n, q]
        rows[1, n, q] += 2.0 * grad_center
        rows[2, n, q] += grad_rate


@parallel_kernel(cost=HEAVY, fastmath=_REORDER)
def _backward(height, center, rate, share, point, decay, base, weight, num_sharp, blocks, rows, columns):
    num_rows, num_dims = height.shape
    num_columns = point.shape[1]
    for block in prange(blocks):
        first, last = np.int64(block) * num_rows // blocks, (np.int64(block) + 1) * num_rows // blocks
        own = columns[block]
        # Products of the factors before each dimension, and the bumps themselves; those behind are multiplied up on the way back.
        before = np.empty((num_dims - num_sharp + 1, _STRIP))
        bump = np.empty((num_dims - num_sharp, _STRIP))
        behind = np.empty(_STRIP)
        for start in range(0, num_columns, _STRIP):
            for n in range(first, last):
                _products_up_to(n, start, num_sharp, height, center, rate, share, point, decay, base, bump, before)
                copy(weight[n if weight.shape[0] > 1 else 0, start : start + _STRIP], behind)
                _mixed_gradients(n, start, num_sharp, height, center, rate, share, point, base, bump, before, behind, rows, own)
                for p in range(_STRIP):
                    behind[p] *= before[0, p]
                _sharp_gradients(n, start, num_sharp, height, center, rate, point, behind, rows, own)
