"""Short runs from different starts: with more latents first and fewer later, where the model can be resized."""

from __future__ import annotations

from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor

from pyro_truncated.distributed.shards import total_rows
from pyro_truncated.em.gibbs_guide import GibbsModel
from pyro_truncated.training.agreement import Reached
from pyro_truncated.training.medians import Medians
from pyro_truncated.training.model_kinds import ResizableModel, starts_near_the_end
from pyro_truncated.training.model_parameters import copies, draws_starts, forgetting_guides, tensors_of
from pyro_truncated.training.model_runs import Run, Settings, offer
from pyro_truncated.training.redundancy import gained_from_noise, losses_without
from pyro_truncated.training.resting import nearly_rested, rested, started, trained
from pyro_truncated.utils.annealing import Temperature
from pyro_truncated.utils.own_store import empty_store

# Chosen on bars of other seeds than those of the tables.
_GROWTH = 2
_SETTLING = 3


class Start(NamedTuple):
    """What a short run reached.

    Attributes:
        reached: its free energy.
        parameters: those of the model, and medians of continuous latents beside.
        states: those that training shall begin with.
        beside: the state of the guide of the continuous latents.
    """

    reached: Reached
    parameters: dict[str, Tensor]
    states: Tensor | None
    beside: dict[str, Tensor] = {}  # noqa: RUF012  (never changed)


def start(model: Any, y: Tensor, settings: Settings, temperature: Temperature, steps: int, generator: torch.Generator | None) -> Start:
    """A short run from where the model says that one may start, by ``initialize``, or from where it is.

    Args:
        model: the model; one that can be resized stays as it is, others are left where the run ends.
        y: data.
        settings: what all runs have in common.
        temperature: as a function of the step.
        steps: steps of training.
        generator: source of randomness.
    """
    if isinstance(model, ResizableModel) and not isinstance(model, GibbsModel):
        with empty_store():
            return _grown_and_shrunk(model, y, settings, temperature, steps, generator)
    if draws_starts(model):
        model.initialize(y, generator)
    with forgetting_guides(model, y):
        run = Run(model, y, settings, temperature)
        if starts_near_the_end(model):
            return Start(nearly_rested(run, y, steps), copies(model, y), _states(run))
        reached = started(run, model, y, temperature, steps)
    return start_of(run, model, y, reached)._replace(states=None if run.truncated is None else _states(run))


def start_of(run: Run, model: Any, y: Tensor, reached: Reached) -> Start:
    """What a run has learned, without its states."""
    if run.truncated is None or not run.beside:
        return Start(reached, copies(model, y), None)
    return Start(
        reached, Medians(model, y, run.truncated).state(run.beside), None, {name: value.clone() for name, value in run.beside.items()}
    )


def _grown_and_shrunk(
    model: Any, y: Tensor, settings: Settings, temperature: Temperature, steps: int, generator: torch.Generator | None
) -> Start:
    """Trains a model of more latents, and takes away those that it misses least."""
    number = model.num_latents
    model = model.with_latents(torch.arange(number).repeat(_GROWTH)).initialize(y, generator)
    run = Run(model, y, settings, temperature)
    reached = trained(run, y, steps)
    while model.num_latents > number:
        fewer = max(number, model.num_latents - max(1, (model.num_latents - number) // 3))
        # Those that are missed most, in the order in which the model has them.
        kept = _losses(run, y).topk(fewer).indices.sort().values
        states = _states(run)[..., kept]
        model = model.with_latents(kept)
        # In the names of the parameters of this one, a module of Pyro's own has those of the larger one.
        pyro.clear_param_store()
        before, run = run, Run(model, y, settings)
        run.take_over(before.beside, y)
        offer(run, y, states)
        reached = trained(run, y, _SETTLING) if model.num_latents > number else rested(run, y, steps)
    return start_of(run, model, y, reached._replace(noise=_gained_from_noise(model, run, y)))._replace(states=_states(run))


def _gained_from_noise(model: Any, run: Run, y: Tensor) -> float:
    if model.num_latents == 1:
        return 0.0
    fewer = model.with_latents(torch.arange(model.num_latents - 1))
    return gained_from_noise(_losses(run, y), _num_parameters(model, y) - _num_parameters(fewer, y), total_rows(y))


def _num_parameters(model: Any, y: Tensor) -> int:
    return sum(value.numel() for value in tensors_of(model, y).values())


def _states(run: Run) -> Tensor:
    assert run.truncated is not None
    return run.truncated.population().states()


def _losses(run: Run, y: Tensor) -> Tensor:
    assert run.truncated is not None
    return losses_without(run.truncated.population(), run.scorer(y))
