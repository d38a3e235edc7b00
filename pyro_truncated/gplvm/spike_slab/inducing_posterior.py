"""Posteriors over inducing variables, with bounds and predictions."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

from pyro_truncated.gp.uncertain import PsiStatistics
from pyro_truncated.utils.constraints import without_missing


@dataclasses.dataclass(frozen=True)
class Observations:
    r"""Outputs of some data points, less the centre, with log likelihoods :math:`o_n -\frac{\beta}{2} \sum_d w_{nd} (y_{nd} - f_d)^2`."""

    values: Tensor  # (N, D) with zeros in place of missing entries, float64
    weights: Tensor | None  # precisions w relative to the noise's, (N, D) float64, zero where missing; None if all are one
    offset: Tensor | None = None  # what of the log likelihood does not depend on the functions, (N,); None for that of Gaussian noise

    @classmethod
    def from_outputs(cls, y: Tensor) -> Observations:
        """Splits outputs ``(N, D)`` into values and a mask of NaN."""
        values, is_observed = without_missing(y)
        return cls(values, None if is_observed is None else is_observed.double())

    @property
    def all_weights(self) -> Tensor:
        """The weights, ones where there are none, ``(N, D)``."""
        return torch.ones_like(self.values) if self.weights is None else self.weights

    @property
    def counts(self) -> Tensor:
        """The sum of each data point's weights, ``(N,)``."""
        if self.weights is None:
            return self.values.new_full(self.values.shape[:1], float(self.values.shape[1]))
        return self.weights.sum(1)

    @property
    def weighted_values(self) -> Tensor:
        """Values times weights, ``(N, D)``."""
        return self.values if self.weights is None else self.values * self.weights

    def normalizer(self, noise: Tensor) -> Tensor:
        """What of the log likelihood does not depend on the functions, ``(N,)``."""
        return -self.counts * (noise.log() + math.log(2 * math.pi)) / 2 if self.offset is None else self.offset

    @functools.cached_property
    def patterns(self) -> tuple[Tensor, Tensor]:
        """Returns distinct columns of ``weights``, ``(G, N)``, and outputs' columns ``(D,)``."""
        assert self.weights is not None
        distinct, position = torch.unique(self.weights.detach().mT, dim=0, return_inverse=True)
        if self.weights.requires_grad or len(distinct) == self.weights.shape[1]:
            return self.weights.mT, torch.arange(self.weights.shape[1], device=position.device)
        return distinct, position


@dataclasses.dataclass(frozen=True)
class InducingPosterior:
    r"""Gaussian posterior of whitened inducing variables: :math:`u_d = L v_d`, :math:`L L^\top = K_{uu}`, :math:`q(v_d) = N(m_d, S_d)`.

    Example:
        >>> model = SpikeSlabGPLVM(12, 3, num_latents=2, num_inducing=5)
        >>> posterior: InducingPosterior = model.inducing_posterior(torch.randn(12, 3))[0]
        >>> posterior.mean.shape
        torch.Size([5, 3])

    Attributes:
        cholesky: :math:`L`, ``(M, M)``.
        mean: means :math:`m_d`, ``(M, D)``.
        covariance: :math:`S`, ``(M, M)`` for all outputs, or ``(D, M, M)``.
    """

    cholesky: Tensor
    mean: Tensor
    covariance: Tensor

    @functools.cached_property
    def weights(self) -> Tensor:
        r""":math:`\alpha = L^{-\top} m`, ``(M, D)``: the expected function at :math:`x` is :math:`k_u(x)^\top \alpha`."""
        return torch.linalg.solve_triangular(self.cholesky.mT, self.mean, upper=True)

    @functools.cached_property
    def reduction(self) -> Tensor:
        r""":math:`P = L^{-\top} (I - S) L^{-1}`, ``(M, M)`` or ``(D, M, M)``: how much the data reduce the prior variance."""
        eye = torch.eye(len(self.cholesky), dtype=self.cholesky.dtype, device=self.cholesky.device)
        inverse = torch.linalg.solve_triangular(self.cholesky, eye, upper=False)
        return inverse.mT @ (eye - self.covariance) @ inverse


def collapsed_bound(psi: PsiStatistics, cholesky: Tensor, data: Observations, noise: Tensor) -> tuple[Tensor, InducingPosterior]:
    r"""Returns the bound, and the optimal posterior of the inducing variables.

    .. math:: F = \tfrac{ND}{2}\log\tfrac{\beta}{2\pi} + \tfrac D2 \log|K_{uu}| - \tfrac D2 \log|K_{uu} + \beta\Psi_2|
              - \tfrac\beta2 \|Y\|^2 + \tfrac{\beta^2}{2}\,\mathrm{tr}(Y^\top\Psi_1\Sigma\Psi_1^\top Y)
              - \tfrac{\beta D}{2}\left[\psi_0 - \mathrm{tr}(K_{uu}^{-1}\Psi_2)\right], \quad \Sigma = (K_{uu} + \beta\Psi_2)^{-1}

    With missing outputs, or outputs of different weights, the statistics of an output are weighted sums over the data points. Outputs that
    have the same weights share them.

    Reference:
        Titsias and Lawrence, "Bayesian Gaussian process latent variable model" (2010); Dai, Hensman and Lawrence (2015), equation 9.
    """
    psi0, psi1, psi2 = psi
    if data.weights is not None:
        groups, position = data.patterns
        psi2 = torch.einsum("gn,nmk->gmk", groups, psi2)
        psi0_sum = (data.counts * psi0).sum()
        multiplicity = torch.bincount(position, minlength=len(groups)).to(psi2)
    else:
        psi2, position = psi2.unsqueeze(0), torch.zeros(data.values.shape[1], dtype=torch.long, device=psi2.device)
        psi0_sum = data.values.shape[1] * psi0.sum()
        multiplicity = psi2.new_full((1,), float(data.values.shape[1]))
    eye = torch.eye(len(cholesky), dtype=cholesky.dtype, device=cholesky.device)
    half = torch.linalg.solve_triangular(cholesky, psi2, upper=False)
    gain = torch.linalg.solve_triangular(cholesky, half.mT, upper=False) / noise
    factor = torch.linalg.cholesky(eye + (gain + gain.mT) / 2)
    projected = torch.linalg.solve_triangular(cholesky, psi1.mT @ data.weighted_values, upper=False) / noise
    if len(factor) == 1:
        fitted = torch.linalg.solve_triangular(factor[0], projected, upper=False)
        mean = torch.linalg.solve_triangular(factor[0].mT, fitted, upper=True)
        covariance = torch.cholesky_inverse(factor[0])
    else:
        own = factor[position]
        fitted = torch.linalg.solve_triangular(own, projected.mT.unsqueeze(-1), upper=False)
        mean = torch.linalg.solve_triangular(own.mT, fitted, upper=True).squeeze(-1).mT
        covariance = torch.cholesky_inverse(factor)[position]
    log_det = 2 * (multiplicity * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)).sum()
    trace = (multiplicity * gain.diagonal(dim1=-2, dim2=-1).sum(-1)).sum()
    bound = data.normalizer(noise).sum() - (log_det + (data.values * data.weighted_values).sum() / noise) / 2
    bound = bound + (fitted.square().sum() - psi0_sum / noise + trace) / 2
    return bound, InducingPosterior(cholesky, mean, covariance)


def expected_log_likelihood(psi: PsiStatistics, posterior: InducingPosterior, data: Observations, noise: Tensor) -> Tensor:
    r"""The expected log likelihood under posteriors of inputs and inducing variables.

    .. math:: E_n = \sum_{d\ \mathrm{seen}} \tfrac12\log\tfrac{\beta}{2\pi} - \tfrac\beta2 \left[ y_{nd}^2 - 2 y_{nd} \psi_{1n}^\top\alpha_d
              + \alpha_d^\top \Psi_{2n} \alpha_d + \psi_{0n} - \mathrm{tr}(P_d \Psi_{2n}) \right]
    """
    psi0, psi1, psi2 = psi
    alpha, reduction = posterior.weights, posterior.reduction
    counts = data.counts
    fixed = data.normalizer(noise)
    square = ((data.values - 2 * (psi1 @ alpha)) * data.weighted_values).sum(1) + counts * psi0
    if data.weights is None:
        # Outputs enter through their number and their squared weights only.
        total = reduction.sum(0) if reduction.dim() == 3 else reduction * alpha.shape[1]
        curvature = alpha @ alpha.mT - total
        if psi2.dim() == 2:
            return fixed.sum() - (square.sum() + (curvature * psi2).sum()) / (2 * noise)
    else:
        squares = torch.einsum("md,kd->dmk", alpha, alpha) - reduction
        curvature = torch.einsum("nd,dmk->nmk", data.weights, squares.expand(alpha.shape[1], -1, -1))
    return fixed - (square + (curvature * psi2).sum((-2, -1))) / (2 * noise)


def divergence(posterior: InducingPosterior, scale_tril: Tensor) -> Tensor:
    r"""The divergence of all outputs' whitened inducing variables from their prior."""
    num_outputs = posterior.mean.shape[1]
    log_det = 2 * scale_tril.diagonal().log().sum()
    trace = scale_tril.square().sum()
    return (num_outputs * (trace - log_det - len(scale_tril)) + posterior.mean.square().sum()) / 2


@dataclasses.dataclass(frozen=True)
class Prediction:
    r"""Means and variances of outputs at uncertain inputs.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> posterior = Posterior(model, y)
        >>> latents = posterior.infer(y[:3])
        >>> prediction = posterior.predict(latents.loc, scale=latents.scale)
        >>> prediction.mean.shape
        torch.Size([3, 5])

    Attributes:
        mean: ``(N, D)``.
        variance: variances of the noise-free outputs, ``(N, D)``.
        noise: variance of the noise, a scalar.
        covariance: of each data point's noise-free outputs, ``(N, D, D)``, if asked for. Outputs are correlated
            because they share the input, which is uncertain.
    """

    mean: Tensor
    variance: Tensor
    noise: Tensor
    covariance: Tensor | None = None


def predict(psi: PsiStatistics, posterior: InducingPosterior, noise: Tensor, full_covariance: bool = False) -> Prediction:
    r"""Moments of the outputs of each data point.

    .. math:: E f_d = \psi_1^\top \alpha_d, \qquad \mathrm{Cov}(f_d, f_{d'}) = \delta_{dd'} [\psi_0 - \mathrm{tr}(P_d \Psi_2)]
              + \alpha_d^\top (\Psi_2 - \psi_1 \psi_1^\top) \alpha_{d'}
    """
    psi0, psi1, psi2 = psi
    alpha, reduction = posterior.weights, posterior.reduction
    mean = psi1 @ alpha
    spread = psi2 - psi1.unsqueeze(-1) * psi1.unsqueeze(-2)
    own = psi0.unsqueeze(-1) - torch.einsum("nmk,...mk->n...", psi2, reduction).reshape(len(psi0), -1)
    own = own.expand_as(mean)
    if full_covariance:
        covariance = alpha.mT @ spread @ alpha + torch.diag_embed(own)
        return Prediction(mean, covariance.diagonal(dim1=-2, dim2=-1), noise, covariance)
    return Prediction(mean, own + ((spread @ alpha) * alpha).sum(-2), noise)
