"""The solutions of restarts, and the best one, improved by moves."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor

from pyro_truncated.multistart.agreement import FreeEnergyEstimate, are_shared, vary
from pyro_truncated.multistart.learn_report import MoveCounts, Restart
from pyro_truncated.multistart.profile import Profile
from pyro_truncated.multistart.recombination import Recombination, build_recombinations
from pyro_truncated.multistart.solution import NOTHING, Solution, converge, fit_likeliest_states, settle
from pyro_truncated.multistart.solution_moves import (
    Complement,
    Crossover,
    DifferenceCodes,
    Move,
    RedundantLatents,
    improve,
)

Refine = Callable[[Profile, Solution], Solution]


class SolutionPool:
    """The solutions of restarts.

    Restarts are independent, so a latent that two of them have found is hardly an accident. Once each latent of the best has been found
    twice, few are missing. The number of kinds that a sample misses grows with the square of the number seen only once (Chao, 1987).

    Args:
        profile: of restarts.
        refine: trains what a move proposes.
        fit: fits parameters to the likeliest states of a solution.

    Attributes:
        best: the one with the highest free energy, with what others have added to it.
        estimates: of independent restarts: those from one place agree in poor optima.
        kept: the best of those that are compared by their latents, with their states; of chains all, without states.
        groups: exchange latents between restarts; none where these exchange nothing.
        is_network: whether restarts exchange nothing, as weights of networks mean nothing in another network.
        decoded: the values that a network decodes states into, if a linear model can warm-start it.
        restarts: what each was.
        moves: what was tried beyond restarts.
    """

    def __init__(self, profile: Profile, refine: Refine = settle, fit: Refine = fit_likeliest_states) -> None:
        self._profile, self._refine, self._fit = profile, refine, fit
        self.best = NOTHING
        self.estimates: list[FreeEnergyEstimate] = []
        self.kept: list[Solution] = []
        self.groups: list[Recombination] = []
        self.is_network = profile.initialization == "draw_start"
        self.decoded: Tensor | None = None
        self.restarts: list[Restart] = []
        self.moves = MoveCounts()
        # All restarts and the best one, with populations; and, by name of a move, the one that it gained nothing from.
        self._members: list[Solution] = []
        self._best: Solution | None = None
        self._failed: dict[str, Solution] = {}
        self._resolve: list[Move] = []

    @property
    def energies(self) -> list[float]:
        """The free energy per data point of each restart, in order."""
        return [restart.free_energy for restart in self.restarts]

    def add(self, found: Solution, restart: Restart) -> None:
        """Adds a restart."""
        if self._profile.is_matched or found.probabilities is not None:
            number = None if self._profile.is_chain else self._profile.config.num_kept
            self.kept = sorted([*self.kept, found], key=lambda one: -one.free_energy)[:number]
        self.restarts.append(restart)
        self.estimates.append(found.estimate)
        if self.groups:
            self._join(found)
            found = self._without_states()
        self._take_best(found)

    def exchange(self, groups: list[Recombination]) -> None:
        """Lets restarts exchange latents, from the best one on."""
        self.groups = groups
        if groups:
            complement = Complement(groups, lambda solution: self._populate(self._fit(self._profile, solution), solution))
            self._resolve = [DifferenceCodes(groups), complement]
            self._redundant = RedundantLatents(groups, self._profile.config.max_candidates, self._profile.generator)
            if self.best.parameters:
                self._join(self.best)

    def is_complete(self) -> bool:
        """Whether two restarts have found each latent of the best.

        None of them may be redundant: of two equal ones one may be missing elsewhere.
        """
        return not any(bool((self._find_singletons(group) | self._find_redundant(group)).any()) for group in self.groups)

    @property
    def num_singletons(self) -> int:
        """Returns how many latents of the best only one restart has found.

        Redundant ones do not count, unless they are the majority.
        """
        return sum(self._num_singletons(group) for group in self.groups)

    @property
    def num_found_once(self) -> int:
        """Returns how many chains of the best no other restart has found."""
        best, *others = [one.probabilities for one in self.kept if one.probabilities is not None]
        is_found = torch.stack([are_shared(best, other) for other in others]).any(0)
        return int((vary(best) & ~is_found).sum())

    def use_redundant_latents(self) -> bool:
        """Whether the best gains by its own redundant latents.

        They are not tried while other restarts still add to it.
        """
        if not self.groups or not self._improve(self._redundant):
            return False
        self._take_best(self._without_states())
        return True

    def _take_best(self, found: Solution) -> None:
        candidates = [self.best, found] if self.best.parameters else [found]
        self.best = max(candidates, key=lambda one: one.free_energy if math.isfinite(one.free_energy) else -math.inf)

    def _without_states(self) -> Solution:
        """The best one without its few states: training finds them anew."""
        assert self._best is not None
        return self._best.replace(population=None)

    def _join(self, found: Solution) -> None:
        """Adds latents of a restart to the best, then of others."""
        before = self._best
        self._members.append(self.groups[0].populate(found))
        waiting = [self._members[-1]]
        while waiting:
            other = waiting.pop()
            has_gained = [self._cross(other), *map(self._improve, self._resolve)]
            if any(has_gained):
                waiting = [member for member in self._members if member is not other]
        if self._best is before:
            self._improve(self._redundant)

    def _cross(self, other: Solution) -> bool:
        """Whether the best has become better by what another one has found."""
        if self._best is None:
            self._best = other
            return False
        before = self._best
        self._best, lesser = sorted((before, other), key=attrgetter("free_energy"), reverse=True)
        self._best = self._apply(self._best, Crossover(self.groups, lesser))
        return self._best is not before

    def _improve(self, move: Move) -> bool:
        """Whether a move improves the best; it is not repeated on it."""
        before = self._best
        assert before is not None
        if before is self._failed.get(move.name):
            return False
        self._best = self._failed[move.name] = self._apply(before, move)
        return self._best is not before

    def _apply(self, best: Solution, move: Move) -> Solution:
        return improve(best, move, self._train_child, self._profile.tolerance, self.moves)

    def _train_child(self, child: Solution) -> Solution:
        """Returns a trained proposal, or itself if training does not help.

        Beside continuous latents the free energy of an untrained child is an estimate with the parent's spread. There only trained
        children count.
        """
        settled = self._populate(self._refine(self._profile, child), child)
        return settled if child.companion else max(child, settled, key=attrgetter("free_energy"))

    def _populate(self, found: Solution, near: Solution) -> Solution:
        return self.groups[0].populate(found, near)

    def _num_singletons(self, group: Recombination) -> int:
        singletons = self._find_singletons(group)
        if not bool(singletons.any()):
            return 0
        redundant = self._find_redundant(group)
        is_excused = int(redundant.sum()) <= int((~singletons & ~redundant).sum())
        return int((singletons & ~redundant if is_excused else singletons).sum())

    def _find_singletons(self, group: Recombination) -> Tensor:
        assert self._best is not None
        best = self._best
        return torch.stack([group.are_shared(best, member) for member in self._members]).sum(0) < 2

    def _find_redundant(self, group: Recombination) -> Tensor:
        assert self._best is not None
        return group.find_redundant(self._best)


def resolve_difference_codes(profile: Profile, solution: Solution) -> Solution:
    """Replaces difference codes by causes where this raises the free energy.

    Most restarts hold no latent that is active only where another one is, and cost only this check.
    """
    groups = build_recombinations(profile, profile.config.replacement_gain * profile.tolerance, solution.parameters)[:1]
    if not groups or solution.population is None:
        return solution
    return improve(solution, DifferenceCodes(groups), partial(converge, profile), 0.0, known=groups[0].rescore(solution))


def have_found_the_same(profile: Profile, one: Solution, other: Solution) -> bool:
    """Whether nine of ten latents of two restarts match, both ways.

    They must be active for the same data points. With few data points, or without most latents, free energies of different solutions are
    close to each other. Without states, or if latents cannot change places, nothing is known, and this is true.
    """
    groups = build_recombinations(profile, 0.0, one.parameters)
    if not groups or one.population is None or other.population is None:
        return True
    return groups[0].share_most(groups[0].rescore(one), groups[0].rescore(other), profile.config.max_unmatched)
