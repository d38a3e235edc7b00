"""What objects say of themselves: the call that makes their like."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor


class Described:
    """An object whose ``repr`` is the call that makes its like: its positional arguments, and others that are not at their default.

    Only arguments that the object keeps under their own names are shown.
    """

    def __repr__(self) -> str:
        shown = [
            f"{name}={_text(getattr(self, name))}"
            for name, parameter in inspect.signature(type(self)).parameters.items()
            if name in vars(self) and (parameter.kind is parameter.POSITIONAL_OR_KEYWORD or not _is_default(getattr(self, name), parameter))
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


def _is_default(value: Any, parameter: inspect.Parameter) -> bool:
    return value is parameter.default or (isinstance(value, (bool, int, float, str)) and value == parameter.default)


def _text(value: Any) -> str:
    if isinstance(value, torch.nn.Module):
        return type(value).__name__
    if isinstance(value, Tensor):
        return f"<tensor {tuple(value.shape)}>"
    if isinstance(value, torch.Generator):
        return "<generator>"
    if inspect.isroutine(value):
        return str(value.__qualname__)
    return repr(value)


def power_of_ten(number: int) -> str:
    """A count as it is, or its order of magnitude if it is huge."""
    return str(number) if number < 10**7 else f"about 10^{len(str(number)) - 1}"
