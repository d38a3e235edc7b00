"""Binary observations that any of the active latents can switch on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import ops
from pyro_truncated.distributions.superposition import Superposition
from pyro_truncated.ops.vectorised.quadratic import log1mexp, log_off
from pyro_truncated.utils.missing import in_blocks, or_missing


class NoisyOrSuperposition(Superposition):
    r"""Bernoulli observations whose causes act independently: a noisy-OR.

    .. math:: p(y_d = 1 \mid s) = 1 - (1 - w_{0d}) \prod_h (1 - W_{dh} s_h).

    Log probabilities are computed from :math:`\log p(y_d = 0 \mid s)`, so probabilities near 0 and 1 lose no precision, and an observation
    that is impossible under a state has log probability minus infinity. Entries of an observation that are NaN are missing and contribute
    nothing.

    Args:
        states: binary states ``(*batch, H)``.
        weight: probabilities :math:`W` that a latent switches a dimension on, ``(D, H)``, or with batch dimensions in front.
        leak: probability :math:`w_0` that a dimension is on without a cause, a scalar or ``(D,)``, or with batch dimensions
            in front of ``D``.
        validate_args: whether to check parameters and values.

    Raises:
        ValueError: if states and weight disagree about the number of latents, or a parameter is invalid.
    """

    arg_constraints = {  # noqa: RUF012 - the attribute is an instance attribute in torch
        "states": constraints.independent(constraints.boolean, 1),
        "weight": constraints.independent(constraints.unit_interval, 2),
        "leak": constraints.unit_interval,
    }
    support = constraints.independent(or_missing(constraints.boolean), 1)
    has_rsample = False

    leak: Tensor

    def __init__(self, states: Tensor, weight: Tensor, leak: Tensor | float = 0.0, validate_args: bool | None = None) -> None:
        super().__init__(states, weight, validate_args, leak=leak)

    @property
    def mean(self) -> Tensor:
        """Probability of being on, ``(*batch, D)``."""
        return -torch.expm1(self._log_off(self.states)).expand(self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Tensor:
        """Variance of the observations, ``(*batch, D)``."""
        mean = self.mean
        return mean * (1 - mean)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws observations in {0, 1}."""
        with torch.no_grad():
            return torch.bernoulli(self.mean.expand(torch.Size(sample_shape) + self.batch_shape + self.event_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log probability of observations ``(*batch, D)`` under the states, over their observed entries."""
        if self._validate_args:
            self._validate_sample(value)
        if not self.has_packed_log_prob:
            return self._log_prob(self.states, value)
        return in_blocks(self._log_prob, self.states, value, torch.broadcast_shapes(self.batch_shape, value.shape[:-1]))

    @property
    def has_packed_log_prob(self) -> bool:
        """Whether :meth:`packed_log_prob` is available: no parameter may have batch dimensions."""
        return self.weight.dim() == 2 and self.leak.dim() <= 1

    def packed_log_prob(self, words: Tensor, value: Tensor, state_logits: Tensor | None = None) -> Tensor:
        r"""Log probability of observations under packed binary states, plus :math:`\sum_h s_h\,\mathrm{logit}_h`.

        The states the distribution was built with play no role. Differentiable once in the parameters and the logits.

        Args:
            words: packed states, ``(N, C, W)``.
            value: observations ``(N, D)``; NaN where missing.
            state_logits: coefficients of the states, ``(H,)`` or ``(N, H)``, such as prior log-odds.

        Returns:
            ``(N, C)``.
        """
        linear = None if state_logits is None else state_logits.expand(len(value), self.weight.shape[-1])
        return ops.noisy_or_log_prob(words, value, *self._log_complements(), linear).to(self.weight.dtype)

    def _log_complements(self) -> tuple[Tensor, Tensor]:
        leak = self.leak.double().expand(*self.leak.shape[:-1], *self.event_shape)
        return torch.log1p(-self.weight.double()), torch.log1p(-leak)

    def _log_off(self, states: Tensor) -> Tensor:
        log_complements = (tensor.to(self.weight.dtype) for tensor in self._log_complements())
        return log_off(states.to(self.weight.dtype), *log_complements)

    def _log_prob(self, states: Tensor, value: Tensor) -> Tensor:
        off = self._log_off(states)
        return torch.where(value.isnan(), 0.0, torch.where(value == 1, log1mexp(off), off)).sum(-1)
