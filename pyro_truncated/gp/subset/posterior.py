"""Predictions of a sparse regression whose hyper-parameters and inducing inputs are settled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_truncated.gp.leave_one_out import LowRankCovariance
from pyro_truncated.gp.subset.evidence import Basis
from pyro_truncated.gp.subset.problem import independent_cholesky


class SparsePosterior:
    r"""The posterior of a Gaussian process given its inducing inputs.

    With :math:`\phi = C^{-1} k_I(x)`, :math:`L` the rows :math:`\phi(x_i)` and noise :math:`\Lambda`, the posterior of the weights has
    precision :math:`A = I + L^\top \Lambda^{-1} L`, so that

    .. math:: \mu(x) = \phi^\top A^{-1} L^\top \Lambda^{-1} Y, \qquad v(x) = k(x, x) - \phi^\top (I - A^{-1}) \phi .

    Both are kept as one vector and one matrix in terms of :math:`k_I(x)`: :math:`O(m)` per mean, :math:`O(m^2)` per variance.

    Args:
        basis: inducing inputs; those that depend on earlier ones are left out.
        targets: ``(n, H)`` float64.
        noise: noise variance.
        fitc: whether what the inducing inputs leave unexplained counts as noise of each data point.
    """

    @torch.no_grad()
    def __init__(self, basis: Basis, targets: Tensor, noise: float, fitc: bool = False) -> None:
        self.basis = basis
        self.targets = targets
        columns, square = basis.columns(), basis.square()
        kept, triangle = independent_cholesky(square)
        self.factor = torch.linalg.solve_triangular(triangle, columns[:, kept].mT, upper=False).mT
        prior = basis.kernel.diag().double()
        self.residual = (prior - self.factor.square().sum(1)).clamp(min=0.0)
        self.noise = (noise + self.residual) if fitc else torch.full_like(prior, noise)
        scaled = self.factor / self.noise[:, None]
        identity = torch.eye(len(kept), dtype=scaled.dtype, device=scaled.device)
        R = torch.linalg.cholesky(identity + self.factor.mT @ scaled)
        inverse = torch.linalg.solve_triangular(triangle, identity, upper=False)
        shrink = torch.linalg.solve_triangular(R, inverse, upper=False)
        m = len(basis)
        self.mean_weights = targets.new_zeros(m, targets.shape[1])
        self.mean_weights[kept] = shrink.mT @ torch.linalg.solve_triangular(R, scaled.mT @ targets, upper=False)
        self.variance_weights = targets.new_zeros(m, m)
        self.variance_weights[kept[:, None], kept] = inverse.mT @ inverse - shrink.mT @ shrink

    @torch.no_grad()
    def predict(self, new: Any) -> tuple[Tensor, Tensor]:
        """Means ``(n_new, H)`` and variances ``(n_new,)`` of the function at new inputs, noise not included."""
        cross = self.basis.cross(new)
        prior = self.basis.kernel.diag_new(new).double()
        return cross @ self.mean_weights, (prior - ((cross @ self.variance_weights) * cross).sum(1)).clamp(min=0.0)

    @torch.no_grad()
    def leave_one_out(self) -> tuple[Tensor, Tensor]:
        r"""Predictions of each data point's targets from all others, the inducing inputs held fixed.

        They are those of the approximate covariance :math:`L L^\top + \Lambda`.

        Returns:
            Means ``(n, H)`` and variances ``(n,)``, noise included.
        """
        return LowRankCovariance(self.factor, self.noise).leave_one_out(self.targets)
