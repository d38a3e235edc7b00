"""Exchange of latents between restarts, and training after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pyro_truncated.search.base import Search, SearchBatch
from pyro_truncated.states.population import Population
from pyro_truncated.training.convergence import fixed, train
from pyro_truncated.training.exchangeable import Exchangeable, exchangeable_latents
from pyro_truncated.training.model_kinds import ConditionalModel
from pyro_truncated.training.model_parameters import Medians, forgetting_guides, layers_of, put_back
from pyro_truncated.training.model_runs import Run, Settings, default_search, offer
from pyro_truncated.training.recombination import Member, Recombination
from pyro_truncated.training.starts import Start, start_of


def are_behind_a_network(model: Any, y: Tensor, state: dict[str, Tensor], groups: Sequence[Exchangeable]) -> bool:
    """Whether most parameters are shared by all latents, as in a network.

    They mean nothing in another network.
    """
    own = {name for group in groups for name in group.axes}
    shared = sum(state[name].numel() for name in layers_of(model, y) - own)
    return shared > sum(state[name].numel() for name in own)


def settled(model: Any, y: Tensor, settings: Settings, member: Member, steps: int) -> Start:
    """Trains briefly in ever smaller steps from a nearly final state."""
    with forgetting_guides(model, y):
        run = _run_from(model, y, settings.slowing(steps), member)
        offer(run, y, member.population.states())
        return start_of(run, model, y, train(run, y, fixed(steps)))


def fitted(model: Any, y: Tensor, settings: Settings, member: Member, steps: int) -> Start:
    """Fits parameters briefly to fixed likeliest states."""
    with forgetting_guides(model, y):
        run = _run_from(model, y, dataclasses.replace(settings, search=AsTheyAre(), num_states=1), member)
        words, scorer = member.population.mode().unsqueeze(1), run.scorer(y)
        assert run.truncated is not None
        run.truncated.populations.store_(scorer.score(words), None, words)
        return start_of(run, model, y, train(run, y, fixed(steps)))


class AsTheyAre(Search):
    """Proposes nothing new."""

    def propose(self, batch: SearchBatch) -> Population:
        """The states that there are."""
        return batch.population


def _run_from(model: Any, y: Tensor, settings: Settings, member: Member) -> Run:
    put_back(model, y, member.parameters)
    run = Run(model, y, settings)
    if run.truncated is not None and member.beside:
        run.see(y)
        run.take_over(Medians(model, y, run.truncated).beside(member.parameters, member.beside), y)
    return run


def recombinations_of(model: Any, y: Tensor, settings: Settings, tolerance: float, state: dict[str, Tensor]) -> list[Recombination]:
    """Returns recombinations for each group of exchangeable latents.

    Args:
        model: the model.
        y: its data.
        settings: what all runs have in common.
        tolerance: least gain in free energy per data point.
        state: parameters, and medians of continuous latents beside, in which latents differ.
    """
    if isinstance(model, ConditionalModel):
        return []  # its draws given the states hold for these states only
    guide = settings.guide_for(model, y)
    learned = Medians(model, y, guide)
    groups = exchangeable_latents(learned, state)
    if are_behind_a_network(model, y, state, groups):
        return []
    search = settings.search or default_search(model, guide.space, settings.num_states)
    search.forget()
    return [Recombination(learned, search, latents, tolerance) for latents in groups]
