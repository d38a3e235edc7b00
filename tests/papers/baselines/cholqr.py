r"""The swap algorithm of Cao et al. (PAMI 2015) as published, kept for comparison: a partial Cholesky factor inside a QR factor.

Equation and algorithm numbers are the paper's. Three misprints are put right: the objective after a swap is
:math:`F_{m-1} - \Delta F` (algorithm 1), the variational term is :math:`\sigma^{-2} \operatorname{tr}(K - \hat K)` (equation 5), and the
augmented rows are the last ones (postcondition 5).
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from pyro_truncated.gp import SubsetSearch
from pyro_truncated.gp.cholesky import DEPENDENT, independent_cholesky
from pyro_truncated.gp.subset.objectives import SubsetProblem, check_index
from pyro_truncated.gp.subset.subset_search import Budget, draw, random_subset
from pyro_truncated.utils.arguments import check_counts, check_kinds, names_arguments


class CholQRFactors:
    r""":math:`\hat K = L L^\top` and :math:`[L; \sigma I] = Q R`, with :math:`L` lower trapezoidal in the order :math:`p` of the rows.

    Args:
        problem: data, kernel and noise.
        index: inducing inputs ``(m,)``; those that depend on earlier ones are left out.
        capacity: most inducing inputs at any time; default: as many as there are.

    Attributes:
        order: :math:`p`, ``(n,)``: all inputs, the inducing inputs first.
        L: ``(n, m)``; the rows :math:`\sigma I` below are not stored.
        Q: ``(n + m, m)``.
        R: ``(m, m)``, upper triangular.
        residual: :math:`d = \operatorname{diag}(K - \hat K)`, ``(n,)``.
        size: number of columns in use.
    """

    def __init__(self, problem: SubsetProblem, index: Tensor, capacity: int | None = None) -> None:
        n, m = problem.num_data, len(index) if capacity is None else capacity
        self.problem = problem
        self.prior = problem.diag()
        self.residual = self.prior.clone()
        new = problem.targets.new_zeros
        self.order = torch.arange(n, device=problem.targets.device)
        self.L, self.Q, self.R = new(n, m), new(n + m, m), new(m, m)
        self.size = 0
        for j in index.tolist():
            if float(self.residual[j]) > DEPENDENT * float(self.prior[j]):
                self.append(j)

    @property
    def index(self) -> Tensor:
        """Inducing inputs in the order of the columns."""
        return self.order[: self.size]

    def candidates(self) -> Tensor:
        """Which inputs may be added: neither members nor determined by them, ``(n,)`` boolean."""
        allowed = self.residual > DEPENDENT * self.prior
        allowed[self.index] = False
        return allowed

    def residual_column(self, j: int) -> Tensor:
        r""":math:`(K - \hat K)_{:j}`, ``(n,)``."""
        column = self.problem.columns(self.order.new_tensor([j])).squeeze(1)
        return column - self.L[:, : self.size] @ self.L[j, : self.size]

    def append(self, j: int) -> None:
        """One step of the incremental Cholesky and QR factorisation (algorithm 3)."""
        n, k = self.problem.num_data, self.size
        place = int((self.order == j).nonzero())
        self.order[[k, place]] = self.order[[place, k]]
        column = self.residual_column(j) / self.residual[j].sqrt()
        column[self.index] = 0.0
        column[j] = self.residual[j].sqrt()
        self.L[:, k] = column
        self.residual = (self.residual - column.square()).clamp(min=0.0)
        self.residual[j] = 0.0
        augmented = self.Q.new_zeros(len(self.Q))
        augmented[:n], augmented[n + k] = column, math.sqrt(self.problem.noise)
        # Orthogonalised twice: once loses digits slowly.
        for _ in range(2):
            share = self.Q[:, :k].mT @ augmented
            self.R[:k, k] += share
            augmented = augmented - self.Q[:, :k] @ share
        self.R[k, k] = augmented.norm()
        self.Q[:, k] = augmented / self.R[k, k]
        self.size += 1

    def move_to_right(self, k: int) -> None:
        """Makes the ``k``-th inducing input the last by swaps of neighbours (algorithm 4)."""
        n = self.problem.num_data
        for s in range(k, self.size - 1):
            pair = slice(s, s + 2)
            self.order[pair] = self.order[pair].flip(0)
            rows = self.order[pair]
            Q1, _ = _qr22(self.L[rows, pair].mT)
            self.L[:, pair] = self.L[:, pair] @ Q1
            self.L[rows[0], s + 1] = 0.0
            self.R[:, pair] = self.R[:, pair] @ Q1
            Q2, _ = _qr22(self.R[pair, pair])
            self.R[pair] = Q2.mT @ self.R[pair]
            self.R[s + 1, s] = 0.0
            self.Q[:, pair] = self.Q[:, pair] @ Q2
            # The rows below L stay sigma I because they are turned back.
            self.Q[n + s : n + s + 2] = Q1.mT @ self.Q[n + s : n + s + 2]

    def remove_last(self) -> None:
        """Drops the last inducing input (algorithm 5)."""
        last = self.size - 1
        self.residual = self.residual + self.L[:, last].square()
        self.size = last
        self.residual[self.index] = 0.0
        for matrix in (self.L, self.Q):
            matrix[:, last] = 0.0
        self.R[:, last] = 0.0
        self.R[last] = 0.0

    def value(self) -> float:
        """The objective by equations 9, 12 and 13."""
        n, k, problem = self.problem.num_data, self.size, self.problem
        explained = (self.Q[:n, :k].mT @ problem.targets).square().sum()
        data = (problem.targets.square().sum() - explained) / problem.noise
        complexity = (n - k) * math.log(problem.noise) + 2 * self.R.diagonal()[:k].abs().log().sum()
        return float(0.5 * (data + problem.num_outputs * complexity + problem.trace_weight * self.residual.sum()))

    def decrease(self, j: int) -> float:
        r"""Exact :math:`\Delta F` by adding input ``j`` (equations 14 and 16 to 18)."""
        column = self.residual_column(j) / self.residual[j].sqrt()
        along = self.Q[: len(column), : self.size].mT @ column
        rest = self.problem.targets - self.Q[: len(column), : self.size] @ self._projected()
        return float(self._decrease(column.square().sum(), along.square().sum(), (column @ rest).square().sum()))

    def approximate_decreases(self, half: Tensor) -> Tensor:
        r"""Approximate :math:`\Delta F` by every input ``(n,)`` from a factor :math:`L_z` ``(n, z)`` of the residual (equation 21)."""
        n, k = self.problem.num_data, self.size
        squared = half.square().sum(1)
        along = self.Q[:n, :k].mT @ half
        inner = half.mT @ half
        rest = half.mT @ self.problem.targets - along.mT @ self._projected()
        size = ((half @ inner) * half).sum(1) / squared
        inside = ((half @ (along.mT @ along)) * half).sum(1) / squared
        found = self._decrease(size, inside, (half @ rest).square().sum(1) / squared)
        return torch.where(self.candidates() & (squared > DEPENDENT * self.prior), found, -torch.inf)

    def partial_cholesky(self, pivots: Tensor) -> Tensor:
        r""":math:`L_z`: the factor ``(n, z)`` of :math:`K - \hat K` on the information pivots."""
        residuals = self.problem.columns(pivots) - self.L[:, : self.size] @ self.L[pivots, : self.size].mT
        kept, triangle = independent_cholesky(residuals[pivots], self.prior[pivots])
        half: Tensor = torch.linalg.solve_triangular(triangle, residuals[:, kept].mT, upper=False).mT
        return half

    def _projected(self) -> Tensor:
        return self.Q[: self.problem.num_data, : self.size].mT @ self.problem.targets

    def _decrease(self, size: Tensor, inside: Tensor, alignment: Tensor) -> Tensor:
        r"""Equations 16 to 18; ``alignment`` is :math:`|\tilde y^\top (I - QQ^\top) \tilde\ell|^2`."""
        noise = self.problem.noise
        outside = (size - inside).clamp(min=0.0) + noise
        complexity = self.problem.num_outputs * (math.log(noise) - outside.log())
        return 0.5 * (alignment / (noise * outside) + complexity + self.problem.trace_weight * size)


class CholQRSearch(SubsetSearch):
    """Swaps members for the candidate that an approximation favours, and keeps the swap if the exact objective falls (algorithm 1).

    The subset starts at random. Members take turns in random order.

    Example:
        >>> x = torch.linspace(0, 6, 60).double().unsqueeze(-1)
        >>> model = SubsetGPRegression(smooth_rbf(x), x.squeeze(-1).sin(), num_inducing=8, algorithm=CholQRSearch())
        >>> objective = model.fit(max_epochs=2)

    Args:
        information_pivots: number ``z``; the most, if ``adaptive``.
        pivots: ``"random"``, or ``"optimized"`` for the variant OI, which takes the inputs of largest residual variance.
        adaptive: the variant AA: few pivots at first, twice as many after a rejection, one fewer after a success.
        redraw: probability of drawing all random pivots anew for a swap.
        members_per_pass: how many members a pass considers.

    Reference:
        Cao, Brubaker, Fleet and Hertzmann, "Efficient optimization for sparse Gaussian process regression", PAMI 37 (2015), section 3.
    """

    _fewest_pivots = 4
    _relative_gain = 1e-6

    @names_arguments
    def __init__(
        self,
        information_pivots: int = 16,
        *,
        pivots: str = "random",
        adaptive: bool = False,
        redraw: float = 0.2,
        members_per_pass: int = 60,
    ) -> None:
        self.information_pivots, self.members_per_pass = check_counts(
            information_pivots=information_pivots, members_per_pass=members_per_pass
        )
        if pivots not in ("random", "optimized"):
            raise ValueError(f'pivots must be "random" or "optimized"; got {pivots!r}')
        if not 0 <= redraw <= 1:
            raise ValueError(f"redraw must be a probability; got {redraw}")
        check_kinds(CholQRSearch.__init__, adaptive=adaptive)
        self.pivots = pivots
        self.adaptive = adaptive
        self.redraw = redraw

    @torch.no_grad()
    def improve(
        self, problem: SubsetProblem, num_inducing: int, index: Tensor | None, budget: Budget, generator: torch.Generator | None = None
    ) -> Tensor:
        """Swaps members until a pass over all of them changes nothing or the budget is spent; see :class:`SubsetSearch`."""
        device = problem.targets.device
        start = random_subset(problem.num_data, num_inducing, generator, device) if index is None else check_index(index, problem.num_data)
        factors = CholQRFactors(problem, start[:num_inducing], num_inducing)
        while factors.size < num_inducing and bool((allowed := factors.candidates()).any()):
            # Members that depended on others make room for random ones.
            factors.append(int(draw(allowed.double(), 1, generator)))
        value = factors.value()
        budget.record(value)
        z = self._fewest_pivots if self.adaptive else self.information_pivots
        drawn = random_subset(problem.num_data, 0, generator, device)
        rejected = 0
        while rejected < factors.size and not budget.is_exhausted:
            turn = factors.index[torch.randperm(factors.size, generator=generator)[: self.members_per_pass].to(device)]
            for member in turn.tolist():
                if self._is_over(budget):
                    break
                budget.attempts += 1
                redraw = bool(torch.rand((), generator=generator) < self.redraw)
                before = copy.copy(factors)
                before.order, before.L, before.Q, before.R = (t.clone() for t in (factors.order, factors.L, factors.Q, factors.R))
                factors.move_to_right(int((factors.index == member).nonzero()))
                factors.remove_last()
                drawn = self._pivots(factors, drawn[:0] if redraw else drawn, z, generator)
                new = self._swap(factors, value, drawn)
                if new is None:
                    factors, rejected = before, rejected + 1
                    z = min(2 * z, self.information_pivots) if self.adaptive else z
                    continue
                value, rejected = new, 0
                z = max(z - 1, self._fewest_pivots) if self.adaptive else z
                budget.record(value, 1)
        return factors.index.clone()

    def _swap(self, factors: CholQRFactors, value: float, pivots: Tensor) -> float | None:
        """Adds the candidate the ranking favours if that brings the objective below ``value``; the objective then."""
        gains = factors.approximate_decreases(factors.partial_cholesky(pivots))
        best = int(gains.argmax())
        if not math.isfinite(float(gains[best])):
            return None
        new = factors.value() - factors.decrease(best)
        if not new < value - self._relative_gain * abs(value):
            return None
        factors.append(best)
        return new

    def _is_over(self, budget: Budget) -> bool:
        return budget.is_exhausted

    def _pivots(self, factors: CholQRFactors, drawn: Tensor, z: int, generator: torch.Generator | None) -> Tensor:
        """Information pivots: those drawn before that are still outside of the subset, and new ones."""
        outside = torch.ones(len(factors.prior), dtype=torch.bool, device=drawn.device)
        outside[factors.index] = False
        if self.pivots == "optimized":
            return torch.where(outside, factors.residual, -1.0).topk(min(z, int(outside.sum()))).indices
        drawn = drawn[outside[drawn]][:z]
        outside[drawn] = False
        more = outside.nonzero().squeeze(1)
        extra = more[torch.randperm(len(more), generator=generator)[: z - len(drawn)].to(drawn.device)]
        return torch.cat([drawn, extra])


def _qr22(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """QR factors of a two by two matrix; the diagonal of the second is not negative, each sign by itself."""
    Q, R = torch.linalg.qr(matrix)
    sign = torch.where(R.diagonal() < 0, -1.0, 1.0).to(R)
    return Q * sign, R * sign[:, None]
