"""Gaussian observations of a linear superposition of latents with spike-and-slab prior, the slabs integrated out."""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import ops
from pyro_truncated.distributions.superposition import Superposition
from pyro_truncated.ops.vectorised.quadratic import product
from pyro_truncated.ops.vectorised.spike_slab import collapse
from pyro_truncated.utils.missing import in_blocks, or_missing


class SpikeSlabSuperposition(Superposition):
    r"""Normal observations of a superposition of normal slabs, which are integrated out.

    With :math:`y \sim \mathcal N(W (b \odot z), \mathrm{diag}(\sigma^2))` and slabs :math:`z \sim \mathcal N(\mu, \mathrm{diag}(\tau^2))`
    the density given the binary indicators :math:`b` is exactly

    .. math:: \log p(y \mid b) = \log \mathcal N\bigl(y;\; W (b \odot \mu),\;
        \mathrm{diag}(\sigma^2) + W\,\mathrm{diag}(b \odot \tau^2)\,W^\top\bigr),

    evaluated without a matrix of the size of the observations: from a Cholesky factor over the latents, or, packed, over the active
    latents only. It is taken in float64.

    Entries of an observation that are NaN are missing and contribute nothing.

    Args:
        states: indicators :math:`b`, ``(*batch, H)``, zeros and ones.
        weight: dictionary :math:`W`, ``(D, H)``, or with batch dimensions in front.
        scale: standard deviation of the noise :math:`\sigma`, a scalar or ``(D,)``, or with batch dimensions in front of ``D``.
        slab_mean: means of the slabs :math:`\mu`, a scalar or ``(H,)``, or with batch dimensions in front of ``H``.
        slab_scale: standard deviations of the slabs :math:`\tau`, as ``slab_mean``.
        validate_args: whether to check parameters and values.

    Raises:
        ValueError: if states and weight disagree about the number of latents, or a parameter is invalid.

    Reference:
        Sheikh, Shelton and Lücke, "A Truncated EM Approach for Spike-and-Slab Sparse Coding", JMLR 2014.
    """

    arg_constraints = {  # noqa: RUF012 - the attribute is an instance attribute in torch
        "states": constraints.independent(constraints.boolean, 1),
        "weight": constraints.independent(constraints.real, 2),
        "scale": constraints.positive,
        "slab_mean": constraints.real,
        "slab_scale": constraints.positive,
    }
    support = constraints.independent(or_missing(constraints.real), 1)
    has_rsample = True

    scale: Tensor
    slab_mean: Tensor
    slab_scale: Tensor

    def __init__(
        self,
        states: Tensor,
        weight: Tensor,
        scale: Tensor | float,
        slab_mean: Tensor | float,
        slab_scale: Tensor | float,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(states, weight, validate_args, scale=scale, slab_mean=slab_mean, slab_scale=slab_scale)

    @property
    def mean(self) -> Tensor:
        r"""Mean :math:`W (b \odot \mu)`, ``(*batch, D)``."""
        mean = product(self.weight, self.states.to(self.weight.dtype) * self.slab_mean)
        return mean.expand(self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Tensor:
        r"""Variance :math:`\sigma_d^2 + \sum_h W_{dh}^2 b_h \tau_h^2`, ``(*batch, D)``."""
        variance = self.scale.square() + product(self.weight.square(), self.states.to(self.weight.dtype) * self.slab_scale.square())
        return variance.expand(self.batch_shape + self.event_shape)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws observations, differentiable in the parameters."""
        shape = torch.Size(sample_shape) + self.batch_shape
        options: dict[str, Any] = {"dtype": self.weight.dtype, "device": self.weight.device}
        slabs = self.slab_mean + self.slab_scale * torch.randn(shape + self.states.shape[-1:], **options)
        noise = torch.randn(shape + self.event_shape, **options)
        return product(self.weight, self.states.to(self.weight.dtype) * slabs) + self.scale * noise

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of observations ``(*batch, D)`` under the indicators, over their observed entries."""
        if self._validate_args:
            self._validate_sample(value)
        if not self.has_packed_log_prob:
            return self._log_prob(self.states, value)
        batch_shape = torch.broadcast_shapes(self.batch_shape, value.shape[:-1])
        # A precision matrix of the slabs for every state, its factor, and what these are made from.
        return in_blocks(self._log_prob, self.states, value, batch_shape, 4 * self.weight.shape[-1] ** 2)

    def _log_prob(self, states: Tensor, value: Tensor) -> Tensor:
        log_prob = self._constant(value) + self._collapse(states, value)[0]
        return log_prob.to(torch.promote_types(self.weight.dtype, value.dtype))

    @property
    def has_packed_log_prob(self) -> bool:
        """Whether :meth:`packed_log_prob` is available: no parameter may have batch dimensions."""
        return self.weight.dim() == 2 and max(self.scale.dim(), self.slab_mean.dim(), self.slab_scale.dim()) <= 1

    def packed_log_prob(self, words: Tensor, value: Tensor, state_logits: Tensor | None = None) -> Tensor:
        r"""Log density of observations under packed indicators, plus :math:`\sum_h b_h\,\mathrm{logit}_h`.

        The states the distribution was built with play no role. Differentiable once in the parameters and the logits.

        Args:
            words: packed states, ``(N, C, W)``.
            value: observations ``(N, D)``; NaN where missing.
            state_logits: coefficients of the states, ``(H,)`` or ``(N, H)``, such as prior log-odds.

        Returns:
            ``(N, C)``.
        """
        num_latents = self.weight.shape[-1]
        linear = None if state_logits is None else state_logits.double().expand(len(value), num_latents)
        slabs = self.slab_mean.expand(num_latents), self.slab_scale.expand(num_latents)
        log_prob = ops.spike_slab_log_prob(words, value, self.weight, self._precision(), *slabs, linear)
        return log_prob.to(torch.promote_types(self.weight.dtype, value.dtype))

    def slab_posterior(self, value: Tensor) -> MultivariateNormal:
        r"""Exact posterior :math:`p(z \mid b, y)` of the slabs, with batch shape ``batch``, in the type of the dictionary.

        Slabs of latents that are off have their prior there. Of the coefficients :math:`s = b \odot z` the mean and covariance are those
        of :math:`z` with the rows and columns of latents that are off set to zero.

        Args:
            value: observations ``(*batch, D)``; NaN where missing.
        """
        _, factor, solution = self._collapse(self.states, value)
        identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
        deviation = self.slab_scale.double()
        scale_tril = deviation.unsqueeze(-1) * torch.linalg.cholesky(inverse.mT @ inverse)
        loc = self.slab_mean.double() + deviation * solution
        return MultivariateNormal(loc.to(self.weight.dtype), scale_tril=scale_tril.to(self.weight.dtype))

    def _precision(self) -> Tensor:
        return self.scale.double().reciprocal().square().expand(*self.scale.shape[:-1], *self.event_shape)

    def _constant(self, value: Tensor) -> Tensor:
        """What the log density of the observed entries would be if every latent were off."""
        precision = self._precision()
        terms = 0.5 * (precision.log() - math.log(2 * math.pi) - precision * value.double().nan_to_num(0.0).square())
        return terms.masked_fill(value.isnan(), 0.0).sum(-1)

    def _collapse(self, states: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight, precision = self.weight.double(), self._precision()
        if bool(value.isnan().any()):
            precision = precision * ~value.isnan()
        linear = product(weight.mT, precision * value.double().nan_to_num(0.0))
        gram = (weight.mT * precision.unsqueeze(-2)) @ weight
        return collapse(states.double(), linear, gram, self.slab_mean.double(), self.slab_scale.double())
