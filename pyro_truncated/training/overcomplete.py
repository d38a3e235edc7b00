"""Restarts that begin overcomplete and are pruned."""

from __future__ import annotations

import math
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_truncated.distributed.shards import total_rows
from pyro_truncated.search.automatic import is_of_many
from pyro_truncated.training.agreement import FreeEnergyEstimate
from pyro_truncated.training.completion import can_complete, mended
from pyro_truncated.training.convergence import to_convergence, train
from pyro_truncated.training.model_parameters import load_snapshot, snapshot, tensors_of
from pyro_truncated.training.model_runs import Run, Settings, insert_states, layout_of
from pyro_truncated.training.redundancy import gained_from_noise, is_redundant, least_missed, losses_and_stand_ins
from pyro_truncated.training.starts import Start, start_of, states_of
from pyro_truncated.utils.annealing import Temperature
from pyro_truncated.utils.parameter_store import empty_store

# Chosen on bars of other seeds than those of the tables.
_GROWTH = 2
_SETTLING = 3
# Most latents that may substitute for a redundant one.
_DEPTH = 8


def start_overcomplete(
    model: Any, y: Tensor, settings: Settings, temperature: Temperature, steps: int, generator: torch.Generator | None, tolerance: float
) -> Start:
    """Trains with surplus latents, then prunes the redundant ones.

    Redundant latents (see :func:`~pyro_truncated.training.redundancy.is_redundant`) fit noise, slowly and never alike. With closed-form
    M-steps they are removed too, before the run has converged. The free energy is that of the others alone. Parameters are those of all
    latents asked for; redundant ones are unchanged and inactive in all states.

    More than 256 binary latents are neither doubled nor pruned: to evaluate each of them costs more than the steps.

    Args:
        model: can be resized; stays as it is.
        y: data.
        settings: what all runs have in common.
        temperature: as a function of the step.
        steps: steps of training, and the most steps until it is at rest.
        generator: source of randomness.
        tolerance: free energies per data point that differ by less are the same.
    """
    with empty_store():
        is_many = are_many(model, y, settings)
        # Pyro's store holds the larger model's parameters under these names.
        pyro.clear_param_store()
        larger = model.with_latents(torch.arange(model.num_latents).repeat(1 if is_many else _GROWTH)).initialize(y, generator)
        shrinking = _Shrinking(larger, y, settings, temperature)
        shrinking.take(steps)
        if is_many:
            return shrinking.start(train(shrinking.run, y, to_convergence(shrinking.run, max(1, steps // 2), tolerance)))
        shrinking.to(model.num_latents)
        asked = shrinking.start(FreeEnergyEstimate(-math.inf))
        if not can_complete(model):
            reached = train(shrinking.run, y, to_convergence(shrinking.run, steps, tolerance))
            noise = gained_from_noise(shrinking.losses()[0], shrinking.num_parameters, total_rows(y))
            return shrinking.start(reached._replace(noise=reached.noise + noise))
        kept = shrinking.to_what_is_needed()
        reached = train(shrinking.run, y, to_convergence(shrinking.run, steps, tolerance))
        found = mended(shrinking.model, y, settings, shrinking.start(reached), tolerance, steps)
        return found if len(kept) == model.num_latents else _filled_up(shrinking.model, y, found, asked, kept)


def are_many(model: Any, y: Tensor, settings: Settings) -> bool:
    """Whether a model has more than 256 binary latents.

    A restart with twice as many would cost several times the training.
    """
    return is_of_many(layout_of(model, y, settings).space)


class _Shrinking:
    """A model, in a run, that loses latents."""

    def __init__(self, model: Any, y: Tensor, settings: Settings, temperature: Temperature) -> None:
        self.model, self.run = model, Run(model, y, settings, temperature)
        self._y, self._settings = y, settings
        self.num_parameters = _num_parameters_of_one(model, y)

    def start(self, reached: FreeEnergyEstimate) -> Start:
        """What has been learned, with its states."""
        return start_of(self.run, self.model, self._y, reached)._replace(states=states_of(self.run))

    def take(self, steps: int) -> None:
        """Takes steps of training."""
        for _ in range(steps):
            self.run.step(self._y)

    def losses(self) -> tuple[Tensor, Tensor]:
        """Returns deletion losses ``(H,)`` of latents, and substitutes ``(H, H)``."""
        assert self.run.truncated is not None
        return losses_and_stand_ins(self.run.truncated.population(), self.run.scorer(self._y), _DEPTH)

    def to(self, number: int) -> None:
        """Prunes to so many latents, a third of the surplus each time."""
        while (surplus := self.model.num_latents - number) > 0:
            self._lose(least_missed(*self.losses(), max(1, surplus // 3)))

    def to_what_is_needed(self) -> Tensor:
        """Prunes redundant latents, a third at a time.

        Returns the positions ``(K,)`` of the remaining ones.
        """
        kept = torch.arange(self.model.num_latents)
        while len(kept) > 1:
            losses, stand_ins = self.losses()
            num_spare = int(is_redundant(losses, self.num_parameters, total_rows(self._y)).sum())
            if not num_spare:
                break
            kept = kept[self._lose(least_missed(losses, stand_ins, min(max(1, num_spare // 3), len(kept) - 1))).to(kept.device)]
        return kept

    def _lose(self, lost: Tensor) -> Tensor:
        """Drops some latents and returns the positions of the others."""
        kept = torch.ones(self.model.num_latents, dtype=torch.bool, device=lost.device).index_fill(0, lost, False).nonzero().squeeze(1)
        states = states_of(self.run)[..., kept]
        self.model = self.model.with_latents(kept)
        if len(kept) > 1:  # a single latent keeps its parameters
            self.num_parameters = _num_parameters_of_one(self.model, self._y)
        # Pyro's store holds the larger model's parameters under these names.
        pyro.clear_param_store()
        before, self.run = self.run, Run(self.model, self._y, self._settings)
        self.run.take_over(before.beside, self._y)
        insert_states(self.run, self._y, states)
        self.take(_SETTLING)
        return kept


def _filled_up(model: Any, y: Tensor, found: Start, asked: Start, kept: Tensor) -> Start:
    """Adds inactive latents of ``asked`` to the learned latents ``kept``.

    The model keeps these parameters.
    """
    assert found.states is not None
    assert asked.states is not None
    number = asked.states.shape[-1]
    place = torch.zeros(number, dtype=torch.long).index_copy(0, kept, torch.arange(len(kept)))
    spare = torch.ones(number, dtype=torch.bool).index_fill(0, kept, False).nonzero().squeeze(1)
    load_snapshot(model, y, found.parameters)
    parameters = snapshot(model.with_latents(place), y)
    for name, value in parameters.items():
        # Sizes differ along axes of latents. Parameters of pairs, such as covariances, have two and stay.
        axes = [axis for axis, (one, other) in enumerate(zip(value.shape, found.parameters[name].shape, strict=True)) if one != other]
        if len(axes) == 1:
            index = spare.to(value.device)
            parameters[name] = value.index_copy(axes[0], index, asked.parameters[name].index_select(axes[0], index))
    states = torch.zeros_like(asked.states[:, :1]).repeat(1, found.states.shape[1], 1)
    states[..., kept] = found.states
    return found._replace(parameters=parameters, states=states)


def _num_parameters_of_one(model: Any, y: Tensor) -> int:
    """Returns how many parameters one latent has.

    Covariances are of pairs, and fewer with fewer latents.
    """
    return _num_parameters(model, y) - _num_parameters(model.with_latents(torch.arange(model.num_latents - 1)), y)


def _num_parameters(model: Any, y: Tensor) -> int:
    return sum(value.numel() for value in tensors_of(model, y).values())
