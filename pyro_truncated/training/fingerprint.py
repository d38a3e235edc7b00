"""Fingerprints of training runs: descriptions of parts, hashes of data."""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuide, AutoGuideList
from torch import Tensor
from torch.utils._pytree import tree_flatten

from pyro_truncated.distributed.shards import Shard, fingerprint

# Constructor arguments that do not change results, or that are described elsewhere.
_LEFT_OUT = {"self", "name", "model", "guide", "search", "init", "generator", "memory_budget", "max_plate_nesting"}


def describe_run(svi: SVI) -> dict[str, str]:
    """Returns class names and arguments of the parts of a run.

    They are ``model``, ``guide``, ``optimizer``, ``elbo`` and perhaps ``search``.

    Functions are known by their qualified names and modules by their classes, arguments of constructors and submodules. Neither
    addresses nor anything that changes while a run goes on is part of a description.
    """
    elbo = getattr(svi.loss, "__self__", svi.loss)
    parts = {"model": svi.model, "guide": svi.guide, "optimizer": svi.optim, "elbo": elbo, "search": getattr(elbo, "search", None)}
    return {name: describe(part) for name, part in parts.items() if part is not None}


def describe_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Describes each of a model's arguments in one line, with hashes."""
    arguments = {f"argument {position}": value for position, value in enumerate(args, 1)} | {f"argument {k}": v for k, v in kwargs.items()}
    return {name: _describe_argument(value) for name, value in arguments.items()}


def describe(value: Any, depth: int = 6) -> str:
    """Describes an object by a line that is equal in every process."""
    if isinstance(value, float):
        return repr(float(value))
    if value is None or isinstance(value, (bool, int, complex, str, torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, (Tensor, np.ndarray)):
        # Few numbers are settings, as the values of a latent, many are data.
        numbers = value.tolist() if math.prod(value.shape) <= 64 else ""
        return f"{type(value).__name__}{tuple(value.shape)}{numbers}"
    if depth == 0:
        return type(value).__qualname__
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe(item, depth - 1)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(describe(item, depth - 1) for item in value) + "]"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(describe(item, depth - 1) for item in value)) + "}"
    if isinstance(value, functools.partial):
        return _call("partial", {"": value.func, **dict(enumerate(value.args)), **value.keywords}, depth)
    if isinstance(value, (type, np.ufunc)) or inspect.isroutine(value):
        return str(getattr(value, "__qualname__", getattr(value, "__name__", type(value).__qualname__)))
    return _call(type(value).__qualname__, dict(_configuration(value)), depth)


def _call(name: str, arguments: Mapping[Any, Any], depth: int) -> str:
    return f"{name}({', '.join(f'{key}={describe(value, depth - 1)}' for key, value in arguments.items())})"


def _configuration(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the constructor arguments that an object stores, and its submodules."""
    if hasattr(value, "pt_optim_constructor"):
        yield from ((name, attributes) for name, attributes in vars(value).items() if name.startswith("pt_") or name == "kwargs")
        return
    names = {name for kind in type(value).__mro__ for name in _constructor_parameters(kind)} - _LEFT_OUT
    attributes = {**getattr(value, "_buffers", {}), **vars(value)} if hasattr(value, "__dict__") else {}
    yield from ((name, attributes[name]) for name in sorted(names & attributes.keys()) if not isinstance(attributes[name], torch.nn.Module))
    if "conditional" in names:
        yield "conditional", getattr(value, "conditional", None)
    if isinstance(value, torch.nn.Module) and (isinstance(value, AutoGuideList) or not isinstance(value, AutoGuide)):
        # Automatic guides make submodules when they are first called.
        yield from value.named_children()


def _constructor_parameters(kind: type) -> Collection[str]:
    try:
        return inspect.signature(kind.__init__).parameters if "__init__" in vars(kind) else ()  # type: ignore[misc]
    except ValueError:
        return ()


def _describe_argument(value: Any) -> str:
    if isinstance(value, Shard):
        return f"{str(value.dtype).removeprefix('torch.')}{(value.portion.total, *value.shape[1:])} with hash {fingerprint(value):016x}"
    leaves, structure = tree_flatten(value)
    arrays = [_as_tensor(leaf) for leaf in leaves]
    is_leaf = structure.is_leaf()
    if is_leaf and arrays[0] is None:
        return describe(value)
    digest = hashlib.sha256(b"" if is_leaf else str(structure).encode())
    for leaf, tensor in zip(leaves, arrays, strict=True):
        digest.update(describe(leaf).encode() if tensor is None else _label(tensor).encode())
        for chunk in () if tensor is None else _chunks(tensor):
            digest.update(chunk)
    label = _label(arrays[0]) if is_leaf and arrays[0] is not None else f"{type(value).__name__} of {len(leaves)}"
    return f"{label} with hash {digest.hexdigest()[:16]}"


def _label(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}"


def _as_tensor(leaf: Any) -> Tensor | None:
    """Returns a tensor of an array or data frame, else ``None``."""
    if isinstance(leaf, Tensor):
        return leaf.detach().to_dense() if leaf.layout != torch.strided else leaf.detach()
    if isinstance(leaf, type) or not hasattr(leaf, "__array__"):
        return None
    try:
        return torch.from_numpy(np.ascontiguousarray(leaf))
    except TypeError:
        return None


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    entries = tensor.resolve_conj().resolve_neg().reshape(-1)
    size = max(1, 2**24 // max(1, entries.element_size()))  # 16 MiB at a time
    for start in range(0, len(entries), size):
        yield memoryview(entries[start : start + size].cpu().contiguous().view(torch.uint8).numpy())  # type: ignore[arg-type]
