"""A file of its own: layers with running statistics, and a warning.

Runs of a model change these statistics.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook


@contextmanager
def warn_about_running_statistics() -> Iterator[None]:
    """Warns of layers in training mode that keep running statistics.

    The layers run in here, such as ``BatchNorm1d``.

    Warns:
        UserWarning: naming their classes.
    """
    found: dict[str, None] = {}

    def note(module: torch.nn.Module, _: Any) -> None:
        if module.training and getattr(module, "running_mean", None) is not None:
            found[type(module).__name__] = None

    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
    if found:
        warnings.warn(
            f"the model runs {', '.join(found)} in training mode: each run normalises by the states in it and updates the running "
            "statistics. Call .eval() of these layers, or take LayerNorm.",
            UserWarning,
            stacklevel=3,
        )
