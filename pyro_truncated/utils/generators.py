"""Sources of randomness."""

from __future__ import annotations

import torch


def device_of(generator: torch.Generator | None) -> torch.device:
    """The device that a generator draws on, and no other; for ``None``, torch's global one, the CPU, whatever the default device is.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> torch.randperm(3, generator=generator, device=device_of(generator)).device
        device(type='cpu')
    """
    return torch.device("cpu") if generator is None else generator.device
