"""Backends, loaded when first used: compiled for CPUs, fused for GPUs, vectorised."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_LOGGER = logging.getLogger(__name__)
# Whether the process was forked after the library had been imported.
is_forked = False


def enter_child() -> None:
    """What is to be done in a forked child, before anything else."""
    # Torch, too, would wait for threads that stayed behind; its data loaders set the same in their workers.
    global is_forked
    is_forked = True
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)


# Here and not beside the kernels, which may be loaded only in the child.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=enter_child)


_KINDS = ("compiled", "vectorised", "fused")
# Modules of which some functions have fused kernels; all others are those of vectorised torch.
_FUSED = ("evolution", "latent_values", "noisy_or", "quadratic", "slabs")
_chosen: ContextVar[str] = ContextVar("pyro_truncated_ops", default="compiled")
_leaves_core: ContextVar[bool] = ContextVar("pyro_truncated_leaves_core", default=False)
_compiles_first: ContextVar[bool] = ContextVar("pyro_truncated_compiles_first", default=False)
_loaded: dict[tuple[str, str], Any] = {}


class NoKernelError(Exception):
    """There is no kernel of these sizes, or not yet: torch computes."""


class _Kernels:
    """Compiled or fused functions, vectorised ones where there is no kernel."""

    def __init__(self, kind: str, name: str) -> None:
        self._name, self._own = name, importlib.import_module(f"pyro_truncated.ops.{kind}.{name}")
        self.__name__, self._compiles = self._own.__name__, kind == "compiled"

    def __getattr__(self, function: str) -> Callable[..., Any]:
        call = functools.partial(self._call, function) if hasattr(self._own, function) else self._plain(function)
        setattr(self, function, call)
        return call

    def _plain(self, function: str) -> Callable[..., Any]:
        plain: Callable[..., Any] = getattr(importlib.import_module(f"pyro_truncated.ops.vectorised.{self._name}"), function)
        return plain

    def _call(self, function: str, *arguments: Any, **options: Any) -> Any:
        try:
            return getattr(self._own, function)(*arguments, **options)
        except NoKernelError:
            pass
        # Kernels have no gradients, and neither has what serves in their place.
        with torch.no_grad(), _leave_core() if self._compiles else contextlib.nullcontext():
            return self._plain(function)(*arguments, **options)


@contextlib.contextmanager
def _leave_core() -> Iterator[None]:
    """A context that leaves a core to the process that compiles.

    It holds in the thread that enters it. Torch's threads wait for each other without sleep: without a core for each, most of the time.
    """
    if _leaves_core.get():
        yield
        return
    token = _leaves_core.set(True)
    try:
        with _thread_pools().limit(limits=max(1, torch.get_num_threads() - 1), user_api="openmp"):
            yield
    finally:
        _leaves_core.reset(token)


@functools.cache
def _thread_pools() -> Any:
    # It sets the number of one thread, where torch sets that of all to come, too.
    return importlib.import_module("threadpoolctl").ThreadpoolController()


def backend(name: str, tensor: Tensor, *, is_small: bool = False) -> Any:
    """Returns the module of that name for a tensor's device.

    The first request loads the module, and with the first compiled one numba; not if torch takes as little time (``is_small``).
    """
    kind = "vectorised" if is_small and tensor.is_cpu else _kind(tensor)
    return _loaded.get((kind, name)) or _load(kind, name)


def is_vectorised(tensor: Tensor) -> bool:
    """Whether kernels for devices compute with a tensor: vectorised or fused ones."""
    return not tensor.is_cpu or _chosen.get() != "compiled"


def _kind(tensor: Tensor) -> str:
    kind = _chosen.get()
    if kind != "compiled" or tensor.is_cpu:
        return kind
    return "fused" if tensor.is_cuda and runs_triton(tensor.device) else "vectorised"


@functools.cache
def runs_triton(device: torch.device) -> bool:
    """Whether Triton is installed, and its kernels run on a GPU."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        evolution = importlib.import_module("pyro_truncated.ops.fused.evolution")
        evolution.find_duplicates(torch.zeros(1, 2, 1, dtype=torch.int64, device=device))
    except Exception as error:  # such as a missing C compiler, or a GPU that is too old
        _LOGGER.warning("Triton's kernels do not run on %s, plain torch is used in their place: %s", device, error)
        return False
    return True


@contextlib.contextmanager
def use_backend(kind: str) -> Iterator[None]:
    """A context that fixes the kind of kernels.

    Other threads and tasks are not affected. All kinds compute the same and draw the same random numbers, but sum in another order. If
    ``"vectorised"`` is all that is used, neither numba nor Triton is ever loaded.

    Args:
        kind: ``"compiled"``, the default: compiled kernels on the CPU, fused ones on NVIDIA GPUs where Triton is installed, else
            vectorised. ``"vectorised"``: plain torch on every device. ``"fused"``: Triton's, on the CPU by its interpreter.

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


def compiles_first() -> bool:
    """Whether this is a context of :func:`compile_first`."""
    return _compiles_first.get()


@contextlib.contextmanager
def compile_first() -> Iterator[None]:
    """A context in which kernels are compiled before their first use."""
    token = _compiles_first.set(True)
    try:
        yield
    finally:
        _compiles_first.reset(token)


def are_differentiated(*tensors: Tensor) -> bool:
    """Whether backward or forward derivatives by any of the tensors are needed."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def save_with_context(ctx: Any, *tensors: Tensor | None) -> None:
    """Saves a forward pass's tensors, kernels and memory budget for :func:`gradient`."""
    ctx.save_for_backward(*tensors)
    ctx.run_as_forward = copy_context().run


def gradient(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the backward pass of an autograd function that is differentiable once.

    Autograd casts gradients to the types of inputs.

    Torch's own ``once_differentiable`` lets second derivatives by chosen tensors pass without the terms of this function.
    """
    run = differentiable_gradient(backward)

    @functools.wraps(backward)
    def run_once(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "sets of states, and likelihoods with kernels of their own, have no second derivatives. Leave out create_graph=True, or "
                "write the program with Pyro's distributions and take AutoTruncated(..., whole_states=True)."
            )
        return run(ctx, *grads)

    return run_once


def differentiable_gradient(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a backward pass that is made of differentiable functions."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        # With the kernels and the memory budget of the forward pass, whatever thread autograd calls it on.
        return ctx.run_as_forward(backward, ctx, *grads)

    return run


def _load(kind: str, name: str) -> Any:
    has_kernels = kind == "compiled" or (kind == "fused" and name in _FUSED)
    _loaded[kind, name] = _Kernels(kind, name) if has_kernels else importlib.import_module(f"pyro_truncated.ops.vectorised.{name}")
    return _loaded[kind, name]
