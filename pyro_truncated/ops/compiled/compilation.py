"""Compiled functions, cached on disk between processes where possible."""

from __future__ import annotations

import functools
import hashlib
import logging
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile

from pyro_truncated.ops.backend import NotCompiledError
from pyro_truncated.ops.compiled.background import VARIABLE, compile_later, is_on

_logger = logging.getLogger(__name__)

# Numba logs every instruction it compiles at the level DEBUG: users whose root logger has that level drown in it.
if logging.getLogger("numba").level == logging.NOTSET:
    logging.getLogger("numba").setLevel(logging.WARNING)


def njit(function: Callable[..., Any] | None = None, *, cache: bool = False, later: bool = False, **options: Any) -> Any:
    """:func:`numba.njit` that also works for read-only installations.

    There, functions are compiled anew in every process.

    Where numba finds no folder for compiled code (containers, clusters), or cannot read or write it (a full disk), one line is logged.

    Args:
        function: the function. Without it, a decorator is returned.
        cache: whether to keep the compiled code on disk.
        later: whether another process may compile it. A call raises ``NotCompiledError`` until then.
        **options: for :func:`numba.njit`.
    """
    if function is None:
        return functools.partial(njit, cache=cache, later=later, **options)
    compiled = numba.njit(**options)(function)
    if cache:
        try:
            compiled._cache = _Cache(function, later)
        except RuntimeError as error:  # numba's, if it finds no folder
            _say_once(error)
    return compiled


class _Cache(FunctionCache):
    """A cache on disk that may fail.

    Then the function is compiled and forgotten when the process ends.

    Numba compiles a function anew once its own file says something else. The functions that it calls, and that its code contains, may be
    from other files, so here those count as well.
    """

    def __init__(self, function: Callable[..., Any], later: bool) -> None:
        super().__init__(function)
        self._later = later
        own = function.__code__.co_filename
        others = _sources(function.__globals__, {own: ""})
        # The order of the files and where they are say nothing about the code.
        stamp = self._impl.locator.get_source_stamp(), sorted(others.values())
        self._cache_file = IndexDataCacheFile(self.cache_path, self._impl.filename_base, stamp)

    def load_overload(self, signature: Any, context: Any) -> Any:
        try:
            found = super().load_overload(signature, context)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            _say_once(error)
            return None
        if found is None:
            _say_compiling()
            if self._later and compile_later(self._py_func, signature, self.cache_path):
                raise NotCompiledError
        return found

    def save_overload(self, *arguments: Any) -> None:
        try:
            super().save_overload(*arguments)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            _say_once(error)


def _sources(names: dict[str, Any], found: dict[str, str]) -> dict[str, str]:
    """Adds digests of the files of all compiled functions called.

    Global names are followed recursively.

    Intrinsics, whose code is written by hand, count as well.
    """
    for value in list(names.values()):
        function = getattr(value, "py_func", getattr(value, "__wrapped__", None))
        if isinstance(function, FunctionType) and (path := function.__code__.co_filename) not in found:
            found[path] = _digest(path)
            _sources(function.__globals__, found)
    return found


@functools.cache
def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if Path(path).is_file() else ""


def _say_once(error: Exception) -> None:
    _logger.debug("no cache of compiled kernels: %s", error)
    _say()


@functools.cache
def _say_compiling() -> None:
    # Workers compile what their parent has not; one line, from the parent, is enough.
    if multiprocessing.parent_process() is None:
        how = f"in the background, for up to a minute ({VARIABLE}=0: before the first step)" if is_on() else "which takes up to a minute"
        _logger.warning(
            "compiling kernels for their first use on this machine, %s; the next process finds them on disk. "
            '"python -m pyro_truncated.warmup" compiles all of them at once.',
            how,
        )


@functools.cache
def _say() -> None:
    _logger.warning(
        "compiled kernels cannot be kept on disk: every process compiles them anew, for a minute or two. "
        "Set the environment variable NUMBA_CACHE_DIR to a folder that can be written to."
    )
