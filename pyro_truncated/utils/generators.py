"""Sources of randomness."""

from __future__ import annotations

import torch


def device_of(generator: torch.Generator | None) -> torch.device:
    """The device that a generator draws on, and no other; for ``None``, torch's global one, the CPU, whatever the default device is."""
    return torch.device("cpu") if generator is None else generator.device
