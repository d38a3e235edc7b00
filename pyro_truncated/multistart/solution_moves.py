"""Moves: changes of a solution beyond restarts."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pyro_truncated.multistart.convergence import by_gradients, train
from pyro_truncated.multistart.learn_report import MoveCounts
from pyro_truncated.multistart.model_parameters import forgetting_guides, learned_parameters, load_snapshot
from pyro_truncated.multistart.profile import Profile
from pyro_truncated.multistart.recombination import Recombination
from pyro_truncated.multistart.solution import FixedStates, Solution, fit_states, record_solution, trainer_at
from pyro_truncated.multistart.trainer import Trainer
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.states.population import Population
from pyro_truncated.utils.budget import rows_per_block

# Yields solutions, and is sent the best one after each.
Proposals = Generator[Solution, Solution, None]


class Move(Protocol):
    """Proposes changed solutions; :func:`improve` refines and accepts them."""

    name: str

    def propose(self, best: Solution) -> Proposals:
        """Yields changed solutions; is sent the best one after each."""


def improve(
    best: Solution,
    move: Move,
    refine: Callable[[Solution], Solution],
    min_gain: float,
    counts: MoveCounts | None = None,
) -> Solution:
    """Returns the best solution after a move: itself, or a refined proposal.

    Args:
        best: the best one before.
        move: what proposes.
        refine: trains a proposal.
        min_gain: least gain in free energy per data point.
        counts: counts what is tried and accepted.
    """
    proposals = move.propose(best)
    proposal = next(proposals, None)
    while proposal is not None:
        refined = refine(proposal)
        is_better = refined.free_energy > best.free_energy + min_gain
        if counts is not None:
            counts.count(move.name, is_better)
        best = refined if is_better else best
        try:
            proposal = proposals.send(best)
        except StopIteration:
            proposal = None
    return best


class Crossover:
    """Latents of another solution, by group. Source: Whitley, Hains and Howe (2009)."""

    name = "crossover"

    def __init__(self, groups: Sequence[Recombination], other: Solution) -> None:
        self._groups, self._other = groups, other

    def propose(self, best: Solution) -> Proposals:
        """Yields a child of each group that gains by itself."""
        for group in self._groups:
            if (child := group.cross(best, self._other)) is not best:
                best = yield child


class Complement:
    """Complements of latents that are mostly active.

    A latent may have the negative of its dictionary element, with a constant added elsewhere. Then it is active for all data points
    without the cause. Gradients do not lead from there to the cause, but parameters fitted to complemented states do. A latent that
    gained nothing is not complemented again as long as it is active for the same data points.

    Args:
        groups: of exchangeable latents.
        fit: fits parameters to the likeliest states of a solution.
    """

    name = "complement"

    def __init__(self, groups: Sequence[Recombination], fit: Callable[[Solution], Solution]) -> None:
        self._groups, self._fit = groups, fit
        self._failed: list[list[Tensor]] = [[] for _ in groups]

    def propose(self, best: Solution) -> Proposals:
        """Yields a solution for each such latent."""
        first = best
        for group, failed in zip(self._groups, self._failed, strict=True):
            for latent, share in group.find_mostly_active(first, failed).items():
                before, best = best, (yield self._fit(group.complement(best, latent)))
                if best is before:
                    failed.append(share)
                else:
                    failed.clear()


class RedundantLatents:
    """Redundant latents, initialised beside those that explain data worst."""

    name = "use of redundant latents"

    def __init__(self, groups: Sequence[Recombination], max_candidates: int, generator: torch.Generator | None) -> None:
        self._groups, self._max_candidates, self._generator = groups, max_candidates, generator

    def propose(self, best: Solution) -> Proposals:
        """Yields solutions as long as one of them gains."""
        before = None
        while best is not before:
            before = best
            for group in self._groups:
                redundant = group.find_redundant(best)
                if not bool(redundant.any()) or bool(redundant.all()):
                    continue
                need = group.deficits(best).masked_fill(redundant, -math.inf)
                for other in need.topk(min(self._max_candidates, int((~redundant).sum()))).indices.tolist():
                    last, best = best, (yield group.reinitialize(best, int(redundant.nonzero()[0]), other, self._generator))
                    if best is not last:
                        break


# Most latents revived at once, each in a state of its own; most rounds, as likelihoods may be unbounded.
_MAX_REVIVED, _MAX_ROUNDS = 512, 4


class DeadLatents:
    """The move that revives dead latents.

    Args:
        profile: of restarts, by gradients; the model is left somewhere else.
    """

    name = "revival of dead latents"

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def propose(self, best: Solution) -> Proposals:
        """Yields solutions fitted with dead latents, while these gain."""
        for _ in range(_MAX_ROUNDS):
            dead = dead_latents(self._profile, best)
            if not len(dead):
                return
            before, best = best, (yield _fit_alive(self._profile, best, dead))
            if best is before:
                return


def revive_dead_latents(profile: Profile, found: Solution, counts: MoveCounts | None = None) -> Solution:
    r"""Revives dead binary latents that all data share, if that gains.

    With a posterior for each data point most latents are active somewhere, and their parameters are learned. In a single posterior a
    latent may be inactive in all states because of its initial parameters, which nothing then corrects. Here parameters are fitted to
    the likeliest state :math:`s`, and to all states with one dead latent :math:`l` added,

    .. math:: \max_\theta \; \log p(s, y \mid \theta) + \sum_l \log p(s + e_l, y \mid \theta),

    so that each explains a part of the residual. Then states are searched and the model is trained, while the free energy rises.
    """
    if found.population is None or found.companion:
        return found

    def search_and_train(child: Solution) -> Solution:
        with forgetting_guides(profile.model, profile.y):
            trainer = Trainer(profile)
            trainer.insert_states(child.states)
            trainer.find_states()
            return record_solution(trainer, train(trainer, by_gradients(trainer, profile.config.restart_steps)))

    return improve(found, DeadLatents(profile), search_and_train, profile.tolerance, counts)


# With more posteriors than these bytes hold fewer latents are revived at once.
def dead_latents(profile: Profile, solution: Solution, max_bytes: int = 2**28) -> Tensor:
    """Returns dead binary latents whose parameters a step does not change.

    Of too many a random part: as many as states of the given memory, one for each, hold.
    """
    with forgetting_guides(profile.model, profile.y):
        trainer = trainer_at(profile, solution)
        trainer.insert_states(solution.states)
        trainer.step()
        assert trainer.truncated is not None
        population = trainer.truncated.population()
        # Probabilities and gradients that count as zero.
        is_off = (population.marginals().amax(0) < 1e-8).cpu()
        latents: Tensor = (is_off & (population.space.cardinality.cpu() == 2)).nonzero().squeeze(1)
        parameters = learned_parameters(profile.model, profile.y)
        is_taught = all(_have_moved(value, solution.parameters[name]) for name, value in parameters.items())
    if is_taught:
        return latents[:0]
    states = solution.states[:, 0]
    most = min(_MAX_REVIVED, rows_per_block(states.numel() * states.element_size(), max_bytes))
    return latents if len(latents) <= most else latents[torch.randperm(len(latents), device="cpu")[:most].sort().values]


def _have_moved(after: Tensor, before: Tensor) -> bool:
    """Whether a first Adam step has moved all entries of a parameter.

    It is equally long for all gradients that are not zero.
    """
    step = (after.detach() - before).abs()
    return bool((step.max() > 0) & (step >= step.max() / 2).all())


def _fit_alive(profile: Profile, solution: Solution, dead: Tensor) -> Solution:
    """Fits parameters to the likeliest states, with dead latents added in turn."""
    load_snapshot(profile.model, profile.y, solution.parameters)

    def with_dead_latents(scorer: LogJoint) -> Tensor:
        """States ``(N, 1 + K, W)`` of which each but the first has one dead latent."""
        assert solution.population is not None
        space, words = solution.population.space, solution.population.words
        likeliest = Population(space, words, scorer.score(words)).mode()
        states = space.unpack(likeliest).unsqueeze(1).repeat(1, 1 + len(dead), 1)
        states[:, torch.arange(1, 1 + len(dead)), dead] = 1
        return space.pack(states)

    with forgetting_guides(profile.model, profile.y):
        # At this temperature all states count alike.
        trainer = Trainer(profile.replace(search=FixedStates(), num_states=1 + len(dead)), lambda _: 1e9)
        fitted = fit_states(trainer, with_dead_latents)
    return fitted.replace(population=solution.population)
