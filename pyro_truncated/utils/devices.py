"""Devices of modules, states and generators; facts known of data there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

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


def brought(state: Any, device: torch.device) -> Any:
    """Moves a nested state to a device, except entries named ``generator``."""
    if isinstance(state, Tensor):
        return state.to(device)
    if isinstance(state, Mapping):
        return {name: value if name == _GENERATOR else brought(value, device) for name, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(brought(value, device) for value in state)
    return state


# By tensor (that of the memory, for views), which view of it, and what is asked. A changed tensor is another.
_facts: Any = WeakIdKeyDictionary()


def cached_answer(value: Tensor, question: str, find_out: Callable[[], Tensor]) -> bool:
    """The answer about a tensor's entries, kept on a device."""
    if not _is_remembered(value):
        return bool(find_out())
    answers, key = _answers(value), _key(value, question)
    if key not in answers:
        answers[key] = bool(find_out())
    return answers[key]


def is_cached(value: Tensor, question: str) -> bool:
    """Whether the cached answer to a question about a tensor is yes."""
    return _is_remembered(value) and _answers(value).get(_key(value, question), False)


def cache_answer(value: Tensor, question: str, answer: bool) -> None:
    """Caches the answer to a question about a tensor, where possible."""
    if _is_remembered(value):
        _answers(value)[_key(value, question)] = answer


def _is_remembered(value: Tensor) -> bool:
    # Whether an inference tensor has been changed since cannot be told.
    return not value.is_cpu and not value.is_inference()


def _answers(value: Tensor) -> dict[Any, bool]:
    owner = value if value._base is None else value._base
    version, answers = _facts.get(owner, (None, {}))
    if version != value._version:
        answers = {}
        _facts[owner] = value._version, answers
    known: dict[Any, bool] = answers
    return known


def _key(value: Tensor, question: str) -> Any:
    return question, value.dtype, value.shape, value.stride(), value.storage_offset()
