r"""Predictions of each training target as if its data point had never been seen, and the share of what is left unexplained that fits them.

Of an inducing input, its targets and the input itself are left out: it was chosen because the others predict it badly, and predictions of
all other data points alone look better than those of new ones, the more so the larger the subset.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_truncated.gp.noisy_covariance import LowRankCovariance

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
    r"""Predictions of each data point from all others; of a member of the subset also without it as an inducing input.

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
