"""What a run has reached, and whether two have reached the same."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from pyro_truncated.states.population import Population

# Standard errors by which equal values may differ.
STANDARD_ERRORS = 3.0
# The correlation above which two models have found the same latent.
SHARED = 0.9
# Standard deviation below which probabilities are constant.
ROUNDING = 1e-4


class FreeEnergyEstimate(NamedTuple):
    """The free energy per data point that a run has reached."""

    free_energy: float
    noise: float = 0.0  # difference of two runs in one optimum: what the last steps gained, or the error of a mean over draws
    each: Tensor | None = None  # the free energies of the data points, (N,), where they are known
    rise: float = 0.0  # what the last five steps have raised it by, if the run has not converged
    remaining_gain: float = 0.0  # what more steps will still gain, if the run has not converged beside continuous latents
    steps: int = 0  # how many the run has taken
    scatter: float = 0.0  # by what deviation data points' free energies may differ in one optimum, beside continuous latents


@dataclasses.dataclass(frozen=True)
class Solution:
    """What a run has learned, or what a move proposes.

    Attributes:
        estimate: the free energy that was reached.
        parameters: those of the model, and medians of continuous latents.
        population: states that training can begin with, and their log joints when they were found; ``None`` if it shall find others.
        companion: the state of the guide of continuous latents, of this solution or of the one that it was made of.
        spread: what the free energy per data point has from the spread of that guide around its medians.
        probabilities: probabilities ``(N, H)`` that binary latents of a network are active, or chains at all steps; ``None`` where all are
            constant. Parameters of networks do not match, and sets of steps are no populations.
    """

    estimate: FreeEnergyEstimate
    parameters: dict[str, Tensor]
    population: Population | None = None
    companion: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    spread: float = 0.0
    probabilities: Tensor | None = None

    @property
    def free_energy(self) -> float:
        """The free energy per data point."""
        return self.estimate.free_energy + self.spread

    @property
    def finite_energy(self) -> float:
        """The same, and minus infinity for a run that failed."""
        return self.free_energy if math.isfinite(self.free_energy) else -math.inf

    @property
    def kept_population(self) -> Population:
        """The population of a solution that has one."""
        assert self.population is not None
        return self.population

    @property
    def states(self) -> Tensor:
        """States of the population, unpacked, ``(N, S, L)``."""
        return self.kept_population.states()

    def replace(self, **fields: object) -> Solution:
        """Returns a solution with other fields."""
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]


NOTHING = Solution(FreeEnergyEstimate(-math.inf), {})


def estimate_mean(values: Sequence[float]) -> FreeEnergyEstimate:
    """Returns the mean of noisy values and three standard errors."""
    spread = torch.tensor(values, dtype=torch.float64).std(correction=1) if len(values) > 1 else torch.zeros(())
    return FreeEnergyEstimate(sum(values) / len(values), STANDARD_ERRORS * float(spread) / math.sqrt(len(values)))


def estimate_on_trend(values: Sequence[float]) -> FreeEnergyEstimate:
    r"""Returns the mean of rising noisy values and three standard errors.

    The errors are those around a cubic through the values, or a line through less than ten. Values of successive steps are correlated.
    With a correlation :math:`\rho` of neighbours the standard error is that of independent values times
    :math:`\sqrt{(1 + \rho) / (1 - \rho)}`. Residuals of a cubic through :math:`n` values underestimate :math:`\rho` by about
    :math:`(4 + 8 \rho) / n`. It is at most 0.8, and zero for less than ten values.
    """
    number = len(values)
    degree = 3 if number > 9 else 1
    times = torch.linspace(-1.0, 1.0, number, dtype=torch.float64)
    basis = torch.linalg.qr(torch.stack([times**power for power in range(degree + 1)], 1)).Q
    noisy = torch.tensor(values, dtype=torch.float64)
    noisy = noisy - noisy.mean()
    residuals = noisy - basis @ (basis.mT @ noisy)
    total, free, correlation = float(residuals.square().sum()), number - degree - 1, 0.0
    if degree == 3 and total > 0.0:
        correlation = (float(residuals[1:] @ residuals[:-1]) / total + 4 / number) / (1 - 8 / number)
        correlation = min(max(correlation, 0.0), 0.8)
    spread = math.sqrt(total / free) if free > 0 else 0.0
    error = spread / math.sqrt(number) * math.sqrt((1 + correlation) / (1 - correlation))
    return FreeEnergyEstimate(sum(values) / number, STANDARD_ERRORS * error)


def best_two(estimates: Sequence[FreeEnergyEstimate]) -> list[FreeEnergyEstimate]:
    """Returns the best two."""
    return sorted(estimates, key=lambda one: one.free_energy, reverse=True)[:2]


def energies_agree(best: FreeEnergyEstimate, second: FreeEnergyEstimate, tolerance: float) -> bool:
    """Whether two runs reached one free energy, within tolerance and noise.

    Both must have converged: what they will still gain lies in the tolerance. Data points at either end do not count, see
    :func:`without_extremes`; terms of no data point count in full.
    """
    difference = best.free_energy - second.free_energy
    if best.each is not None and second.each is not None:
        each = best.each - second.each
        difference += float(without_extremes(each).mean() - each.mean())
    return max(best.remaining_gain, second.remaining_gain) <= tolerance and abs(difference) <= tolerance + min(best.noise, second.noise)


def is_gain_below_error(estimates: Sequence[FreeEnergyEstimate]) -> bool:
    r"""Whether the expected gain of another restart is below its error.

    The error is that of five more steps of the best two, or of chance.

    The expected gain of restart :math:`K + 1` is the lead of the best divided by :math:`K`, a mean over all orders. Restarts that still
    rise by as much cannot be compared. Of three restarts and more, chance does not count either: the standard error
    :math:`\sigma / \sqrt N` of the difference, with the deviation :math:`\sigma` of the differences at the :math:`N` data points.
    """
    if len(estimates) < 2:
        return False
    best, second = best_two(estimates)
    if best.each is None or second.each is None:
        return False
    can_differ = len(estimates) >= 3 and len(best.each) > 1
    error = float((best.each - second.each).std()) / math.sqrt(len(best.each)) if can_differ else 0.0
    return (best.free_energy - second.free_energy) / len(estimates) < max(min(best.rise, second.rise), error)


def explain_equally(one: FreeEnergyEstimate, other: FreeEnergyEstimate, tolerance: float) -> bool:
    """Whether two runs explain the same data points equally well.

    The free energies of data points then differ by a standard deviation of at most three tolerances. In one optimum reached by gradients
    they differed by 0.02 to 0.05. In others, whose means were equal to 0.05, they differed by 0.3 to 2.

    Medians of continuous latents differ by the noise of gradients, so their scatter is allowed, too.
    """
    if one.each is None or other.each is None:
        return True
    return float(without_extremes(one.each - other.each).std(correction=0)) <= max(3.0 * tolerance, one.scatter, other.scatter)


def without_extremes(differences: Tensor) -> Tensor:
    """Leaves out 1 % at either end: a search misses few states, by much."""
    number = int(0.01 * len(differences))
    return differences.sort().values[number : len(differences) - number]


def match_latents(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Returns absolute correlations ``(H, H)`` of two models' latents, and partners.

    Latents have probabilities ``(N, H)`` for the same data points; constant ones correlate with nothing.
    """
    parts = []
    for value in (one, other):
        deviation = value - value.mean(0)
        parts.append(normalize(deviation.where(deviation.square().mean(0).sqrt() > ROUNDING, 0.0), dim=0))
    # This takes longer to import than all of the library.
    from scipy.optimize import linear_sum_assignment

    correlation = (parts[0].mT @ parts[1]).abs()
    return correlation, torch.from_numpy(linear_sum_assignment(correlation.numpy(), maximize=True)[1])


def shared_mask(one: Tensor, other: Tensor) -> Tensor:
    """Whether the other model has a latent that correlates with each, ``(H,)``."""
    correlation, partner = match_latents(one, other)
    return correlation.gather(1, partner.unsqueeze(1)).squeeze(1) > SHARED


def share_most(one: Tensor, other: Tensor, most_apart: float) -> bool:
    """Whether most latents that vary have a partner in the other model."""
    apart = [(~shared_mask(*pair), vary(pair[0])) for pair in ((one, other), (other, one))]
    return all(float((is_alone & varies).sum()) <= most_apart * float(varies.sum()) for is_alone, varies in apart)


def vary(code: Tensor) -> Tensor:
    """Whether latents of probabilities ``(N, H)`` vary over data points, ``(H,)``."""
    return code.std(0, correction=0) > ROUNDING
