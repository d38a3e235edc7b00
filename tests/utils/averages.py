"""Averages of trained losses, as torch makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def average_of_steps(module: torch.nn.Module, y: Tensor, steps: int, **options: Any) -> torch.nn.Module:
    """The average over so many steps of Adam."""
    module(y)  # torch averages modules that have all their buffers
    average = torch.optim.swa_utils.AveragedModel(module, **options)
    optimiser = torch.optim.Adam(module.parameters(), lr=0.3)
    for _ in range(steps):
        optimiser.zero_grad()
        module(y).backward()
        optimiser.step()
        average.update_parameters(module)
    return average
