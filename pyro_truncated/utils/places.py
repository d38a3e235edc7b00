"""Where modules and states live, and states brought there."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# States of generators are on the CPU, whatever they draw on.
_GENERATOR = "generator"


def device_of_module(module: Any) -> torch.device:
    """Where the first parameter of a module lives, or its first buffer; of what has neither the CPU."""
    if not isinstance(module, torch.nn.Module):
        return torch.device("cpu")
    return next((tensor.device for tensor in itertools.chain(module.parameters(), module.buffers())), torch.device("cpu"))


def brought(state: Any, device: torch.device) -> Any:
    """A state of tensors, lists, tuples and dictionaries on a device, but for what is named ``generator``."""
    if isinstance(state, Tensor):
        return state.to(device)
    if isinstance(state, Mapping):
        return {name: value if name == _GENERATOR else brought(value, device) for name, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(brought(value, device) for value in state)
    return state
