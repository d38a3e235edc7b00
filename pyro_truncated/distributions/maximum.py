"""Superpositions of which the largest cause counts."""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.util import broadcast_shape
from torch import Tensor
from torch.distributions import Bernoulli, Distribution, Exponential, Gamma, Poisson, constraints

from pyro_truncated import ops
from pyro_truncated.distributions.superposition import GaussianSuperposition, Statistics, Superposition, check_binary, data_sums
from pyro_truncated.ops import raise_if
from pyro_truncated.ops.maximum import Segments, max_superposition, maximum_segments
from pyro_truncated.states.population import Population
from pyro_truncated.utils.arguments import Renamed, names_arguments
from pyro_truncated.utils.constraints import check_entries, finite, larger_batch, or_missing, positive_finite, without_missing


class MaximumSuperposition(GaussianSuperposition):
    r"""Normal observations around the largest active dictionary entry, :math:`y_d \sim \mathcal N(\max(0, \max_h s_h W_{dh}), \sigma_d^2)`.

    Negative entries of the dictionary never win. Entries of an observation that are NaN are missing and contribute nothing.

    Example:
        >>> states, weight = torch.tensor([1.0, 1.0]), torch.tensor([[1.0, 3.0], [2.0, 0.5]])
        >>> MaximumSuperposition(states, weight, 1.0).mean
        tensor([3., 2.])

    Args:
        states: states ``(*batch, H)``; real numbers, usually zeros and ones.
        weight: dictionary :math:`W`, ``(D, H)``, or with batch dimensions in front.
        scale: standard deviation :math:`\sigma`, a scalar or ``(D,)``, or with batch dimensions in front of ``D``.
        validate_args: whether to check parameters and values.

    Raises:
        ValueError: if states and weight disagree about the number of latents, or a parameter is invalid.

    Reference:
        Lücke and Sahani, "Maximal Causes for Non-linear Component Extraction", JMLR 2008.
    """

    arg_constraints = {  # noqa: RUF012 - the attribute is an instance attribute in torch
        "states": constraints.real_vector,
        "weight": constraints.independent(finite, 2),
        "scale": constraints.positive,
    }
    support = constraints.independent(or_missing(constraints.real), 1)

    @names_arguments
    def __init__(self, states: Tensor, weight: Tensor, scale: Tensor | float, validate_args: bool | None = None) -> None:
        super().__init__(states, weight, validate_args, scale=scale)

    @property
    def numbers_per_state(self) -> int:
        """Intermediate numbers that scoring one state takes: ``2 D H``."""
        # A product of every state with the dictionary, and which of them is largest.
        return 2 * math.prod(self.weight.shape)

    def packed_log_prob(self, words: Tensor, value: Tensor, state_logits: Tensor | None = None) -> Tensor:
        r"""Log density under packed binary states, plus :math:`\sum_h s_h\,\mathrm{logit}_h`: :meth:`Superposition.packed_log_prob`."""
        error = ops.maximum_error(words, value, self.weight, self._precision())
        log_prob = self._log_normalizer(value).unsqueeze(-1) - 0.5 * error
        if state_logits is not None:
            log_prob = log_prob + ops.linear_energy(words, state_logits.double().expand(len(value), self.weight.shape[-1]))
        return log_prob.to(torch.promote_types(self.weight.dtype, value.dtype))

    @torch.no_grad()
    def statistics(self, population: Population, value: Tensor, temperature: float = 1.0) -> Statistics:
        r"""Expected sufficient statistics, summed over the population's data points, in float64.

        :math:`A_{dh}(s) = 1` where latent ``h`` attains a positive maximum in dimension ``d``. Wins
        are :math:`w_{dh} = \sum_n \langle A_{dh} \rangle` and :math:`v_{dh} = \sum_n y_{nd} \langle
        A_{dh} \rangle`, over the data points that have dimension ``d``. They give the gradient of
        the truncated free energy

        .. math:: \frac{\partial \mathcal F}{\partial W_{dh}} = \frac{v_{dh} - w_{dh} W_{dh}}{\sigma_d^2}, \qquad
            \frac{\partial \mathcal F}{\partial \sigma_d} = \frac{E_d}{\sigma_d^3} - \frac{N_d}{\sigma_d},

        with the expected squared errors :math:`E_d` of :meth:`square_error`. Who wins depends on the dictionary.

        Returns:
            ``num_data``; ``observed`` :math:`N_d`; ``sums`` and ``squares`` of the data, ``(D,)``.
            ``states``, the sum of :math:`\langle s \rangle`, ``(H,)``. ``wins`` and ``won``, ``(D, H)``. All can be added and scaled.
        """
        rows = population.select_rows(value)
        active, _, wins, won = self._explain(population, rows, temperature)
        return {**data_sums(*without_missing(rows)), "states": active.sum(0), "wins": wins, "won": won}

    def wins(self, words: Tensor, weights: Tensor, rows: Tensor) -> Statistics:
        """Returns ``wins`` and ``won`` of :meth:`statistics` alone.

        They compare dictionaries under the same posterior.

        Args:
            words: packed states, ``(N, C, W)``.
            weights: their posterior weights, ``(N, C)``.
            rows: data of these data points, ``(N, D)``. NaN where missing.
        """
        _, _, wins, won = ops.maximum_statistics(words, weights, rows, self.weight.double())
        return {"wins": wins, "won": won}

    @torch.no_grad()
    def draw_statistics(self, selected: Tensor, coefficients: Tensor, value: Tensor) -> Statistics:
        r"""Returns the same statistics, averaged over draws of a few latents' coefficients.

        :meth:`draw_coefficients` makes the draws.

        Args:
            selected: selected latents, ``(N, K)``. All others are off.
            coefficients: draws of their coefficients, ``(N, S, K)``. Zero where a latent is off.
            value: observations, ``(N, D)``. NaN where missing.

        Returns:
            ``num_data``; ``observed``, ``sums`` and ``squares``, ``(D,)``; ``wins`` :math:`\sum_n \langle A_{dh} s_h^2 \rangle` and ``won``
            :math:`\sum_n y_{nd} \langle A_{dh} s_h \rangle`, ``(D, H)``; ``errors``, the expected squared errors, ``(D,)``.
        """
        won, wins, errors = ops.maximum_slab_statistics(value, self.weight, selected, coefficients)
        return {**data_sums(*without_missing(value)), "wins": wins, "won": won, "errors": errors}

    @torch.no_grad()
    def draw_coefficients(
        self,
        value: Tensor,
        selected: Tensor,
        start: Tensor,
        *,
        prior: Tensor,
        slab_mean: Tensor,
        slab_scale: Tensor,
        burn_in: int = 0,
        sweeps: int = 1,
        temperature: float = 1.0,
        rows: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        r"""Draws coefficients :math:`s_h = b_h z_h` of a few latents by Gibbs sampling.

        Each data point has its own latents; all others are off.

        The model is :math:`b_h \sim \mathrm{Bernoulli}(\pi_h)`, :math:`z_h \sim \mathcal N(\mu_h, \tau_h^2)`. Every pair :math:`(b_h, z_h)`
        is drawn from its exact conditional given the others, in random order. The dictionary must not be negative.

        Args:
            value: observations, ``(N, D)``. NaN where missing.
            selected: selected latents, ``(N, K)`` int64, distinct within a row.
            start: where the chains start, ``(N, H)``.
            prior: :math:`\pi`, a scalar or ``(H,)``.
            slab_mean: :math:`\mu`, a scalar or ``(H,)``.
            slab_scale: :math:`\tau`, a scalar or ``(H,)``.
            burn_in: sweeps before the first one kept.
            sweeps: sweeps kept.
            temperature: factor on the variance of the noise.
            rows: positions ``(N,)`` of the data points among all data, by which random numbers are keyed. Default: ``0 .. N - 1``.
            generator: source of randomness. Default: torch's global generator.

        Returns:
            Draws ``(N, sweeps, K)``, zero where a latent is off, and the mean of the exact conditional probabilities that the latents are
            on, ``(N, K)``; both float64.
        """
        num_latents = self.weight.shape[-1]
        latents = (parameter.expand(num_latents) for parameter in (prior.double().logit(), slab_mean, slab_scale))
        precision = self._precision() / temperature
        arguments = value, self.weight, precision, *latents, selected, start
        return ops.maximum_slab_gibbs(*arguments, burn_in=burn_in, sweeps=sweeps, rows=rows, generator=generator)

    def square_error(self, statistics: Statistics) -> Tensor:
        r"""Expected squared errors :math:`\sum_n \langle (y_{nd} - \max(0, \max_h s_h W_{dh}))^2 \rangle` of every dimension, ``(D,)``.

        The square of a maximum is that of its winner's entry: :math:`\sum_n y_{nd}^2 + \sum_h W_{dh} (W_{dh} w_{dh} - 2 v_{dh})`. The
        statistics must be those under this dictionary.
        """
        weight = self.weight.double()
        return statistics["squares"] + (weight * (weight * statistics["wins"] - 2 * statistics["won"])).sum(1)

    @torch.no_grad()
    def reconstruct(self, population: Population, value: Tensor) -> Tensor:
        """Posterior mean of the data without noise, see :meth:`Superposition.reconstruct`."""
        return self._explain(population, population.select_rows(value), 1.0)[1].to(value.dtype)

    def _explain(self, population: Population, rows: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        check_binary(population, self.weight.shape[-1])
        return ops.maximum_statistics(population.words, population.weights(temperature), rows, self.weight.double())

    def _mean(self, states: Tensor) -> Tensor:
        return max_superposition(states.to(self.weight.dtype), self.weight)

    def _log_prob(self, states: Tensor, value: Tensor) -> Tensor:
        # Masked before it is divided, or missing entries would turn the gradient of the scale into NaN.
        residual = torch.where(value.isnan(), 0.0, value - self._mean(states)) / self.scale
        log_prob = self._log_normalizer(value) - 0.5 * residual.double().square().sum(-1)
        return log_prob.to(torch.promote_types(self.weight.dtype, value.dtype))


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
        """Draws observations ``(*sample_shape, *batch, D)``, without gradients."""
        with torch.no_grad():
            return self._family(self.mean).sample(torch.Size(sample_shape))

    numbers_per_state = MaximumSuperposition.numbers_per_state

    def packed_log_prob(self, words: Tensor, value: Tensor, state_logits: Tensor | None = None) -> Tensor:
        r"""Log density under packed binary states, plus :math:`\sum_h s_h\,\mathrm{logit}_h`: :meth:`Superposition.packed_log_prob`."""
        means = self._means()
        base = self._elementwise_base(value).sum(-1, keepdim=True)
        score = ops.maximum_score(words, value, self.natural(means), self.partition(means)) + base
        if state_logits is not None:
            score = score + ops.linear_energy(words, state_logits.double().expand(len(value), self.weight.shape[-1]))
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

        Returns:
            ``num_data``; ``observed``, ``(D,)``; ``sums``, ``squares`` and ``bases``, the sums of
            the data, of their squares and of the log base measures, ``(D,)``. ``states``, the sum
            of :math:`\langle s \rangle`, ``(H,)``. ``wins`` and ``won``, ``(D, H + 1)``. All can be
            added and scaled.
        """
        check_binary(population, self.weight.shape[-1])
        rows = population.select_rows(value)
        active, _, wins, won = ops.maximum_wins(population.words, population.weights(temperature), rows, _round(self._means()))
        sums = data_sums(*without_missing(rows))
        return {**sums, "bases": self._elementwise_base(rows).sum(0), "states": active.sum(0), "wins": wins, "won": won}

    def wins(self, words: Tensor, weights: Tensor, rows: Tensor) -> Statistics:
        """The ``wins`` and what is ``won`` alone, for comparing dictionaries; see :meth:`.MaximumSuperposition.wins`."""
        _, _, wins, won = ops.maximum_wins(words, weights, rows, _round(self._means()))
        return {"wins": wins, "won": won}

    @torch.no_grad()
    def reconstruct(self, population: Population, value: Tensor) -> Tensor:
        """Posterior mean of the data without noise, see :meth:`Superposition.reconstruct`."""
        check_binary(population, self.weight.shape[-1])
        return ops.maximum_wins(population.words, population.weights(1.0), population.select_rows(value), self._means())[1].to(value.dtype)

    def _family(self, mean: Tensor) -> Distribution:
        """The distribution of single observations."""
        raise NotImplementedError(f"{type(self).__name__} cannot be sampled")

    def _means(self) -> Tensor:
        """Those of the latents, and last of the background, ``(D, H + 1)`` in float64."""
        background = self.background.expand(self.event_shape)
        return torch.cat([self.weight.double(), background.double().unsqueeze(-1)], -1)

    def _mean(self, states: Tensor) -> Tensor:
        return max_superposition(states.to(self.weight.dtype), self.weight).maximum(self.background)

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
    """Rounds to 41 bits (Veltkamp's splitting)."""
    # The order of sums over the same data must not decide the maximum.
    large = means * (2.0**12 + 1)
    return large - (large - means)


def _limits(mean: constraints.Constraint = constraints.positive, **others: constraints.Constraint) -> dict[str, constraints.Constraint]:
    weight = constraints.independent(mean, 2)
    return {"states": constraints.independent(constraints.boolean, 1), "weight": weight, "background": mean, **others}


class PoissonMaximum(FamilyMaximum):
    r"""Counts: a :class:`FamilyMaximum` with :math:`\eta = \log m` and :math:`A = m`.

    Example:
        >>> PoissonMaximum(torch.tensor([1.0, 1.0]), torch.tensor([[2.0, 7.0], [0.5, 0.1]]), background=1.0).mean
        tensor([7., 1.])
    """

    arg_constraints = _limits()
    support = constraints.independent(or_missing(constraints.nonnegative_integer), 1)

    def natural(self, mean: Tensor) -> Tensor:
        r"""Returns natural parameters :math:`\log \mu` of means."""
        return mean.log()

    def partition(self, mean: Tensor) -> Tensor:
        r"""Returns log partition functions :math:`\mu` of means."""
        return mean

    def log_base(self, value: Tensor) -> Tensor:
        r"""Returns log base measures :math:`-\log y!` of observations."""
        return -(value + 1).lgamma()

    def _family(self, mean: Tensor) -> Distribution:
        return Poisson(mean, validate_args=False)


class BernoulliMaximum(FamilyMaximum):
    r"""Binary data: a :class:`FamilyMaximum` with :math:`\eta = \mathrm{logit}\, m` and :math:`A = -\log(1 - m)`.

    Example:
        >>> BernoulliMaximum(torch.tensor([1.0, 0.0]), torch.tensor([[0.75, 0.9]]), 0.1).log_prob(torch.ones(1)).exp()
        tensor(0.7500)
    """

    arg_constraints = _limits(constraints.unit_interval)
    support = constraints.independent(or_missing(constraints.boolean), 1)

    def natural(self, mean: Tensor) -> Tensor:
        r"""Returns natural parameters :math:`\log \mu / (1 - \mu)` of means."""
        return mean.logit()

    def partition(self, mean: Tensor) -> Tensor:
        r"""Returns log partition functions :math:`-\log(1 - \mu)` of means."""
        return -torch.log1p(-mean)

    def _family(self, mean: Tensor) -> Distribution:
        return Bernoulli(mean, validate_args=False)


class ExponentialMaximum(FamilyMaximum):
    r"""Waiting times: a :class:`FamilyMaximum` with :math:`\eta = -1 / m` and :math:`A = \log m`.

    Example:
        >>> ExponentialMaximum(torch.tensor([0.0, 1.0]), torch.tensor([[2.0, 4.0]]), background=1.0).variance
        tensor([16.])
    """

    arg_constraints = _limits()
    support = constraints.independent(or_missing(constraints.nonnegative), 1)

    def natural(self, mean: Tensor) -> Tensor:
        r"""Returns natural parameters :math:`-1 / \mu` of means."""
        return -mean.reciprocal()

    def partition(self, mean: Tensor) -> Tensor:
        r"""Returns log partition functions :math:`\log \mu` of means."""
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

    arg_constraints = _limits(concentration=constraints.positive)
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
        r"""Returns natural parameters :math:`-k / \mu` of means."""
        return -self.concentration.double() / mean

    def partition(self, mean: Tensor) -> Tensor:
        r"""Returns log partition functions :math:`k \log \mu` of means."""
        return self.concentration.double() * mean.log()

    def log_base(self, value: Tensor) -> Tensor:
        r"""Returns log base measures :math:`k \log k - \log \Gamma(k) + (k - 1) \log y`."""
        k = self.concentration.double()
        return k * k.log() - k.lgamma() + (k - 1) * value.log()

    def _family(self, mean: Tensor) -> Distribution:
        return Gamma(self.concentration, self.concentration / mean, validate_args=False)


class PiecewiseGaussian(TorchDistribution):
    r"""Piecewise Gaussian density of a real number between successive edges.

    .. math:: p(z) \propto \exp(c_j + \beta_j z - \tfrac12 a_j z^2) \quad (e_j < z < e_{j+1}).

    Masses and draws are taken in the log domain, so they hold far out in the tails. All is float64.

    Example:
        >>> y, others, element = torch.tensor([2.0, 0.1]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0])
        >>> slab = PiecewiseGaussian.from_maximum(y, others, element, torch.tensor(0.1), torch.tensor(0.0), torch.tensor(1.0))
        >>> abs(float(slab.mean) - 2.0 / 1.01) < 1e-4  # the normal posterior, where nothing else competes
        True

    Args:
        segments: edges and coefficients.
        validate_args: whether to check values.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 - the attribute is an instance attribute in torch
    support = constraints.real

    @names_arguments
    def __init__(self, segments: Segments, validate_args: bool | None = None) -> None:
        self.segments = segments
        super().__init__(segments.edges.shape[:-1], validate_args=validate_args)

    of_maximum = Renamed("from_maximum")

    @classmethod
    def from_maximum(
        cls, value: Tensor, others: Tensor, element: Tensor, scale: Tensor, slab_mean: Tensor, slab_scale: Tensor
    ) -> PiecewiseGaussian:
        r"""The exact posterior of one slab where causes superpose by maximum.

        With :math:`z \sim \mathcal N(\mu, \tau^2)` and :math:`y_d \sim \mathcal N(\max(m_d, z w_d), \sigma_d^2)`, where :math:`m` is what
        the other causes offer, this is :math:`p(z \mid y, m)`; its :attr:`log_normalizer` is :math:`\log p(y \mid m)`, with ``z``
        integrated out.

        Args:
            value: data :math:`y`, ``(*batch, D)``. NaN where missing.
            others: :math:`m \ge 0`, ``(*batch, D)``.
            element: dictionary element :math:`w \ge 0`, ``(*batch, D)``.
            scale: standard deviation :math:`\sigma` of the noise, broadcastable to ``(*batch, D)``.
            slab_mean: :math:`\mu`, ``(*batch)``.
            slab_scale: :math:`\tau`, ``(*batch)``.

        Raises:
            ValueError: if an offer or an element is negative.
        """
        is_valid = (others >= 0).all() & (element >= 0).all()
        raise_if(
            ~is_valid,
            lambda: (
                f"others and element must not be negative, so that the cause wins above a threshold; got {others.min()} and {element.min()}"
            ),
        )
        value, others, element, scale, slab_mean, slab_scale = (
            tensor.double() for tensor in (value, others, element, scale, slab_mean, slab_scale)
        )
        return cls(maximum_segments(value, others, element, scale.square().reciprocal(), slab_mean, slab_scale))

    @property
    def log_normalizer(self) -> Tensor:
        """Logarithm of the integral of the density as given, ``(*batch)``."""
        return self.segments.log_masses().logsumexp(-1)

    @property
    def mean(self) -> Tensor:
        """Mean of the normalised density, ``(*batch)``."""
        return self.segments.mean()

    def expand(self, batch_shape: Any, _instance: Any = None) -> PiecewiseGaussian:
        """The same distribution over a larger batch."""
        return larger_batch(self, batch_shape, _instance, segments=Segments(*(part.expand(*batch_shape, -1) for part in self.segments)))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Exact draws by inversion, ``(*sample_shape, *batch)``."""
        shape = torch.Size(sample_shape) + self.batch_shape
        edges = self.segments.edges
        with torch.no_grad():
            first, second = torch.rand(2, *shape, dtype=edges.dtype, device=edges.device)
            return Segments(*(part.expand(shape + part.shape[-1:]) for part in self.segments)).draw(first, second)

    @names_arguments
    def log_prob(self, value: Tensor) -> Tensor:
        """Returns the normalised log density at values ``(*batch)``.

        Raises:
            ValueError: if validation is on and a value is NaN or infinite.
        """
        if self._validate_args:
            self._validate_sample(value)
        return self.segments.log_density(value) - self.log_normalizer


class MaximumSlabs(TorchDistribution):
    r"""Proposes slabs of causes that superpose by maximum.

    The proposal is close to their posterior given data and indicators.

    The slabs are drawn in sequence. Each comes from its exact conditional given the data, the slabs
    already drawn and guesses :math:`\hat z` of those to come:

    .. math:: q(z \mid b, y) = \prod_h p(z_h \mid z_{<h}, \hat z_{>h}, b, y).

    The guesses start at the prior means and go through sweeps of conditional means. For states with at most one active cause, or causes
    that never compete, this is the exact posterior. Slabs of causes that are off have their prior.

    A proposal is not what is trained: its parameters are taken as constants, and draws pass no gradient.

    Example:
        >>> states, weight, y = torch.tensor([1.0, 0.0]), torch.eye(2), torch.tensor([2.0, 0.0])
        >>> slabs = MaximumSlabs(states, weight, torch.tensor(0.1), torch.tensor(1.0), torch.tensor(1.0), y)
        >>> slabs.sample().shape
        torch.Size([2])

    Args:
        states: indicators :math:`b`, ``(*batch, H)``, zeros and ones.
        weight: dictionary :math:`W \ge 0`, ``(D, H)``.
        scale: standard deviation of the noise, a scalar or ``(D,)``.
        slab_mean: means of the slabs, a scalar or ``(H,)``.
        slab_scale: standard deviations of the slabs, a scalar or ``(H,)``.
        value: data, ``(*batch, D)``. NaN where missing.
        validate_args: whether to check values.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 - the attribute is an instance attribute in torch
    support = constraints.real_vector

    @names_arguments
    def __init__(
        self,
        states: Tensor,
        weight: Tensor,
        scale: Tensor,
        slab_mean: Tensor,
        slab_scale: Tensor,
        value: Tensor,
        validate_args: bool | None = None,
    ) -> None:
        if validate_args is not False:
            check_entries(finite, states=states, weight=weight, slab_mean=slab_mean)
            check_entries(positive_finite, scale=scale, slab_scale=slab_scale)
            check_entries(or_missing(finite), value=value)
        batch_shape = torch.Size(broadcast_shape(states.shape[:-1], value.shape[:-1]))
        num_latents = weight.shape[1]
        self.dtype = weight.dtype
        self.states = states.detach().double().expand(*batch_shape, num_latents)
        self.weight, self.scale = weight.detach().double(), scale.detach().double()
        self.slab_mean = slab_mean.detach().double().expand(num_latents)
        self.slab_scale = slab_scale.detach().double().expand(num_latents)
        self.value = value.double()
        super().__init__(batch_shape, torch.Size([num_latents]), validate_args=validate_args)
        self.guess = self._guess()

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws slabs, ``(*sample_shape, *batch, H)``."""
        shape = torch.Size(sample_shape) + self.batch_shape + self.event_shape
        slabs = self.guess.expand(shape).clone()
        for latent in range(shape[-1]):
            slabs[..., latent] = self._conditional(slabs, latent).sample()
        return slabs.to(self.dtype)

    @torch.no_grad()
    @names_arguments
    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of slabs ``(*batch, H)``."""
        slabs = self.guess.expand(broadcast_shape(value.shape, self.guess.shape)).clone()
        total = slabs.new_zeros(slabs.shape[:-1])
        for latent in range(slabs.shape[-1]):
            total += self._conditional(slabs, latent).log_prob(value[..., latent].double())
            slabs[..., latent] = value[..., latent]
        return total.to(self.dtype)

    @torch.no_grad()
    def _guess(self, *, refinements: int = 2) -> Tensor:
        guess = self.slab_mean.expand(self.states.shape).clone()
        for _ in range(refinements):
            for latent in range(guess.shape[-1]):
                guess[..., latent] = self._conditional(guess, latent).mean
        return guess

    def _conditional(self, slabs: Tensor, latent: int) -> PiecewiseGaussian:
        offers = self.states * slabs
        offers[..., latent] = 0.0
        others = (offers.unsqueeze(-2) * self.weight).amax(-1).clamp(min=0.0)
        # A cause that is off wins nothing.
        element = self.states[..., latent, None] * self.weight[:, latent]
        mean, scale = self.slab_mean[latent], self.slab_scale[latent]
        return PiecewiseGaussian.from_maximum(self.value, others, element, self.scale, mean, scale)
