"""Base of likelihoods with normal slabs that are integrated out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.distributions.linear import biased_error
from pyro_truncated.distributions.superposition import GaussianSuperposition, Statistics, check_binary
from pyro_truncated.ops.unpacked import product
from pyro_truncated.states.population import Population
from pyro_truncated.utils.constraints import missing_where, or_missing

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

    def square_error(self, statistics: Statistics) -> Tensor:
        r"""Expected squared errors :math:`\sum_n \langle (y_{nd} - a_d - W_d s)^2 \rangle` of every dimension, ``(D,)``."""
        return biased_error(self.weight, self.bias, statistics)

    def _spread(self, standard: Tensor) -> Tensor:
        """Deviations from the means of slabs ``(*batch, H)`` made of standard normal numbers."""
        raise NotImplementedError(f"{type(self).__name__} has no method that draws slabs")

    def _slabs(self) -> tuple[Tensor, Tensor]:
        """Means of the slabs, ``(H,)``, and their deviations or covariance."""
        raise NotImplementedError(f"{type(self).__name__} has no posterior of slabs")

    def _integrate(self, states: Tensor, linear: Tensor, gram: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns log density, precision factor and mean of standardised slabs.

        They are those under a state; the density is correct up to a constant.
        """
        raise NotImplementedError(f"{type(self).__name__} does not integrate its slabs")

    def _posterior_arguments(self, population: Population, rows: Tensor, temperature: float) -> _Arguments:
        check_binary(population, self.weight.shape[-1])
        mean, spread = self._slabs()
        weights = population.weights(temperature)
        return population.words, weights, self._above_bias(rows), self.weight.double(), self._precision(), mean.double(), spread.double()

    def _above_bias(self, value: Tensor) -> Tensor:
        return missing_where(value.double() - self.bias.double(), value)

    def _mean(self, states: Tensor) -> Tensor:
        return product(self.weight, states.to(self.weight.dtype) * self.slab_mean) + self.bias

    def _reconstruction(self, coefficients: Tensor, value: Tensor) -> Tensor:
        return (coefficients @ self.weight.double().mT + self.bias.double()).to(value.dtype)

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
