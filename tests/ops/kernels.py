"""Runs a test on the compiled kernels and on their plain torch versions."""

from __future__ import annotations

from types import ModuleType

import pytest
from torch import Tensor

from pyro_truncated.ops import evolution, selection
from pyro_truncated.ops import values as bits

MODULES: tuple[ModuleType, ...] = (bits, evolution, selection)


def use(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the public functions take the ``"compiled"`` or the ``"dense"`` path whatever the device."""

    def uses_kernels(tensor: Tensor) -> bool:
        return implementation == "compiled"

    for module in MODULES:
        monkeypatch.setattr(module, "uses_kernels", uses_kernels)
