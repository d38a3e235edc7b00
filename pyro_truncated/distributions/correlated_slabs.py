"""Gaussian observations of linear superpositions with correlated slabs, integrated out."""

from __future__ import annotations

import torch
from pyro.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import ops
from pyro_truncated.distributions.slabs import SlabSuperposition
from pyro_truncated.distributions.superposition import Statistics, data_sums, trials
from pyro_truncated.ops.unpacked import collapse_correlated
from pyro_truncated.states.population import Population
from pyro_truncated.utils.constraints import without_missing


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
        """See :class:`.Superposition`."""
        # As for independent slabs, and two products of matrices.
        return 6 * self.weight.shape[-1] ** 2

    @property
    def _has_plain_parameters(self) -> bool:
        return self.weight.dim() == 2 and all(parameter.dim() <= 1 for parameter in (self.scale, self.slab_mean, self.bias))

    def packed_log_prob(self, words: Tensor, value: Tensor, state_logits: Tensor | None = None) -> Tensor:
        r"""Log density under packed indicators, plus :math:`\sum_h b_h\,\mathrm{logit}_h`: :meth:`Superposition.packed_log_prob`."""
        linear = None if state_logits is None else state_logits.double().expand(len(value), self.weight.shape[-1])
        arguments = self._above_bias(value), self.weight, self._precision(), *self._slabs()
        return ops.correlated_slab_log_prob(words, *arguments, linear).to(torch.promote_types(self.weight.dtype, value.dtype))

    def slab_posterior(self, value: Tensor) -> MultivariateNormal:
        r"""Returns the exact posterior :math:`p(z \mid b, y)` of the slabs.

        It has batch shape ``batch``, in the type of the dictionary.

        Slabs of latents that are off have their prior given the others there. Mean and covariance
        of the coefficients :math:`s = b \odot z` are those of :math:`z`, with zeros for latents
        that are off.

        Args:
            value: observations ``(*batch, D)``. NaN where missing.
        """
        _, factor, solution = self._collapse(self.states, self._above_bias(value))
        identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
        root = self.slab_scale_tril.double()
        scale_tril = root @ torch.linalg.cholesky(inverse.mT @ inverse)
        loc = self.slab_mean.double() + solution @ root.mT
        return MultivariateNormal(loc.to(self.weight.dtype), scale_tril=scale_tril.to(self.weight.dtype))

    @torch.no_grad()
    def statistics(self, population: Population, value: Tensor, temperature: float = 1.0) -> Statistics:
        r"""Expected sufficient statistics, summed over the population's data points, in float64.

        Those of a linear superposition of the coefficients :math:`s = b \odot z`, as in
        :meth:`.SpikeSlabSuperposition.statistics`, with the same gradients in dictionary and
        offset. The gradients in the prior of the slabs are :math:`g`, and the symmetric :math:`K`,
        with

        .. math:: \frac{\partial \mathcal F}{\partial \mu} = g, \qquad \frac{\partial \mathcal F}{\partial T} = \mathrm{tril}(K T).

        Args:
            population: truncated posteriors over the ``H`` indicators. Its ``indices`` select the data points among all data.
            value: all data, ``(N, D)``. NaN where missing.
            temperature: of the posteriors over the indicators.

        Returns:
            ``num_data``; ``observed``, ``sums`` and ``squares``, ``(D,)``. ``states`` and
            ``coefficients``, the sums of :math:`\langle b \rangle` and :math:`\langle s \rangle`,
            ``(H,)``. ``state_pairs``, :math:`\sum_n \langle b b^\top \rangle`, ``(H, H)``.
            ``slab_slope`` :math:`g`, ``(H,)``, and ``slab_curvature`` :math:`K`, ``(H, H)``.
            ``trials`` and ``cross``, ``(D, H)``. ``pairs``, ``(H, H)`` if nothing is missing, else
            ``(D, H, H)``. All can be added and scaled; pairs of the two shapes add up by
            broadcasting.
        """
        rows = population.rows_of(value)
        arguments = self._posterior_arguments(population, rows, temperature)
        rows, is_observed = without_missing(rows)
        moments = ops.correlated_slab_moments if is_observed is None else ops.correlated_slab_moments_by_dimension
        active, coefficients, pairs, slope, curvature = moments(*arguments)
        return {
            **data_sums(rows, is_observed),
            "states": active.sum(0),
            "state_pairs": ops.moments(population.words, arguments[1], self.weight.shape[-1])[1].double(),
            "coefficients": coefficients.sum(0),
            "slab_slope": slope,
            "slab_curvature": curvature,
            "trials": trials(coefficients, rows, is_observed),
            "cross": rows.mT @ coefficients,
            "pairs": pairs,
        }

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
        arguments = self._posterior_arguments(population, population.rows_of(value), temperature)
        return ops.expected_log_slab_prior(*arguments, means, covariances)

    @torch.no_grad()
    def reconstruct(self, population: Population, value: Tensor) -> Tensor:
        r"""Posterior mean :math:`W \langle b \odot z \rangle + a` of the data without noise, see :meth:`Superposition.reconstruct`."""
        coefficients = ops.correlated_slab_moments(*self._posterior_arguments(population, population.rows_of(value), 1.0))[1]
        return self._reconstruction(coefficients, value)

    def _slabs(self) -> tuple[Tensor, Tensor]:
        root = self.slab_scale_tril.double()
        return self.slab_mean.expand(self.weight.shape[-1]), root @ root.mT

    def _spread(self, standard: Tensor) -> Tensor:
        return standard @ self.slab_scale_tril.mT

    def _integrate(self, states: Tensor, linear: Tensor, gram: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return collapse_correlated(states, linear, gram, self.slab_mean.double(), self.slab_scale_tril.double())
