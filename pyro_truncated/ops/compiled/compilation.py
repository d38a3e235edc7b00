"""Compiled functions, cached on disk where possible, and their threads."""

from __future__ import annotations

import functools
import gc
import hashlib
import logging
import multiprocessing
import os
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import numpy as np
import torch
from llvmlite.binding import Linkage
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher

from pyro_truncated.ops import backend
from pyro_truncated.ops.backend import NoKernelError
from pyro_truncated.ops.compiled.background import VARIABLE, compile_later, is_on

_logger = logging.getLogger(__name__)

# Numba logs every instruction it compiles at the level DEBUG: users whose root logger has that level drown in it.
if logging.getLogger("numba").level == logging.NOTSET:
    logging.getLogger("numba").setLevel(logging.WARNING)


def njit(function: Callable[..., Any] | None = None, *, cache: bool = False, later: bool = False, **options: Any) -> Any:
    """:func:`numba.njit` that also works for read-only installations.

    Where numba finds no folder for compiled code, or cannot read or write it, one line is logged. Functions are then compiled anew in every
    process. Those that Python calls have a ``cache`` on disk; others are helpers of compiled functions. If another process compiles a
    function ``later``, calls raise ``NoKernelError`` until then. Divisions by zero give infinity or NaN, not an exception.
    """
    if function is None:
        return functools.partial(njit, cache=cache, later=later, **options)
    options |= {"no_cpython_wrapper": not cache, "no_cfunc_wrapper": True, "error_model": "numpy"}
    options["pipeline_class"] = _KernelCompiler if cache else _HelperCompiler
    compiled = numba.njit(**options)(function)
    if isinstance(compiled, CPUDispatcher):
        compiled.__class__ = _Kernel if cache else _Helper
    if cache:
        try:
            compiled._cache = _Cache(function, later)
        except RuntimeError as error:  # numba's, if it finds no folder
            _say_once(error)
    return compiled


class _Kernel(CPUDispatcher):
    """A compiled function."""

    def compile(self, signature: Any) -> Any:
        """Compiles without collecting garbage, which would take a fifth of the time."""
        is_enabled = gc.isenabled()
        gc.disable()
        try:
            return super().compile(signature)
        finally:
            if is_enabled:
                gc.enable()


class _KernelCode(JITCodeLibrary):
    """Code of a kernel, with its own copies of helpers and loops.

    Code from disk has no others. Code in memory would call the first of each name, which is optimised least.
    """

    def _finalize_final_module(self) -> None:
        for function in self._final_module.functions:
            if function.linkage in (Linkage.linkonce_odr, Linkage.weak_odr):
                function.linkage = Linkage.internal
        super()._finalize_final_module()


class _KernelCompiler(Compiler):
    def __init__(self, typing_context: Any, context: Any, library: Any, *others: Any) -> None:
        library = _KernelCode(context.codegen(), "kernel")
        library.enable_object_caching()
        super().__init__(typing_context, context, library, *others)


class _Helper(CPUDispatcher):
    """A function within the code of those that call it."""

    def compile(self, signature: Any) -> Any:
        """Compiles once for all constants among the arguments."""
        return super().compile(tuple(numba.types.unliteral(kind) for kind in signature))

    def __call__(self, *arguments: Any) -> Any:
        """Runs in Python, as compiled code without wrapper would end the process."""
        return self.py_func(*arguments)


class _HelperCode(JITCodeLibrary):
    """Code of a helper, which its callers optimise with their own."""

    def _optimize_final_module(self) -> None:
        pass


class _HelperCompiler(Compiler):
    def __init__(self, typing_context: Any, context: Any, library: Any, *others: Any) -> None:
        super().__init__(typing_context, context, _HelperCode(context.codegen(), "helper"), *others)


class _Cache(FunctionCache):
    """A disk cache that may fail, and knows all source files.

    Numba compiles a function anew once its own file has another date. Here the contents of files count, those of functions that it calls
    included. So a checkout or an installation finds what another one has compiled.
    """

    def __init__(self, function: Callable[..., Any], later: bool) -> None:
        super().__init__(function)
        self._later = later
        own = function.__code__.co_filename
        # A file may have changed since another function was read from it.
        others = _sources(function.__globals__, {own: _digest.__wrapped__(own)})
        # The order of the files and where they are say nothing about the code.
        stamp = sorted(others.values())
        self._cache_file = IndexDataCacheFile(self.cache_path, self._impl.filename_base, stamp)

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Returns a kernel from disk; ``None`` compiles it."""
        try:
            found = super().load_overload(signature, context)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            _say_once(error)
            return None
        if found is None:
            _announce_compilation()
            if self._later and compile_later(self._py_func, signature, self.cache_path):
                raise NoKernelError
        return found

    def save_overload(self, *arguments: Any) -> None:
        """Keeps a kernel on disk where that can be written to."""
        try:
            super().save_overload(*arguments)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            _say_once(error)


def _sources(names: dict[str, Any], digests: dict[str, str]) -> dict[str, str]:
    """Adds digests of the files of all compiled functions called, recursively."""
    for value in list(names.values()):
        function = getattr(value, "py_func", getattr(value, "__wrapped__", None))
        if isinstance(function, FunctionType) and (path := function.__code__.co_filename) not in digests:
            digests[path] = _digest(path)
            _sources(function.__globals__, digests)
    return digests


@functools.cache
def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if Path(path).is_file() else ""


def _say_once(error: Exception) -> None:
    _logger.debug("no cache of compiled kernels: %s", error)
    _say()


@functools.cache
def _announce_compilation() -> None:
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


# The cost of kernels that are worth all threads on any arrays.
HEAVY = 2**14
# Blocks of rows with sums of their own, which are added up in order: they do not depend on the number of threads.
BLOCKS = 16
# Numba's threads are as many as torch's, of which OMP_NUM_THREADS and torch.set_num_threads speak, unless their number is given.
_AS_TORCH = "NUMBA_NUM_THREADS" not in os.environ


def parallel_kernel(
    *, cost: int = 1, has_plain: bool | Callable[..., bool] = False, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compiles a function with parallel loops, which small arrays do not use.

    Waking threads takes longer than a small call needs: arrays of fewer than ``2**14 / cost`` entries in all are small. The number of
    threads is set for the calling thread only, and is no more than torch has, unless the environment variable ``NUMBA_NUM_THREADS`` says
    otherwise.

    A forked child (a worker of a ``DataLoader``) has none of its parent's threads, and the OpenMP runtime of the GNU compiler would end it.
    There, functions are compiled once more, without parallel loops; their results are the same. The same functions, which compile in a
    third of the time, serve while another process compiles the kernel for its first use. If plain torch computes the same to the last digit
    (``has_plain``), that serves on first use. A function of the arguments says where it takes less time than compiling.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = njit(function, cache=True, later=True, nogil=True, parallel=True, **options)
        serial = functools.cache(lambda: njit(_rename(function), cache=True, nogil=True, **options))

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            if backend.is_forked:
                return serial()(*arguments)
            size = sum(argument.size for argument in arguments if isinstance(argument, np.ndarray))
            num_threads = numba.get_num_threads()
            at_most = 1 if size * cost < HEAVY else torch.get_num_threads() if _AS_TORCH else num_threads
            if at_most < num_threads:
                numba.set_num_threads(at_most)
            try:
                return compiled(*arguments)
            except NoKernelError:
                if has_plain(*arguments) if callable(has_plain) else has_plain:
                    raise
            finally:
                if at_most < num_threads:
                    numba.set_num_threads(num_threads)
            return serial()(*arguments)

        call.compiled = compiled  # type: ignore[attr-defined]
        return call

    return decorate


def _rename(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function under another name, as numba goes by names."""
    assert isinstance(function, types.FunctionType)
    duplicate = types.FunctionType(function.__code__, function.__globals__, f"{function.__name__}_serial")
    duplicate.__qualname__ = f"{function.__qualname__}_serial"
    return duplicate


def _start_threads() -> None:
    """Starts numba's threads and restores torch's OpenMP thread count, once."""
    num_threads = torch.get_num_threads()
    numba.get_num_threads()
    torch.set_num_threads(num_threads)


if not backend.is_forked:
    _start_threads()
