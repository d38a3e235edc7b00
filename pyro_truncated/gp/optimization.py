"""L-BFGS that keeps the best parameters, and the record of a fit."""

from __future__ import annotations

import dataclasses
import inspect
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_truncated.gp.cholesky import NotPositiveDefiniteError
from pyro_truncated.utils.console import progress_bar
from pyro_truncated.utils.parameter_store import load_snapshot, snapshot


class Minimum(NamedTuple):
    """Where :func:`minimize` has ended."""

    value: float  # the smallest value seen; NaN if the first one is
    iterations: int  # number of iterations begun


class OutOfTimeError(Exception):
    """Ends an optimiser in the middle of a line search."""


class _LBFGS(torch.optim.LBFGS):
    """L-BFGS without torch's compiler, which takes seconds to import."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        inspect.unwrap(torch.optim.LBFGS.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        inspect.unwrap(torch.optim.LBFGS.zero_grad)(self, set_to_none)


def minimize(
    evaluate: Callable[[], float | Tensor],
    parameters: Sequence[Tensor],
    *,
    max_iterations: int = 10**9,
    max_evaluations: int | None = None,
    tolerance: float = 1e-9,
    gradient_tolerance: float = 1e-7,
    memory: int = 100,
    should_stop: Callable[[], bool] = lambda: False,
    on_better: Callable[[float], None] = lambda value: None,
) -> Minimum:
    """L-BFGS with strong Wolfe line searches that keeps the best parameters.

    ``evaluate`` returns the value and adds its gradient to the leaves ``parameters``, changed in place. Where there is no value (NaN,
    infinity, a failed factorisation) the line search meets a wall, far above and flat. It ends below ``tolerance`` or
    ``gradient_tolerance``, or where ``should_stop`` says so; ``on_better`` is called with each new best value.
    """
    if not parameters:
        return Minimum(float(evaluate()), 0)
    best, best_values, count = math.inf, snapshot(parameters), 0
    limit = max_iterations * 5 // 4 if max_evaluations is None else max_evaluations
    optimizer = _LBFGS(
        list(parameters), max_iter=min(max_iterations, limit), max_eval=limit, tolerance_change=tolerance,
        tolerance_grad=gradient_tolerance, history_size=memory, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> float:
        nonlocal best, best_values, count
        if count and (should_stop() or (max_evaluations is not None and count >= max_evaluations)):
            raise OutOfTimeError
        count += 1
        optimizer.zero_grad()
        try:
            found = evaluate()
            value = float(found.detach() if isinstance(found, Tensor) else found)
        except (NotPositiveDefiniteError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            value = math.nan
        slopes = [p.grad for p in parameters if p.grad is not None]
        if not math.isfinite(value) or not all(bool(slope.isfinite().all()) for slope in slopes):
            optimizer.zero_grad()
            return best + 10 * (abs(best) + 1) if math.isfinite(best) else value
        for parameter in parameters:
            # Torch's L-BFGS flattens gradients as they lie in memory.
            parameter.grad = None if parameter.grad is None else parameter.grad.contiguous()
        if value < best:
            best, best_values = value, snapshot(parameters)
            on_better(value)
        return value

    try:
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    except OutOfTimeError:
        pass
    finally:
        load_snapshot(parameters, best_values)
        optimizer.zero_grad()
    return Minimum(best if math.isfinite(best) else math.nan, int(optimizer.state[parameters[0]].get("n_iter", 0)))


@dataclasses.dataclass(frozen=True)
class FitSettings:
    """How the subset and hyper-parameters take turns."""

    max_epochs: int  # most alternations
    remaining_seconds: Callable[[], float]  # what is left of the time
    tolerance: float = 1e-4  # gain of an epoch, in nats per data point, below which the alternation ends
    hyper_evaluations: int = 5  # evaluations of the objective per continuous phase
    attempts: int = 4  # attempts to exchange members per discrete phase
    rows: int = 0  # data points that an alternation looks at
    gives_up: bool = False  # whether it ends after an alternation that explains nothing
    tries_all: bool = True  # whether every member has had its turn before it ends


class FitRecord:
    """The clock, the history and the progress bar of one fit."""

    def __init__(
        self,
        history: list[tuple[float, str, float]],
        max_seconds: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        progress: bool | None = False,
    ) -> None:
        self.history, self.max_seconds, self.clock = history, max_seconds, clock
        self._start = clock()
        self._bar = progress_bar(progress, unit="phase")

    def remaining_seconds(self) -> float:
        """What is left of the time."""
        return math.inf if self.max_seconds is None else self.max_seconds - (self.clock() - self._start)

    def budget(self, share: float) -> Callable[[], float]:
        """A clock for a share of the seconds that are left."""
        reserve = 0.0 if self.max_seconds is None else (1 - share) * self.remaining_seconds()
        return lambda: self.remaining_seconds() - reserve

    def note(self, phase: str, value: float) -> None:
        """Adds a line to the history, and to the progress bar."""
        self.history.append((self.clock() - self._start, phase, value))
        self._bar.update()
        self._bar.set_postfix_str(f"{phase} F={value:.6g}")

    def close(self) -> None:
        """Ends the progress bar."""
        self._bar.close()
