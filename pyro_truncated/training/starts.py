"""Short runs: restarts, and those from a solution."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_truncated.distributed.shards import total_rows
from pyro_truncated.search.base import Search, SearchBatch
from pyro_truncated.states.population import Population
from pyro_truncated.training.agreement import FreeEnergyEstimate, vary
from pyro_truncated.training.convergence import fixed, of_restart, train
from pyro_truncated.training.model_kinds import has_informed_init
from pyro_truncated.training.model_parameters import (
    Medians,
    draw_start,
    draws_starts,
    forgetting_guides,
    is_a_network,
    load_snapshot,
    snapshot,
)
from pyro_truncated.training.model_runs import Run, Settings, insert_states, num_posteriors
from pyro_truncated.training.recombination import Member
from pyro_truncated.utils.annealing import Temperature


class Start(NamedTuple):
    """What a short run reached.

    Attributes:
        reached: its free energy.
        parameters: those of the model, and medians of continuous latents beside.
        states: those that training shall begin with.
        beside: the state of the guide of the continuous latents.
        probabilities: probabilities ``(N, H)`` that binary latents of a network are active; ``None`` where all are constant. Parameters
            of networks do not match.
    """

    reached: FreeEnergyEstimate
    parameters: dict[str, Tensor]
    states: Tensor | None
    beside: dict[str, Tensor] = {}  # noqa: RUF012  (never changed)
    probabilities: Tensor | None = None


def start(
    model: Any,
    y: Tensor,
    settings: Settings,
    temperature: Temperature,
    steps: int,
    generator: torch.Generator | None,
    states: Tensor | None = None,
    tolerance: float = 0.0,
) -> Start:
    """Runs a short training from ``initialize``, or from present parameters.

    Args:
        model: the model; left where the run ends.
        y: data.
        settings: what all runs have in common.
        temperature: as a function of the step.
        steps: steps of training.
        generator: source of randomness.
        states: one of each data point, ``(N, L)``, which the search begins with.
        tolerance: free energies per data point that differ by less are the same.
    """
    if draws_starts(model):
        draw_start(model, y, generator)
    with forgetting_guides(model, y):
        run = Run(model, y, settings, temperature)
        if states is not None:
            insert_states(run, y, states.unsqueeze(1))
        reached = train(run, y, of_restart(run, model, temperature, steps, tolerance))
        if has_informed_init(model):
            is_product = run.truncated is not None and run.truncated.product is not None
            return Start(reached, snapshot(model, y), None if is_product else states_of(run))
    found = start_of(run, model, y, reached)
    if run.truncated is None or run.truncated.product is not None:
        return found
    are_apart = num_posteriors(run.truncated, y) == total_rows(y)
    is_told = are_apart and run.is_by_gradients and run.truncated.space.is_binary and is_a_network(model, y)
    probabilities = run.truncated.population().marginals().double().cpu() if is_told else None
    is_code = probabilities is not None and bool(vary(probabilities).any())
    return found._replace(states=states_of(run), probabilities=probabilities if is_code else None)


def start_of(run: Run, model: Any, y: Tensor, reached: FreeEnergyEstimate) -> Start:
    """What a run has learned, without its states."""
    if run.truncated is None or not run.beside:
        return Start(reached, snapshot(model, y), None)
    return Start(
        reached, Medians(model, y, run.truncated).state(run.beside), None, {name: value.clone() for name, value in run.beside.items()}
    )


def states_of(run: Run) -> Tensor:
    """The states of the populations of a run, ``(N, S, L)``."""
    assert run.truncated is not None
    return run.truncated.population().states()  # type: ignore[no-any-return]


def settled(model: Any, y: Tensor, settings: Settings, member: Member, steps: int) -> Start:
    """Trains briefly in ever smaller steps from a nearly final state."""
    with forgetting_guides(model, y):
        run = _run_from(model, y, settings.slowing(steps), member)
        insert_states(run, y, member.population.states())
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
    load_snapshot(model, y, member.parameters)
    run = Run(model, y, settings)
    if run.truncated is not None and member.beside:
        run.see(y)
        run.take_over(Medians(model, y, run.truncated).beside(member.parameters, member.beside), y)
    return run
