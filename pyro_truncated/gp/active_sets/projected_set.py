"""Predictions from all data points through a few of them, for data sets too large to be an active set themselves."""

from __future__ import annotations

import dataclasses

import torch
from pyro.contrib.gp.kernels import Kernel
from torch import Tensor

from pyro_truncated.gp.cholesky import FINE_JITTER, inducing_cholesky, stable_cholesky
from pyro_truncated.gp.kernels.evaluation import covariance, prior_variance


@dataclasses.dataclass(frozen=True)
class ProjectedStatistics:
    r"""Sums over data points that a :class:`ProjectedSet` is made of; those of two parts of the data add up.

    Attributes:
        latents: latents :math:`U` of the points projected on, ``(M, Q)``.
        gram: :math:`\sum_n k_{Un} k_{nU}`, ``(M, M)`` in float64.
        moment: :math:`\sum_n k_{Un} x_n`, ``(M, D)`` in float64.
    """

    latents: Tensor
    gram: Tensor
    moment: Tensor


def projected_statistics(kernel: Kernel, chosen: Tensor, latents: Tensor, outputs: Tensor, block: int = 5000) -> ProjectedStatistics:
    """Sums over data points ``(N, Q)``, ``(N, D)`` for projection on the chosen latents ``(M, Q)``: ``O(N M (M + D))``.

    Raises:
        ValueError: if outputs are missing; give complete data points only.
    """
    if bool(outputs.isnan().any()):
        raise ValueError("data points with missing outputs cannot be projected; leave them out")
    gram = chosen.new_zeros(len(chosen), len(chosen), dtype=torch.float64)
    moment = chosen.new_zeros(len(chosen), outputs.shape[1], dtype=torch.float64)
    for z, x in zip(latents.split(block), outputs.split(block), strict=True):
        cross = covariance(kernel, chosen.double(), z.double()).double()
        gram += cross @ cross.mT
        moment += cross @ x.double()
    return ProjectedStatistics(chosen, gram, moment)


class ProjectedSet:
    r"""The posterior given all data points, of a process that the function's values at a few latents :math:`U` determine.

    .. math:: m_* = \tfrac{1}{\sigma^2} k_{*U} \Sigma^{-1} K_{UN} x, \qquad
        c_* = k_{**} + \sigma^2 - k_{*U} (K_{UU}^{-1} - \Sigma^{-1}) k_{U*}, \qquad \Sigma = K_{UU} + \tfrac{1}{\sigma^2} K_{UN} K_{NU}

    Where the latents cover those of the data within a length-scale this is close to conditioning on every data point, at a cost that is
    linear in their number. Factors are computed in float64.

    Args:
        kernel: kernel of :mod:`pyro.contrib.gp.kernels`.
        noise: noise variance.
        statistics: sums over the data, from :func:`projected_statistics` at the same parameters of the kernel.

    Reference:
        Quiñonero-Candela and Rasmussen, "A unifying view of sparse approximate Gaussian process regression", JMLR 6 (2005), section 5.
    """

    def __init__(self, kernel: Kernel, noise: Tensor, statistics: ProjectedStatistics) -> None:
        self.kernel, self.latents = kernel, statistics.latents
        self.noise = torch.as_tensor(noise).reshape(())
        prior = covariance(kernel, self.latents.double(), self.latents.double())
        outer = inducing_cholesky(prior, FINE_JITTER)
        identity = torch.eye(len(outer), dtype=torch.float64, device=outer.device)
        # Everything is expressed in features L^-1 k_U*, in which the weights are well-conditioned; K_UU itself is not.
        self._whiten = torch.linalg.solve_triangular(outer, identity, upper=False)
        gram = self._whiten @ statistics.gram @ self._whiten.mT / self.noise.double()
        inner = stable_cholesky(identity + (gram + gram.mT) / 2)
        moment = self._whiten @ statistics.moment / self.noise.double()
        self._shrink = torch.linalg.solve_triangular(inner, identity, upper=False)
        self._weights = torch.cholesky_solve(moment, inner).to(self.latents.dtype)

    def predict(self, latents: Tensor, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Predictive means ``(*batch, D)`` and variances ``(*batch, 1)``, of the observations or ``noiseless`` of the function."""
        cross = covariance(self.kernel, latents.reshape(-1, latents.shape[-1]).double(), self.latents.double())
        features = cross @ self._whiten.mT
        left = prior_variance(self.kernel, latents).reshape(-1) - features.square().sum(-1) + (features @ self._shrink.mT).square().sum(-1)
        variance = left.clamp(min=0.0).to(latents.dtype) + (0.0 if noiseless else self.noise)
        mean = features.to(latents.dtype) @ self._weights
        return mean.reshape(*latents.shape[:-1], mean.shape[-1]), variance.reshape(*latents.shape[:-1], 1)
