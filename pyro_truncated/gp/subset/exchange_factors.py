r"""Factors of a kernel matrix on an inducing subset, to and from which blocks of inputs are added and removed.

:math:`L` need not be triangular: the objective only sees :math:`L L^\top`, so columns may be rotated. Removing inputs is one block
Householder reflection that moves their directions into the last columns, which are then ignored; taking a removal or an addition back
costs nothing but the number of columns in use. All that grows with ``n`` are products of matrices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_truncated.gp.subset.objective import DEPENDENT, SubsetProblem, independent_cholesky


class Pool(NamedTuple):
    r"""Candidates, and everything that exact changes of the objective by any of them depend on.

    Attributes:
        positions: where they are among the data, ``(p,)``.
        residuals: columns :math:`E = (K - \hat K)_{:J}`, ``(n, p)``.
        gram: :math:`E^\top E`, ``(p, p)``.
        precision_gram: :math:`E^\top S^{-1} E` with :math:`S = \hat K + \sigma^2 I`, ``(p, p)``.
        alignment: :math:`E^\top S^{-1} Y`, ``(p, H)``.
    """

    positions: Tensor
    residuals: Tensor
    gram: Tensor
    precision_gram: Tensor
    alignment: Tensor


class ExchangeFactors:
    r""":math:`L`, :math:`C^{-1} = L_I^{-1}`, :math:`G = L^\top L`, :math:`L^\top Y` and the diagonal of :math:`K - \hat K` of a subset.

    Args:
        problem: data, kernel and noise.
        capacity: most inputs that the subset holds at any time, candidates included.
        index: inputs to start from, ``(m,)``; those that depend on others are left out.
    """

    def __init__(self, problem: SubsetProblem, capacity: int, index: Tensor | None = None) -> None:
        self.problem = problem
        new = problem.targets.new_zeros
        n, H = problem.targets.shape
        self._factor, self._inverse = new(n, capacity), new(capacity, capacity)
        self._gram, self._moment = new(capacity, capacity), new(capacity, H)
        self._index = torch.zeros(capacity, dtype=torch.int64, device=problem.targets.device)
        self.prior = problem.diag()
        self.rebuild(self._index[:0] if index is None else index)

    def rebuild(self, index: Tensor | None = None) -> None:
        """Computes all factors anew, which removes rounding errors; for the given inputs, or those it holds."""
        index = self.index.clone() if index is None else index
        self.size = 0
        self._cholesky: Tensor | None = None
        self.residual = self.prior.clone()
        if len(index):
            # All inputs at once: K_nI C^-T beats adding blocks.
            columns = self.problem.columns(index)
            kept, triangle = independent_cholesky(columns[index], self.prior[index])
            self._place(index[kept], columns[:, kept], triangle)

    @property
    def index(self) -> Tensor:
        """Positions of the inducing inputs, ``(m,)``."""
        return self._index[: self.size]

    @property
    def factor(self) -> Tensor:
        """:math:`L`, ``(n, m)``."""
        return self._factor[:, : self.size]

    @property
    def inverse(self) -> Tensor:
        """:math:`C^{-1}`, ``(m, m)``: the inverse of the rows of :math:`L` at the inducing inputs."""
        return self._inverse[: self.size, : self.size]

    @property
    def gram(self) -> Tensor:
        r""":math:`G = L^\top L`, ``(m, m)``."""
        return self._gram[: self.size, : self.size]

    @property
    def moment(self) -> Tensor:
        r""":math:`L^\top Y`, ``(m, H)``."""
        return self._moment[: self.size]

    @property
    def cholesky(self) -> Tensor:
        """Lower triangular factor ``(m, m)`` of :math:`B`."""
        if self._cholesky is None or len(self._cholesky) < self.size:
            noise = self.problem.noise * torch.eye(self.size, dtype=self._gram.dtype, device=self._gram.device)
            self._cholesky = torch.linalg.cholesky(self.gram + noise)
        return self._cholesky[: self.size, : self.size]

    def value(self) -> float:
        """The objective."""
        whitened = torch.linalg.solve_triangular(self.cholesky, self.moment, upper=False)
        return float(self.problem.value_from(self.cholesky, whitened, self.residual.sum()))

    def weights(self) -> Tensor:
        r""":math:`S^{-1} Y`, ``(n, H)``."""
        return (self.problem.targets - self.factor @ torch.cholesky_solve(self.moment, self.cholesky)) / self.problem.noise

    def candidates(self) -> Tensor:
        """Which inputs may be added: neither members nor determined by them, ``(n,)`` boolean."""
        allowed = self.residual > DEPENDENT * self.prior
        allowed[self.index] = False
        return allowed

    def residual_columns(self, index: Tensor) -> Tensor:
        r"""Columns :math:`(K - \hat K)_{:J}`, ``(n, p)``."""
        return self.problem.columns(index) - self.factor @ self.factor[index].mT

    def append(self, index: Tensor, residuals: Tensor | None = None) -> int:
        """Adds inputs, but for those that depend on others.

        Args:
            index: positions ``(t,)``, no members.
            residuals: their :meth:`residual_columns`, if known.

        Returns:
            How many were added.
        """
        residuals = self.residual_columns(index) if residuals is None else residuals
        kept, triangle = independent_cholesky(residuals[index], self.prior[index])
        if len(kept):
            self._place(index[kept], residuals[:, kept], triangle)
        return len(kept)

    def _place(self, index: Tensor, residuals: Tensor, triangle: Tensor) -> None:
        """Borders all factors by those of new inputs with their residual columns and the Cholesky factor of their residual block."""
        old, new = self.size, self.size + len(index)
        block = self._factor[:, old:new]
        block.copy_(torch.linalg.solve_triangular(triangle, residuals.mT, upper=False).mT)
        # What the members know is known exactly.
        block[self.index] = 0.0
        block[index] = triangle
        inverse = torch.linalg.solve_triangular(triangle, torch.eye(len(index), dtype=block.dtype, device=block.device), upper=False)
        self._inverse[old:new, :old] = -inverse @ (self._factor[index, :old] @ self.inverse)
        self._inverse[:old, old:new] = 0.0
        self._inverse[old:new, old:new] = inverse
        self._gram[:new, old:new] = self._factor[:, :new].mT @ block
        self._gram[old:new, :old] = self._gram[:old, old:new].mT
        self._moment[old:new] = block.mT @ self.problem.targets
        self._index[old:new] = index
        self.residual = (self.residual - block.square().sum(1)).clamp(min=0.0)
        self.size = new
        self._cholesky = None
        self.residual[self.index] = 0.0

    def forget(self, count: int) -> Tensor:
        """Ignores the last inputs.

        Returns:
            The residual variances before, for :meth:`recall`.
        """
        before = self.residual
        dropped = self._factor[:, self.size - count : self.size]
        self.size -= count
        self.residual = before + dropped.square().sum(1)
        self.residual[self.index] = 0.0
        return before

    def recall(self, count: int, residual: Tensor) -> None:
        """Takes a :meth:`forget` back."""
        self.size += count
        self.residual = residual

    def move_to_end(self, places: Tensor) -> None:
        """Makes the members at ``places`` ``(t,)`` the last ones, and the last ``t`` columns of :math:`L` theirs alone."""
        m, t = self.size, len(places)
        member = torch.ones(m, dtype=torch.bool, device=places.device)
        member[places] = False
        order = torch.cat([member.nonzero().squeeze(1), places])
        # Directions that only the leaving inputs see, reflected onto the last axes; flipped, since LAPACK reflects onto the first.
        packed, tau = torch.geqrf(self.inverse[:, places].flip(0))
        V = packed.tril(-1)
        V.diagonal().fill_(1.0)
        overlap = V.mT @ V
        T = torch.linalg.inv(overlap.triu(1) + torch.diag_embed(1 / tau.clamp(min=1e-300)))
        V = V.flip(0)
        self._factor[:, :m].addmm_(self.factor @ V, T @ V.mT, alpha=-1)
        self._inverse[:m, :m] = (self.inverse - V @ (T.mT @ (V.mT @ self.inverse)))[:, order]
        gram = self.gram - (self.gram @ V) @ (T @ V.mT)
        gram = gram - V @ (T.mT @ (V.mT @ gram))
        self._gram[:m, :m] = (gram + gram.mT) / 2
        self._moment[:m] = self.moment - V @ (T.mT @ (V.mT @ self.moment))
        self._index[:m] = self.index[order]
        self._inverse[: m - t, m - t : m] = 0.0
        self._factor[self._index[: m - t], m - t : m] = 0.0
        self._cholesky = None

    def removal_plan(self, count: int) -> tuple[Tensor, Tensor]:
        r"""The ``count`` members that are cheapest to remove one after the other, and what each of the removals costs, exactly.

        With :math:`M = K_{II}^{-1}`, :math:`N = (K_{In} K_{nI} + \sigma^2 K_{II})^{-1}`, :math:`\beta = N K_{In} Y` and
        :math:`A = M K_{In} K_{nI} M`, removing member ``i`` raises the objective by

        .. math:: \tfrac12 \Big[ \sum_h \frac{\beta_{ih}^2}{\sigma^2 N_{ii}} + H \log \frac{\sigma^2 N_{ii}}{M_{ii}}
            + \frac{H}{\sigma^2} \frac{A_{ii}}{M_{ii}} \Big],

        the last term only for ``"vfe"``; and all four follow a removal by updates of rank one or two. Nothing here grows with ``n``.

        Returns:
            Places ``(count,)`` among the members, and costs ``(count,)``.
        """
        noise, H, trace = self.problem.noise, self.problem.num_outputs, self.problem.trace_weight
        inverse, R = self.inverse, self.cholesky
        half = torch.linalg.solve_triangular(R, inverse, upper=False)
        M, N = inverse.mT @ inverse, half.mT @ half
        beta = half.mT @ torch.linalg.solve_triangular(R, self.moment, upper=False)
        through = R.mT @ inverse
        A = through.mT @ through - noise * M
        places, costs = [], []
        alive = torch.ones(self.size, dtype=torch.bool, device=M.device)
        for _ in range(count):
            m, q = M.diagonal().clamp(min=1e-300), N.diagonal().clamp(min=1e-300)
            data = beta.square().sum(1) / (noise * q)
            cost = 0.5 * (data + H * (noise * q / m).log() + trace * A.diagonal() / m)
            i = int(torch.where(alive, cost, torch.inf).argmin())
            places.append(i)
            costs.append(cost[i])
            alive[i] = False
            Mi, Ni, Ai = M[:, i] / M[i, i], N[:, i] / N[i, i], A[:, i]
            crossed = torch.outer(Mi, Ai)
            A = A - crossed - crossed.mT + A[i, i] * torch.outer(Mi, Mi)
            beta = beta - torch.outer(Ni, beta[i])
            M, N = M - torch.outer(Mi, M[i]), N - torch.outer(Ni, N[i])
        return torch.tensor(places, device=M.device), torch.stack(costs)

    def removal_costs(self) -> Tensor:
        """What removing each member alone would cost, exactly, ``(m,)``; see :meth:`removal_plan`."""
        noise, H = self.problem.noise, self.problem.num_outputs
        inverse, R = self.inverse, self.cholesky
        half = torch.linalg.solve_triangular(R, inverse, upper=False)
        beta = half.mT @ torch.linalg.solve_triangular(R, self.moment, upper=False)
        m, q = inverse.square().sum(0), half.square().sum(0)
        explained = (R.mT @ inverse).square().sum(0) - noise * m
        data = beta.square().sum(1) / (noise * q)
        costs: Tensor = 0.5 * (data + H * (noise * q / m).log() + self.problem.trace_weight * explained / m)
        return costs

    def pool(self, index: Tensor) -> Pool:
        """All that exact scores of candidates at positions ``index`` ``(p,)`` need."""
        residuals = self.residual_columns(index)
        gram = residuals.mT @ residuals
        along = self.factor.mT @ residuals
        half = torch.linalg.solve_triangular(self.cholesky, along, upper=False)
        noise = self.problem.noise
        # S^-1 Y is spread over the data only where candidates need it.
        explained = along.mT @ torch.cholesky_solve(self.moment, self.cholesky)
        alignment = (residuals.mT @ self.problem.targets - explained) / noise
        return Pool(index, residuals, gram, (gram - half.mT @ half) / noise, alignment)

    def gains(self, pool: Pool) -> Tensor:
        """Exact decreases of the objective ``(p,)`` by each candidate alone; minus infinity where it depends on the members."""
        block = pool.residuals[pool.positions]
        allowed = block.diagonal() > DEPENDENT * self.prior[pool.positions]
        gains = self._gains(block, pool.gram, pool.precision_gram, pool.alignment)
        return torch.where(allowed, gains, -torch.inf)

    def choose(self, pool: Pool, count: int) -> tuple[Tensor, Tensor]:
        """Candidates that lower the objective most, each given those chosen before.

        Returns:
            Places in the pool and exact decreases, ``(t,)`` each, ``t`` at most ``count``; fewer where the others depend on these.
        """
        block, gram, weighted, alignment = pool.residuals[pool.positions], pool.gram, pool.precision_gram, pool.alignment
        allowed = torch.ones(len(block), dtype=torch.bool, device=block.device)
        places, gains = [], []
        for _ in range(min(count, len(block))):
            allowed = allowed & (block.diagonal() > DEPENDENT * self.prior[pool.positions])
            gain = torch.where(allowed, self._gains(block, gram, weighted, alignment), -torch.inf)
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

    def _gains(self, block: Tensor, gram: Tensor, weighted: Tensor, alignment: Tensor) -> Tensor:
        variance = block.diagonal().clamp(min=1e-300)
        return self._gain(variance, gram.diagonal(), weighted.diagonal(), alignment)

    def _gain(self, variance: Tensor, squared: Tensor, weighted: Tensor, alignment: Tensor) -> Tensor:
        r""":math:`\frac12 [ |\ell^\top a|^2 / (1 + w) - H \log(1 + w) + H |\ell|^2 / \sigma^2 ]`, all per unit of residual variance."""
        w = (weighted / variance).clamp(min=0.0)
        data = alignment.square().sum(1) / (variance * (1 + w))
        gain: Tensor = 0.5 * (data - self.problem.num_outputs * torch.log1p(w) + self.problem.trace_weight * squared / variance)
        return gain

    def approximate_gains(self, pivots: Tensor, diagonal: bool = True) -> Tensor:
        r"""Approximate decreases of the objective by every input alone, ``(n,)``, for ranking.

        Residual columns are taken from a partial Cholesky factor :math:`L_z` of :math:`K - \hat K` on the information pivots.

        Args:
            pivots: positions ``(z,)``, no members.
            diagonal: whether to add what the factor misses on the diagonal, which is known.

        Returns:
            Approximate decreases; minus infinity for members and inputs that depend on them.
        """
        noise = self.problem.noise
        residuals = self.residual_columns(pivots)
        kept, triangle = independent_cholesky(residuals[pivots], self.prior[pivots])
        half = torch.linalg.solve_triangular(triangle, residuals[:, kept].mT, upper=False).mT
        along = self.factor.mT @ half
        whitened = torch.linalg.solve_triangular(self.cholesky, along, upper=False)
        M1 = half.mT @ half
        M2 = (M1 - whitened.mT @ whitened) / noise
        aligned = half.mT @ self.problem.targets - along.mT @ torch.cholesky_solve(self.moment, self.cholesky)
        known = half.square().sum(1)
        squared, weighted, alignment = ((half @ M1) * half).sum(1), ((half @ M2) * half).sum(1), half @ (aligned / noise)
        if diagonal:
            missing = (self.residual - known).clamp(min=0.0)
            squared = squared + missing * (2 * known + missing)
            weighted = weighted + missing * (2 * known + missing) / noise
            alignment = alignment + missing[:, None] * self.weights()
        variance = self.residual if diagonal else known
        gains = self._gain(variance.clamp(min=1e-300), squared, weighted, alignment)
        return torch.where(self.candidates(), gains, -torch.inf)


def _without(gram: Tensor, along: Tensor, c: Tensor, squared: Tensor) -> Tensor:
    r"""Gram matrix of :math:`E - \ell c^\top` from that of :math:`E`, :math:`E^\top \ell` and :math:`|\ell|^2`."""
    crossed = torch.outer(along, c)
    return gram - crossed - crossed.mT + squared * torch.outer(c, c)
