"""Temperatures of posteriors: numbers, or functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

Temperature = float | Callable[[int], float]


def temperature_at(temperature: Temperature, step: int) -> float:
    """The temperature of a step.

    Raises:
        ValueError: if it is not a finite number of at least one.
    """
    value = temperature(step) if callable(temperature) else temperature
    if not 1.0 <= value < math.inf:
        raise ValueError(f"temperature must be at least 1, and finite; got {value}")
    return float(value)
