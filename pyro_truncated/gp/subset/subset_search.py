"""Searches for an inducing subset, their interface and their budget."""

from __future__ import annotations

import abc
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.gp.cholesky import DEPENDENT, independent_cholesky
from pyro_truncated.gp.data_kernels.protocol import bound_kernel, check_data_kernel
from pyro_truncated.gp.subset.objectives import Basis, SparsePosterior, SubsetProblem, check_index
from pyro_truncated.utils.arguments import check_count, check_counts, check_kinds, names_arguments, renames
from pyro_truncated.utils.console import progress_bar
from pyro_truncated.utils.constraints import in_double


@dataclasses.dataclass
class Budget:
    """Ends a search, and keeps its record."""

    max_swaps: int | None = None  # most members exchanged. Default: no limit.
    max_attempts: int | None = None  # most attempts, whether they succeed or not. Default: no limit.
    max_seconds: float | None = None  # most seconds by clock. Default: no limit.
    clock: Callable[[], float] = time.perf_counter  # seconds from some moment on. Default: wall clock time.
    progress: bool = False  # whether to show a progress bar
    swaps: int = 0  # members exchanged so far
    attempts: int = 0  # attempts so far
    # Seconds, swaps and objective after each change, the start included.
    history: list[tuple[float, int, float]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("max_swaps", "max_attempts"):
            if (limit := getattr(self, name)) is not None:
                setattr(self, name, check_count(name, limit, least=0))
        if self.max_seconds is not None and not self.max_seconds >= 0:
            raise ValueError(f"max_seconds must be a number of at least 0; got {self.max_seconds}")
        self._start = self.clock()
        self._bar = progress_bar(self.progress, total=self.max_swaps, unit="swap")

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self.clock() - self._start

    @property
    def is_exhausted(self) -> bool:
        """Whether any limit is reached."""
        return (
            (self.max_swaps is not None and self.swaps >= self.max_swaps)
            or (self.max_attempts is not None and self.attempts >= self.max_attempts)
            or (self.max_seconds is not None and self.seconds >= self.max_seconds)
        )

    def record(self, objective: float, swaps: int = 0) -> None:
        """Notes an objective that ``swaps`` more exchanges led to."""
        self.swaps += swaps
        self.history.append((self.seconds, self.swaps, objective))
        self._bar.update(swaps)
        self._bar.set_postfix_str(f"F={objective:.6g}")

    def close(self) -> None:
        """Ends the progress bar."""
        self._bar.close()


class SubsetSearch(abc.ABC):
    """A way of choosing inducing inputs from the training inputs.

    Example:
        >>> isinstance(ExchangeSearch(), SubsetSearch), isinstance(RandomSearch(), SubsetSearch)
        (True, True)
    """

    @abc.abstractmethod
    def improve(
        self, problem: SubsetProblem, num_inducing: int, index: Tensor | None, budget: Budget, generator: torch.Generator | None = None
    ) -> Tensor:
        """Chooses an inducing subset.

        Args:
            problem: data, kernel and noise.
            num_inducing: how many inputs to choose, ``m``; fewer are returned where others would depend on them.
            index: the subset so far, ``(m,)``; None at the start.
            budget: ends the search and keeps the record.
            generator: source of randomness.

        Returns:
            Distinct positions, at most ``m``.
        """


class RandomSearch(SubsetSearch):
    """A random subset, which stays as it is.

    Example:
        >>> x = torch.linspace(0, 6, 60, dtype=torch.float64).unsqueeze(-1)
        >>> model = SubsetGPRegression(smooth_rbf(x), x.squeeze(-1).sin(), num_inducing=5, algorithm=RandomSearch())
        >>> objective = model.fit(max_epochs=2)
        >>> len(model.subset)
        5
    """

    def improve(
        self, problem: SubsetProblem, num_inducing: int, index: Tensor | None, budget: Budget, generator: torch.Generator | None = None
    ) -> Tensor:
        """The subset given, or a random one; see :class:`SubsetSearch`."""
        return random_subset(problem.num_data, num_inducing, generator, problem.targets.device) if index is None else index


def random_subset(num_data: int, num: int, generator: torch.Generator | None, device: torch.device | None = None) -> Tensor:
    """Distinct random positions ``(num,)`` on the CPU, or all."""
    return torch.randperm(num_data, generator=generator)[:num].to(device)


def draw(weights: Tensor, num: int, generator: torch.Generator | None) -> Tensor:
    """At most ``num`` distinct positions, drawn in proportion to weights ``(n,)``."""
    # One exponential variable per position is raced against its weight: that needs no loops, and no limit on their number.
    positive = int((weights > 0).sum())
    noise = torch.rand(len(weights), generator=generator, dtype=torch.float64).to(weights.device)
    arrival = -torch.log1p(-noise) / weights.clamp(min=0.0)
    arrival = torch.where(weights > 0, arrival, torch.inf)
    return arrival.topk(min(num, positive), largest=False).indices


class ExchangeFactors:
    r""":math:`L`, :math:`C^{-1} = L_I^{-1}`, :math:`G = L^\top L`, :math:`L^\top Y` and the diagonal of :math:`K - \hat K` of a subset.

    The objective only sees :math:`L L^\top`, so columns may be rotated. Removing inputs is one block Householder reflection that moves
    their directions into the last columns, which are then ignored; taking it back costs nothing. All that grows with ``n`` are products of
    matrices.

    ``capacity`` is the most inputs that the subset holds at any time, candidates included. Inputs that depend on others are left out.
    """

    def __init__(self, problem: SubsetProblem, capacity: int, index: Tensor | None = None) -> None:
        self.problem = problem
        new = problem.targets.new_zeros
        n, H = problem.targets.shape
        self._factor, self._inverse = new(n, capacity), new(capacity, capacity)
        self._gram, self._moment = new(capacity, capacity), new(capacity, H)
        self._index = torch.zeros(capacity, dtype=torch.int64, device=problem.targets.device)
        self.prior = problem.diag()
        self.size = 0
        self._cholesky: Tensor | None = None
        self.residual = self.prior.clone()
        if index is not None and len(index):
            # All inputs at once: K_nI C^-T beats adding blocks.
            columns = problem.columns(index)
            rows, triangle = independent_cholesky(columns[index], self.prior[index])
            self._place(index[rows], columns[:, rows], triangle)

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
        """Returns :math:`C^{-1}`, ``(m, m)``, for :math:`L`'s rows at inducing inputs."""
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

    def candidates(self) -> Tensor:
        """Which inputs may be added, ``(n,)``: no members, nor determined by them."""
        allowed = self.residual > DEPENDENT * self.prior
        allowed[self.index] = False
        return allowed

    def residual_columns(self, index: Tensor) -> Tensor:
        r"""Columns :math:`(K - \hat K)_{:J}`, ``(n, p)``."""
        return self.problem.columns(index) - self.factor @ self.factor[index].mT

    def append(self, index: Tensor, residuals: Tensor | None = None) -> int:
        """Adds inputs ``(t,)`` that do not depend on others; returns how many."""
        residuals = self.residual_columns(index) if residuals is None else residuals
        rows, triangle = independent_cholesky(residuals[index], self.prior[index])
        if len(rows):
            self._place(index[rows], residuals[:, rows], triangle)
        return len(rows)

    def _place(self, index: Tensor, residuals: Tensor, triangle: Tensor) -> None:
        """Extends all factors by new inputs' residual columns and block."""
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
        """Ignores the last inputs; returns the residual variances before, for :meth:`recall`."""
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
        """Moves members at ``places`` ``(t,)`` to the last columns of :math:`L`."""
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


class CandidatePool:
    r"""Candidates, with everything that exact changes of the objective depend on.

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
        """Exact decreases of the objective ``(p,)`` by single candidates."""
        gains = _gains(self.problem, self._block, self.gram, self.precision_gram, self.alignment)
        return torch.where(self._block.diagonal() > self._floor, gains, -torch.inf)

    def choose(self, count: int) -> tuple[Tensor, Tensor]:
        """Places and decreases ``(t,)`` of the best candidates, each given those before."""
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
            gram = _deflate(gram, gram[:, i] / root, c, gram[i, i] / block[i, i])
            along, w, aligned = weighted[:, i] / root, weighted[i, i] / block[i, i], alignment[i] / root
            after = along - c * w
            weighted = _deflate(weighted, along, c, w) - torch.outer(after, after) / (1 + w)
            alignment = alignment - torch.outer(c, aligned) - torch.outer(after, aligned) / (1 + w)
            block = block - torch.outer(c, c)
        index = torch.tensor(places, dtype=torch.int64, device=block.device)
        return index, torch.stack(gains) if gains else block.new_zeros(0)


def approximate_gains(factors: ExchangeFactors, pivots: Tensor) -> Tensor:
    r"""Approximate decreases of the objective by every input alone, ``(n,)``, for ranking.

    Residual columns are taken from a partial Cholesky factor :math:`L_z` of :math:`K - \hat K` on the information pivots ``(z,)``, and what
    it misses on the diagonal is added. Minus infinity for members and inputs that depend on them.
    """
    noise = factors.problem.noise
    residuals = factors.residual_columns(pivots)
    rows, triangle = independent_cholesky(residuals[pivots], factors.prior[pivots])
    half = torch.linalg.solve_triangular(triangle, residuals[:, rows].mT, upper=False).mT
    along = factors.factor.mT @ half
    whitened = torch.linalg.solve_triangular(factors.cholesky, along, upper=False)
    M1 = half.mT @ half
    M2 = (M1 - whitened.mT @ whitened) / noise
    aligned = half.mT @ factors.problem.targets - along.mT @ torch.cholesky_solve(factors.moment, factors.cholesky)
    square_norm = half.square().sum(1)
    squared, weighted, alignment = ((half @ M1) * half).sum(1), ((half @ M2) * half).sum(1), half @ (aligned / noise)
    missing = (factors.residual - square_norm).clamp(min=0.0)
    squared = squared + missing * (2 * square_norm + missing)
    weighted = weighted + missing * (2 * square_norm + missing) / noise
    weights = (factors.problem.targets - factors.factor @ torch.cholesky_solve(factors.moment, factors.cholesky)) / noise
    alignment = alignment + missing[:, None] * weights
    gains = _gain(factors.problem, factors.residual.clamp(min=1e-300), squared, weighted, alignment)
    return torch.where(factors.candidates(), gains, -torch.inf)


def _gains(problem: SubsetProblem, block: Tensor, gram: Tensor, forms: Tensor, alignment: Tensor) -> Tensor:
    return _gain(problem, block.diagonal().clamp(min=1e-300), gram.diagonal(), forms.diagonal(), alignment)


def _gain(problem: SubsetProblem, variance: Tensor, square_norm: Tensor, form: Tensor, alignment: Tensor) -> Tensor:
    r""":math:`\frac12 [ |\ell^\top a|^2 / (1 + w) - H \log(1 + w) + H |\ell|^2 / \sigma^2 ]`, all per unit of residual variance."""
    w = (form / variance).clamp(min=0.0)
    data = alignment.square().sum(1) / (variance * (1 + w))
    return 0.5 * (data - problem.num_outputs * torch.log1p(w) + problem.trace_weight * square_norm / variance)


def _deflate(gram: Tensor, projection: Tensor, coefficients: Tensor, square_norm: Tensor) -> Tensor:
    r"""Gram matrix of :math:`E - \ell c^\top` from that of :math:`E`, :math:`E^\top \ell` and :math:`|\ell|^2`."""
    crossed = torch.outer(projection, coefficients)
    return gram - crossed - crossed.mT + square_norm * torch.outer(coefficients, coefficients)


def removal_plan(factors: ExchangeFactors, count: int) -> tuple[Tensor, Tensor]:
    r"""Returns the ``count`` cheapest members to remove in turn, and exact costs.

    Let :math:`M = K_{II}^{-1}`, :math:`N = (K_{In} K_{nI} + \sigma^2 K_{II})^{-1}`, :math:`\beta = N K_{In} Y` and :math:`A = M K_{In}
    K_{nI} M`. To remove member ``i`` raises the objective by

    .. math:: \tfrac12 \Big[ \sum_h \frac{\beta_{ih}^2}{\sigma^2 N_{ii}} + H \log \frac{\sigma^2 N_{ii}}{M_{ii}}
        + \frac{H}{\sigma^2} \frac{A_{ii}}{M_{ii}} \Big],

    the last term only for ``"vfe"``; and all four follow a removal by updates of rank one or two. Nothing here grows with ``n``.
    """
    problem = factors.problem
    noise, H, trace = problem.noise, problem.num_outputs, problem.trace_weight
    inverse, R = factors.inverse, factors.cholesky
    half = torch.linalg.solve_triangular(R, inverse, upper=False)
    M, N = inverse.mT @ inverse, half.mT @ half
    beta = half.mT @ torch.linalg.solve_triangular(R, factors.moment, upper=False)
    through = R.mT @ inverse
    A = through.mT @ through - noise * M
    places, costs = [], []
    alive = torch.ones(factors.size, dtype=torch.bool, device=M.device)
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


def removal_costs(factors: ExchangeFactors) -> Tensor:
    """What removing each member alone would cost, exactly, ``(m,)``; see :func:`removal_plan`."""
    noise, H = factors.problem.noise, factors.problem.num_outputs
    inverse, R = factors.inverse, factors.cholesky
    half = torch.linalg.solve_triangular(R, inverse, upper=False)
    beta = half.mT @ torch.linalg.solve_triangular(R, factors.moment, upper=False)
    m, q = inverse.square().sum(0), half.square().sum(0)
    explained = (R.mT @ inverse).square().sum(0) - noise * m
    data = beta.square().sum(1) / (noise * q)
    return 0.5 * (data + H * (noise * q / m).log() + factors.problem.trace_weight * explained / m)


# An exchange has to pay more than rounding errors do.
_RELATIVE_GAIN = 1e-9


class ExchangeSearch(SubsetSearch):
    """Exchanges members for inputs that lower the objective, until none does.

    The subset starts from nothing, by blocks of the best of random candidates. Each exchange ranks all inputs by information pivots, scores
    a pool of the best exactly, and swaps a block of these for the cheapest members. If the objective would not fall, the block is halved.
    At last single swaps first take a member out and then look for a better one. The objective never rises.

    Example:
        >>> x = torch.linspace(0, 6, 60).double().unsqueeze(-1)
        >>> model = SubsetGPRegression(smooth_rbf(x), x.squeeze(-1).sin(), num_inducing=8, algorithm=ExchangeSearch())
        >>> objective = model.fit(max_epochs=2)

    Args:
        information_pivots: number ``z`` of pivots of the ranking, drawn in proportion to the variance left unexplained.
        pool: number of candidates that are scored exactly, the best of the ranking.
        patience: failed exchanges in a row after which single swaps begin.
        candidates_per_input: how many random candidates each input of the start is chosen from, at most 256 at once.

    Reference:
        The objective, information pivots and exact acceptance are those of Cao, Brubaker, Fleet and Hertzmann (PAMI 2015).
    """

    @renames("block", "single_swaps")
    @names_arguments
    def __init__(self, information_pivots: int = 64, pool: int = 64, *, patience: int = 3, candidates_per_input: int = 16) -> None:
        self.information_pivots, self.pool, self.patience, self.candidates_per_input = check_counts(
            information_pivots=information_pivots, pool=pool, patience=patience, candidates_per_input=candidates_per_input
        )

    @torch.no_grad()
    def improve(
        self, problem: SubsetProblem, num_inducing: int, index: Tensor | None, budget: Budget, generator: torch.Generator | None = None
    ) -> Tensor:
        """Exchanges members until nothing helps or the budget is spent; see :class:`SubsetSearch`."""
        block = min(16, max(1, num_inducing // 8))
        capacity = min(problem.num_data, num_inducing + block)
        start = None if index is None else check_index(index, problem.num_data).to(problem.targets.device)[:num_inducing]
        factors = ExchangeFactors(problem, capacity, start)
        self.fill(factors, num_inducing, block, generator)
        value = factors.value()
        budget.record(value)
        block = min(block, capacity - factors.size)
        if block:
            value = self._exchange_blocks(factors, value, block, budget, generator)
            self._swap_singles(factors, value, budget, generator)
        return factors.index.clone()

    def fill(self, factors: ExchangeFactors, num_inducing: int, block: int, generator: torch.Generator | None) -> None:
        """Adds the best of random candidates in blocks, up to ``num_inducing``."""
        while factors.size < min(num_inducing, factors.problem.num_data):
            number = min(block, num_inducing - factors.size)
            draws = draw(factors.candidates().double(), min(256, self.candidates_per_input * number), generator)
            if not len(draws):
                return
            pool = CandidatePool(factors, draws)
            places, _ = pool.choose(number)
            if not len(places) or not factors.append(draws[places], pool.residuals[:, places]):
                return

    def _exchange_blocks(
        self, factors: ExchangeFactors, value: float, most: int, budget: Budget, generator: torch.Generator | None
    ) -> float:
        block, failures = most, 0
        while failures < self.patience and not budget.is_exhausted:
            budget.attempts += 1
            limit = block if budget.max_swaps is None else min(block, budget.max_swaps - budget.swaps)
            swapped, value = self._exchange(factors, value, limit, generator)
            if not swapped:
                failures += 1
                block = 1
                continue
            failures, block = 0, min(most, 2 * swapped)
            budget.record(value, swapped)
        return value

    def _exchange(self, factors: ExchangeFactors, value: float, block: int, generator: torch.Generator | None) -> tuple[int, float]:
        """Exchanges at most ``block`` inputs; returns their number and the objective."""
        size = factors.size
        ranked = self._rank(factors, generator)
        if not len(ranked):
            return 0, value
        pool = CandidatePool(factors, ranked)
        places, _ = pool.choose(block)
        count = factors.append(ranked[places], pool.residuals[:, places])
        while count:
            grown = factors.value()
            dropped, costs = removal_plan(factors, count)
            # Dropping only inputs that were just added is no exchange.
            if grown + float(costs.sum()) < value - _RELATIVE_GAIN * abs(value) and bool((dropped < size).any()):
                fresh = int((dropped >= size).sum())
                factors.move_to_end(dropped)
                factors.forget(count)
                return count - fresh, factors.value()
            factors.forget(count - count // 2)
            count //= 2
        return 0, value

    def _rank(self, factors: ExchangeFactors, generator: torch.Generator | None) -> Tensor:
        """The pool: the best candidates of the ranking by information pivots."""
        allowed = factors.candidates()
        pivots = draw(factors.residual * allowed, self.information_pivots, generator)
        if not len(pivots):
            return pivots
        gains = approximate_gains(factors, pivots)
        return gains.topk(min(self.pool, int(allowed.sum()))).indices

    def _swap_singles(self, factors: ExchangeFactors, value: float, budget: Budget, generator: torch.Generator | None) -> float:
        """Swaps members for better inputs, cheapest first, until none was exchanged."""
        visited: set[int] = set()
        while not budget.is_exhausted:
            untried = torch.tensor([int(i) not in visited for i in factors.index.tolist()], device=factors.index.device)
            if not bool(untried.any()):
                return value
            budget.attempts += 1
            place = torch.where(untried, removal_costs(factors), torch.inf).argmin()
            member = int(factors.index[place])
            visited.add(member)
            factors.move_to_end(place[None])
            before = factors.forget(1)
            swap = self._better(factors, value, generator)
            if swap is None:
                factors.recall(1, before)
                continue
            factors.append(swap)
            new = factors.value()
            if not new < value:
                # Rounding made the gain; the member comes back in its place.
                factors.forget(1)
                factors.append(torch.tensor([member], device=swap.device))
                continue
            # The landscape has changed: all others are worth another try.
            visited = {int(swap[0])}
            value = new
            budget.record(value, 1)
        return value

    def _better(self, factors: ExchangeFactors, value: float, generator: torch.Generator | None) -> Tensor | None:
        """The best candidate, if adding it brings the objective below ``value``."""
        ranked = self._rank(factors, generator)
        if not len(ranked):
            return None
        gains = CandidatePool(factors, ranked).gains()
        best = gains.argmax()
        return ranked[best : best + 1] if factors.value() - float(gains[best]) < value - _RELATIVE_GAIN * abs(value) else None


class InducingSubset:
    r"""Chooses a sparse Gaussian process's inducing inputs from its training inputs.

    Inputs may be anything a kernel is defined on. The objective (see :mod:`pyro_truncated.gp.subset.objectives`), which also fits
    hyper-parameters, never rises, whatever the search.

    Example::

        subset = InducingSubset(fingerprints, y, CountKernel, num_inducing=128, noise=0.1)
        subset.optimize(max_seconds=5)
        mean, variance = subset.predict(new_fingerprints)

    Args:
        X: the training inputs, or a kernel with its own, as for :class:`SubsetGPRegression`.
        y: targets, ``(n,)``, or ``(n, H)`` for several outputs that share subset, kernel and noise; centred.
        kernel: as for :class:`SubsetGPRegression`.
        num_inducing: size ``m`` of the subset, at most ``n``.
        noise: noise variance.
        objective: ``"vfe"`` (variational free energy) or ``"pp"`` (likelihood of the projected process).
        algorithm: ``"exchange"``, or a :class:`SubsetSearch`.
        index: a subset to start from. Default: the algorithm's own start.
        generator: source of randomness.

    Attributes:
        index: positions of the inducing inputs, ``(m,)``; fewer if all other inputs depend on them.
        objective_value: the objective, in nats. Its constant :math:`\frac{nH}2 \log 2\pi` is left out.
        history: seconds, swaps and objective after each change since the start.

    Raises:
        ValueError: if targets, noise or names are not as above, or the kernel is none: not finite, not symmetric or not positive.
        TypeError: if the kernel offers no covariances.
    """

    @names_arguments
    def __init__(
        self,
        X: Any,
        y: Tensor,
        kernel: Any = None,
        *,
        num_inducing: int,
        noise: float,
        objective: str = "vfe",
        algorithm: str | SubsetSearch = "exchange",
        index: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.kernel = bound_kernel(X, kernel)
        matrix = _matrix(y)
        if len(matrix) != self.kernel.num_data:
            raise ValueError(f"y must have one target for each of the {self.kernel.num_data} inputs X; got {len(matrix)}")
        check_kinds(InducingSubset.__init__, noise=noise, generator=generator)
        self.problem = SubsetProblem(self.kernel, matrix, float(noise), objective)
        check_data_kernel(self.kernel)
        most = self.problem.num_data
        self.num_inducing = num_inducing = check_count("num_inducing", num_inducing, most=most, limit="the number of inputs")
        self.search = make_search(algorithm)
        self.generator = generator
        self.history: list[tuple[float, int, float]] = []
        if index is None:
            index = self.search.improve(self.problem, num_inducing, None, Budget(max_attempts=0), generator)
        self.index = check_index(index, self.problem.num_data).to(self.problem.targets.device)
        self.objective_value = self._value(self.index)

    def optimize(
        self,
        *,
        max_swaps: int | None = None,
        max_attempts: int | None = None,
        max_seconds: float | None = None,
        progress: bool = False,
    ) -> float:
        """Searches for a better subset until convergence or a limit.

        Args:
            max_swaps: most members exchanged.
            max_attempts: most attempts to exchange members.
            max_seconds: most seconds.
            progress: whether to show a progress bar.

        Returns:
            The objective, never above that before.
        """
        budget = Budget(max_swaps, max_attempts, max_seconds, progress=progress)
        index = self.search.improve(self.problem, self.num_inducing, self.index, budget, self.generator)
        budget.close()
        value = self._value(index)
        self.history += budget.history
        if value < self.objective_value:
            self.index, self.objective_value = index, value
        return self.objective_value

    def update(self, *, noise: float | None = None, targets: Tensor | None = None) -> float:
        """Updates new noise, new targets, or changed kernel parameters.

        Returns:
            The objective of the present subset.
        """
        matrix = self.problem.targets if targets is None else _matrix(targets)
        self.problem = SubsetProblem(self.kernel, matrix, self.problem.noise if noise is None else float(noise), self.problem.objective)
        self.objective_value = self._value(self.index)
        return self.objective_value

    def posterior(self) -> SparsePosterior:
        """The posterior given the present subset."""
        return SparsePosterior(Basis(self.kernel, self.index), self.problem.targets, self.problem.noise)

    @torch.no_grad()
    def predict(self, new: Any, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Means ``(n_new, H)`` and variances ``(n_new,)``, or ``noiseless`` ones."""
        mean, variance = self.posterior().marginals(new)
        return mean, variance if noiseless else variance + self.problem.noise

    def leave_one_out(self) -> tuple[Tensor, Tensor]:
        """Means ``(n, H)`` and variances ``(n,)`` with noise, given all others."""
        return self.posterior().leave_one_out()

    @torch.no_grad()
    def _value(self, index: Tensor) -> float:
        return ExchangeFactors(self.problem, len(index), index).value()


def make_search(algorithm: str | SubsetSearch) -> SubsetSearch:
    """A search by name, or the one given."""
    if isinstance(algorithm, SubsetSearch):
        return algorithm
    if not isinstance(algorithm, str):
        raise TypeError(f"algorithm must be a name or a SubsetSearch; got {type(algorithm).__name__}")
    if algorithm != "exchange":
        raise ValueError(f'algorithm must be "exchange" or a SubsetSearch; got {algorithm!r}')
    return ExchangeSearch()


def _matrix(targets: Tensor) -> Tensor:
    values = in_double("y, the targets,", targets).detach()
    if values.dim() not in (1, 2):
        raise ValueError(f"y, the targets, must have shape (n,) or (n, H); got {tuple(values.shape)}")
    return values if values.dim() == 2 else values[:, None]
