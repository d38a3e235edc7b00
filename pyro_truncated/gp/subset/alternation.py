"""How an inducing subset and hyper-parameters are learned in turn, by one objective that never rises."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_truncated.gp.data_kernels import DataKernel
from pyro_truncated.gp.optimization import minimize
from pyro_truncated.gp.subset.basis import Basis
from pyro_truncated.gp.subset.exchange_factors import ExchangeFactors
from pyro_truncated.gp.subset.fit_record import FitRecord
from pyro_truncated.gp.subset.gradient import backward, noise_of
from pyro_truncated.gp.subset.objective import SubsetProblem, explains_something
from pyro_truncated.gp.subset.row_sample import RowSample, sample_rows
from pyro_truncated.gp.subset.subset_search import Budget, SubsetSearch


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


@dataclasses.dataclass(frozen=True)
class Alternation:
    """Data, a kernel and a noise whose parameters are learned in place, and the search for a subset of inducing inputs.

    Attributes:
        kernel: the kernel on the training inputs.
        targets: ``(n, H)`` float64.
        log_noise: the noise as a free parameter, see :func:`~pyro_truncated.gp.subset.gradient.noise_of`.
        objective: ``"vfe"``, ``"pp"`` or ``"fitc"``; the subset of the last is chosen by ``"vfe"``.
        search: how subsets are improved.
        num_inducing: size of the subset.
        generator: source of randomness.
    """

    kernel: DataKernel
    targets: Tensor
    log_noise: Tensor
    objective: str
    search: SubsetSearch
    num_inducing: int
    generator: torch.Generator | None = None

    def run(self, index: Tensor, plan: Plan, record: FitRecord) -> tuple[Tensor, float]:
        """Learns subset and hyper-parameters, from where they are.

        Args:
            index: the subset to start from; empty where there is none yet.
            plan: how they take turns.
            record: takes the objective after each phase.

        Returns:
            The subset, and the objective of it and of the hyper-parameters, the best on the way.

        Raises:
            ValueError: if the objective is not finite at the start.
        """
        num, attempts = plan.rows, plan.attempts
        if not len(index):
            sample = sample_rows(self.kernel, self.targets, index, num, self.generator)
            index = sample.among_all(self._improve(sample, None, Budget(max_attempts=0)))
        best, kept, kept_values = math.inf, index, self._values()
        tolerance = plan.tolerance * len(self.targets)
        for epoch in range(plan.max_epochs + 1):
            sample = sample_rows(self.kernel, self.targets, index, num, self.generator)
            chosen = sample.inducing
            if epoch:
                limit = plan.seconds_left()
                budget = Budget(None, attempts, None if limit == math.inf else max(0.0, limit), record.clock)
                chosen = self._improve(sample, chosen, budget)
                index = sample.among_all(chosen)
                if sample.rows is None:
                    record.note("subset", self._subset_value(index))
            value = self._fit_parameters(sample, chosen, plan)
            if sample.rows is not None:
                # What some rows liked has to prove itself on all.
                value = self._value_of_all(index)
            record.note("hyper" if epoch else "start", value)
            gained = best - value
            if value < best:
                best, kept, kept_values = value, index, self._values()
            elif sample.rows is not None:
                index = kept
                self._restore(kept_values)
            if plan.seconds_left() <= 0 or (plan.gives_up and epoch and not explains_something(best, self.targets)):
                break
            is_settled = bool(epoch) and abs(gained) < tolerance
            if sample.rows is not None:
                num = num if gained >= tolerance else 2 * num
            elif is_settled and attempts > plan.attempts:
                break
            # A few attempts may fail by chance: before it ends, every member has had its turn.
            attempts = plan.attempts + self.num_inducing if is_settled else plan.attempts
        if not math.isfinite(best):
            raise ValueError("the objective is not finite at the start: check the kernel, its parameters and the noise")
        self._restore(kept_values)
        return kept, best

    def _improve(self, sample: RowSample, index: Tensor | None, budget: Budget) -> Tensor:
        problem = SubsetProblem(sample.kernel, sample.targets, self._noise(), self._of_subset())
        return self.search.improve(problem, self.num_inducing, index, budget, self.generator)

    def _fit_parameters(self, sample: RowSample, chosen: Tensor, plan: Plan) -> float:
        return minimize(
            lambda: backward(Basis(sample.kernel, chosen), sample.targets, self.log_noise, self.objective),
            hyper_parameters(self.kernel, self.log_noise),
            max_evaluations=plan.hyper_evaluations,
            is_spent=lambda: plan.seconds_left() <= 0,
        ).value

    @torch.no_grad()
    def _subset_value(self, index: Tensor) -> float:
        """The objective that subsets are chosen by."""
        problem = SubsetProblem(self.kernel, self.targets, self._noise(), self._of_subset())
        return ExchangeFactors(problem, len(index), index).value()

    def _value_of_all(self, index: Tensor) -> float:
        """The objective of all data."""
        if self.objective != "fitc":
            return self._subset_value(index)
        value = backward(Basis(self.kernel, index), self.targets, self.log_noise, "fitc")
        for parameter in hyper_parameters(self.kernel, self.log_noise):
            parameter.grad = None
        return value

    def _of_subset(self) -> str:
        return "vfe" if self.objective == "fitc" else self.objective

    def _noise(self) -> float:
        return float(noise_of(self.log_noise.detach()))

    def _values(self) -> list[Tensor]:
        return [p.detach().clone() for p in hyper_parameters(self.kernel, self.log_noise)]

    @torch.no_grad()
    def _restore(self, values: list[Tensor]) -> None:
        for parameter, value in zip(hyper_parameters(self.kernel, self.log_noise), values, strict=True):
            parameter.copy_(value)


def hyper_parameters(kernel: DataKernel, log_noise: Tensor) -> list[Tensor]:
    """All that a fit learns beside the subset: the kernel's parameters that are not frozen, and the noise."""
    return [*(p for p in kernel.parameters() if p.requires_grad), log_noise]
