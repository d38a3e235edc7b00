"""Backends: kernels compiled for the CPU, or vectorised torch for devices.

Nothing is compiled or loaded before its first use.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

_KINDS = ("compiled", "vectorised")
_chosen: ContextVar[str] = ContextVar("pyro_truncated_ops", default="compiled")
_loaded: dict[tuple[str, str], ModuleType] = {}


def backend(name: str, tensor: Tensor) -> ModuleType:
    """Returns the module of that name for a tensor's device.

    It has compiled kernels for tensors on the CPU, vectorised ones elsewhere.

    Both have the same functions. The first request loads the module, and with the first compiled one numba.

    Args:
        name: name of the module.
        tensor: what is computed with.
    """
    kind = "vectorised" if is_vectorised(tensor) else "compiled"
    return _loaded.get((kind, name)) or _load(kind, name)


def is_vectorised(tensor: Tensor) -> bool:
    """Whether vectorised kernels compute with a tensor."""
    return not tensor.is_cpu or _chosen.get() == "vectorised"


@contextlib.contextmanager
def use_backend(kind: str) -> Iterator[None]:
    """A context that fixes the kind of kernels for CPU tensors.

    Other threads and tasks are not affected.

    Both kinds compute the same and draw the same random numbers, but sum in another order.
    ``"vectorised"`` is for debugging (every step is a line of torch), for tests, and for machines
    on which numba does not work. If nothing else is used, numba is never loaded.

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


def are_differentiated(*tensors: Tensor) -> bool:
    """Whether derivatives by any of the tensors are needed.

    They may be backward or forward; compiled kernels have none.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def remember_context(ctx: Any) -> None:
    """Records kernels and memory budget for :func:`gradient`.

    Call it in the forward pass of an autograd function.
    """
    ctx.run_as_forward = copy_context().run


def gradient(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the backward pass of an autograd function that is differentiable once.

    It runs with the kernels and the memory budget of the forward pass, on whatever thread and in whatever context autograd calls it.
    """

    @once_differentiable
    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        return ctx.run_as_forward(backward, ctx, *grads)

    return run


def _load(kind: str, name: str) -> ModuleType:
    module = _loaded[kind, name] = importlib.import_module(f"pyro_truncated.ops.{kind}.{name}")
    return module
