"""What mixtures have in common: the M-step of their mixing proportions."""

from __future__ import annotations

from torch import Tensor

NEVER_USED = 1e-8
_WEIGHT_FLOOR = 1e-6


def best_weights(counts: Tensor) -> Tensor:
    """Mixing proportions that maximise the expected log prior, none below a floor: at zero a component could never come back."""
    weights = (counts / counts.sum()).clamp(min=_WEIGHT_FLOOR)
    return weights / weights.sum()
