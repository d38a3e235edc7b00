"""What kernels share: their device, bits of packed states, random words."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def on_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates launches of kernels: on the device of the first tensor."""

    @functools.wraps(launch)
    def run(tensor: Tensor, *arguments: Any) -> Any:
        # Triton launches on the current device, wherever the data are.
        with torch.cuda.device_of(tensor):
            return launch(tensor, *arguments)

    return run


@triton.jit
def lowest_bit(word):
    """Positions of the lowest bits of words, below zero without bits."""
    # A power of two is exact in float64, and its exponent is the position.
    exponent = ((word & -word).to(tl.float64).to(tl.int64, bitcast=True) >> 52) & 0x7FF
    return exponent - 1023


@triton.jit
def any_bits(words):
    """Whether one of the words is not zero."""
    return tl.max((words != 0).to(tl.int32), 0) > 0


@triton.jit
def mix(x):
    """See :func:`pyro_truncated.ops.vectorised.random.mix`."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def uniform(words):
    """See :func:`pyro_truncated.ops.vectorised.random.uniform`."""
    return ((words >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16
