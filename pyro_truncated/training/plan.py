"""How starts are made, and when they agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch


@dataclasses.dataclass(frozen=True)
class Plan:
    """How many starts there are, of which kind, and when they agree.

    Attributes:
        starts: largest number of restarts; ``None``: 8, or 16 if they exchange latents. The latter have half the states each.
        steps: steps of each.
        temperature: as a function of the step.
        tolerance: free energies per data point that differ by less are the same.
        generator: source of randomness.
        is_of_gains: whether the tolerance is twice the expected gain of another restart. That gain is the lead of the best divided by the
            number of restarts. Best restarts further apart than four tolerances do not agree. Small mixtures (data values times components
            at most 50 000) have eight restarts at least.
        is_shared: whether data points share latents. Their restarts are :func:`woken`. There are eight at least, as bad optima of a single
            posterior are met twice.
        are_compared: whether agreement also needs the same latents. With closed-form M-steps these are active for the same data points. By
            gradients data points have the same free energies (see :func:`are_alike`).
        is_product: whether each node of the program has a set of states. Restarts then exchange nothing.
    """

    starts: int | None
    steps: int
    temperature: Callable[[int], float]
    tolerance: float
    generator: torch.Generator | None
    is_of_gains: bool = False
    is_shared: bool = False
    are_compared: bool = False
    is_product: bool = False
