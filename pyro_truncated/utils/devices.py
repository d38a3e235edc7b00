"""Devices of modules, states and generators; facts known of data there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


def generator_device(generator: torch.Generator | None) -> torch.device:
    """The device that a generator draws on, the CPU for ``None``.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> torch.randperm(3, generator=generator, device=generator_device(generator)).device
        device(type='cpu')
    """
    return torch.device("cpu") if generator is None else generator.device


# States of generators are on the CPU, whatever they draw on.
_GENERATOR = "generator"


def module_device(module: Any) -> torch.device:
    """The device of a module's first parameter or buffer, else the CPU."""
    if not isinstance(module, torch.nn.Module):
        return torch.device("cpu")
    return next((tensor.device for tensor in itertools.chain(module.parameters(), module.buffers())), torch.device("cpu"))


class DoubleModule(torch.nn.Module):
    """A module that computes in float64, on any device."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        dtype = fn(torch.empty(0, dtype=torch.float64, device=module_device(self))).dtype
        if dtype != torch.float64:
            raise TypeError(f"{type(self).__name__} computes in float64 and does not convert to {dtype}; convert what it predicts")
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def to_device(state: Any, device: torch.device) -> Any:
    """Moves a nested state to a device, except entries named ``generator``."""
    if isinstance(state, Tensor):
        return state.to(device)
    if isinstance(state, Mapping):
        return {name: value if name == _GENERATOR else to_device(value, device) for name, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(to_device(value, device) for value in state)
    return state


# By tensor (that of the memory, for views), and which view of it. A changed tensor is another.
_facts: Any = WeakIdKeyDictionary()


def cached_answers(value: Tensor) -> dict[str, bool]:
    """What is known of a tensor's entries, by question.

    It is kept on a device. On the CPU memory may be shared with arrays that change unseen, and inference tensors change unseen, too.
    """
    if value.is_cpu or value.is_inference():
        return {}
    owner = value if value._base is None else value._base
    version, views = _facts.get(owner, (None, {}))
    if version != value._version:
        views = {}
        _facts[owner] = value._version, views
    answers: dict[str, bool] = views.setdefault((value.dtype, value.shape, value.stride(), value.storage_offset()), {})
    return answers


def cached_answer(value: Tensor, question: str, find_out: Callable[[], Tensor | bool]) -> bool:
    """The answer about a tensor's entries, kept on a device."""
    answers = cached_answers(value)
    if question not in answers:
        answers[question] = bool(find_out())
    return answers[question]
