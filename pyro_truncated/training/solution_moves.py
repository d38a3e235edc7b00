"""Moves: changes of a solution beyond restarts."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pyro_truncated.training.learn_report import MoveCounts
from pyro_truncated.training.recombination import Recombination
from pyro_truncated.training.solution import Solution

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
    known: Solution | None = None,
) -> Solution:
    """Returns the best solution after a move: itself, or a refined proposal.

    Args:
        best: the best one before.
        move: what proposes.
        refine: trains a proposal.
        min_gain: least gain in free energy per data point.
        counts: counts what is tried and accepted.
        known: what proposals are made of; default: the best one.
    """
    proposals = move.propose(best if known is None else known)
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


class CompletionByOthers:
    """The crossover of converged solutions, which differ in few latents."""

    name = "crossover"

    def __init__(self, group: Recombination, others: Sequence[Solution]) -> None:
        self._group, self._others = group, others

    def propose(self, best: Solution) -> Proposals:
        """Yields the solution with latents of all others that gain."""
        child = best
        for other in self._others:
            child = self._group.complete(child, self._group.known(other))
        if child is not best:
            yield child


class DifferenceCodes:
    """Difference codes, replaced by the causes."""

    name = "replacement of difference codes"

    def __init__(self, groups: Sequence[Recombination]) -> None:
        self._groups = groups

    def propose(self, best: Solution) -> Proposals:
        """Yields a solution for each group that gains by itself."""
        for group in self._groups:
            if (child := group.resolve_difference_codes(best)) is not best:
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
            for latent, share in group.mostly_on(first, failed).items():
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
                spare = group.are_spare(best)
                if not bool(spare.any()) or bool(spare.all()):
                    continue
                need = group.badly_explained(best).masked_fill(spare, -math.inf)
                for other in need.topk(min(self._max_candidates, int((~spare).sum()))).indices.tolist():
                    last, best = best, (yield group.beside(best, int(spare.nonzero()[0]), other, self._generator))
                    if best is not last:
                        break
