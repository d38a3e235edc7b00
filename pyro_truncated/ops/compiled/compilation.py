"""Compiled functions, kept on disk from one process to the next wherever there is a place for them."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import numba
from numba.core.caching import FunctionCache

_logger = logging.getLogger(__name__)

# Numba logs every instruction it compiles at the level DEBUG: users whose root logger has that level drown in it.
if logging.getLogger("numba").level == logging.NOTSET:
    logging.getLogger("numba").setLevel(logging.WARNING)


def njit(function: Callable[..., Any] | None = None, *, cache: bool = False, **options: Any) -> Any:
    """:func:`numba.njit` for installations that cannot be written to, too: there, functions are compiled anew in every process.

    Where numba finds no folder for compiled code (containers, clusters), or cannot read or write it (a full disk), one line is logged.

    Args:
        function: the function; without it, a decorator is returned.
        cache: whether to keep the compiled code on disk.
        **options: for :func:`numba.njit`.
    """
    if function is None:
        return functools.partial(njit, cache=cache, **options)
    compiled = numba.njit(**options)(function)
    if cache:
        try:
            compiled._cache = _Cache(function)
        except RuntimeError as error:  # numba's, if it finds no folder
            _say_once(error)
    return compiled


class _Cache(FunctionCache):
    """A cache on disk that may fail: then the function is compiled, and forgotten when the process ends."""

    def load_overload(self, *arguments: Any) -> Any:
        try:
            found = super().load_overload(*arguments)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            _say_once(error)
            return None
        if found is None:
            _say_compiling()
        return found

    def save_overload(self, *arguments: Any) -> None:
        try:
            super().save_overload(*arguments)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            _say_once(error)


def _say_once(error: Exception) -> None:
    _logger.debug("no cache of compiled kernels: %s", error)
    _say()


@functools.cache
def _say_compiling() -> None:
    # Workers compile what their parent has not; one line, from the parent, is enough.
    if multiprocessing.parent_process() is None:
        _logger.warning(
            "compiling kernels for their first use on this machine, which takes up to a minute; the next process finds them on disk "
            '("python -m pyro_truncated.warmup" compiles all of them at once)'
        )


@functools.cache
def _say() -> None:
    _logger.warning(
        "compiled kernels cannot be kept on disk, so every process compiles them anew, which takes a minute or two in all; "
        "let the environment variable NUMBA_CACHE_DIR name a folder that can be written to"
    )
