"""What candidates for an inducing subset would gain: exactly for a few, approximately for all."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.gp.cholesky import DEPENDENT, independent_cholesky
from pyro_truncated.gp.subset.exchange_factors import ExchangeFactors
from pyro_truncated.gp.subset.objective import SubsetProblem


class CandidatePool:
    r"""Candidates, and everything that exact changes of the objective by any of them depend on.

    Args:
        factors: the factors of the subset, as they are now.
        index: positions of the candidates among the data, ``(p,)``.

    Attributes:
        residuals: columns :math:`E = (K - \hat K)_{:J}`, ``(n, p)``.
        gram: :math:`E^\top E`, ``(p, p)``.
        precision_gram: :math:`E^\top S^{-1} E` with :math:`S = \hat K + \sigma^2 I`, ``(p, p)``.
        alignment: :math:`E^\top S^{-1} Y`, ``(p, H)``.
    """

    def __init__(self, factors: ExchangeFactors, index: Tensor) -> None:
        self.problem = factors.problem
        self.residuals = factors.residual_columns(index)
        self.gram = self.residuals.mT @ self.residuals
        along = factors.factor.mT @ self.residuals
        half = torch.linalg.solve_triangular(factors.cholesky, along, upper=False)
        # S^-1 Y is spread over the data only where candidates need it.
        explained = along.mT @ torch.cholesky_solve(factors.moment, factors.cholesky)
        self.precision_gram = (self.gram - half.mT @ half) / self.problem.noise
        self.alignment = (self.residuals.mT @ self.problem.targets - explained) / self.problem.noise
        self._block = self.residuals[index]
        self._floor = DEPENDENT * factors.prior[index]

    def gains(self) -> Tensor:
        """Exact decreases of the objective ``(p,)`` by each candidate alone; minus infinity where it depends on the members."""
        gains = _gains(self.problem, self._block, self.gram, self.precision_gram, self.alignment)
        return torch.where(self._block.diagonal() > self._floor, gains, -torch.inf)

    def choose(self, count: int) -> tuple[Tensor, Tensor]:
        """Candidates that lower the objective most, each given those chosen before.

        Returns:
            Places in the pool and exact decreases, ``(t,)`` each, ``t`` at most ``count``; fewer where the others depend on these.
        """
        block, gram, weighted, alignment = self._block, self.gram, self.precision_gram, self.alignment
        allowed = torch.ones(len(block), dtype=torch.bool, device=block.device)
        places, gains = [], []
        for _ in range(min(count, len(block))):
            allowed = allowed & (block.diagonal() > self._floor)
            gain = torch.where(allowed, _gains(self.problem, block, gram, weighted, alignment), -torch.inf)
            i = int(gain.argmax())
            if not bool(allowed[i]):
                break
            places.append(i)
            gains.append(gain[i])
            allowed[i] = False
            c = block[:, i] / block[i, i].sqrt()
            root = block[i, i].sqrt()
            gram = _without(gram, gram[:, i] / root, c, gram[i, i] / block[i, i])
            along, w, aligned = weighted[:, i] / root, weighted[i, i] / block[i, i], alignment[i] / root
            after = along - c * w
            weighted = _without(weighted, along, c, w) - torch.outer(after, after) / (1 + w)
            alignment = alignment - torch.outer(c, aligned) - torch.outer(after, aligned) / (1 + w)
            block = block - torch.outer(c, c)
        chosen = torch.tensor(places, dtype=torch.int64, device=block.device)
        return chosen, torch.stack(gains) if gains else block.new_zeros(0)


def approximate_gains(factors: ExchangeFactors, pivots: Tensor, diagonal: bool = True) -> Tensor:
    r"""Approximate decreases of the objective by every input alone, ``(n,)``, for ranking.

    Residual columns are taken from a partial Cholesky factor :math:`L_z` of :math:`K - \hat K` on the information pivots.

    Args:
        factors: the factors of the subset.
        pivots: positions ``(z,)``, no members.
        diagonal: whether to add what the factor misses on the diagonal, which is known.

    Returns:
        Approximate decreases; minus infinity for members and inputs that depend on them.
    """
    noise = factors.problem.noise
    residuals = factors.residual_columns(pivots)
    kept, triangle = independent_cholesky(residuals[pivots], factors.prior[pivots])
    half = torch.linalg.solve_triangular(triangle, residuals[:, kept].mT, upper=False).mT
    along = factors.factor.mT @ half
    whitened = torch.linalg.solve_triangular(factors.cholesky, along, upper=False)
    M1 = half.mT @ half
    M2 = (M1 - whitened.mT @ whitened) / noise
    aligned = half.mT @ factors.problem.targets - along.mT @ torch.cholesky_solve(factors.moment, factors.cholesky)
    known = half.square().sum(1)
    squared, weighted, alignment = ((half @ M1) * half).sum(1), ((half @ M2) * half).sum(1), half @ (aligned / noise)
    if diagonal:
        missing = (factors.residual - known).clamp(min=0.0)
        squared = squared + missing * (2 * known + missing)
        weighted = weighted + missing * (2 * known + missing) / noise
        alignment = alignment + missing[:, None] * factors.weights()
    variance = factors.residual if diagonal else known
    gains = _gain(factors.problem, variance.clamp(min=1e-300), squared, weighted, alignment)
    return torch.where(factors.candidates(), gains, -torch.inf)


def _gains(problem: SubsetProblem, block: Tensor, gram: Tensor, weighted: Tensor, alignment: Tensor) -> Tensor:
    return _gain(problem, block.diagonal().clamp(min=1e-300), gram.diagonal(), weighted.diagonal(), alignment)


def _gain(problem: SubsetProblem, variance: Tensor, squared: Tensor, weighted: Tensor, alignment: Tensor) -> Tensor:
    r""":math:`\frac12 [ |\ell^\top a|^2 / (1 + w) - H \log(1 + w) + H |\ell|^2 / \sigma^2 ]`, all per unit of residual variance."""
    w = (weighted / variance).clamp(min=0.0)
    data = alignment.square().sum(1) / (variance * (1 + w))
    gain: Tensor = 0.5 * (data - problem.num_outputs * torch.log1p(w) + problem.trace_weight * squared / variance)
    return gain


def _without(gram: Tensor, along: Tensor, c: Tensor, squared: Tensor) -> Tensor:
    r"""Gram matrix of :math:`E - \ell c^\top` from that of :math:`E`, :math:`E^\top \ell` and :math:`|\ell|^2`."""
    crossed = torch.outer(along, c)
    return gram - crossed - crossed.mT + squared * torch.outer(c, c)
