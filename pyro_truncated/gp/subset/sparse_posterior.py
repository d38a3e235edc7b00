"""Predictions of a sparse regression whose hyper-parameters and inducing inputs are settled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_truncated.gp.cholesky import independent_cholesky
from pyro_truncated.gp.noisy_covariance import LowRankCovariance
from pyro_truncated.gp.subset.basis import Basis, FreeBasis, covariances_with
from pyro_truncated.gp.subset.left_out import LeftOut, calibrated_share, left_out


class SparsePosterior:
    r"""The posterior of a Gaussian process given its inducing inputs.

    With :math:`\phi = C^{-1} k_I(x)`, :math:`L` the rows :math:`\phi(x_i)` and noise :math:`\Lambda`, the posterior of the weights has
    precision :math:`A = I + L^\top \Lambda^{-1} L`, so that

    .. math:: \mu(x) = \phi^\top A^{-1} L^\top \Lambda^{-1} Y, \qquad v(x) = k(x, x) - \phi^\top (I - A^{-1}) \phi .

    Both are kept as one vector and one matrix in terms of :math:`k_I(x)`: :math:`O(m)` per mean, :math:`O(m^2)` per variance.

    Hyper-parameters that were learned by the projected process know nothing of the variance that the inducing inputs leave,
    :math:`k(x, x) - \phi^\top \phi`, and may have made it far too large. With ``objective="pp"`` it is multiplied by the share
    :math:`c \ge 0` under which the leave-one-out predictions of the training targets have the highest density,

    .. math:: v(x) = c \, (k(x, x) - \phi^\top \phi) + \phi^\top A^{-1} \phi .

    What is left out of an inducing input is the input, too: as long as it stays, its neighbours look easy to predict.

    Args:
        basis: inducing inputs; those that depend on earlier ones are left out.
        targets: ``(n, H)`` float64.
        noise: noise variance.
        objective: what the hyper-parameters were learned by: ``"vfe"``; ``"fitc"``, for which what the inducing inputs leave unexplained
            counts as noise of each data point; or ``"pp"``.
        held_out: positions of data points that had no part in moving the inducing inputs: these alone calibrate ``"pp"`` then.

    Attributes:
        fitted: means at the training inputs, ``(n, H)``.
        share: the factor :math:`c`; 1 but for ``"pp"``.
    """

    @torch.no_grad()
    def __init__(self, basis: Basis, targets: Tensor, noise: float, objective: str = "vfe", held_out: Tensor | None = None) -> None:
        self.basis = basis
        self.targets = targets
        self.is_projected = objective == "pp"
        columns, square = basis.columns(), basis.square()
        kept, triangle = independent_cholesky(square)
        self.factor = torch.linalg.solve_triangular(triangle, columns[:, kept].mT, upper=False).mT
        prior = basis.kernel.diag().double()
        self.residual = (prior - self.factor.square().sum(1)).clamp(min=0.0)
        self.noise = (noise + self.residual) if objective == "fitc" else torch.full_like(prior, noise)
        scaled = self.factor / self.noise[:, None]
        identity = torch.eye(len(kept), dtype=scaled.dtype, device=scaled.device)
        R = torch.linalg.cholesky(identity + self.factor.mT @ scaled)
        inverse = torch.linalg.solve_triangular(triangle, identity, upper=False)
        shrink = torch.linalg.solve_triangular(R, inverse, upper=False)
        m = len(basis)
        whitened = torch.linalg.solve_triangular(R, scaled.mT @ targets, upper=False)
        self.fitted = self.factor @ torch.linalg.solve_triangular(R.mT, whitened, upper=True)
        self.share = self._share_without(triangle, kept, held_out) if self.is_projected else 1.0
        self.mean_weights = targets.new_zeros(m, targets.shape[1])
        self.mean_weights[kept] = shrink.mT @ whitened
        self.variance_weights = targets.new_zeros(m, m)
        self.variance_weights[kept[:, None], kept] = self.share * inverse.mT @ inverse - shrink.mT @ shrink

    def marginals(self, new: Any) -> tuple[Tensor, Tensor]:
        """Means ``(n_new, H)`` and variances ``(n_new,)`` of the function, not of targets, differentiable in numeric inputs."""
        cross, prior = covariances_with(self.basis, new)
        return cross @ self.mean_weights, (self.share * prior - ((cross @ self.variance_weights) * cross).sum(1)).clamp(min=0.0)

    def joint(self, new: Any) -> tuple[Tensor, Tensor]:
        """Means ``(n_new, H)`` and covariances ``(n_new, n_new)`` of the function, differentiable in numeric inputs."""
        cross, _ = covariances_with(self.basis, new)
        covariance = self.share * self.basis.kernel.among(new).double() - cross @ self.variance_weights @ cross.mT
        return cross @ self.mean_weights, (covariance + covariance.mT) / 2

    @torch.no_grad()
    def leave_one_out(self) -> tuple[Tensor, Tensor]:
        r"""Predictions of each data point's targets from all others, the inducing inputs held fixed.

        They are those of the approximate covariance :math:`L L^\top + \Lambda`; with ``"pp"``, the variances hold the calibrated
        share of what the inducing inputs leave, as those of new inputs do.

        Returns:
            Means ``(n, H)`` and variances ``(n,)``, noise included.
        """
        mean, variance = LowRankCovariance(self.factor, self.noise).leave_one_out(self.targets)
        return (mean, variance + self.share * self.residual) if self.is_projected else (mean, variance)

    def _share_without(self, triangle: Tensor, kept: Tensor, held_out: Tensor | None) -> float:
        members = kept[:0] if isinstance(self.basis, FreeBasis) else self.basis.index[kept]
        found = left_out(LowRankCovariance(self.factor, self.noise), triangle, members, self.targets, self.residual)
        rows = slice(None) if held_out is None or not len(held_out) else held_out
        return calibrated_share(LeftOut(*(part[rows] for part in found)), self.targets[rows])
