"""Gaussian observations of the maximum of active dictionary elements."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import ops
from pyro_truncated.distributions.superposition import GaussianSuperposition, Statistics, check_binary, data_sums
from pyro_truncated.ops.unpacked import largest
from pyro_truncated.states.population import Population
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.constraints import finite, or_missing, without_missing


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
        """See :class:`.Superposition`."""
        # A product of every state with the dictionary, and which of them is largest.
        return 2 * math.prod(self.weight.shape)

    def packed_log_prob(self, words: Tensor, value: Tensor, state_logits: Tensor | None = None) -> Tensor:
        r"""Log density under packed binary states, plus :math:`\sum_h s_h\,\mathrm{logit}_h`: :meth:`Superposition.packed_log_prob`."""
        num_latents = self.weight.shape[-1]
        error = ops.maximum_error(words, value, self.weight, self._precision())
        log_prob = self._log_normalizer(value).unsqueeze(-1) - 0.5 * error
        if state_logits is not None:
            linear = state_logits.double().expand(len(value), num_latents)
            log_prob = log_prob + ops.pair_energy(words, linear, linear.new_zeros(num_latents, num_latents))
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

        Args:
            population: truncated posteriors over the ``H`` latents; its ``indices`` select the data points among all data.
            value: all data, ``(N, D)``. NaN where missing.
            temperature: of the posteriors.

        Returns:
            ``num_data``; ``observed`` :math:`N_d`; ``sums`` and ``squares`` of the data, ``(D,)``.
            ``states``, the sum of :math:`\langle s \rangle`, ``(H,)``. ``wins`` and ``won``, ``(D, H)``. All can be added and scaled.
        """
        rows = population.rows_of(value)
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
        return self._explain(population, population.rows_of(value), 1.0)[1].to(value.dtype)

    def _explain(self, population: Population, rows: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        check_binary(population, self.weight.shape[-1])
        return ops.maximum_statistics(population.words, population.weights(temperature), rows, self.weight.double())

    def _mean(self, states: Tensor) -> Tensor:
        return largest(states.to(self.weight.dtype), self.weight)

    def _log_prob(self, states: Tensor, value: Tensor) -> Tensor:
        # Masked before it is divided, or missing entries would turn the gradient of the scale into NaN.
        residual = torch.where(value.isnan(), 0.0, value - self._mean(states)) / self.scale
        log_prob = self._log_normalizer(value) - 0.5 * residual.double().square().sum(-1)
        return log_prob.to(torch.promote_types(self.weight.dtype, value.dtype))
