"""Gaussian observations of a superposition of the active latents' dictionary elements by maximum."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import ops
from pyro_truncated.distributions.superposition import Superposition
from pyro_truncated.ops.vectorised.maximum import largest
from pyro_truncated.utils.missing import in_blocks, or_missing


class MaximumSuperposition(Superposition):
    r"""Normal observations around the largest active dictionary entry, :math:`y_d \sim \mathcal N(\max(0, \max_h s_h W_{dh}), \sigma_d^2)`.

    Negative entries of the dictionary never win. Entries of an observation that are NaN are missing and contribute nothing.

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
        "weight": constraints.independent(constraints.real, 2),
        "scale": constraints.positive,
    }
    support = constraints.independent(or_missing(constraints.real), 1)
    has_rsample = True

    scale: Tensor

    def __init__(self, states: Tensor, weight: Tensor, scale: Tensor | float, validate_args: bool | None = None) -> None:
        super().__init__(states, weight, validate_args, scale=scale)

    @property
    def mean(self) -> Tensor:
        r"""Mean :math:`\max(0, \max_h s_h W_{dh})`, ``(*batch, D)``."""
        return self._mean(self.states).expand(self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Tensor:
        r"""Variance :math:`\sigma^2`, ``(*batch, D)``."""
        return self.scale.square().expand(self.batch_shape + self.event_shape)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws observations, differentiable in the parameters."""
        mean = self.mean
        noise = torch.randn(torch.Size(sample_shape) + mean.shape, dtype=mean.dtype, device=mean.device)
        return mean + self.scale * noise

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of observations ``(*batch, D)`` under the states, over their observed entries."""
        if self._validate_args:
            self._validate_sample(value)
        if not self.has_packed_log_prob:
            return self._log_prob(self.states, value)
        batch_shape = torch.broadcast_shapes(self.batch_shape, value.shape[:-1])
        # A product of every state with the dictionary, and which of them is largest.
        return in_blocks(self._log_prob, self.states, value, batch_shape, 2 * math.prod(self.weight.shape))

    @property
    def has_packed_log_prob(self) -> bool:
        """Whether :meth:`packed_log_prob` is available: no parameter may have batch dimensions."""
        return self.weight.dim() == 2 and self.scale.dim() <= 1

    def packed_log_prob(self, words: Tensor, value: Tensor, state_logits: Tensor | None = None) -> Tensor:
        r"""Log density of observations under packed binary states, plus :math:`\sum_h s_h\,\mathrm{logit}_h`.

        The states the distribution was built with play no role. Differentiable once in the parameters and the logits.

        Args:
            words: packed states, ``(N, C, W)``.
            value: observations ``(N, D)``; NaN where missing.
            state_logits: coefficients of the states, ``(H,)`` or ``(N, H)``, such as prior log-odds.

        Returns:
            ``(N, C)``.
        """
        num_latents = self.weight.shape[-1]
        precision = self.scale.double().reciprocal().square().expand(self.event_shape)
        error = ops.maximum_error(words, value, self.weight, precision)
        log_prob = self._log_normalizer(value).unsqueeze(-1) - 0.5 * error
        if state_logits is not None:
            linear = state_logits.double().expand(len(value), num_latents)
            log_prob = log_prob + ops.pair_energy(words, linear, linear.new_zeros(num_latents, num_latents))
        return log_prob.to(torch.promote_types(self.weight.dtype, value.dtype))

    def _mean(self, states: Tensor) -> Tensor:
        return largest(states.to(self.weight.dtype), self.weight)

    def _log_normalizer(self, value: Tensor) -> Tensor:
        return -((self.scale.double().log() + 0.5 * math.log(2 * math.pi)) * ~value.isnan()).sum(-1)

    def _log_prob(self, states: Tensor, value: Tensor) -> Tensor:
        # Masked before it is divided, or missing entries would turn the gradient of the scale into NaN.
        residual = torch.where(value.isnan(), 0.0, value - self._mean(states)) / self.scale
        log_prob = self._log_normalizer(value) - 0.5 * residual.double().square().sum(-1)
        return log_prob.to(torch.promote_types(self.weight.dtype, value.dtype))
