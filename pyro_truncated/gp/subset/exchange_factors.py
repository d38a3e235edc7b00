r"""Factors of a kernel matrix on an inducing subset, to and from which blocks of inputs are added and removed.

:math:`L` need not be triangular: the objective only sees :math:`L L^\top`, so columns may be rotated. Removing inputs is one block
Householder reflection that moves their directions into the last columns, which are then ignored; taking a removal or an addition back
costs nothing but the number of columns in use. All that grows with ``n`` are products of matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.gp.cholesky import DEPENDENT, independent_cholesky
from pyro_truncated.gp.subset.objective import SubsetProblem


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
