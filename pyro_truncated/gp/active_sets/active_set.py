r"""Gaussian processes with many outputs, conditioned on an active set of data points.

The outputs :math:`x_{\cdot d}`, :math:`d = 1 \ldots D`, are independent Gaussian processes over the latents with one kernel and one
noise variance :math:`\sigma^2`, so one Cholesky factor of :math:`C = K_{AA} + \sigma^2 I` serves them all:
:math:`O(|A|^3 + |A|^2 (D + R) + |A| R D)` for :math:`R` further points.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from pyro.contrib.gp import kernels
from torch import Tensor

from pyro_truncated.gp.cholesky import factorize
from pyro_truncated.gp.kernels.evaluation import covariance, prior_variance
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.arrays import takes_arrays


@dataclasses.dataclass(frozen=True)
class _Factor:
    """What outputs with the same observed rows share: the rows, a Cholesky factor, and the outputs whitened by it."""

    rows: Tensor | slice
    columns: Tensor | slice
    num_outputs: int
    cholesky: Tensor
    whitened: Tensor
    jitter: float


class ActiveSet:
    r"""The Gaussian process posterior given the outputs of an active set.

    .. math:: m_n = k_{nA} C^{-1} x_A, \qquad c_n = k_{nn} + \sigma^2 - k_{nA} C^{-1} k_{An}, \qquad C = K_{AA} + \sigma^2 I

    Outputs that are NaN are missing. Outputs observed at the same rows share a Cholesky factor, so a complete active set needs one, and
    one with missing entries as many as there are patterns of missingness: prefer complete data points as the active ones.

    Example:
        >>> kernel, noise = pyro.contrib.gp.kernels.RBF(1), torch.tensor(0.1)
        >>> active = ActiveSet(torch.randn(8, 1), torch.randn(8, 2), kernel, noise)
        >>> mean, variance = active.predict(torch.zeros(3, 1))
        >>> mean.shape, variance.shape
        (torch.Size([3, 2]), torch.Size([3, 1]))

    Args:
        latents: ``(*batch, A, Q)``.
        outputs: ``(*batch, A, D)``; NaN where missing.
        kernel: kernel of :mod:`pyro.contrib.gp.kernels`.
        noise: noise variance :math:`\sigma^2`, a scalar.
        matrix: kernel matrix ``(*batch, A, A)`` of the latents, if it is known already.

    Attributes:
        jitter: share of the prior variance that was added to the noise for the sake of the factorisation; 0 if none.

    Raises:
        ValueError: if latents and outputs disagree, or the covariance matrix is not positive definite.
    """

    @names_arguments
    @takes_arrays
    def __init__(self, latents: Tensor, outputs: Tensor, kernel: kernels.Kernel, noise: Tensor, matrix: Tensor | None = None) -> None:
        if latents.dim() < 2 or outputs.dim() < 2 or latents.shape[-2] != outputs.shape[-2]:
            raise ValueError(
                f"latents (*batch, A, Q) and outputs (*batch, A, D) must agree; got {tuple(latents.shape)}, {tuple(outputs.shape)}"
            )
        self.kernel, self.latents, self.outputs = kernel, latents, outputs
        self.noise = torch.as_tensor(noise, dtype=latents.dtype, device=latents.device)
        if self.noise.numel() != 1:
            raise ValueError(f"noise must be one variance for all outputs and data points; got shape {tuple(self.noise.shape)}")
        self.noise = self.noise.reshape(())
        matrix = covariance(kernel, latents, latents) if matrix is None else matrix
        observed = ~outputs.isnan()
        if bool(observed.all()):
            self.factors = [self._factor(matrix, slice(None), slice(None), outputs)]
        else:
            self.factors = self._factor_patterns(matrix, observed)
        self.jitter = max(factor.jitter for factor in self.factors)

    def _factor(self, matrix: Tensor, rows: Tensor | slice, columns: Tensor | slice, outputs: Tensor) -> _Factor:
        cholesky, jitter = factorize(matrix, self.noise)
        whitened = torch.linalg.solve_triangular(cholesky, outputs, upper=False)
        return _Factor(rows, columns, outputs.shape[-1], cholesky, whitened, jitter)

    def _factor_patterns(self, matrix: Tensor, observed: Tensor) -> list[_Factor]:
        if observed.dim() > 2:
            raise ValueError("missing entries in an active set with batch dimensions are not supported")
        patterns, which = torch.unique(observed.mT, dim=0, return_inverse=True)
        found = []
        for number, pattern in enumerate(patterns):
            rows, columns = pattern.nonzero().squeeze(-1), (which == number).nonzero().squeeze(-1)
            found.append(self._factor(matrix[..., rows, :][..., rows], rows, columns, self.outputs[rows][:, columns]))
        return found

    @property
    def size(self) -> int:
        """Number of active points ``A``."""
        return self.latents.shape[-2]

    def log_prob_terms(self) -> Tensor:
        r"""Log densities :math:`\log p(x_a \mid x_{<a})`, ``(*batch, A)``, of the active points, each given the ones before it.

        Their sum is :math:`\log p(x_A) = -\frac D2 \log |C| - \frac12 \operatorname{tr}(C^{-1} x_A x_A^\top) - \frac{|A| D}{2} \log 2\pi`.
        """
        total = self.latents.new_zeros(())
        for factor in self.factors:
            scale = factor.cholesky.diagonal(dim1=-2, dim2=-1).log() + 0.5 * math.log(2 * math.pi)
            terms = -0.5 * factor.whitened.square().sum(-1) - factor.num_outputs * scale
            if not isinstance(factor.rows, slice):
                terms = terms.new_zeros(*terms.shape[:-1], self.size).index_add(-1, factor.rows, terms)
            total = total + terms
        return total

    @takes_arrays
    def predict(self, latents: Tensor, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        r"""Predictive means :math:`m_n`, ``(*batch, B, D)``, and variances :math:`c_n`, ``(*batch, B, 1)`` or ``(*batch, B, D)``.

        The variance is that of the observations, or ``noiseless`` that of the function. It has one column for all outputs, unless
        entries of the active set are missing. Latents of further batch dimensions than the active set are allowed.
        """
        if self.latents.dim() == 2 and self.outputs.dim() == 2 and latents.dim() != 2:
            mean, variance = self.predict(latents.reshape(-1, latents.shape[-1]), noiseless=noiseless)
            shape = latents.shape[:-1]
            return mean.reshape(*shape, mean.shape[-1]), variance.reshape(*shape, variance.shape[-1])
        return self.predict_from(prior_variance(self.kernel, latents), covariance(self.kernel, self.latents, latents), noiseless=noiseless)

    def predict_from(self, prior: Tensor, cross: Tensor, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """As :meth:`predict`, from prior variances ``(*batch, B)`` and covariances with the active set ``(*batch, A, B)``."""
        parts = []
        for factor in self.factors:
            basis = torch.linalg.solve_triangular(factor.cholesky, cross[..., factor.rows, :], upper=False)
            left = (prior - basis.square().sum(-2)).clamp(min=0.0)
            parts.append((basis.mT @ factor.whitened, (left if noiseless else left + self.noise).unsqueeze(-1)))
        if len(parts) == 1 and isinstance(self.factors[0].columns, slice):
            return parts[0]
        order = torch.cat([torch.as_tensor(factor.columns) for factor in self.factors]).argsort()
        means = torch.cat([mean for mean, _ in parts], -1)
        variances = torch.cat([variance.expand_as(mean) for mean, variance in parts], -1)
        return means[..., order], variances[..., order]

    def function_covariance(self, latents: Tensor) -> Tensor:
        """Posterior covariance matrix ``(B, B)`` of the function at latents ``(B, Q)``, the same for all outputs.

        Raises:
            ValueError: if entries of the active set are missing, so that outputs have different ones.
        """
        if len(self.factors) > 1 or not isinstance(self.factors[0].rows, slice):
            raise ValueError("outputs share a posterior covariance only where no entry of the active set is missing")
        cross = covariance(self.kernel, self.latents, latents)
        basis = torch.linalg.solve_triangular(self.factors[0].cholesky, cross, upper=False)
        explained: Tensor = basis.mT @ basis
        return covariance(self.kernel, latents, latents) - explained


def conditional_log_prob(value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Log densities ``(*batch, B)`` of observations ``(*batch, B, D)`` under independent normals, over entries that are not NaN."""
    observed = ~value.isnan()
    if bool(observed.all()):
        if variance.shape[-1] == 1:
            squares = (value - mean).square().sum(-1)
            spread = variance.squeeze(-1)
            return -0.5 * (squares / spread + value.shape[-1] * (2 * math.pi * spread).log())
        return -0.5 * ((value - mean).square() / variance + (2 * math.pi * variance).log()).sum(-1)
    terms = (torch.where(observed, value, mean) - mean).square() / variance + (2 * math.pi * variance).log()
    return -0.5 * torch.where(observed, terms, 0.0).sum(-1)
