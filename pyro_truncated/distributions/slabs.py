"""Superpositions of causes with Gaussian slabs, independent and correlated."""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import ops
from pyro_truncated.distributions.linear import error_with_bias
from pyro_truncated.distributions.superposition import GaussianSuperposition, Statistics, check_binary, data_sums, trials
from pyro_truncated.ops.quadratic import product
from pyro_truncated.ops.slabs import collapse, collapse_correlated_slabs
from pyro_truncated.states.population import Population
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.constraints import finite, missing_where, or_missing, without_missing

_Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class SlabSuperposition(GaussianSuperposition):
    r"""Base of normal observations :math:`y \sim \mathcal N(W (b \odot z) + a, \mathrm{diag}(\sigma^2))` with normal slabs :math:`z`.

    A subclass says how the slabs are drawn and integrated out, and what kernels take of them: means, and deviations or covariance.
    """

    support = constraints.independent(or_missing(constraints.real), 1)

    slab_mean: Tensor
    bias: Tensor

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws observations, differentiable in the parameters."""
        shape = torch.Size(sample_shape) + self.batch_shape
        options: dict[str, Any] = {"dtype": self.weight.dtype, "device": self.weight.device}
        slabs = self.slab_mean + self._spread(torch.randn(shape + self.states.shape[-1:], **options))
        noise = torch.randn(shape + self.event_shape, **options)
        return product(self.weight, self.states.to(self.weight.dtype) * slabs) + self.bias + self.scale * noise

    def packed_log_prob(self, words: Tensor, value: Tensor, state_logits: Tensor | None = None) -> Tensor:
        r"""Log density under packed indicators, plus :math:`\sum_h b_h\,\mathrm{logit}_h`: :meth:`Superposition.packed_log_prob`."""
        linear = None if state_logits is None else state_logits.double().expand(len(value), self.weight.shape[-1])
        log_prob = ops.slab_log_prob(words, self._above_bias(value), self.weight, self._precision(), *self._slabs(), linear)
        return log_prob.to(torch.promote_types(self.weight.dtype, value.dtype))

    def slab_posterior(self, value: Tensor) -> MultivariateNormal:
        r"""Returns the exact posterior :math:`p(z \mid b, y)` of the slabs.

        It has batch shape ``batch``, in the type of the dictionary.

        Slabs of latents that are off have their prior there, given the others. Mean and covariance of the coefficients :math:`s = b \odot
        z` are those of :math:`z`, with zeros for latents that are off.

        Args:
            value: observations ``(*batch, D)``. NaN where missing.
        """
        _, factor, solution = self._collapse(self.states, self._above_bias(value))
        identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
        # A factor in standard units; the slabs are made of its columns.
        factor = torch.linalg.cholesky(inverse.mT @ inverse)
        scale_tril = self._spread(factor.movedim(-1, 0)).movedim(0, -1)
        loc = self.slab_mean.double() + self._spread(solution)
        return MultivariateNormal(loc.to(self.weight.dtype), scale_tril=scale_tril.to(self.weight.dtype))

    @torch.no_grad()
    def coefficients(self, population: Population, value: Tensor) -> Tensor:
        r"""Posterior means :math:`\langle b \odot z \rangle` of the coefficients, ``(N, H)`` in float64."""
        return ops.slab_moments(*self._posterior_arguments(population, population.select_rows(value), 1.0))[1]

    @torch.no_grad()
    def reconstruct(self, population: Population, value: Tensor) -> Tensor:
        r"""Posterior mean :math:`W \langle b \odot z \rangle + a` of the data without noise, see :meth:`Superposition.reconstruct`."""
        return (self.coefficients(population, value) @ self.weight.double().mT + self.bias.double()).to(value.dtype)

    def square_error(self, statistics: Statistics) -> Tensor:
        r"""Expected squared errors :math:`\sum_n \langle (y_{nd} - a_d - W_d s)^2 \rangle` of every dimension, ``(D,)``."""
        return error_with_bias(self.weight, self.bias, statistics)

    def _spread(self, standard: Tensor) -> Tensor:
        """Deviations from the means of slabs ``(*batch, H)`` made of standard normal numbers."""
        raise NotImplementedError(f"{type(self).__name__} has no method that draws slabs")

    def _slabs(self) -> tuple[Tensor, Tensor]:
        """Means of the slabs, ``(H,)``, and their deviations or covariance."""
        raise NotImplementedError(f"{type(self).__name__} has no posterior of slabs")

    def _integrate(self, states: Tensor, linear: Tensor, gram: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns log density, precision factor and mean of standardised slabs."""
        raise NotImplementedError(f"{type(self).__name__} does not integrate its slabs")

    def _posterior_arguments(self, population: Population, rows: Tensor, temperature: float) -> _Arguments:
        check_binary(population, self.weight.shape[-1])
        mean, spread = self._slabs()
        weights = population.weights(temperature)
        return population.words, weights, self._above_bias(rows), self.weight.double(), self._precision(), mean.double(), spread.double()

    def _linear_statistics(self, population: Population, value: Tensor, temperature: float) -> tuple[Statistics, Tensor, list[Tensor]]:
        """Statistics of all slabs, weights, and what only some slabs have."""
        rows = population.select_rows(value)
        arguments = self._posterior_arguments(population, rows, temperature)
        rows, is_observed = without_missing(rows)
        moments = ops.slab_moments if is_observed is None else ops.slab_moments_by_dimension
        active, coefficients, pairs, *others = moments(*arguments)
        sums = {**data_sums(rows, is_observed), "states": active.sum(0), "coefficients": coefficients.sum(0), "pairs": pairs}
        sums |= {"trials": trials(coefficients, rows, is_observed), "cross": rows.mT @ coefficients}
        return sums, arguments[1], others

    def _above_bias(self, value: Tensor) -> Tensor:
        return missing_where(value.double() - self.bias.double(), value)

    def _mean(self, states: Tensor) -> Tensor:
        return product(self.weight, states.to(self.weight.dtype) * self.slab_mean) + self.bias

    def _log_prob(self, states: Tensor, value: Tensor) -> Tensor:
        above = self._above_bias(value)
        log_prob = self._constant(above) + self._collapse(states, above)[0]
        return log_prob.to(torch.promote_types(self.weight.dtype, value.dtype))

    def _constant(self, value: Tensor) -> Tensor:
        """Returns the log density of observed entries with all latents off."""
        precision = self._precision()
        terms = 0.5 * (precision.log() - math.log(2 * math.pi) - precision * value.double().nan_to_num(0.0).square())
        return terms.masked_fill(value.isnan(), 0.0).sum(-1)

    def _collapse(self, states: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight, precision = self.weight.double(), self._precision()
        if bool(value.isnan().any()):
            precision = precision * ~value.isnan()
        linear = product(weight.mT, precision * value.double().nan_to_num(0.0))
        gram = (weight.mT * precision.unsqueeze(-2)) @ weight
        return self._integrate(states.double(), linear, gram)


class SpikeSlabSuperposition(SlabSuperposition):
    r"""Normal observations of a superposition of normal slabs, which are integrated out.

    Let :math:`y \sim \mathcal N(W (b \odot z) + a, \mathrm{diag}(\sigma^2))` with slabs :math:`z \sim \mathcal N(\mu,
    \mathrm{diag}(\tau^2))`. The density given the binary indicators :math:`b` is

    .. math:: \log p(y \mid b) = \log \mathcal N\bigl(y;\; W (b \odot \mu) + a,\;
        \mathrm{diag}(\sigma^2) + W\,\mathrm{diag}(b \odot \tau^2)\,W^\top\bigr),

    evaluated without a matrix of the size of the observations: from a Cholesky factor over the latents, or, packed, over the active
    latents only. It is taken in float64.

    Entries of an observation that are NaN are missing and contribute nothing.

    Example:
        >>> states, weight, y = torch.tensor([1.0, 0.0]), torch.tensor([[2.0, 1.0]]), torch.tensor([1.5])
        >>> likelihood = SpikeSlabSuperposition(states, weight, 0.5, 1.0, 0.3)  # the slab is N(1, 0.3^2): y is N(2, 4 0.3^2 + 0.5^2)
        >>> torch.allclose(likelihood.log_prob(y), dist.Normal(2.0, 0.61**0.5).log_prob(y).sum())
        True

    Args:
        states: indicators :math:`b`, ``(*batch, H)``, zeros and ones.
        weight: dictionary :math:`W`, ``(D, H)``, or with batch dimensions in front.
        scale: standard deviation of the noise :math:`\sigma`, a scalar or ``(D,)``, or with batch dimensions in front of ``D``.
        slab_mean: means of the slabs :math:`\mu`, a scalar or ``(H,)``, or with batch dimensions in front of ``H``.
        slab_scale: standard deviations of the slabs :math:`\tau`, as ``slab_mean``.
        bias: offset :math:`a`, ``(D,)``, or with batch dimensions in front. Zero by default.
        validate_args: whether to check parameters and values.

    Raises:
        ValueError: if states and weight disagree about the number of latents, or a parameter is invalid.

    Reference:
        Sheikh, Shelton and Lücke, "A Truncated EM Approach for Spike-and-Slab Sparse Coding", JMLR 2014.
    """

    arg_constraints = {  # noqa: RUF012 - the attribute is an instance attribute in torch
        "states": constraints.independent(constraints.boolean, 1),
        "weight": constraints.independent(finite, 2),
        "scale": constraints.positive,
        "slab_mean": finite,
        "slab_scale": constraints.positive,
        "bias": constraints.independent(finite, 1),
    }
    slab_scale: Tensor

    @names_arguments
    def __init__(
        self,
        states: Tensor,
        weight: Tensor,
        scale: Tensor | float,
        slab_mean: Tensor | float,
        slab_scale: Tensor | float,
        bias: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        bias = weight.new_zeros(1).expand(weight.shape[-2]) if bias is None else bias
        super().__init__(states, weight, validate_args, scale=scale, slab_mean=slab_mean, slab_scale=slab_scale, bias=bias)

    @property
    def variance(self) -> Tensor:
        r"""Variance :math:`\sigma_d^2 + \sum_h W_{dh}^2 b_h \tau_h^2`, ``(*batch, D)``."""
        variance = self.scale.square() + product(self.weight.square(), self.states.to(self.weight.dtype) * self.slab_scale.square())
        return variance.expand(self.batch_shape + self.event_shape)

    @property
    def numbers_per_state(self) -> int:
        """Intermediate numbers that scoring one state takes: ``4 H^2``."""
        # A precision matrix of the slabs for every state, its factor, and what these are made from.
        return 4 * self.weight.shape[-1] ** 2

    @torch.no_grad()
    def statistics(self, population: Population, value: Tensor, temperature: float = 1.0) -> Statistics:
        r"""Expected sufficient statistics, summed over the population's data points, in float64.

        Those of a linear superposition of the coefficients :math:`s = b \odot z`, whose posterior given the indicators is exact, and of the
        slabs. Sums are over the data points that have dimension ``d``, as in :meth:`LinearSuperposition.statistics`. With :math:`n_h =
        \sum_n \langle b_h \rangle` the gradient of the truncated free energy is

        .. math:: \frac{\partial \mathcal F}{\partial W_d} = \frac{c_d - a_d\, t_d - A_d W_d}{\sigma_d^2}, \qquad
            \frac{\partial \mathcal F}{\partial a_d} = \frac{Y_d - N_d\, a_d - W_d^\top t_d}{\sigma_d^2},

        .. math:: \frac{\partial \mathcal F}{\partial \mu_h} = \frac{\sum_n \langle s_h \rangle - n_h \mu_h}{\tau_h^2}, \qquad
            \frac{\partial \mathcal F}{\partial \tau_h} =
            \frac{\sum_n \langle s_h^2 \rangle - 2 \mu_h \sum_n \langle s_h \rangle + n_h \mu_h^2}{\tau_h^3} - \frac{n_h}{\tau_h}.

        They depend on the parameters, through the posterior of the slabs; nothing is subtracted from the data that are summed.

        Returns:
            ``num_data``; ``observed``, ``sums`` and ``squares``, ``(D,)``. ``states``,
            ``coefficients`` and ``coefficient_squares``, the sums of :math:`\langle b \rangle`,
            :math:`\langle s \rangle` and :math:`\langle s^2 \rangle`, ``(H,)``. ``trials``
            :math:`t_d = \sum_n \langle s \rangle` and ``cross`` :math:`c_d`, ``(D, H)``. ``pairs``,
            the matrix :math:`A`, ``(H, H)`` if nothing is missing, else ``(D, H, H)``. All can be
            added and scaled; pairs of the two shapes add up by broadcasting.
        """
        statistics, _, squares = self._linear_statistics(population, value, temperature)
        return {**statistics, "coefficient_squares": squares[0] if squares else statistics["pairs"].diagonal().clone()}

    def _slabs(self) -> tuple[Tensor, Tensor]:
        num_latents = self.weight.shape[-1]
        return self.slab_mean.expand(num_latents), self.slab_scale.expand(num_latents)

    def _spread(self, standard: Tensor) -> Tensor:
        return self.slab_scale * standard

    def _integrate(self, states: Tensor, linear: Tensor, gram: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return collapse(states, linear, gram, self.slab_mean.double(), self.slab_scale.double())


class CorrelatedSlabSuperposition(SlabSuperposition):
    r"""Normal observations of a superposition of jointly normal, integrated slabs.

    Let :math:`y \sim \mathcal N(W (b \odot z) + a, \mathrm{diag}(\sigma^2))` with slabs :math:`z \sim \mathcal N(\mu, \Psi)`, :math:`\Psi =
    T T^\top`. The density given the binary indicators :math:`b` is

    .. math:: \log p(y \mid b) = \log \mathcal N\bigl(y;\; W (b \odot \mu) + a,\;
        \mathrm{diag}(\sigma^2) + W (b b^\top \odot \Psi) W^\top\bigr),

    evaluated without a matrix of the size of the observations, in float64: see :class:`.SpikeSlabSuperposition`, which has independent
    slabs.

    Entries of an observation that are NaN are missing and contribute nothing.

    Example:
        >>> b, weight = torch.tensor([1.0, 1.0, 0.0]), torch.randn(4, 3)
        >>> y = CorrelatedSlabSuperposition(b, weight, scale=0.5, slab_mean=1.0, slab_scale_tril=torch.eye(3))
        >>> y.slab_posterior(y.sample()).mean.shape
        torch.Size([3])

    Args:
        states: indicators :math:`b`, ``(*batch, H)``, zeros and ones.
        weight: dictionary :math:`W`, ``(D, H)``, or with batch dimensions in front.
        scale: standard deviation of the noise :math:`\sigma`, a scalar or ``(D,)``, or with batch dimensions in front of ``D``.
        slab_mean: means of the slabs :math:`\mu`, a scalar or ``(H,)``, or with batch dimensions in front of ``H``.
        slab_scale_tril: lower Cholesky factor :math:`T` of their covariance, ``(H, H)``.
        bias: offset :math:`a`, ``(D,)``, or with batch dimensions in front. Zero by default.
        validate_args: whether to check parameters and values.

    Raises:
        ValueError: if states, weight and slabs disagree about the number of latents, or a parameter is invalid.

    Reference:
        Sheikh, Shelton and Lücke, "A Truncated EM Approach for Spike-and-Slab Sparse Coding", JMLR 2014.
    """

    arg_constraints = {  # noqa: RUF012 - the attribute is an instance attribute in torch
        "states": constraints.independent(constraints.boolean, 1),
        "weight": constraints.independent(constraints.real, 2),
        "scale": constraints.positive,
        "slab_mean": constraints.real,
        "slab_scale_tril": constraints.lower_cholesky,
        "bias": constraints.real_vector,
    }
    slab_scale_tril: Tensor

    def __init__(
        self,
        states: Tensor,
        weight: Tensor,
        scale: Tensor | float,
        slab_mean: Tensor | float,
        slab_scale_tril: Tensor,
        bias: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        expected = (weight.shape[-1],) * 2
        if slab_scale_tril.shape != expected:
            raise ValueError(f"slab_scale_tril must have shape (H, H) = {expected}; got {tuple(slab_scale_tril.shape)}")
        # It has no batch dimensions, unlike what the base class takes.
        self.slab_scale_tril = slab_scale_tril.to(weight)
        bias = weight.new_zeros(1).expand(weight.shape[-2]) if bias is None else bias
        super().__init__(states, weight, validate_args, scale=scale, slab_mean=slab_mean, bias=bias)

    @property
    def variance(self) -> Tensor:
        r"""Variance :math:`\sigma_d^2 + W_d (b b^\top \odot \Psi) W_d^\top`, ``(*batch, D)``."""
        loadings = self.weight * self.states.to(self.weight.dtype).unsqueeze(-2)
        variance = self.scale.square() + (loadings @ self.slab_scale_tril).square().sum(-1)
        return variance.expand(self.batch_shape + self.event_shape)

    @property
    def numbers_per_state(self) -> int:
        """Intermediate numbers that scoring one state takes: ``6 H^2``."""
        # As for independent slabs, and two products of matrices.
        return 6 * self.weight.shape[-1] ** 2

    @torch.no_grad()
    def statistics(self, population: Population, value: Tensor, temperature: float = 1.0) -> Statistics:
        r"""Expected sufficient statistics, summed over the population's data points, in float64.

        Those of a linear superposition of the coefficients :math:`s = b \odot z`, as in
        :meth:`.SpikeSlabSuperposition.statistics`, with the same gradients in dictionary and
        offset. The gradients in the prior of the slabs are :math:`g`, and the symmetric :math:`K`,
        with

        .. math:: \frac{\partial \mathcal F}{\partial \mu} = g, \qquad \frac{\partial \mathcal F}{\partial T} = \mathrm{tril}(K T).

        Returns:
            ``num_data``; ``observed``, ``sums`` and ``squares``, ``(D,)``. ``states`` and
            ``coefficients``, the sums of :math:`\langle b \rangle` and :math:`\langle s \rangle`,
            ``(H,)``. ``state_pairs``, :math:`\sum_n \langle b b^\top \rangle`, ``(H, H)``.
            ``slab_slope`` :math:`g`, ``(H,)``, and ``slab_curvature`` :math:`K`, ``(H, H)``.
            ``trials`` and ``cross``, ``(D, H)``. ``pairs``, ``(H, H)`` if nothing is missing, else
            ``(D, H, H)``. All can be added and scaled; pairs of the two shapes add up by
            broadcasting.
        """
        statistics, weights, (slope, curvature) = self._linear_statistics(population, value, temperature)
        state_pairs = ops.moments(population.words, weights, self.weight.shape[-1])[1]
        return {**statistics, "state_pairs": state_pairs, "slab_slope": slope, "slab_curvature": curvature}

    @torch.no_grad()
    def expected_log_slab_prior(
        self, population: Population, value: Tensor, means: Tensor, covariances: Tensor, temperature: float = 1.0
    ) -> Tensor:
        r"""Returns expected log densities of the active slabs under other priors.

        They are correct up to constants.

        .. math:: \sum_n \bigl\langle \log \mathcal N(z_b;\; m_b, P_b) \bigr\rangle

        with the posterior of indicators and slabs under the parameters as they are.

        Args:
            population: truncated posteriors over the ``H`` indicators. Its ``indices`` select the data points among all data.
            value: all data, ``(N, D)``. NaN where missing.
            means: other means :math:`m`, ``(T, H)``.
            covariances: other covariances :math:`P`, ``(T, H, H)``, positive definite.
            temperature: of the posteriors over the indicators.

        Returns:
            ``(T,)``, in float64.
        """
        arguments = self._posterior_arguments(population, population.select_rows(value), temperature)
        return ops.expected_log_slab_prior(*arguments, means, covariances)

    def _slabs(self) -> tuple[Tensor, Tensor]:
        root = self.slab_scale_tril.double()
        return self.slab_mean.expand(self.weight.shape[-1]), root @ root.mT

    def _spread(self, standard: Tensor) -> Tensor:
        return standard @ self.slab_scale_tril.mT.to(standard.dtype)

    def _integrate(self, states: Tensor, linear: Tensor, gram: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return collapse_correlated_slabs(states, linear, gram, self.slab_mean.double(), self.slab_scale_tril.double())
