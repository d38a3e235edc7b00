"""The default way to choose an inducing subset: blocks of inputs are exchanged as long as the objective falls."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.gp.subset.exchange_factors import ExchangeFactors
from pyro_truncated.gp.subset.exchange_gains import CandidatePool, approximate_gains
from pyro_truncated.gp.subset.exchange_removals import removal_costs, removal_plan
from pyro_truncated.gp.subset.objective import SubsetProblem, check_index
from pyro_truncated.gp.subset.subset_search import Budget, SubsetSearch, draw
from pyro_truncated.utils.arguments import check_kinds, names_arguments
from pyro_truncated.utils.counts import check_count, check_counts

_REFACTOR_EVERY = 500
# An exchange has to pay more than rounding errors do.
_RELATIVE_GAIN = 1e-9


class ExchangeSearch(SubsetSearch):
    """Adds the inputs that lower the objective most, then drops the members that are cheapest to drop, exactly; repeats while it falls.

    The subset starts from nothing, by blocks of the best of random candidates. Each exchange ranks all inputs by information pivots,
    scores a pool of the best exactly, picks a block from it, each input given those picked before, and drops as many members. If the
    objective would not fall, the block is halved. When no exchange succeeds any more, single swaps follow that first take a member out
    and then look for a better one, which helps small subsets out of corners.

    The objective never rises. It falls short of the optimum of a hard combinatorial problem, of course.

    Example:
        >>> x = torch.linspace(0, 6, 60).double().unsqueeze(-1)
        >>> model = SubsetGPRegression(smooth_rbf(x), x.squeeze(-1).sin(), num_inducing=8, algorithm=ExchangeSearch())
        >>> objective = model.fit(max_epochs=2)

    Args:
        information_pivots: number ``z`` of pivots of the ranking, drawn in proportion to the variance left unexplained.
        pool: number of candidates that are scored exactly, the best of the ranking.
        block: most inputs exchanged at once; default: an eighth of the subset, from 1 to 16.
        patience: failed exchanges in a row after which single swaps begin.
        candidates_per_input: how many random candidates each input of the start is chosen from, at most 256 at once.
        single_swaps: whether single swaps follow.

    Reference:
        The objective, information pivots and exact acceptance are those of Cao, Brubaker, Fleet and Hertzmann (PAMI 2015).
    """

    restarts = False

    @names_arguments
    def __init__(
        self,
        information_pivots: int = 64,
        pool: int = 64,
        block: int | None = None,
        patience: int = 3,
        *,
        candidates_per_input: int = 16,
        single_swaps: bool = True,
    ) -> None:
        self.information_pivots, self.pool, self.patience, self.candidates_per_input = check_counts(
            information_pivots=information_pivots, pool=pool, patience=patience, candidates_per_input=candidates_per_input
        )
        self.block = None if block is None else check_count("block", block)
        check_kinds(ExchangeSearch.__init__, single_swaps=single_swaps)
        self.single_swaps = single_swaps

    @torch.no_grad()
    def improve(
        self, problem: SubsetProblem, num_inducing: int, index: Tensor | None, budget: Budget, generator: torch.Generator | None = None
    ) -> Tensor:
        """Exchanges members until nothing helps or the budget is spent; see :class:`SubsetSearch`."""
        block = self.block or min(16, max(1, num_inducing // 8))
        capacity = min(problem.num_data, num_inducing + max(block, 1))
        start = None if index is None else check_index(index, problem.num_data).to(problem.targets.device)[:num_inducing]
        factors = ExchangeFactors(problem, capacity, start)
        self.fill(factors, num_inducing, block, generator)
        value = factors.value()
        budget.record(value)
        block = min(block, capacity - factors.size)
        if block:
            value = self._exchange_blocks(factors, value, block, budget, generator)
            if self.single_swaps:
                self._swap_singles(factors, value, budget, generator)
        return factors.index.clone()

    def fill(self, factors: ExchangeFactors, num_inducing: int, block: int, generator: torch.Generator | None) -> None:
        """Adds inputs in blocks, the best of random candidates, until there are ``num_inducing`` or all others depend on them."""
        while factors.size < min(num_inducing, factors.problem.num_data):
            wanted = min(block, num_inducing - factors.size)
            drawn = draw(factors.candidates().double(), min(256, self.candidates_per_input * wanted), generator)
            if not len(drawn):
                return
            pool = CandidatePool(factors, drawn)
            places, _ = pool.choose(wanted)
            if not len(places) or not factors.append(drawn[places], pool.residuals[:, places]):
                return

    def _exchange_blocks(
        self, factors: ExchangeFactors, value: float, most: int, budget: Budget, generator: torch.Generator | None
    ) -> float:
        block, failures, since = most, 0, 0
        while failures < self.patience and not budget.is_spent:
            budget.attempts += 1
            limit = block if budget.max_swaps is None else min(block, budget.max_swaps - budget.swaps)
            swapped, value = self._exchange(factors, value, limit, generator)
            if not swapped:
                failures += 1
                block = 1
                continue
            failures, block, since = 0, min(most, 2 * swapped), since + swapped
            if since >= _REFACTOR_EVERY:
                factors.rebuild()
                value, since = factors.value(), 0
            budget.record(value, swapped)
        return value

    def _exchange(self, factors: ExchangeFactors, value: float, block: int, generator: torch.Generator | None) -> tuple[int, float]:
        """One exchange of at most ``block`` inputs: how many were exchanged, and the objective."""
        size = factors.size
        ranked = self._ranked(factors, generator)
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

    def _ranked(self, factors: ExchangeFactors, generator: torch.Generator | None) -> Tensor:
        """The pool: the best candidates of the ranking by information pivots."""
        allowed = factors.candidates()
        pivots = draw(factors.residual * allowed, self.information_pivots, generator)
        if not len(pivots):
            return pivots
        gains = approximate_gains(factors, pivots)
        return gains.topk(min(self.pool, int(allowed.sum()))).indices

    def _swap_singles(self, factors: ExchangeFactors, value: float, budget: Budget, generator: torch.Generator | None) -> float:
        """Takes members out one by one, cheapest first, for better ones, until none of them was exchanged."""
        tried: set[int] = set()
        while not budget.is_spent:
            untried = torch.tensor([int(i) not in tried for i in factors.index.tolist()], device=factors.index.device)
            if not bool(untried.any()):
                return value
            budget.attempts += 1
            place = torch.where(untried, removal_costs(factors), torch.inf).argmin()
            member = int(factors.index[place])
            tried.add(member)
            factors.move_to_end(place[None])
            before = factors.forget(1)
            found = self._better(factors, value, generator)
            if found is None:
                factors.recall(1, before)
                continue
            factors.append(found)
            new = factors.value()
            if not new < value:
                # Rounding made the gain; the member comes back in its place.
                factors.forget(1)
                factors.append(torch.tensor([member], device=found.device))
                continue
            # The landscape has changed: all others are worth another try.
            tried = {int(found[0])}
            value = new
            budget.record(value, 1)
        return value

    def _better(self, factors: ExchangeFactors, value: float, generator: torch.Generator | None) -> Tensor | None:
        """The best candidate, if adding it brings the objective below ``value``."""
        ranked = self._ranked(factors, generator)
        if not len(ranked):
            return None
        gains = CandidatePool(factors, ranked).gains()
        best = gains.argmax()
        return ranked[best : best + 1] if factors.value() - float(gains[best]) < value - _RELATIVE_GAIN * abs(value) else None
