"""Exponential-family observations with means superposed by maximum.

They are counts, binary data or waiting times.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Distribution, Exponential, Gamma, Poisson, constraints

from pyro_truncated import ops
from pyro_truncated.distributions.superposition import Statistics, Superposition, check_binary, data_sums
from pyro_truncated.ops.unpacked import largest
from pyro_truncated.states.population import Population
from pyro_truncated.utils.constraints import or_missing, without_missing


class FamilyMaximum(Superposition):
    r"""Base of exponential families around the largest active mean, or a background.

    .. math:: m_d(s) = \max(b_d, \max_h s_h W_{dh}), \qquad
        \log p(y \mid s) = \sum_d y_d\, \eta(m_d(s)) - A(m_d(s)) + \log h(y_d).

    A subclass gives the natural parameter :math:`\eta`, the log partition function :math:`A` and
    the base measure, if there is one. The first two grow with the mean. Entries of an observation
    that are NaN are missing and contribute nothing.

    Example:
        >>> counts: FamilyMaximum = PoissonMaximum(torch.tensor([1.0, 0.0]), torch.tensor([[3.0, 9.0]]), 1.0)
        >>> counts.natural(counts.mean) == torch.tensor([3.0]).log()
        tensor([True])

    Args:
        states: binary states ``(*batch, H)``.
        weight: means :math:`W`, ``(D, H)``, or with batch dimensions in front.
        background: mean :math:`b` without a cause, a scalar or ``(D,)``, or with batch dimensions in front of ``D``.
        validate_args: whether to check parameters and values.

    Raises:
        ValueError: if states and weight disagree about the number of latents, or a parameter is invalid.

    Reference:
        Mousavi, Drefs, Hirschberger and Lücke, "Generic Unsupervised Optimization for a Latent Variable Model with Exponential Family
        Observables", JMLR 2023, which has no background.
    """

    has_rsample = False

    background: Tensor

    def __init__(
        self, states: Tensor, weight: Tensor, background: Tensor | float, validate_args: bool | None = None, **others: Tensor | float
    ) -> None:
        super().__init__(states, weight, validate_args, background=background, **others)

    def natural(self, mean: Tensor) -> Tensor:
        r"""Natural parameter :math:`\eta` of means."""
        raise NotImplementedError(f"{type(self).__name__} has no natural parameter")

    def partition(self, mean: Tensor) -> Tensor:
        """Log partition function :math:`A` of means."""
        raise NotImplementedError(f"{type(self).__name__} has no partition function")

    def log_base(self, value: Tensor) -> Tensor:
        """Log base measure of observed values; zero, unless a subclass says otherwise."""
        return torch.zeros_like(value)

    @property
    def variance(self) -> Tensor:
        """Variance of the observations, ``(*batch, D)``."""
        variance: Tensor = self._family(self.mean).variance
        return variance

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws observations."""
        with torch.no_grad():
            return self._family(self.mean).sample(torch.Size(sample_shape))

    @property
    def numbers_per_state(self) -> int:
        """See :class:`.Superposition`."""
        # A product of every state with the dictionary, and which of them is largest.
        return 2 * math.prod(self.weight.shape)

    def packed_log_prob(self, words: Tensor, value: Tensor, state_logits: Tensor | None = None) -> Tensor:
        r"""Log density under packed binary states, plus :math:`\sum_h s_h\,\mathrm{logit}_h`: :meth:`Superposition.packed_log_prob`."""
        num_latents, means = self.weight.shape[-1], self._means()
        base = self._elementwise_base(value).sum(-1, keepdim=True)
        score = ops.maximum_score(words, value, self.natural(means), self.partition(means)) + base
        if state_logits is not None:
            linear = state_logits.double().expand(len(value), num_latents)
            score = score + ops.pair_energy(words, linear, linear.new_zeros(num_latents, num_latents))
        return score.to(torch.promote_types(self.weight.dtype, value.dtype))

    @torch.no_grad()
    def statistics(self, population: Population, value: Tensor, temperature: float = 1.0) -> Statistics:
        r"""Expected sufficient statistics, summed over the population's data points, in float64.

        :math:`A_{dh}(s) = 1` where ``h`` has the largest mean in dimension ``d``, the background
        being number ``H + 1``. Wins are :math:`w_{dh} = \sum_n \langle A_{dh} \rangle` and
        :math:`v_{dh} = \sum_n y_{nd} \langle A_{dh} \rangle`, over the data points that have
        dimension ``d``. They give the gradient of the truncated free energy

        .. math:: \frac{\partial \mathcal F}{\partial W_{dh}} = \eta'(W_{dh}) (v_{dh} - w_{dh} W_{dh}).

        So it vanishes at the means of what is won, whatever the family. Who wins depends on the
        dictionary. If means are equal up to rounding, the background wins, else the first. This
        occurs if one data point has made them, or at a bound.

        Args:
            population: truncated posteriors over the ``H`` latents; its ``indices`` select the data points among all data.
            value: all data, ``(N, D)``. NaN where missing.
            temperature: of the posteriors.

        Returns:
            ``num_data``; ``observed``, ``(D,)``; ``sums``, ``squares`` and ``bases``, the sums of
            the data, of their squares and of the log base measures, ``(D,)``. ``states``, the sum
            of :math:`\langle s \rangle`, ``(H,)``. ``wins`` and ``won``, ``(D, H + 1)``. All can be
            added and scaled.
        """
        check_binary(population, self.weight.shape[-1])
        rows = population.rows_of(value)
        active, _, wins, won = ops.maximum_wins(population.words, population.weights(temperature), rows, _round(self._means()))
        sums = data_sums(*without_missing(rows))
        return {**sums, "bases": self._elementwise_base(rows).sum(0), "states": active.sum(0), "wins": wins, "won": won}

    def wins(self, words: Tensor, weights: Tensor, rows: Tensor) -> Statistics:
        """The ``wins`` and what is ``won`` alone, for comparing dictionaries; see :meth:`.MaximumSuperposition.wins`."""
        _, _, wins, won = ops.maximum_wins(words, weights, rows, _round(self._means()))
        return {"wins": wins, "won": won}

    def expected_loss(self, statistics: Statistics) -> Tensor:
        r"""Returns expected negative log densities of every dimension, ``(D,)``.

        The statistics must come from this very dictionary.
        """
        means = self._means()
        return (self.partition(means) * statistics["wins"] - self.natural(means) * statistics["won"]).sum(1) - statistics["bases"]

    @torch.no_grad()
    def reconstruct(self, population: Population, value: Tensor) -> Tensor:
        """Posterior mean of the data without noise, see :meth:`Superposition.reconstruct`."""
        check_binary(population, self.weight.shape[-1])
        return ops.maximum_wins(population.words, population.weights(1.0), population.rows_of(value), self._means())[1].to(value.dtype)

    def _family(self, mean: Tensor) -> Distribution:
        """The distribution of single observations."""
        raise NotImplementedError(f"{type(self).__name__} cannot be sampled")

    def _means(self) -> Tensor:
        """Those of the latents, and last of the background, ``(D, H + 1)`` in float64."""
        background = self.background.expand(self.event_shape)
        return torch.cat([self.weight.double(), background.double().unsqueeze(-1)], -1)

    def _mean(self, states: Tensor) -> Tensor:
        return largest(states.to(self.weight.dtype), self.weight).maximum(self.background)

    def _elementwise_base(self, value: Tensor) -> Tensor:
        is_missing = value.isnan()
        return self.log_base(torch.where(is_missing, 1.0, value.double())).masked_fill(is_missing, 0.0)

    def _log_prob(self, states: Tensor, value: Tensor) -> Tensor:
        mean, is_missing = self._mean(states).double(), value.isnan()
        data = torch.where(is_missing, 1.0, value.double())
        terms = data * self.natural(mean) - self.partition(mean)
        log_prob = terms.masked_fill(is_missing, 0.0).sum(-1) + self._elementwise_base(value).sum(-1)
        return log_prob.to(torch.promote_types(self.weight.dtype, value.dtype))


def _round(means: Tensor) -> Tensor:
    """Rounds to 41 bits (Veltkamp's splitting).

    The order of sums over the same data must not decide the maximum.
    """
    large = means * (2.0**12 + 1)
    return large - (large - means)


def _positive(**others: constraints.Constraint) -> dict[str, constraints.Constraint]:
    weight = constraints.independent(constraints.positive, 2)
    return {"states": constraints.independent(constraints.boolean, 1), "weight": weight, "background": constraints.positive, **others}


class PoissonMaximum(FamilyMaximum):
    r"""Counts: a :class:`FamilyMaximum` with :math:`\eta = \log m` and :math:`A = m`.

    Example:
        >>> PoissonMaximum(torch.tensor([1.0, 1.0]), torch.tensor([[2.0, 7.0], [0.5, 0.1]]), background=1.0).mean
        tensor([7., 1.])
    """

    arg_constraints = _positive()
    support = constraints.independent(or_missing(constraints.nonnegative_integer), 1)

    def natural(self, mean: Tensor) -> Tensor:
        """See :class:`FamilyMaximum`."""
        return mean.log()

    def partition(self, mean: Tensor) -> Tensor:
        """See :class:`FamilyMaximum`."""
        return mean

    def log_base(self, value: Tensor) -> Tensor:
        """See :class:`FamilyMaximum`."""
        return -(value + 1).lgamma()

    def _family(self, mean: Tensor) -> Distribution:
        return Poisson(mean, validate_args=False)


class BernoulliMaximum(FamilyMaximum):
    r"""Binary data: a :class:`FamilyMaximum` with :math:`\eta = \mathrm{logit}\, m` and :math:`A = -\log(1 - m)`.

    Example:
        >>> BernoulliMaximum(torch.tensor([1.0, 0.0]), torch.tensor([[0.75, 0.9]]), 0.1).log_prob(torch.ones(1)).exp()
        tensor(0.7500)
    """

    arg_constraints = {  # noqa: RUF012 - the attribute is an instance attribute in torch
        "states": constraints.independent(constraints.boolean, 1),
        "weight": constraints.independent(constraints.unit_interval, 2),
        "background": constraints.unit_interval,
    }
    support = constraints.independent(or_missing(constraints.boolean), 1)

    def natural(self, mean: Tensor) -> Tensor:
        """See :class:`FamilyMaximum`."""
        return mean.logit()

    def partition(self, mean: Tensor) -> Tensor:
        """See :class:`FamilyMaximum`."""
        return -torch.log1p(-mean)

    def _family(self, mean: Tensor) -> Distribution:
        return Bernoulli(mean, validate_args=False)


class ExponentialMaximum(FamilyMaximum):
    r"""Waiting times: a :class:`FamilyMaximum` with :math:`\eta = -1 / m` and :math:`A = \log m`.

    Example:
        >>> ExponentialMaximum(torch.tensor([0.0, 1.0]), torch.tensor([[2.0, 4.0]]), background=1.0).variance
        tensor([16.])
    """

    arg_constraints = _positive()
    support = constraints.independent(or_missing(constraints.nonnegative), 1)

    def natural(self, mean: Tensor) -> Tensor:
        """See :class:`FamilyMaximum`."""
        return -mean.reciprocal()

    def partition(self, mean: Tensor) -> Tensor:
        """See :class:`FamilyMaximum`."""
        return mean.log()

    def _family(self, mean: Tensor) -> Distribution:
        return Exponential(mean.reciprocal(), validate_args=False)


class GammaMaximum(FamilyMaximum):
    r"""Positive data whose deviation is :math:`m / \sqrt k`.

    They are a :class:`FamilyMaximum` of gammas of one concentration :math:`k`.

    :math:`\eta = -k / m`, :math:`A = k \log m`, and :math:`\log h(y) = k \log k - \log \Gamma(k) + (k - 1) \log y`.

    Example:
        >>> GammaMaximum(torch.tensor([0.0, 1.0]), torch.tensor([[2.0, 4.0]]), background=1.0, concentration=16.0).variance
        tensor([1.])

    Args:
        states: binary states ``(*batch, H)``.
        weight: means, as in :class:`FamilyMaximum`.
        background: mean without a cause.
        concentration: shape :math:`k`, a scalar.
        validate_args: whether to check parameters and values.
    """

    arg_constraints = _positive(concentration=constraints.positive)
    support = constraints.independent(or_missing(constraints.positive), 1)

    concentration: Tensor

    def __init__(
        self,
        states: Tensor,
        weight: Tensor,
        background: Tensor | float,
        concentration: Tensor | float = 1.0,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(states, weight, background, validate_args, concentration=concentration)

    def natural(self, mean: Tensor) -> Tensor:
        """See :class:`FamilyMaximum`."""
        return -self.concentration.double() / mean

    def partition(self, mean: Tensor) -> Tensor:
        """See :class:`FamilyMaximum`."""
        return self.concentration.double() * mean.log()

    def log_base(self, value: Tensor) -> Tensor:
        """See :class:`FamilyMaximum`."""
        k = self.concentration.double()
        return k * k.log() - k.lgamma() + (k - 1) * value.log()

    def _family(self, mean: Tensor) -> Distribution:
        return Gamma(self.concentration, self.concentration / mean, validate_args=False)
