"""What a call of learn did."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pyro_truncated.utils.arguments import Renamed


@dataclasses.dataclass(frozen=True)
class Restart:
    """A restart of :func:`~pyro_truncated.learn`.

    Attributes:
        initialisation: where it began.
        steps: how many steps it took.
        free_energy: what it reached, per data point (or posterior, where data points share latents).
    """

    initialisation: str
    steps: int
    free_energy: float


@dataclasses.dataclass(frozen=True)
class LearnReport:
    """What a call of :func:`~pyro_truncated.learn` did; prints itself as a table.

    Example:
        >>> y = linear_bars(100, 3, mean_active=2.0).data
        >>> config = LearnConfig(restart_steps=5, tolerance=9.0)
        >>> guide = learn(BinarySparseCoding(9, 6), y, restarts=2, steps=5, config=config, progress=False)
        >>> [restart.initialisation for restart in guide.learn_report.restarts]
        ['initialize', 'initialize']
        >>> print(guide.learn_report)  # doctest: +ELLIPSIS
        restart  initialisation  steps  free energy
              1  initialize ...
        end of restarts: two restarts agree
        ...

    Attributes:
        restarts: in order.
        moves: changes of the best solution beyond restarts: how many were tried, and how many raised the free energy.
        reason: why no further restart was made.
        disagreement: why the best may be a local optimum; ``None`` if two restarts agree.
        steps: training steps on all data.
        remaining_gain: what more of them are expected to gain per data point; infinity if they were too few to tell. Zero where training
            ends by another rule.
        optimizer: how parameters were changed.
        settings: what was chosen, by the names of the arguments.
    """

    restarts: tuple[Restart, ...]
    moves: dict[str, tuple[int, int]]
    reason: str
    disagreement: str | None
    steps: int
    remaining_gain: float
    optimizer: str
    settings: dict[str, Any]

    remaining = Renamed("remaining_gain")

    def __str__(self) -> str:
        """The table."""
        width = max(len("initialisation"), *(len(one.initialisation) for one in self.restarts))
        lines = [f"restart  {'initialisation':{width}}  steps  free energy"]
        lines += [
            f"{number:7}  {one.initialisation:{width}}  {one.steps:5}  {one.free_energy:11.4f}"
            for number, one in enumerate(self.restarts, 1)
        ]
        lines += [f"{name}: {tried} tried, {accepted} accepted" for name, (tried, accepted) in self.moves.items()]
        lines.append(f"end of restarts: {self.reason}")
        if self.disagreement is not None:
            lines.append(f"disagreement: {self.disagreement}")
        expected = "" if self.remaining_gain == 0.0 or math.isinf(self.remaining_gain) else f", more may gain {self.remaining_gain:.2g}"
        lines.append(f"training: {self.steps} steps{expected}; {self.optimizer}")
        lines.append("settings: " + ", ".join(f"{name}={value}" for name, value in self.settings.items()))
        return "\n".join(lines)
