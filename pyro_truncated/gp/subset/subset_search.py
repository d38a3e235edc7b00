"""The interface and the budget of all searches for inducing subsets."""

from __future__ import annotations

import abc
import dataclasses
import time
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_truncated.gp.subset.objectives import SubsetProblem
from pyro_truncated.utils.console import ProgressBar, progress_bar
from pyro_truncated.utils.counts import check_count


@dataclasses.dataclass
class Budget:
    """Ends a search, and keeps its record.

    Attributes:
        max_swaps: most members exchanged; default: no limit.
        max_attempts: most attempts, whether they succeed or not; default: no limit.
        max_seconds: most seconds by ``clock``; default: no limit.
        clock: seconds from some moment on; wall clock time by default.
        progress: whether to show a progress bar.
        swaps: members exchanged so far.
        attempts: attempts so far.
        history: seconds, swaps and objective after each change, the start included.
    """

    max_swaps: int | None = None
    max_attempts: int | None = None
    max_seconds: float | None = None
    clock: Callable[[], float] = time.perf_counter
    progress: bool = False
    swaps: int = 0
    attempts: int = 0
    history: list[tuple[float, int, float]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("max_swaps", "max_attempts"):
            if (limit := getattr(self, name)) is not None:
                setattr(self, name, check_count(name, limit, least=0))
        if self.max_seconds is not None and not self.max_seconds >= 0:
            raise ValueError(f"max_seconds must be a number of at least 0; got {self.max_seconds}")
        self._start = self.clock()
        self._bar: ProgressBar | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self.clock() - self._start

    @property
    def is_spent(self) -> bool:
        """Whether any limit is reached."""
        return (
            (self.max_swaps is not None and self.swaps >= self.max_swaps)
            or (self.max_attempts is not None and self.attempts >= self.max_attempts)
            or (self.max_seconds is not None and self.seconds >= self.max_seconds)
        )

    def record(self, objective: float, swaps: int = 0) -> None:
        """Notes an objective that ``swaps`` more exchanges led to."""
        self.swaps += swaps
        self.history.append((self.seconds, self.swaps, objective))
        if self.progress:
            self._bar = progress_bar(True, total=self.max_swaps, unit="swap") if self._bar is None else self._bar
            self._bar.update(swaps)
            self._bar.set_postfix_str(f"F={objective:.6g}")

    def close(self) -> None:
        """Ends the progress bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class SubsetSearch(abc.ABC):
    """A way of choosing inducing inputs from the training inputs.

    Example:
        >>> isinstance(ExchangeSearch(), SubsetSearch), isinstance(RandomSearch(), SubsetSearch)
        (True, True)

    Attributes:
        restarts: whether :meth:`improve` forgets the subset it is given, as greedy methods do: its result may be worse.
    """

    restarts = True

    @abc.abstractmethod
    def improve(
        self, problem: SubsetProblem, num_inducing: int, index: Tensor | None, budget: Budget, generator: torch.Generator | None = None
    ) -> Tensor:
        """Chooses an inducing subset.

        Args:
            problem: data, kernel and noise.
            num_inducing: how many inputs to choose, ``m``; fewer are returned where others would depend on them.
            index: the subset so far, ``(m,)``; None at the start.
            budget: ends the search and keeps the record.
            generator: source of randomness.

        Returns:
            Distinct positions, at most ``m``.
        """


class RandomSearch(SubsetSearch):
    """A random subset, which stays as it is.

    Example:
        >>> x = torch.linspace(0, 6, 60, dtype=torch.float64).unsqueeze(-1)
        >>> model = SubsetGPRegression(smooth_rbf(x), x.squeeze(-1).sin(), num_inducing=5, algorithm=RandomSearch())
        >>> objective = model.fit(max_epochs=2)
        >>> len(model.subset)
        5
    """

    restarts = False

    def improve(
        self, problem: SubsetProblem, num_inducing: int, index: Tensor | None, budget: Budget, generator: torch.Generator | None = None
    ) -> Tensor:
        """The subset given, or a random one; see :class:`SubsetSearch`."""
        return random_subset(problem.num_data, num_inducing, generator, problem.targets.device) if index is None else index


def random_subset(num_data: int, num: int, generator: torch.Generator | None, device: torch.device | None = None) -> Tensor:
    """Returns distinct random positions ``(num,)``, or all if there are fewer.

    They are drawn on the CPU, so that devices agree.
    """
    return torch.randperm(num_data, generator=generator)[:num].to(device)


def draw(weights: Tensor, num: int, generator: torch.Generator | None) -> Tensor:
    """Returns at most ``num`` distinct positions by weights ``(n,)``.

    Probabilities are proportional to the weights, and zero weights are never drawn.

    One exponential variable per position is raced against its weight, which needs neither loops nor a limit on ``n``.
    """
    positive = int((weights > 0).sum())
    noise = torch.rand(len(weights), generator=generator, dtype=torch.float64).to(weights.device)
    arrival = -torch.log1p(-noise) / weights.clamp(min=0.0)
    arrival = torch.where(weights > 0, arrival, torch.inf)
    return arrival.topk(min(num, positive), largest=False).indices
