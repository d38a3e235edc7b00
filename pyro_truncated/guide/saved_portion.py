"""Records which processes' data points saved populations belong to.

One process's populations must not become those of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pyro_truncated.distributed.shards import Portion

PORTION = "portion"


def save_portion(portion: Portion | None, destination: Any, prefix: str) -> None:
    """Stores the data points in a state dict, if not all."""
    if portion is not None and portion.is_part:
        destination[prefix + PORTION] = torch.tensor([portion.first, portion.size, portion.total], device="cpu")


def saved_portion(state_dict: Mapping[str, Any], prefix: str) -> Portion | None:
    """What :func:`save_portion` has noted."""
    saved = state_dict.get(prefix + PORTION)
    return None if saved is None else Portion(*saved.tolist())


def other_rows(saved: Portion | None, here: Portion | None) -> str | None:
    """Returns why saved populations belong to other data points, if known."""
    if saved is None or here is None or saved == here:
        return None
    ranges = [f"{portion.first} .. {portion.first + portion.size - 1} of {portion.total}" for portion in (saved, here)]
    return (
        f"the saved populations are those of data points {ranges[0]}, here are {ranges[1]}; checkpoints of fit hold those of all "
        "processes, whatever their number"
    )
