"""Whether two runs from different starts have reached the same optimum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import pyro.poutine as poutine
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import normalize

from pyro_truncated.em.gibbs import GibbsGuide
from pyro_truncated.utils.parameter_store import spare_random_numbers

# Tolerances by which data points differ between different optima.
STANDARD_ERRORS = 3.0
# Values too few for a correlation; degree of the trend; largest correlation told from a trend.
_FEW, _DEGREE, _MOST_CORRELATED = 9, 3, 0.8
# The correlation above which two models have found the same latent.
SHARED = 0.9
# Standard deviation below which probabilities are constant.
ROUNDING = 1e-4


class FreeEnergyEstimate(NamedTuple):
    """The free energy per data point that a run has reached.

    Attributes:
        free_energy: its value.
        noise: difference of two runs in one optimum: overfit of redundant latents, or the error of a mean over draws.
        each: the free energies of the data points, ``(N,)``, where they are known.
        rise: what its last five steps have raised it by, if it has not converged.
        remaining: what it will still gain with more steps, if it has not converged beside continuous latents.
        steps: how many it has taken.
    """

    free_energy: float
    noise: float = 0.0
    each: Tensor | None = None
    rise: float = 0.0
    remaining: float = 0.0
    steps: int = 0


def estimate_mean(values: Sequence[float]) -> FreeEnergyEstimate:
    """Returns the mean of noisy values and three standard errors."""
    spread = torch.tensor(values, dtype=torch.float64).std(correction=1) if len(values) > 1 else torch.zeros(())
    return FreeEnergyEstimate(sum(values) / len(values), STANDARD_ERRORS * float(spread) / math.sqrt(len(values)))


def estimate_on_trend(values: Sequence[float]) -> FreeEnergyEstimate:
    r"""Returns the mean of rising noisy values and three standard errors.

    The errors are those around a curve through the values.

    The curve is a cubic, or a line through less than ten values. Values of successive steps are correlated. With a correlation
    :math:`\rho` of neighbours the standard error is that of independent values times :math:`\sqrt{(1 + \rho) / (1 - \rho)}`. Residuals of
    a cubic through :math:`n` values underestimate :math:`\rho` by about :math:`(4 + 8 \rho) / n`. It is at most 0.8, and zero for less
    than ten values.
    """
    number = len(values)
    degree = 1 if number <= _FEW else _DEGREE
    times = torch.linspace(-1.0, 1.0, number, dtype=torch.float64)
    basis = torch.linalg.qr(torch.stack([times**power for power in range(degree + 1)], 1)).Q
    noisy = torch.tensor(values, dtype=torch.float64)
    noisy = noisy - noisy.mean()
    residuals = noisy - basis @ (basis.mT @ noisy)
    free = number - degree - 1
    spread = math.sqrt(float(residuals.square().sum()) / free) if free > 0 else 0.0
    error = spread / math.sqrt(number) * math.sqrt(_inflation(residuals))
    return FreeEnergyEstimate(sum(values) / number, STANDARD_ERRORS * error)


def _inflation(residuals: Tensor) -> float:
    """Returns the variance of a mean relative to independent values.

    It is estimated from the residuals of a cubic.
    """
    number, total = len(residuals), float(residuals.square().sum())
    if number <= _FEW or total == 0.0:
        return 1.0
    neighbours = float(residuals[1:] @ residuals[:-1]) / total
    correlation = min(max((neighbours + (_DEGREE + 1) / number) / (1 - 2 * (_DEGREE + 1) / number), 0.0), _MOST_CORRELATED)
    return (1 + correlation) / (1 - correlation)


def have_agreed(reached: Sequence[FreeEnergyEstimate], tolerance: float) -> bool:
    """Whether the best two reached one free energy, within tolerance and noise.

    Both must have converged: what they will still gain lies in the tolerance.
    """
    if len(reached) < 2:
        return False
    best, second = sorted(reached, key=lambda one: one.free_energy, reverse=True)[:2]
    have_converged = max(best.remaining, second.remaining) <= tolerance
    return have_converged and abs(_difference(best, second)) <= tolerance + min(best.noise, second.noise)


def is_gain_below_error(reached: Sequence[FreeEnergyEstimate]) -> bool:
    r"""Whether the expected gain of another restart is below its error.

    The error is that of five more steps of the best two, or of chance.

    The expected gain of restart :math:`K + 1` is the lead of the best divided by :math:`K`, a mean over all orders. Restarts that still
    rise by as much cannot be compared, and more steps of the best are worth more. Of three restarts and more, chance does not count
    either. On other data the difference of the best two has the standard error :math:`\sigma / \sqrt N`. Here :math:`\sigma` is the
    deviation of the differences of their free energies at the :math:`N` data points.
    """
    if len(reached) < 2:
        return False
    best, second = sorted(reached, key=lambda one: one.free_energy, reverse=True)[:2]
    if best.each is None or second.each is None:
        return False
    # Restarts from which on the best may lead by chance.
    can_differ = len(reached) >= 3 and len(best.each) > 1
    error = float((best.each - second.each).std()) / math.sqrt(len(best.each)) if can_differ else 0.0
    return (best.free_energy - second.free_energy) / len(reached) < max(min(best.rise, second.rise), error)


def are_alike(one: FreeEnergyEstimate, other: FreeEnergyEstimate, tolerance: float) -> bool:
    """Whether two runs explain the same data points equally well.

    The free energies of data points then differ by a standard deviation of at most three tolerances, without 1 % at either end. In one
    optimum reached by gradients they differed by 0.02 to 0.05. In others, whose means were equal to 0.05, they differed by 0.3 to 2.
    """
    if one.each is None or other.each is None:
        return True
    return float(_usual(one.each - other.each).std(correction=0)) <= 3.0 * tolerance


def _usual(differences: Tensor) -> Tensor:
    ordered = differences.sort().values
    # Share of extreme differences on each side that does not count: a search misses few states, by
    # much.
    number = int(0.01 * len(ordered))
    return ordered[number : len(ordered) - number]


def _difference(one: FreeEnergyEstimate, other: FreeEnergyEstimate) -> float:
    """Returns differences of free energies, without 1 % at either end."""
    whole = one.free_energy - other.free_energy
    if one.each is None or other.each is None:
        return whole
    differences = one.each - other.each
    # Terms of no data point count in full.
    return whole + float(_usual(differences).mean() - differences.mean())


@torch.no_grad()
def likelihoods(guide: GibbsGuide, y: Tensor) -> Tensor:
    """Returns mean log likelihoods of the data points over draws, ``(N,)``.

    They show what a search has missed.
    """
    likelihoods = []
    for coefficients in guide.draws().spread(guide.model.num_latents).unbind(1):
        values = guide.model.site_values(coefficients)
        with spare_random_numbers(), poutine.block():
            trace = poutine.trace(poutine.condition(guide.model, values)).get_trace(y)
        trace.compute_log_prob()
        likelihoods += [trace.nodes[name]["log_prob"] for name in trace.observation_nodes if name not in values]
    return torch.stack(likelihoods).mean(0).double()


def match_latents(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Returns correlations ``(H, H)`` of two models' latents, and partners.

    Args:
        one: probabilities ``(N, H)`` that its latents are on.
        other: those of the other model, of the same data points.
    """
    correlation = _correlation(one, other)
    return correlation, torch.from_numpy(linear_sum_assignment(correlation.numpy(), maximize=True)[1])


def are_shared(one: Tensor, other: Tensor) -> Tensor:
    """Whether each latent of the first model has a partner, ``(H,)``.

    Partners are active, or inactive, for the same data points.
    """
    correlation, partner = match_latents(one, other)
    return correlation.gather(1, partner.unsqueeze(1)).squeeze(1) > SHARED


def share_most(one: Tensor, other: Tensor, most_apart: float) -> bool:
    """Whether most latents of both models have a partner in the other.

    Latents that are the same for all data points do not count.
    """
    apart = [(~are_shared(*pair), vary(pair[0])) for pair in ((one, other), (other, one))]
    return all(float((lost & varies).sum()) <= most_apart * float(varies.sum()) for lost, varies in apart)


def vary(code: Tensor) -> Tensor:
    """Whether latents of probabilities ``(N, H)`` vary over data points, ``(H,)``."""
    return code.std(0, correction=0) > ROUNDING


def _correlation(one: Tensor, other: Tensor) -> Tensor:
    """Returns absolute correlations ``(H, H)`` of probabilities ``(N, H)``.

    They are 0 for constant latents.
    """
    parts = []
    for value in (one, other):
        deviation = value - value.mean(0)
        parts.append(normalize(deviation.where(deviation.square().mean(0).sqrt() > ROUNDING, 0.0), dim=0))
    return (parts[0].mT @ parts[1]).abs()
