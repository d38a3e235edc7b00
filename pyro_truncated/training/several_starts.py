"""Annealed starts until two agree: the best of them, and whether it was reached twice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.training.agreement import Reached, have_agreed
from pyro_truncated.training.model_parameters import copies, disturb, put_back
from pyro_truncated.training.starts import Settings, Start, start
from pyro_truncated.utils.progress import ProgressBar


@dataclasses.dataclass(frozen=True)
class Plan:
    """How many starts there are, of which kind, and when they agree.

    Attributes:
        starts: the most starts.
        steps: steps of each.
        temperature: as a function of the step.
        tolerance: free energies per data point that differ by less are the same.
        generator: source of randomness.
    """

    starts: int
    steps: int
    temperature: Callable[[int], float]
    tolerance: float
    generator: torch.Generator | None


class SeveralStarts:
    """What the starts of a model have reached.

    Attributes:
        best: the one with the highest free energy.
        energies: the free energy per data point of each, in order.
    """

    def __init__(self, model: Any, y: Tensor, settings: Settings, plan: Plan) -> None:
        self.best = Start(Reached(-math.inf), {}, None)
        self.energies: list[float] = []
        self._model, self._y, self._settings, self._plan = model, y, settings, plan
        # Starts from one place agree in bad optima, too: only those count that began apart.
        self._apart: list[Reached] = []
        self._first = None if hasattr(model, "initialize") else copies(model, y)

    def make(self, bar: ProgressBar) -> None:
        """Makes starts until two agree; those of models that do not say where one may start come back too often to end it."""
        for number in range(self._plan.starts):
            bar.set_description(f"start {number + 1}")
            self._make_one(number)
            bar.update(self._plan.steps)
            if self._first is None and have_agreed(self._apart, self._plan.tolerance):
                break

    def have_agreed(self) -> bool:
        """Whether two starts that began apart have reached the same free energy, and none has reached more."""
        tolerance = self._plan.tolerance
        return have_agreed(self._apart, tolerance) and max(self.energies) <= max(one.free_energy for one in self._apart) + tolerance

    def _make_one(self, number: int) -> None:
        model, y, plan = self._model, self._y, self._plan
        is_odd = number % 2 == 1
        if self._first is not None and number > 0:
            # Half of them begin near the best one's end.
            put_back(model, y, self.best.parameters if is_odd else self._first)
            disturb(model, y, self.best.parameters, plan.generator)
        found = start(model, y, self._settings, plan.temperature, plan.steps, plan.generator)
        self.energies.append(found.reached.free_energy)
        if self._first is None or not is_odd:
            self._apart.append(found.reached)
        self.best = max(self.best, found, key=lambda one: one.reached.free_energy)
