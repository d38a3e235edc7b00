"""Alternates between the inducing subset and hyper-parameters, by one objective.

The likelihood of the projected process is no bound: some data points are kept out of sight to calibrate variances.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_truncated.gp.cholesky import stable_cholesky
from pyro_truncated.gp.data_kernels.protocol import DataKernel, InputKernel, RestrictedKernel
from pyro_truncated.gp.kernels import outside_programs
from pyro_truncated.gp.noisy_covariance import DenseCovariance
from pyro_truncated.gp.optimization import FitRecord, FitSettings, minimize
from pyro_truncated.gp.subset.objectives import (
    Basis,
    FreeBasis,
    SubsetProblem,
    backward,
    backward_through,
    covariances_with,
    noise_from_log,
    objective_at_share,
)
from pyro_truncated.gp.subset.subset_search import Budget, ExchangeFactors, SubsetSearch, random_subset
from pyro_truncated.utils.arguments import check_count
from pyro_truncated.utils.console import note_once
from pyro_truncated.utils.parameter_store import load_snapshot, snapshot

# Measured, one core, eight inputs: fits of 3000, 4000 and 5000 data points took 32, 58 and 108 CPU seconds; the last process 1.1 GiB.
EXACT_UP_TO = 5000


def default_size(num_data: int) -> int:
    """Returns and logs the default number of inducing inputs, all if affordable."""
    if num_data <= EXACT_UP_TO:
        note_once(f"SubsetGPRegression is exact on up to {EXACT_UP_TO} data points; num_inducing=... makes it sparse, and faster")
        return num_data
    default = 512
    note_once(f"SubsetGPRegression takes up to {default} inducing inputs on more than {EXACT_UP_TO} data points; see num_inducing")
    return default


def exact_backward(kernel: DataKernel, targets: Tensor, log_noise: Tensor, weight: float = 1.0) -> float:
    """Adds the gradient of a weighted objective to covariances' and noise's leaves."""
    with torch.enable_grad():
        matrix = Basis(kernel, torch.arange(len(targets), device=targets.device)).square()
        covariance = matrix + torch.diag_embed(noise_from_log(log_noise).expand(len(matrix)))
    return evidence_backward(covariance, targets, weight)


def evidence_backward(covariance: Tensor, targets: Tensor, weight: float = 1.0) -> float:
    """The weighted objective of targets ``(n, H)``, with gradients in place."""
    with torch.no_grad():
        factor = stable_cholesky(covariance)
        a = torch.cholesky_solve(targets, factor)
        value = 0.5 * (targets * a).sum() + targets.shape[1] * factor.diagonal().log().sum()
        slope = torch.cholesky_inverse(factor).mul_(0.5 * weight * targets.shape[1]).addmm_(a, a.mT, alpha=-0.5 * weight)
        del factor
    backward_through([(covariance, slope)])
    return weight * float(value)


def fit_exactly(
    kernel: DataKernel, targets: Tensor, log_noise: Tensor, parameters: list[Tensor], settings: FitSettings, record: FitRecord
) -> float:
    """Learns as :func:`learn_exactly`, in place; returns the objective."""
    return learn_exactly(lambda weight: exact_backward(kernel, targets, log_noise, weight), len(targets), parameters, settings, record)


def learn_exactly(
    objective: Callable[[float], float], size: int, parameters: list[Tensor], settings: FitSettings, record: FitRecord
) -> float:
    """Minimises an objective by L-BFGS, in place; returns the smallest value.

    ``objective`` returns the objective times a weight, whose gradient it adds to the parameters. The gain in the settings
    is for each of ``size`` targets.
    """
    minimum = minimize(
        lambda: objective(1 / size),
        parameters,
        max_iterations=settings.max_epochs,
        tolerance=settings.tolerance,
        should_stop=lambda: settings.remaining_seconds() <= 0,
        on_better=lambda value: record.note("exact", size * value),
    )
    if not minimum.value < float("inf"):
        raise ValueError(f"the objective must be finite at the start; got {minimum.value}. Check the kernel, its parameters and the noise")
    return size * minimum.value


class ExactPosterior:
    """The posterior of a Gaussian process given all training data."""

    @torch.no_grad()
    def __init__(self, kernel: DataKernel, targets: Tensor, noise: float) -> None:
        self.basis, self.targets = Basis(kernel, torch.arange(len(targets), device=targets.device)), targets
        self.covariance = DenseCovariance(self.basis.square(), torch.as_tensor(noise, dtype=targets.dtype, device=targets.device))
        self.weights = torch.cholesky_solve(targets, self.covariance.cholesky)

    def marginals(self, new: Any) -> tuple[Tensor, Tensor]:
        """Means ``(n_new, H)`` and variances ``(n_new,)`` of the function."""
        cross, prior = covariances_with(self.basis, new)
        return cross @ self.weights, (prior - self._explain(cross).square().sum(0)).clamp(min=0.0)

    def joint(self, new: Any) -> tuple[Tensor, Tensor]:
        """Means ``(n_new, H)`` and covariances ``(n_new, n_new)`` of the function, differentiable in numeric inputs."""
        cross, _ = covariances_with(self.basis, new)
        explained = self._explain(cross)
        return cross @ self.weights, self.basis.kernel.among(new).double() - explained.mT @ explained

    def _explain(self, cross: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.covariance.cholesky, cross.mT, upper=False)

    @torch.no_grad()
    def leave_one_out(self) -> tuple[Tensor, Tensor]:
        """Means ``(n, H)`` and variances ``(n,)`` with noise, given all others."""
        return self.covariance.leave_one_out(self.targets)


class RowSample(NamedTuple):
    """Data points to learn from."""

    kernel: DataKernel  # the kernel on these alone
    targets: Tensor  # (r, H)
    inducing: Tensor  # where the inducing inputs are among them, (m,)
    rows: Tensor | None  # where they are among all data points, (r,). None if they are all.

    def among_all(self, index: Tensor) -> Tensor:
        """Positions among all data points of those at ``index`` in the sample."""
        return index if self.rows is None else self.rows[index]


def sample_rows(kernel: DataKernel, targets: Tensor, index: Tensor, num: int, generator: torch.Generator | None = None) -> RowSample:
    """Inducing inputs at positions ``index`` and random others, ``num`` in all."""
    if num >= len(targets):
        return RowSample(kernel, targets, index, None)
    order = random_subset(len(targets), len(targets), generator, targets.device)
    others = order[~torch.isin(order, index)][: max(0, num - len(index))]
    rows = torch.cat([index, others])
    inside = torch.arange(len(index), device=rows.device)
    return RowSample(RestrictedKernel(kernel, rows, borrowed=True), targets[rows], inside, rows)


def num_alternation_rows(num_data: int, num_inducing: int, max_rows: int | None) -> int:
    """How many data points an alternation uses, at most ``max_rows``."""
    if max_rows is None:
        # All of moderate data; of more a sample, with four rows for each inducing input at least.
        return num_data if num_data <= 50_000 else max(20_000, 4 * num_inducing)
    if check_count("max_rows", max_rows) < num_inducing:
        raise ValueError(f"max_rows must be at least num_inducing={num_inducing}; got {max_rows}")
    return max_rows


@dataclasses.dataclass(frozen=True)
class Alternation:
    """Data, kernel, noise and the search for a subset, learned in place."""

    kernel: DataKernel  # the kernel on the training inputs
    targets: Tensor  # (n, H) float64
    log_noise: Tensor  # unconstrained noise, see noise_from_log
    objective: str  # "vfe", "pp" or "fitc". The subset of the last is chosen by "vfe".
    search: SubsetSearch  # how subsets are improved
    num_inducing: int  # size of the subset
    generator: torch.Generator | None = None  # source of randomness

    def run(self, index: Tensor, settings: FitSettings, record: FitRecord) -> tuple[Tensor, float]:
        """Learns from ``index``; returns the best subset and objective."""
        num, attempts = settings.rows, settings.attempts
        if not len(index):
            sample = sample_rows(self.kernel, self.targets, index, num, self.generator)
            index = sample.among_all(self._improve(sample, None, Budget(max_attempts=0)))
        best, best_index, best_parameters = math.inf, index, snapshot(self._trainable_parameters())
        tolerance = settings.tolerance * len(self.targets)
        for epoch in range(settings.max_epochs + 1):
            sample = sample_rows(self.kernel, self.targets, index, num, self.generator)
            members = sample.inducing
            if epoch:
                limit = settings.remaining_seconds()
                budget = Budget(None, attempts, None if limit == math.inf else max(0.0, limit), record.clock)
                members = self._improve(sample, members, budget)
                index = sample.among_all(members)
                if sample.rows is None:
                    record.note("subset", self._subset_value(index))
            value = self._fit_parameters(sample, members, settings)
            if sample.rows is not None:
                # What some rows liked has to prove itself on all.
                value = self._full_objective(index)
            record.note("hyper" if epoch else "start", value)
            gained = best - value
            if value < best:
                best, best_index, best_parameters = value, index, snapshot(self._trainable_parameters())
            elif sample.rows is not None:
                index = best_index
                load_snapshot(self._trainable_parameters(), best_parameters)
            if settings.remaining_seconds() <= 0 or (settings.gives_up and epoch and not best < objective_at_share(self.targets)):
                break
            is_settled = bool(epoch) and abs(gained) < tolerance
            if sample.rows is not None:
                num = num if gained >= tolerance else 2 * num
            elif is_settled and (attempts > settings.attempts or not settings.tries_all):
                break
            # A few attempts may fail by chance: before it ends, every member has had its turn.
            attempts = settings.attempts + self.num_inducing if is_settled else settings.attempts
        if not math.isfinite(best):
            raise ValueError(f"the objective must be finite at the start; got {best}. Check the kernel, its parameters and the noise")
        load_snapshot(self._trainable_parameters(), best_parameters)
        return best_index, best

    def _improve(self, sample: RowSample, index: Tensor | None, budget: Budget) -> Tensor:
        problem = self._subset_problem(sample.kernel, sample.targets)
        return self.search.improve(problem, self.num_inducing, index, budget, self.generator)

    def _fit_parameters(self, sample: RowSample, index: Tensor, settings: FitSettings) -> float:
        return minimize(
            lambda: backward(Basis(sample.kernel, index), sample.targets, self.log_noise, self.objective),
            self._trainable_parameters(),
            max_evaluations=settings.hyper_evaluations,
            should_stop=lambda: settings.remaining_seconds() <= 0,
        ).value

    @torch.no_grad()
    def _subset_value(self, index: Tensor) -> float:
        """The objective that subsets are chosen by."""
        problem = self._subset_problem(self.kernel, self.targets)
        return ExchangeFactors(problem, len(index), index).value()

    def _full_objective(self, index: Tensor) -> float:
        if self.objective != "fitc":
            return self._subset_value(index)
        value = backward(Basis(self.kernel, index), self.targets, self.log_noise, "fitc")
        for parameter in self._trainable_parameters():
            parameter.grad = None
        return value

    def _subset_problem(self, kernel: DataKernel, targets: Tensor) -> SubsetProblem:
        objective = "vfe" if self.objective == "fitc" else self.objective
        return SubsetProblem(kernel, targets, float(noise_from_log(self.log_noise.detach())), objective)

    def _trainable_parameters(self) -> list[Tensor]:
        return hyper_parameters(self.kernel, self.log_noise)


def hyper_parameters(kernel: DataKernel, log_noise: Tensor) -> list[Tensor]:
    """Returns the kernel's parameters that are not frozen, and the noise."""
    return [*(p for p in kernel.parameters() if p.requires_grad), log_noise]


# Few enough for a second or two each; of 500, the exact regression took one of four relevant inputs of 32 for irrelevant.
SCOUTED, SCOUTING_ITERATIONS = 800, 30
# Of standardised targets. From more noise, what varies at short length-scales often remains noise.
SCOUTING_NOISE = 0.03
# Gains of less than so many nats are a matter of the rows.
LEAST_EXPLAINED, MIN_SCOUTED_GAIN = 0.1, 1.0


def fit_with_restart(
    attempt: Callable[[bool], float],
    kernel: DataKernel,
    targets: Tensor,
    log_noise: Tensor,
    record: FitRecord,
    index: Tensor,
    generator: torch.Generator | None,
) -> float:
    """Fits from the current parameters, or from those of an exact regression.

    Long length-scales that explain a part as a trend are a local optimum, and too few inducing inputs for short ones cannot tell that these
    are better. If the fit finds nothing, or an exact regression on some hundred data points finds more, that says where to start again.
    The search for another start takes half of the time left at most.

    An ``attempt`` fits from where the parameters are, and gives up if it finds nothing and is told to. The ``index`` is what it changes
    beside parameters, the subset.
    """
    if not kernels_with_length_scales(kernel):
        return attempt(False)
    parameters = hyper_parameters(kernel, log_noise)
    start = snapshot(parameters)
    value = attempt(True)
    has_found = value < objective_at_share(targets)
    if record.remaining_seconds() <= 0:
        return value
    # To tell whether there is more than what was found, a quarter of them suffices.
    rows = torch.randperm(len(targets), generator=generator)[: SCOUTED // (4 if has_found else 1)].to(targets.device)
    some, settings = RestrictedKernel(kernel, rows, borrowed=True), FitSettings(SCOUTING_ITERATIONS, record.budget(0.5))

    def fit_some() -> float:
        return fit_exactly(some, targets[rows], log_noise, parameters, settings, FitRecord([]))

    def scout() -> float:
        if log_noise.requires_grad:
            log_noise.data.fill_(math.log(SCOUTING_NOISE))
        scouted = fit_some()
        return scouted if scouted < objective_at_share(targets[rows], LEAST_EXPLAINED) else math.inf

    everything = [*parameters, index]
    found, reached = snapshot(everything), fit_some() if has_found else math.inf
    best, best_parameters = scout_length_scales(scout, kernel, parameters, start)
    if not has_found:
        load_snapshot(parameters, best_parameters or start)
        return attempt(False)
    if best_parameters is not None and best < reached - MIN_SCOUTED_GAIN:
        load_snapshot(parameters, best_parameters)
        if (other := attempt(False)) < value:
            return other
    load_snapshot(everything, found)
    return value


def scout_length_scales(
    scout: Callable[[], float], kernel: DataKernel, parameters: list[Tensor], start: list[Tensor]
) -> tuple[float, list[Tensor] | None]:
    """Returns the least objective of short fits, and its parameters, if any."""
    best, best_parameters = math.inf, None
    for share in (1.0, 0.5, 0.25, 0.125, 0.0625):
        load_snapshot(parameters, start)
        with torch.no_grad(), outside_programs():
            for module in kernels_with_length_scales(kernel):
                setattr(module, "lengthscale", share * getattr(module, "lengthscale").detach())  # noqa: B009, B010
        value = scout()
        if value < best:
            best, best_parameters = value, snapshot(parameters)
    return best, best_parameters


def kernels_with_length_scales(kernel: DataKernel) -> list[torch.nn.Module]:
    """Kernels of Pyro and of GPyTorch whose length-scales are learned."""
    names = {"lengthscale_unconstrained", "raw_lengthscale"}
    return [module for module in kernel.modules() if any(p.requires_grad and n in names for n, p in module.named_parameters(recurse=False))]


class SomeInputs(InputKernel):
    """A kernel of numeric inputs on some training inputs."""

    def __init__(self, kernel: InputKernel, rows: Tensor) -> None:
        super().__init__(kernel.inputs[rows])
        self._lent = (kernel,)

    def between(self, first: Tensor, second: Tensor) -> Tensor:
        """Covariances ``(a, b)`` of points ``(a, D)`` and ``(b, D)``, differentiable in both."""
        return self._lent[0].between(first, second)

    def variances(self, points: Tensor) -> Tensor:
        """Variances ``(a,)`` of points ``(a, D)``."""
        return self._lent[0].variances(points)


def held_out_rows(num_data: int, members: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Returns a random tenth of the data outside the subset, at most 1000."""
    order = random_subset(num_data, num_data, generator, members.device)
    return order[~torch.isin(order, members)][: min(1000, int(0.1 * num_data))]


def optimize_free_inputs(
    kernel: InputKernel, inputs: Tensor, targets: Tensor, log_noise: Tensor, objective: str, held_out: Tensor, most: int, record: FitRecord
) -> float:
    """Optimises inducing inputs, kernel parameters and noise on all data but ``held_out``."""
    rows = torch.ones(len(targets), dtype=torch.bool, device=targets.device).index_fill(0, held_out, False)
    fitted_kernel, parameters = (SomeInputs(kernel, rows) if len(held_out) else kernel), [*hyper_parameters(kernel, log_noise), inputs]
    value = minimize(
        lambda: backward(FreeBasis(fitted_kernel, inputs), targets[rows], log_noise, objective),
        parameters,
        max_evaluations=most,
        should_stop=lambda: record.remaining_seconds() <= 0,
        on_better=lambda better: None if len(held_out) else record.note("free", better),
    ).value
    if len(held_out):
        value = backward(FreeBasis(kernel, inputs), targets, log_noise, objective)
        record.note("free", value)
        for parameter in parameters:
            parameter.grad = None
    return value
