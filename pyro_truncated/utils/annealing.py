"""Temperatures of posteriors: numbers, or functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from pyro_truncated.utils.arguments import check_count, names_arguments

Temperature = float | Callable[[int], float]


@names_arguments
def temperature_at(temperature: Temperature, step: int) -> float:
    """The temperature of a step."""
    value = temperature(step) if callable(temperature) else temperature
    if not 1.0 <= value < math.inf:
        raise ValueError(f"temperature must be at least 1, and finite; got {value}")
    return float(value)


@names_arguments
def cooling(start: float, steps: int, share: float = 0.6) -> Callable[[int], float]:
    r"""A temperature that falls linearly to one: :math:`\tau_t = \max(1, \tau_0 + (1 - \tau_0) \, t / (\mathrm{share} \cdot T))`.

    At a high temperature the posteriors of a :class:`~pyro_truncated.Truncated_ELBO` are nearly uniform over their populations.
    Causes that would have ended in one component separate while it falls.

    Example:
        >>> temperature = cooling(8.0, 100)
        >>> temperature(0), temperature(30), temperature(60)
        (8.0, 4.5, 1.0)

    Args:
        start: temperature :math:`\tau_0 \ge 1` of the first step.
        steps: steps of the whole run, :math:`T`.
        share: part of the steps in which it falls, above 0 and at most 1.

    Returns:
        The temperature as a function of the step, ``Truncated_ELBO(search, temperature=cooling(8.0, 100))``.

    Raises:
        ValueError: for a start below one, a share outside of ``(0, 1]`` or no steps.
    """
    check_count("steps", steps)
    if not start >= 1.0 or start == float("inf"):
        raise ValueError(f"start must be a finite temperature of at least 1; got {start}")
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share must lie in (0, 1]; got {share}")
    return lambda step: max(1.0, start + (1.0 - start) * step / (share * steps))
