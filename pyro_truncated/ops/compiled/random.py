"""Counter-based random numbers for compiled kernels, a stream per data point.

Plain torch takes 3 to 8 times as long for uniform numbers of 2000 data points.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import njit, parallel_kernel

# The increment and the multipliers of splitmix64 (Steele, Lea & Flood, 2014, "Fast splittable pseudorandom number generators").
STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


@njit(inline="always")
def mix(x):
    """Scrambles 64 bits by a bijection that behaves like a random one."""
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


@njit(inline="always")
def stream(seed, row):
    """The first state of a data point's stream, which advances by ``STEP``."""
    return mix(np.uint64(seed) + mix(np.uint64(row + 1) * STEP))


@njit(inline="always")
def uniform(state):
    """Uniform number in [0, 1) with 53 random bits."""
    return np.float64(mix(state) >> np.uint64(11)) * 2.0**-53


@njit(inline="always")
def below(state, bound):
    """Uniform integer in 0 .. bound - 1, for bounds far below 2**32."""
    return np.int64(((mix(state) >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32))


def uniform_numbers(rows: Tensor, count: int, seed: int) -> Tensor:
    """See :func:`pyro_truncated.ops.uniform`."""
    out = torch.empty(len(rows), count, dtype=torch.float64, device="cpu")
    _uniform_numbers(rows.contiguous().numpy(), seed, out.numpy())
    return out


@parallel_kernel(has_plain=True)
def _uniform_numbers(rows, seed, out):
    for n in prange(len(rows)):
        state = stream(seed, rows[n])
        for i in range(out.shape[1]):
            state += STEP
            out[n, i] = uniform(state)
