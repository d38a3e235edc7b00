"""The plan of a fit, its clock and its history."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

from pyro_truncated.utils.console import progress_bar


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the subset and hyper-parameters take turns.

    Attributes:
        max_epochs: most alternations.
        seconds_left: what is left of the time.
        tolerance: gain of an epoch, in nats per data point, below which the alternation ends.
        hyper_evaluations: evaluations of the objective per continuous phase.
        attempts: attempts to exchange members per discrete phase.
        rows: data points that an alternation looks at.
        gives_up: whether it ends after an alternation that explains nothing.
    """

    max_epochs: int
    seconds_left: Callable[[], float]
    tolerance: float = 1e-4
    hyper_evaluations: int = 5
    attempts: int = 4
    rows: int = 0
    gives_up: bool = False


class FitRecord:
    """The clock, the history and the progress bar of one fit.

    Args:
        history: seconds, phase and objective after each phase, which it adds to.
        max_seconds: most seconds; default: no limit.
        clock: seconds from some moment on.
        progress: whether to show a progress bar.
    """

    def __init__(
        self,
        history: list[tuple[float, str, float]],
        max_seconds: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        progress: bool = False,
    ) -> None:
        self.history, self.max_seconds, self.clock = history, max_seconds, clock
        self._start = clock()
        self._bar = progress_bar(progress, unit="phase")

    def seconds_left(self) -> float:
        """What is left of the time."""
        return math.inf if self.max_seconds is None else self.max_seconds - (self.clock() - self._start)

    def share_left(self, share: float) -> Callable[[], float]:
        """A clock for a share of the seconds that are left."""
        kept = 0.0 if self.max_seconds is None else (1 - share) * self.seconds_left()
        return lambda: self.seconds_left() - kept

    def note(self, phase: str, value: float) -> None:
        """Adds a line to the history, and to the progress bar."""
        self.history.append((self.clock() - self._start, phase, value))
        self._bar.update()
        self._bar.set_postfix_str(f"{phase} F={value:.6g}")

    def close(self) -> None:
        """Ends the progress bar."""
        self._bar.close()
