"""Closed-form evidence and coefficients of linear regressions on sets of predictors."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

# Share of a column's length that is added to Gram matrices, without which predictors that repeat others have no inverse.
_RIDGE = 1e-9


class Coefficients(NamedTuple):
    """Posteriors of the coefficients of ``C`` regressions with at most ``k`` predictors.

    Attributes:
        positions: the predictors, ``(C, k)``. Where there are fewer, any others.
        is_used: which of them are used, ``(C, k)``.
        factor: Cholesky factors of the precisions in units of the noise's, ``(C, k, k)``; 1 on the diagonal where unused.
        mean: means ``(C, k)``; 0 where unused.
        rest: posterior sums of squares :math:`S`, ``(C,)``.
    """

    positions: Tensor
    is_used: Tensor
    factor: Tensor
    mean: Tensor
    rest: Tensor


@dataclasses.dataclass(frozen=True)
class LinearModels:
    r"""The regressions :math:`y \sim \mathcal N(\alpha + X_s \beta_s, \sigma^2 I)` on the predictors that :math:`s \in \{0, 1\}^p` selects.

    Priors of :math:`\alpha` and :math:`\log \sigma` are flat, and :math:`\beta_s \sim \mathcal N(0, \sigma^2 V_s)`. Either :math:`V_s = g
    (X_s^\top X_s)^{-1}` (Zellner) or :math:`V_s = (g / n) I` (independent). All but :math:`s` is integrated out:

    .. math:: \log p(y \mid s) = \log\Gamma\bigl(\tfrac{n-1}2\bigr) - \tfrac{n-1}2 \log \pi S_s - \tfrac12 \log n
        - \tfrac12 \log |I + V_s X_s^\top X_s|, \qquad S_s = y^\top y - y^\top X_s (X_s^\top X_s + V_s^{-1})^{-1} X_s^\top y.

    The number of predictors has a beta-binomial prior of mean ``size``: :math:`p(s) = B(1 + |s|, b + p - |s|) / B(1, b)` with
    :math:`b = (p - m) / m`.

    Args:
        X: predictors ``(n, p)``, centred, of variance 1 (or 0).
        y: centred targets ``(n,)``.
        g: variance of the coefficients, relative to least squares.
        is_zellner: whether the prior is Zellner's.
        size: expected number of predictors :math:`m`, between 0 and :math:`p`.

    Attributes:
        precision: precisions of all coefficients in units of the noise's, :math:`X^\top X + V^{-1}`, ``(p, p)``.
        linear: :math:`X^\top y`, ``(p,)``.

    Reference: Liang, Paulo, Molina, Clyde and Berger, "Mixtures of g priors for Bayesian variable
        selection", JASA 2008. Ley and Steel, "On the effect of prior assumptions in Bayesian model
        averaging", Journal of Applied Econometrics 2009.
    """

    X: Tensor
    y: Tensor
    g: float
    is_zellner: bool
    size: float
    precision: Tensor = dataclasses.field(init=False)
    linear: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        n, p = self.X.shape
        gram = self.X.mT @ self.X
        ridge = torch.eye(p, dtype=gram.dtype) * n
        precision = (1 + 1 / self.g) * (gram + _RIDGE * ridge) if self.is_zellner else gram + ridge / self.g
        object.__setattr__(self, "precision", precision)
        object.__setattr__(self, "linear", self.X.mT @ self.y)

    def log_joint(self, states: Tensor) -> Tensor:
        """``log p(s, y)`` of states ``(*batch, p)``, ``(*batch,)``."""
        flat = states.reshape(-1, states.shape[-1])
        return (self.log_prior(flat) + self.log_evidence(flat)).reshape(states.shape[:-1])

    def log_prior(self, states: Tensor) -> Tensor:
        """``log p(s)`` of states ``(C, p)``."""
        p = states.shape[-1]
        b, active = (p - self.size) / self.size, states.sum(-1).double()
        return torch.lgamma(1 + active) + torch.lgamma(b + p - active) - math.lgamma(1 + b + p) + math.log(b)

    def log_evidence(self, states: Tensor) -> Tensor:
        """``log p(y | s)`` of states ``(C, p)``."""
        n = len(self.y)
        found = self.coefficients(states)
        if self.is_zellner:
            determinant = found.is_used.sum(-1) * math.log1p(self.g)
        else:
            determinant = 2 * found.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - found.is_used.sum(-1) * math.log(n / self.g)
        return math.lgamma((n - 1) / 2) - (n - 1) / 2 * (math.pi * found.rest).log() - math.log(n) / 2 - determinant / 2

    def coefficients(self, states: Tensor) -> Coefficients:
        """Posteriors of the coefficients of states ``(C, p)``."""
        most = max(1, int(states.sum(-1).max()))
        chosen = states.to(torch.uint8).topk(most)
        positions, is_used = chosen.indices, chosen.values.bool()
        both = is_used.unsqueeze(-1) & is_used.unsqueeze(-2)
        precision = torch.where(both, self.precision[positions.unsqueeze(-1), positions.unsqueeze(-2)], torch.eye(most).double())
        linear = self.linear[positions] * is_used
        factor = torch.linalg.cholesky(precision)
        mean = torch.cholesky_solve(linear.unsqueeze(-1), factor).squeeze(-1)
        total = self.y.square().sum()
        least = torch.finfo(total.dtype).eps * total if total > 0 else torch.finfo(total.dtype).tiny
        return Coefficients(positions, is_used, factor, mean, (total - (linear * mean).sum(-1)).clamp(min=float(least)))
