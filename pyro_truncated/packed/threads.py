"""Compiled loops over data points that run on as many threads as they are worth."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

_SMALL = 2**14


def parallel_kernel(*, cost: int = 1, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compiles a function with parallel loops; called on small arrays it runs on one thread.

    Waking threads takes longer than a small call needs, the more so where they compete with those of torch. The number of threads is
    set for the calling thread only and put back after the call, whatever happens in it.

    Args:
        cost: work per entry of the arrays, relative to a simple kernel: arrays of fewer than ``2**14 / cost`` entries in all are small.
        **options: for :func:`numba.njit`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = numba.njit(cache=True, nogil=True, parallel=True, **options)(function)

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            size = sum(argument.size for argument in arguments if isinstance(argument, np.ndarray))
            num_threads = numba.get_num_threads()
            if size * cost >= _SMALL or num_threads == 1:
                return compiled(*arguments)
            numba.set_num_threads(1)
            try:
                return compiled(*arguments)
            finally:
                numba.set_num_threads(num_threads)

        return call

    return decorate
