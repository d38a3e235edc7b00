"""Compiled loops over data points on as many threads as worthwhile.

Forked children use one thread.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch

from pyro_truncated.ops.backend import NotCompiledError
from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.forks import is_forked

_SMALL = 2**14
# The cost of kernels that are worth all threads on any arrays.
HEAVY = _SMALL
# Numba's threads are as many as torch's, of which OMP_NUM_THREADS and torch.set_num_threads speak, unless their number is given.
_AS_TORCH = "NUMBA_NUM_THREADS" not in os.environ


def parallel_kernel(*, cost: int = 1, has_plain: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compiles a function with parallel loops.

    On small arrays it runs on one thread.

    Waking threads takes longer than a small call needs, the more so where they compete with those of torch. The number of threads is
    set for the calling thread only and put back after the call, whatever happens in it. There are no more than torch has, unless the
    environment variable ``NUMBA_NUM_THREADS`` says otherwise: those beyond the cores that one is given wait for each other, and spin.

    A forked child has none of its parent's threads, and the OpenMP runtime of the GNU compiler
    would end it. Such children are workers of a ``DataLoader``, or processes of the method "fork".
    There, functions are compiled once more, without parallel loops; their results are the same. A
    child that was spawned has threads of its own. The same functions, which compile in a third of
    the time, serve while another process compiles the kernel for its first use.

    Args:
        cost: work per entry of the arrays, relative to a simple kernel: arrays of fewer than ``2**14 / cost`` entries in all are small.
        has_plain: whether plain torch computes the same to the last digit, so that it serves on first use and nothing is compiled.
        **options: for :func:`numba.njit`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = njit(function, cache=True, later=True, nogil=True, parallel=True, **options)
        serial = functools.cache(lambda: njit(_renamed(function), cache=True, nogil=True, **options))

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            if is_forked():
                return serial()(*arguments)
            size = sum(argument.size for argument in arguments if isinstance(argument, np.ndarray))
            num_threads = numba.get_num_threads()
            at_most = 1 if size * cost < _SMALL else torch.get_num_threads() if _AS_TORCH else num_threads
            if at_most < num_threads:
                numba.set_num_threads(at_most)
            try:
                return compiled(*arguments)
            except NotCompiledError:
                if has_plain:
                    raise
            finally:
                if at_most < num_threads:
                    numba.set_num_threads(num_threads)
            return serial()(*arguments)

        call.compiled = compiled  # type: ignore[attr-defined]
        return call

    return decorate


def _renamed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the same function under another name.

    Numba finds compiled code on disk by its name, not by its options.
    """
    assert isinstance(function, types.FunctionType)
    duplicate = types.FunctionType(function.__code__, function.__globals__, f"{function.__name__}_serial")
    duplicate.__qualname__ = f"{function.__qualname__}_serial"
    return duplicate


def _start_threads() -> None:
    """Starts numba's threads and restores the OpenMP thread count, once.

    Torch shares this runtime, whose count is otherwise reset.
    """
    num_threads = torch.get_num_threads()
    numba.get_num_threads()
    torch.set_num_threads(num_threads)


if not is_forked():
    _start_threads()
