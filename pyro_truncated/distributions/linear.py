"""Gaussian observations of a linear superposition of the active latents' dictionary elements."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import ops
from pyro_truncated.distributions.superposition import Superposition
from pyro_truncated.ops.vectorised.quadratic import product
from pyro_truncated.utils.missing import in_blocks, or_missing


class LinearSuperposition(Superposition):
    r"""Normal observations around a sum of dictionary elements, :math:`y \sim \mathcal N(W s + b, \mathrm{diag}(\sigma^2))`.

    The same density as ``Normal(states @ weight.mT + bias, scale).to_event(1)``, at a cost per state that does not depend on the number
    ``D`` of observed dimensions: with :math:`\tilde y = y - b` and :math:`\Lambda = \mathrm{diag}(\sigma^{-2})`

    .. math:: |\tilde y - W s|_\Lambda^2 = |\tilde y|_\Lambda^2 - 2\, s^\top W^\top \Lambda \tilde y + s^\top W^\top \Lambda W s,

    where the two products with :math:`W^\top` are shared by all states. The terms cancel, so they are taken in float64; noise about
    :math:`10^6` times smaller than the data leaves nine or so correct digits.

    Entries of an observation that are NaN are missing and contribute nothing.

    Args:
        states: states ``(*batch, H)``; real numbers, usually zeros and ones.
        weight: dictionary :math:`W`, ``(D, H)``, or with batch dimensions in front.
        scale: standard deviation :math:`\sigma`, a scalar or ``(D,)``, or with batch dimensions in front of ``D``.
        bias: offset :math:`b`, ``(D,)``, or with batch dimensions in front; zero by default.
        validate_args: whether to check parameters and values.

    Raises:
        ValueError: if states and weight disagree about the number of latents, or a parameter is invalid.
    """

    arg_constraints = {  # noqa: RUF012 - the attribute is an instance attribute in torch
        "states": constraints.real_vector,
        "weight": constraints.independent(constraints.real, 2),
        "scale": constraints.positive,
        "bias": constraints.real_vector,
    }
    support = constraints.independent(or_missing(constraints.real), 1)
    has_rsample = True

    scale: Tensor
    bias: Tensor
    _cached: tuple[Any, Tensor, tuple[Tensor, Tensor, Tensor]] | None = None

    def __init__(
        self, states: Tensor, weight: Tensor, scale: Tensor | float, bias: Tensor | None = None, validate_args: bool | None = None
    ) -> None:
        bias = weight.new_zeros(1).expand(weight.shape[-2]) if bias is None else bias
        super().__init__(states, weight, validate_args, scale=scale, bias=bias)

    @property
    def mean(self) -> Tensor:
        """Mean :math:`W s + b`, ``(*batch, D)``."""
        mean = product(self.weight, self.states.to(self.weight.dtype)) + self.bias
        return mean.expand(self.batch_shape + self.event_shape)

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
        if bool(value.isnan().any()):
            return self._log_prob_missing(value)
        linear, pairwise, constant = self._terms(value)
        states = self.states.double()
        energy = (states * (linear + product(pairwise, states))).sum(-1)
        return (constant + energy).to(torch.promote_types(self.weight.dtype, value.dtype))

    @property
    def has_packed_log_prob(self) -> bool:
        """Whether :meth:`packed_log_prob` is available: no parameter may have batch dimensions."""
        return self.weight.dim() == 2 and self.scale.dim() <= 1 and self.bias.dim() == 1

    def packed_log_prob(self, words: Tensor, value: Tensor, state_logits: Tensor | None = None) -> Tensor:
        r"""Log density of observations under packed binary states, plus :math:`\sum_h s_h\,\mathrm{logit}_h`.

        The states the distribution was built with play no role. Differentiable once in the parameters and the logits. Without gradients
        the products of a value with the dictionary are kept, so scoring more states for the same value costs nothing more for them.

        Args:
            words: packed states, ``(N, C, W)``.
            value: observations ``(N, D)``; NaN where missing.
            state_logits: coefficients of the states, ``(H,)`` or ``(N, H)``, such as prior log-odds.

        Returns:
            ``(N, C)``.
        """
        dtype = torch.promote_types(self.weight.dtype, value.dtype)
        num_latents = self.weight.shape[-1]
        logits = self.weight.new_zeros(1) if state_logits is None else state_logits
        logits = logits.double().expand(len(value), num_latents)
        if bool(value.isnan().any()):
            error = ops.square_error(words, value.double() - self.bias.double(), self.weight, self._precision())
            prior = ops.pair_energy(words, logits, logits.new_zeros(num_latents, num_latents))
            return (prior - 0.5 * error + self._log_normalizer(value).unsqueeze(-1)).to(dtype)
        linear, pairwise, constant = self._terms(value)
        return (ops.pair_energy(words, linear + logits, pairwise) + constant.unsqueeze(-1)).to(dtype)

    def _precision(self) -> Tensor:
        return self.scale.double().reciprocal().square().expand(*self.scale.shape[:-1], *self.event_shape)

    def _log_normalizer(self, value: Tensor) -> Tensor:
        is_observed = ~value.isnan()
        return -((self.scale.double().log() + 0.5 * math.log(2 * math.pi)) * is_observed).sum(-1)

    def _terms(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Coefficients ``(*batch, H)``, ``(H, H)`` and constant ``(*batch)`` of the log density as a quadratic function of the state."""
        # Another view of the same memory counts as the same value; the cache keeps the memory alive.
        # Whether an inference tensor has been changed since cannot be told.
        is_kept = not torch.is_grad_enabled() and not value.is_inference()
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype, value._version) if is_kept else None
        if is_kept and self._cached is not None and self._cached[0] == key:
            return self._cached[2]
        weight, precision = self.weight.double(), self._precision()
        centred = value.double() - self.bias.double()
        scaled = centred * precision
        linear = product(weight.mT, scaled)
        pairwise = -0.5 * weight.mT @ (precision.unsqueeze(-1) * weight)
        constant = self._log_normalizer(value) - 0.5 * (scaled * centred).sum(-1)
        if is_kept:
            self._cached = key, value, (linear, pairwise, constant)
        return linear, pairwise, constant

    def _log_prob_missing(self, value: Tensor) -> Tensor:
        precision = self._precision()

        def log_prob(states: Tensor, value: Tensor) -> Tensor:
            """Log densities over observed entries, elementwise in the batch."""
            residual = torch.where(value.isnan(), 0.0, value - self.bias - product(self.weight, states.to(self.weight.dtype)))
            return self._log_normalizer(value) - 0.5 * (residual.double().square() * precision).sum(-1)

        batch_shape = torch.broadcast_shapes(self.batch_shape, value.shape[:-1])
        dtype = torch.promote_types(self.weight.dtype, value.dtype)
        if not self.has_packed_log_prob:
            return log_prob(self.states, value).to(dtype)
        return in_blocks(log_prob, self.states, value, batch_shape).to(dtype)
