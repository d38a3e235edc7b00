"""Predictions of a sparse regression, at new inputs and leave-one-out.

Of an inducing input, its targets and the input itself are left out. It was chosen because the
others predict it badly. Predictions of all other data points therefore look better than those of
new ones, the more so the larger the subset.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_truncated.gp.cholesky import independent_cholesky
from pyro_truncated.gp.noisy_covariance import LowRankCovariance
from pyro_truncated.gp.subset.objectives import Basis, FreeBasis, covariances_with

# 1 - w of a column that explains a data point alone is zero but for rounding.
_SMALLEST_SHARE = 1e-12


class LeftOut(NamedTuple):
    """What each data point's targets are predicted to be without it.

    Attributes:
        mean: ``(n, H)``.
        variance: ``(n,)``, of the projected process, noise included.
        unexplained: prior variance that the inducing inputs leave, ``(n,)``.
    """

    mean: Tensor
    variance: Tensor
    unexplained: Tensor


def left_out(covariance: LowRankCovariance, triangle: Tensor, members: Tensor, targets: Tensor, unexplained: Tensor) -> LeftOut:
    r"""Predicts each data point from all others.

    A member of the subset is also left out as an inducing input.

    Without member :math:`j`, :math:`\hat K` loses :math:`\ell_j \ell_j^\top`, and the inverse of :math:`S = \hat K + \sigma^2 I` gains
    :math:`S^{-1} \ell_j \ell_j^\top S^{-1} / (1 - w_j)`, with

    .. math:: \ell_j = K_{nI} K_{II}^{-1} e_j / (e_j^\top K_{II}^{-1} e_j)^{1/2}, \qquad w_j = \ell_j^\top S^{-1} \ell_j ,

    which takes :math:`O(n m^2)` for all members.

    Args:
        covariance: of the targets, with the factor :math:`L = K_{nI} C^{-\top}`.
        triangle: :math:`C`, ``(m, m)``.
        members: positions ``(m,)`` of the inducing inputs; empty if they are no data points.
        targets: ``(n, H)``.
        unexplained: diagonal ``(n,)`` of :math:`K - \hat K`.
    """
    mean, variance = covariance.leave_one_out(targets)
    if not len(members):
        return LeftOut(mean, variance, unexplained)
    identity = torch.eye(len(triangle), dtype=triangle.dtype, device=triangle.device)
    inverse = torch.linalg.solve_triangular(triangle, identity, upper=False)
    lost = covariance.factor @ inverse / inverse.square().sum(0).sqrt()
    solved = covariance.solve(lost)
    room = (1 - (lost * solved).sum(0)).clamp(min=_SMALLEST_SHARE)
    own = solved[members].diagonal()
    precision = covariance.inverse_diagonal[members] + own.square() / room
    weights = covariance.solve(targets, members) + (own / room)[:, None] * (solved.mT @ targets)
    return LeftOut(
        mean.index_copy(0, members, targets[members] - weights / precision[:, None]),
        variance.index_copy(0, members, 1 / precision),
        unexplained.index_copy(0, members, lost[members].diagonal().square()),
    )


def calibrated_share(found: LeftOut, targets: Tensor) -> float:
    r"""The :math:`c` that maximises :math:`\sum_n \log \mathcal N(y_n; \mu_n, v_n + c r_n)` over all predictions."""
    error = (targets - found.mean).square().mean(1)

    def best(shares: Tensor) -> int:
        """Position of the share of the highest density."""
        densities = [-(v.log() + error / v).sum() for v in (found.variance + share * found.unexplained for share in shares)]
        return int(torch.stack(densities).argmax())

    # The density may have several maxima: first all orders of magnitude, then between the neighbours of the best.
    coarse = torch.cat([error.new_zeros(1), torch.logspace(-6, 3, 91, dtype=error.dtype, device=error.device)])
    position = best(coarse)
    ends = coarse[max(0, position - 1)], coarse[min(len(coarse) - 1, position + 1)]
    fine = torch.linspace(float(ends[0]), float(ends[1]), 101, dtype=error.dtype, device=error.device)
    return float(fine[best(fine)])


class SparsePosterior:
    r"""The posterior of a Gaussian process given its inducing inputs.

    With :math:`\phi = C^{-1} k_I(x)`, :math:`L` the rows :math:`\phi(x_i)` and noise :math:`\Lambda`, the posterior of the weights has
    precision :math:`A = I + L^\top \Lambda^{-1} L`, so that

    .. math:: \mu(x) = \phi^\top A^{-1} L^\top \Lambda^{-1} Y, \qquad v(x) = k(x, x) - \phi^\top (I - A^{-1}) \phi .

    Both are kept as one vector and one matrix in terms of :math:`k_I(x)`: :math:`O(m)` per mean, :math:`O(m^2)` per variance.

    Hyper-parameters learned by the projected process know nothing of the variance that the inducing
    inputs leave, :math:`k(x, x) - \phi^\top \phi`. It may be far too large. With ``objective="pp"``
    it is multiplied by the share :math:`c \ge 0` under which the leave-one-out predictions of the
    training targets have the highest density,

    .. math:: v(x) = c \, (k(x, x) - \phi^\top \phi) + \phi^\top A^{-1} \phi .

    What is left out of an inducing input is the input, too: as long as it stays, its neighbours look easy to predict.

    Args:
        basis: inducing inputs; those that depend on earlier ones are left out.
        targets: ``(n, H)`` float64.
        noise: noise variance.
        objective: by which hyper-parameters were learned. ``"vfe"``; ``"fitc"``, where the
            unexplained variance counts as noise of each data point; or ``"pp"``.
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
        """Returns means ``(n_new, H)`` and variances ``(n_new,)`` of the function.

        They are without noise, and differentiable in numeric inputs.
        """
        cross, prior = covariances_with(self.basis, new)
        return cross @ self.mean_weights, (self.share * prior - ((cross @ self.variance_weights) * cross).sum(1)).clamp(min=0.0)

    def joint(self, new: Any) -> tuple[Tensor, Tensor]:
        """Means ``(n_new, H)`` and covariances ``(n_new, n_new)`` of the function, differentiable in numeric inputs."""
        cross, _ = covariances_with(self.basis, new)
        covariance = self.share * self.basis.kernel.among(new).double() - cross @ self.variance_weights @ cross.mT
        return cross @ self.mean_weights, (covariance + covariance.mT) / 2

    @torch.no_grad()
    def leave_one_out(self) -> tuple[Tensor, Tensor]:
        r"""Predicts each data point's targets from all others.

        The inducing inputs are held fixed.

        They are those of the approximate covariance :math:`L L^\top + \Lambda`. With ``"pp"``, the
        variances hold the calibrated share that the inducing inputs leave, as those of new inputs
        do.

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
