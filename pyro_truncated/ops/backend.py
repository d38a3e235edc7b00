"""Who computes: kernels compiled for the CPU, or vectorised torch for any device. Nothing is compiled or loaded before its first use."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from contextvars import ContextVar
from types import ModuleType

from torch import Tensor

_KINDS = ("compiled", "vectorised")
_chosen: ContextVar[str] = ContextVar("pyro_truncated_ops", default="compiled")
_loaded: dict[tuple[str, str], ModuleType] = {}


def backend(name: str, tensor: Tensor) -> ModuleType:
    """The module of that name: compiled kernels for tensors on the CPU, vectorised ones elsewhere.

    Both have the same functions. The first request loads the module, and with the first compiled one numba.

    Args:
        name: name of the module.
        tensor: what is computed with.
    """
    kind = _chosen.get() if tensor.is_cpu else "vectorised"
    return _loaded.get((kind, name)) or _load(kind, name)


@contextlib.contextmanager
def use(kind: str) -> Iterator[None]:
    """A context in which tensors on the CPU are computed with by one kind of kernel, whatever else runs in other threads and tasks.

    Both kinds compute the same, but draw other random numbers and sum in another order. ``"vectorised"`` is for debugging (every step is
    a line of torch), for tests, and for machines on which numba does not work: where nothing else is used, numba is never loaded.

    Args:
        kind: ``"compiled"``, the default, or ``"vectorised"``.

    Raises:
        ValueError: if there is no such kind.
    """
    if kind not in _KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, _KINDS))}; got {kind!r}")
    token = _chosen.set(kind)
    try:
        yield
    finally:
        _chosen.reset(token)


def _load(kind: str, name: str) -> ModuleType:
    module = _loaded[kind, name] = importlib.import_module(f"pyro_truncated.ops.{kind}.{name}")
    return module
