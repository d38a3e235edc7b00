r"""Views of labels and counts.

Their likelihoods are bounded by quadratic functions of the latent functions.

The posterior of a latent function :math:`g` under uncertain inputs is no Gaussian, but its first two moments are in closed form. Each
likelihood here therefore has a lower bound that asks for no more,

.. math:: \log p(y \mid g) \ge c - \tfrac12 \sum_d w_d (g_d - t_d)^2,

with equality, and the right slope, at a point that is optimised along. A view sees pseudo-targets :math:`t` with known precisions
:math:`w`, and everything else about it is as in a Gaussian view.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable

import numpy as np
import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Tensor

from pyro_truncated.gplvm.spike_slab.inducing_posterior import Observations
from pyro_truncated.utils.arguments import check_count

_NODES = 32
_DRAWS = 512


class LabelLikelihood(abc.ABC):
    """A likelihood of labels with a quadratic bound.

    Example:
        >>> isinstance(BernoulliLabels(), LabelLikelihood), isinstance(CategoricalLabels(3), LabelLikelihood)
        (True, True)

    Attributes:
        noise: the variance that a precision of one stands for.
        uses_square: whether the best point asks for second moments.
    """

    noise: float = 1.0
    uses_square: bool = False

    def num_functions(self, num_observed: int) -> int:
        """Number of latent functions ``F`` of ``D`` columns of data."""
        return num_observed

    @abc.abstractmethod
    def check(self, y: Tensor, view: int) -> None:
        """Raises ``ValueError`` for data ``(N, D)`` outside the likelihood's support; NaN is missing."""

    @abc.abstractmethod
    def base(self, y: Tensor) -> Tensor:
        """Returns the constant functions ``(F,)`` that fit data ``(N, D)`` best.

        They are a little regularised. Functions deviate from them.
        """

    @abc.abstractmethod
    def best_point(self, first: Tensor, second: Tensor | None) -> Tensor:
        """Returns the point ``(N, F)`` at which the bound is tightest.

        It follows from the functions' first and second moments ``(N, F)``.
        """

    @abc.abstractmethod
    def bound(self, y: Tensor, point: Tensor) -> Observations:
        """The quadratic bound of data ``(N, D)`` at a point ``(N, F)``."""

    @abc.abstractmethod
    def log_prob(self, y: Tensor, functions: Tensor) -> Tensor:
        """Returns log probabilities of data ``(..., D)`` given functions ``(..., F)``.

        They are summed over observed entries, ``(...)``.
        """

    @abc.abstractmethod
    def response(self, loc: Tensor, variance: Tensor) -> Tensor:
        """Expected data (probabilities of each class, rates) ``(N, F)`` under independent normal functions."""

    @abc.abstractmethod
    def distribution(self, functions: Tensor) -> TorchDistribution:
        """The distribution of data ``(..., D)`` given functions ``(..., F)``."""

    def as_numbers(self, y: Tensor) -> Tensor:
        """Returns data ``(N, D)`` as numbers ``(N, F)`` for principal components.

        They are NaN where missing.
        """
        return y


class BernoulliLabels(LabelLikelihood):
    r"""Binary labels in {0, 1}: :math:`p(y = 1 \mid g) = 1 / (1 + e^{-g})`.

    The bound is that of Jaakkola and Jordan, "Bayesian parameter estimation via variational
    methods" (2000): :math:`w = \tanh(\xi/2) / 2\xi`, tightest at :math:`\xi^2 = E g^2`. It is also
    the one of Polya-Gamma augmentation.

    Example:
        >>> model = SpikeSlabMRD(20, [5, 1], 3, likelihood=["gaussian", BernoulliLabels()])  # the second view: zeros, ones, NaN
    """

    uses_square = True

    def check(self, y: Tensor, view: int) -> None:
        """Raises ``ValueError`` for data ``(N, D)`` outside the likelihood's support; NaN is missing."""
        if not bool(((y == 0) | (y == 1) | y.isnan()).all()):
            raise ValueError(f"view {view} has a Bernoulli likelihood: its data must be 0, 1, or NaN where missing")

    def base(self, y: Tensor) -> Tensor:
        """Returns each column's log odds, with half a label added to either."""
        seen, ones = (~y.isnan()).sum(0), y.nansum(0)
        return ((ones + 0.5) / (seen - ones + 0.5)).log()

    def best_point(self, first: Tensor, second: Tensor | None) -> Tensor:
        """Returns the point ``(N, F)`` at which the bound is tightest.

        It is the root of the functions' second moments.
        """
        assert second is not None
        return second.clamp(min=1e-12).sqrt()

    def bound(self, y: Tensor, point: Tensor) -> Observations:
        """The quadratic bound of data ``(N, D)`` at a point ``(N, F)``."""
        seen = ~y.isnan()
        xi = point.abs()
        # Of tanh(x / 2) / 2x the series around zero, where the quotient has no digits.
        weight = torch.where(xi < 1e-4, 0.25 - xi.square() / 48, (xi.clamp(min=1e-4) / 2).tanh() / (2 * xi.clamp(min=1e-4)))
        half = torch.where(seen, y, 0.5) - 0.5
        offset = half.square() / (2 * weight) + weight * xi.square() / 2 - xi / 2 - torch.nn.functional.softplus(-xi)
        return Observations(half / weight, weight * seen, (offset * seen).sum(1))

    def log_prob(self, y: Tensor, functions: Tensor) -> Tensor:
        """Returns log probabilities of data ``(..., D)`` given functions ``(..., F)``.

        They are summed over observed entries, ``(...)``.
        """
        signed = (2 * y.nan_to_num(0.0) - 1) * functions
        found: Tensor = torch.where(y.isnan(), 0.0, torch.nn.functional.logsigmoid(signed)).sum(-1)
        return found

    def response(self, loc: Tensor, variance: Tensor) -> Tensor:
        """Expected labels ``(N, F)``, by quadrature."""
        return _gaussian_mean(torch.sigmoid, loc, variance)

    def distribution(self, functions: Tensor) -> TorchDistribution:
        """The distribution of labels ``(..., F)``."""
        found: TorchDistribution = dist.Bernoulli(logits=functions).to_event(1)
        return found


class _CurvatureBound(LabelLikelihood):
    r"""Likelihoods with a Taylor series of second order below them, as :math:`-\nabla^2 \log p(y \mid g) \preceq \mathrm{diag}(\kappa)`."""

    @abc.abstractmethod
    def slope(self, y: Tensor, point: Tensor) -> Tensor:
        """Derivative of the log probability of complete data at a point ``(N, F)``."""

    @abc.abstractmethod
    def curvature(self, y: Tensor) -> Tensor | None:
        r"""The bounds :math:`\kappa` ``(N, F)``; ``None`` where all are the inverse of :attr:`noise`."""

    def best_point(self, first: Tensor, second: Tensor | None) -> Tensor:
        """The point ``(N, F)`` at which the bound is tightest: the functions' means."""
        return first

    def bound(self, y: Tensor, point: Tensor) -> Observations:
        """The quadratic bound of data ``(N, D)`` at a point ``(N, F)``."""
        seen = ~y.isnan()
        complete = torch.where(seen, y, 0.0)
        slope, curvature = self.slope(complete, point), self.curvature(complete)
        observed = seen.to(point).expand_as(point)
        if curvature is None:
            step, gain = self.noise * slope, self.noise * slope.square() / 2
            weights = None if bool(seen.all()) else observed
        else:
            step, gain, weights = slope / curvature, slope.square() / (2 * curvature), curvature * observed
        return Observations(point + step, weights, self.log_prob(y, point) + (gain * observed).sum(1))


class CategoricalLabels(_CurvatureBound):
    r"""One label per data point, with :math:`p(y = k \mid g) \propto e^{g_k}`.

    Labels are class numbers from 0 on, and the view has one column.

    At any point the Hessian of the log normaliser is at most half the identity (Böhning,
    "Multinomial logistic regression algorithm", 1992). So the view costs as much as a Gaussian one
    with as many outputs as classes.

    Example:
        >>> model = SpikeSlabMRD(20, [5, 1], 3, likelihood=["gaussian", CategoricalLabels(4)])  # the second view: classes 0 to 3, NaN

    Args:
        num_classes: number of classes, at least 2.

    Raises:
        ValueError: for fewer than two classes.
    """

    noise = 2.0

    def __init__(self, num_classes: int) -> None:
        self.num_classes = check_count("num_classes", num_classes, least=2)

    def num_functions(self, num_observed: int) -> int:
        """The number of classes.

        Raises:
            ValueError: if the view has more than one column.
        """
        if num_observed != 1:
            raise ValueError(f"a view of categorical labels has one column of class numbers; got num_observed={num_observed}")
        return self.num_classes

    def check(self, y: Tensor, view: int) -> None:
        """Raises ``ValueError`` for data ``(N, 1)`` outside the likelihood's support; NaN is missing."""
        known = y[~y.isnan()]
        if not bool(((known >= 0) & (known < self.num_classes) & (known == known.round())).all()):
            raise ValueError(f"view {view} has categorical labels: its data must be class numbers 0 .. {self.num_classes - 1}, or NaN")

    def base(self, y: Tensor) -> Tensor:
        """Log frequencies of the classes, with a data point of each added."""
        known = y[~y.isnan()].long()
        return ((torch.bincount(known, minlength=self.num_classes) + 1.0) / (len(known) + self.num_classes)).log().to(y)

    def slope(self, y: Tensor, point: Tensor) -> Tensor:
        """Derivative of the log probability of complete data at a point ``(N, F)``."""
        hot: Tensor = torch.nn.functional.one_hot(y[:, 0].long(), self.num_classes)
        return hot - point.softmax(-1)

    def curvature(self, y: Tensor) -> Tensor | None:
        """``None``: half everywhere."""
        return None

    def log_prob(self, y: Tensor, functions: Tensor) -> Tensor:
        """Returns log probabilities of data ``(..., 1)`` given functions ``(..., F)``.

        They are ``(...)``, and zero where data are missing.
        """
        logits = functions.log_softmax(-1)
        shape = torch.broadcast_shapes(y.shape[:-1], logits.shape[:-1])
        label = y.nan_to_num(0.0).long().expand(*shape, 1)
        found = logits.expand(*shape, -1).gather(-1, label).squeeze(-1)
        return torch.where(y.isnan().squeeze(-1), 0.0, found)

    def response(self, loc: Tensor, variance: Tensor) -> Tensor:
        """Returns expected class probabilities ``(N, F)`` by quasi Monte Carlo.

        The numbers are the same at every call.
        """
        uniform = torch.quasirandom.SobolEngine(self.num_classes, scramble=True, seed=0).draw(_DRAWS, dtype=torch.float64)
        normal = torch.special.ndtri(uniform.clamp(1e-12, 1 - 1e-12)).to(loc)
        total = torch.zeros_like(loc)
        for draw in normal:
            total += (loc + variance.sqrt() * draw).softmax(-1)
        return total / len(normal)

    def distribution(self, functions: Tensor) -> TorchDistribution:
        """The distribution of class numbers ``(..., 1)``."""
        found: TorchDistribution = dist.Categorical(logits=functions.unsqueeze(-2)).to_event(1)
        return found

    def as_numbers(self, y: Tensor) -> Tensor:
        """Returns one-hot labels, NaN where missing."""
        hot = torch.nn.functional.one_hot(y[:, 0].nan_to_num(0.0).long(), self.num_classes).to(y)
        return hot.masked_fill(y.isnan(), torch.nan)


class PoissonCounts(_CurvatureBound):
    r"""Counts: :math:`y \sim \mathrm{Poisson}(\log(1 + e^g))`; the curvature is at most :math:`1/4 + 0.17 y`.

    Example:
        >>> model = SpikeSlabMRD(20, [5, 2], 3, likelihood=["gaussian", PoissonCounts()])  # the second view: counts, NaN

    Reference:
        Seeger and Bouchard, "Fast variational Bayesian inference for non-conjugate matrix factorization models" (2012).
    """

    def check(self, y: Tensor, view: int) -> None:
        """Raises ``ValueError`` for data ``(N, D)`` outside the likelihood's support; NaN is missing."""
        known = y[~y.isnan()]
        if not bool(((known >= 0) & (known == known.round())).all()):
            raise ValueError(f"view {view} has a Poisson likelihood: its data must be counts, or NaN where missing")

    def base(self, y: Tensor) -> Tensor:
        """Returns functions at which each column's rate is its mean.

        Half a count is added.
        """
        rate = (y.nansum(0) + 0.5) / ((~y.isnan()).sum(0) + 1)
        return rate + (-torch.expm1(-rate)).log()

    def slope(self, y: Tensor, point: Tensor) -> Tensor:
        """Derivative of the log probability of complete data at a point ``(N, F)``."""
        return (y / _rate(point) - 1) * point.sigmoid()

    def curvature(self, y: Tensor) -> Tensor | None:
        """The bounds on the curvature ``(N, F)``."""
        return 0.25 + 0.17 * y

    def log_prob(self, y: Tensor, functions: Tensor) -> Tensor:
        """Returns log probabilities of data ``(..., D)`` given functions ``(..., F)``.

        They are summed over observed entries, ``(...)``.
        """
        rate, counts = _rate(functions), y.nan_to_num(0.0)
        found: Tensor = torch.where(y.isnan(), 0.0, counts * rate.log() - rate - (counts + 1).lgamma()).sum(-1)
        return found

    def response(self, loc: Tensor, variance: Tensor) -> Tensor:
        """Expected rates ``(N, F)``, by quadrature."""
        return _gaussian_mean(_rate, loc, variance)

    def distribution(self, functions: Tensor) -> TorchDistribution:
        """The distribution of counts ``(..., F)``."""
        found: TorchDistribution = dist.Poisson(_rate(functions)).to_event(1)
        return found


def _rate(functions: Tensor) -> Tensor:
    rate: Tensor = torch.nn.functional.softplus(functions)
    return rate.clamp(min=torch.finfo(rate.dtype).tiny)


def _gaussian_mean(function: Callable[[Tensor], Tensor], loc: Tensor, variance: Tensor) -> Tensor:
    """Expectation of a function of a normal number, by Gauss-Hermite quadrature."""
    roots, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    total = torch.zeros_like(loc)
    for root, weight in zip(roots.tolist(), (weights / math.sqrt(2 * math.pi)).tolist(), strict=True):
        total += weight * function(loc + root * variance.sqrt())
    return total
