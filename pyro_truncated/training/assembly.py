"""The combined solution of several restarts, and latents found only once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from pyro_truncated.training.agreement import FreeEnergyEstimate
from pyro_truncated.training.learn_report import Moves
from pyro_truncated.training.recombination import Member, Recombination
from pyro_truncated.training.starts import Start

# Most badly fitting latents beside which a redundant one is tried.
_MOST_TRIED = 3


class Assembly:
    """The best restart, improved by latents of the others.

    Restarts are independent, so a latent that two of them have found is hardly an accident. Once each latent of the best has been found
    twice, few are missing. The number of kinds that a sample misses grows with the square of the number seen only once (Chao, 1987).

    Args:
        recombinations: each exchanges latents of one group between two members.
        settle: trains the model a little, in ever smaller steps, from where a member is.
        fit: trains its parameters alone, for the likeliest states of a member.
        generator: source of randomness.
        moves: counts what is tried and accepted.
    """

    def __init__(
        self,
        recombinations: Sequence[Recombination],
        settle: Callable[[Member], Start],
        fit: Callable[[Member], Start],
        generator: torch.Generator | None = None,
        moves: Moves | None = None,
    ) -> None:
        self._moves = Moves() if moves is None else moves
        self._recombinations, self._settle, self._fit, self._generator = recombinations, settle, fit, generator
        self._starts: list[Member] = []
        self._best: Member | None = None
        # The last one whose spare latents have been tried elsewhere; what each change of the best has left; and, of each group, when those
        # latents were on that had better not be turned.
        self._tried: Member | None = None
        self._left: dict[str, Member] = {}
        self._upright: list[list[Tensor]] = [[] for _ in recombinations]

    @property
    def best(self) -> Start:
        """What all starts have found together."""
        assert self._best is not None
        return Start(
            FreeEnergyEstimate(self._best.free_energy, each=self._best.population.free_energy()),
            self._best.parameters,
            None,
            self._best.beside,
        )

    def join(self, found: Start) -> None:
        """Adds latents of a new restart, then of the others."""
        before = self._best
        self._starts.append(self._member(found))
        waiting = [self._starts[-1]]
        while waiting:
            other = waiting.pop()
            if self._take(other) | self._gains_by(self._resolve_difference_codes) | self._gains_by(self._complement):
                waiting = [start for start in self._starts if start is not other]
        if self._best is before:
            self.use_spare_latents()

    def is_complete(self) -> bool:
        """Whether two restarts have found each latent of the best.

        None of them may be redundant: of two equal ones one may be missing elsewhere.
        """
        return not any(bool((self._are_singletons(group) | self._are_spare(group)).any()) for group in self._recombinations)

    @property
    def num_singletons(self) -> int:
        """Returns how many latents of the best only one restart has found.

        Redundant ones do not count, unless they are the majority.
        """
        return sum(self._num_singletons(group) for group in self._recombinations)

    def _num_singletons(self, group: Recombination) -> int:
        lonely = self._are_singletons(group)
        if not bool(lonely.any()):
            return 0
        spare = self._are_spare(group)
        is_excused = int(spare.sum()) <= int((~lonely & ~spare).sum())
        return int((lonely & ~spare if is_excused else lonely).sum())

    def _take(self, other: Member) -> bool:
        """Whether the best has become better by what another one has found."""
        if self._best is None:
            self._best = other
            return False
        before = self._best
        self._best, lesser = sorted((before, other), key=attrgetter("free_energy"), reverse=True)
        for group in self._recombinations:
            self._best = self._better("crossover", group, self._best, group.cross(self._best, lesser))
        return self._best is not before

    def _gains_by(self, change: Callable[[Member], Member]) -> bool:
        """Whether a change has improved the best; otherwise it is not repeated."""
        before = self._best
        assert before is not None
        if before is self._left.get(change.__name__):
            return False
        self._best = self._left[change.__name__] = change(before)
        return self._best is not before

    def _resolve_difference_codes(self, best: Member) -> Member:
        """Replaces difference codes by the causes where this is better."""
        for group in self._recombinations:
            best = self._better("replacement of difference codes", group, best, group.resolve_difference_codes(best))
        return best

    def _complement(self, before: Member) -> Member:
        """Complements latents where this is better.

        A latent may have the negative of its dictionary element, with a constant added elsewhere. Then it is active for all data points
        without the cause. Gradients do not lead from there to the cause, but parameters fitted to complemented states do. A latent that
        gained nothing is not complemented again as long as it is active for the same data points.
        """
        best = before
        for group, upright in zip(self._recombinations, self._upright, strict=True):
            for latent, share in group.mostly_on(before, upright).items():
                turned = group.complement(best, latent)
                settled = self._settled(self._member(self._fit(turned), near=turned))
                is_better = settled.free_energy > best.free_energy + group.tolerance
                self._moves.count("complement", is_better)
                if is_better:
                    best = settled
                    upright.clear()
                else:
                    upright.append(share)
        return best

    def _better(self, name: str, group: Recombination, parent: Member, child: Member) -> Member:
        """Returns the better of parent and child, trained if that helps.

        Beside continuous latents the free energy of an untrained child is an estimate with the parent's spread. There only trained
        children count.
        """
        if child is parent:
            return parent
        settled = self._settled(child)
        is_better = not child.beside or settled.free_energy > parent.free_energy + group.tolerance
        self._moves.count(name, is_better)
        if child.beside:
            return settled if is_better else parent
        return max(child, settled, key=attrgetter("free_energy"))

    def _settled(self, member: Member) -> Member:
        return self._member(self._settle(member), near=member)

    def _member(self, found: Start, near: Member | None = None) -> Member:
        """Returns the solution of a run.

        Beside continuous latents their spread gives the free energy that was reached.
        """
        member = self._recombinations[0].member(found.parameters, near)
        if not found.beside:
            return member
        member = member._replace(beside=found.beside, spread=0.0)
        return member._replace(spread=found.reached.free_energy - member.free_energy)

    def use_spare_latents(self) -> bool:
        """Re-initialises redundant latents beside those that explain data worst.

        It goes on as long as this raises the free energy.

        Returns:
            Whether it has gained.
        """
        before = self._best
        while self._best is not None and self._best is not self._tried:
            self._tried = self._best
            for group in self._recombinations:
                self._best = self._with_spare_latent_used(group, self._best)
        return self._best is not before

    def _with_spare_latent_used(self, group: Recombination, member: Member) -> Member:
        spare = self._are_spare(group)
        if not bool(spare.any()) or bool(spare.all()):
            return member
        need = group.badly_explained(member).masked_fill(spare, -math.inf)
        for other in need.topk(min(_MOST_TRIED, int((~spare).sum()))).indices.tolist():
            settled = self._settled(group.beside(member, int(spare.nonzero()[0]), other, self._generator))
            is_better = settled.free_energy > member.free_energy + group.tolerance
            self._moves.count("use of redundant latents", is_better)
            if is_better:
                return settled
        return member

    def _are_singletons(self, group: Recombination) -> Tensor:
        assert self._best is not None
        counts = torch.stack([group.are_shared(self._best, start) for start in self._starts]).sum(0)
        return counts < 2

    def _are_spare(self, group: Recombination) -> Tensor:
        assert self._best is not None
        return group.are_spare(self._best)
