"""Other starts for fits that find nothing: where length-scales are far too long, what bends within them looks like noise."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_truncated.gp.data_kernels import DataKernel, RestrictedKernel
from pyro_truncated.gp.kernels.evaluation import outside_of_programs
from pyro_truncated.gp.subset.alternation import Plan, hyper_parameters
from pyro_truncated.gp.subset.exact_regression import fit_exactly
from pyro_truncated.gp.subset.fit_record import FitRecord
from pyro_truncated.gp.subset.objective import explains_something

# Few enough for a second or two each; of 500, the exact regression took one of four relevant inputs of 32 for irrelevant.
SCOUTED, SCOUTING_ITERATIONS = 800, 30
LEAST_EXPLAINED = 0.1
_SHARES = (1.0, 0.5, 0.25)


def fitted_from_some_start(
    attempt: Callable[[bool], float],
    kernel: DataKernel,
    targets: Tensor,
    log_noise: Tensor,
    record: FitRecord,
    generator: torch.Generator | None = None,
) -> float:
    """Fits from where the parameters are; where that finds nothing, from what an exact regression on some hundred data points finds.

    Inducing inputs that are too few for short length-scales cannot tell that these are better, and long ones are a corner that no gradient
    leads out of. If the regression finds nothing, either, the fit goes on from where it was first to start.

    Args:
        attempt: fits from where the parameters are, and returns the objective; told whether it may give up early.
        kernel: the kernel; without length-scales to learn there is one attempt.
        targets: standardised, ``(n, H)``.
        log_noise: the noise as a free parameter.
        record: says how much time is left, of which the search for another start takes half at most.
        generator: source of randomness.

    Returns:
        The objective.
    """
    if not learned_length_scales(kernel):
        return attempt(False)
    parameters = hyper_parameters(kernel, log_noise)
    start = copies(parameters)
    value = attempt(True)
    if explains_something(value, targets) or record.seconds_left() <= 0:
        return value
    rows = torch.randperm(len(targets), generator=generator)[:SCOUTED].to(targets.device)
    some, plan = RestrictedKernel(kernel, rows, borrowed=True), Plan(SCOUTING_ITERATIONS, record.share_left(0.5))

    def scout() -> float:
        """An exact regression on the rows."""
        scouted = fit_exactly(some, targets[rows], log_noise, parameters, plan, FitRecord([]))
        return scouted if explains_something(scouted, targets[rows], LEAST_EXPLAINED) else math.inf

    restore(parameters, best_scouted(scout, kernel, parameters, start) or start)
    return attempt(False)


def best_scouted(scout: Callable[[], float], kernel: DataKernel, parameters: list[Tensor], start: list[Tensor]) -> list[Tensor] | None:
    """What scouts find that start from all, a half and a quarter of the length-scales: the parameters of the best.

    Args:
        scout: fits to some of the data, from where the parameters are; returns the objective, infinity where that explains too little.
        kernel: the kernel, whose length-scales are shortened.
        parameters: all that is learned, changed in place.
        start: values of the parameters to start from.

    Returns:
        Values of the parameters, or ``None`` if no scout finds anything.
    """
    best, found = math.inf, None
    for share in _SHARES:
        restore(parameters, start)
        _shorten(kernel, share)
        scouted = scout()
        if scouted < best:
            best, found = scouted, copies(parameters)
    return found


def learned_length_scales(kernel: DataKernel) -> list[torch.nn.Module]:
    """Kernels of Pyro and of GPyTorch whose length-scales are learned."""
    learned = {"lengthscale_unconstrained", "raw_lengthscale"}
    return [
        module for module in kernel.modules() if any(p.requires_grad and n in learned for n, p in module.named_parameters(recurse=False))
    ]


@torch.no_grad()
def _shorten(kernel: DataKernel, share: float) -> None:
    with outside_of_programs():
        for module in learned_length_scales(kernel):
            setattr(module, "lengthscale", share * getattr(module, "lengthscale").detach())  # noqa: B009, B010


@torch.no_grad()
def restore(parameters: list[Tensor], values: list[Tensor]) -> None:
    """Sets parameters to values that :func:`copies` gave."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def copies(parameters: list[Tensor]) -> list[Tensor]:
    """Values of parameters."""
    return [parameter.detach().clone() for parameter in parameters]
