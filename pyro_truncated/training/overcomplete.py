"""Restarts that begin overcomplete and are pruned."""

from __future__ import annotations

from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_truncated.distributed.shards import total_rows
from pyro_truncated.states.population import Population
from pyro_truncated.training.convergence import to_convergence, train
from pyro_truncated.training.model_parameters import load_snapshot, snapshot, tensors_of
from pyro_truncated.training.pool import resolve_difference_codes
from pyro_truncated.training.profile import Profile
from pyro_truncated.training.redundancy import gained_from_noise, is_redundant, losses_with_substitutes, select_for_pruning
from pyro_truncated.training.solution import NOTHING, Solution, solution_of
from pyro_truncated.training.trainer import Trainer
from pyro_truncated.utils.annealing import Temperature
from pyro_truncated.utils.parameter_store import empty_store


def start_overcomplete(profile: Profile) -> Solution:
    """Trains with surplus latents, then prunes the redundant ones.

    Redundant latents (see :func:`~pyro_truncated.training.redundancy.is_redundant`) fit noise, slowly and never alike. With closed-form
    M-steps they are removed too, before the run has converged. The free energy is that of the others alone. Parameters are those of all
    latents asked for; redundant ones are unchanged and inactive in all states.

    More than 256 binary latents are neither doubled nor pruned: to evaluate each of them costs more than the steps.

    Args:
        profile: of a model that can be resized; the model stays as it is.
    """
    model, steps = profile.model, profile.short_steps
    with empty_store():
        # Pyro's store holds the larger model's parameters under these names.
        pyro.clear_param_store()
        growth = 1 if profile.is_large else profile.config.growth
        larger = model.with_latents(torch.arange(model.num_latents).repeat(growth)).initialize(profile.y, profile.generator)
        pruner = _Pruner(profile.replace(model=larger), profile.temperature)
        pruner.take(steps)
        if profile.is_large:
            return pruner.converge(max(1, steps // 2))
        pruner.prune(model.num_latents)
        asked = solution_of(pruner.trainer, NOTHING.estimate)
        if not profile.is_matched:
            found = pruner.converge(steps)
            noise = gained_from_noise(pruner.losses()[0], pruner.num_parameters, total_rows(profile.y))
            return found.replace(estimate=found.estimate._replace(noise=found.estimate.noise + noise))
        kept = pruner.prune_redundant()
        found = resolve_difference_codes(pruner.trainer.profile, pruner.converge(steps))
        return found if len(kept) == model.num_latents else _filled_up(pruner.trainer.profile, found, asked, kept)


class _Pruner:
    """A run whose model loses latents."""

    def __init__(self, profile: Profile, temperature: Temperature) -> None:
        self.trainer = Trainer(profile, temperature)
        self.num_parameters = num_parameters_per_latent(profile)

    def converge(self, steps: int) -> Solution:
        """Trains to convergence; returns what was learned."""
        return solution_of(self.trainer, train(self.trainer, to_convergence(self.trainer, steps)))

    def take(self, steps: int) -> None:
        """Takes steps of training."""
        for _ in range(steps):
            self.trainer.step()

    def losses(self) -> tuple[Tensor, Tensor]:
        """Returns deletion losses ``(H,)`` of latents, and substitutes ``(H, H)``."""
        assert self.trainer.truncated is not None
        depth = self.trainer.profile.config.pruning_depth
        return losses_with_substitutes(self.trainer.truncated.population(), self.trainer.scorer(), depth)

    def prune(self, number: int) -> None:
        """Prunes to so many latents, a third of the surplus each time."""
        while (surplus := self.trainer.profile.model.num_latents - number) > 0:
            self._lose(select_for_pruning(*self.losses(), max(1, surplus // 3)))

    def prune_redundant(self) -> Tensor:
        """Prunes redundant latents, a third at a time.

        Returns the positions ``(K,)`` of the remaining ones.
        """
        kept = torch.arange(self.trainer.profile.model.num_latents)
        while len(kept) > 1:
            losses, substitutes = self.losses()
            num_spare = int(is_redundant(losses, self.num_parameters, total_rows(self.trainer.profile.y)).sum())
            if not num_spare:
                break
            lost = select_for_pruning(losses, substitutes, min(max(1, num_spare // 3), len(kept) - 1))
            kept = kept[self._lose(lost).to(kept.device)]
        return kept

    def _lose(self, lost: Tensor) -> Tensor:
        """Drops some latents and returns the positions of the others."""
        before, model = self.trainer, self.trainer.profile.model
        assert before.truncated is not None
        kept = torch.ones(model.num_latents, dtype=torch.bool, device=lost.device).index_fill(0, lost, False).nonzero().squeeze(1)
        states = before.truncated.population().states()[..., kept]
        profile = before.profile.replace(model=model.with_latents(kept))
        if len(kept) > 1:  # a single latent keeps its parameters
            self.num_parameters = num_parameters_per_latent(profile)
        # Pyro's store holds the larger model's parameters under these names.
        pyro.clear_param_store()
        self.trainer = Trainer(profile)
        self.trainer.take_over(before.companion)
        self.trainer.insert_states(states)
        self.take(profile.config.pruning_steps)
        return kept


def _filled_up(profile: Profile, found: Solution, asked: Solution, kept: Tensor) -> Solution:
    """Adds inactive latents of ``asked`` to the learned latents ``kept``.

    The model keeps these parameters.
    """
    assert asked.population is not None
    model, y, number = profile.model, profile.y, asked.states.shape[-1]
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
    space = asked.population.space
    # Training scores them anew.
    words = space.pack(states)
    return found.replace(parameters=parameters, population=Population(space, words, states.new_zeros(words.shape[:-1], dtype=y.dtype)))


def num_parameters_per_latent(profile: Profile) -> int:
    """Returns how many parameters one latent has.

    Covariances are of pairs, and fewer with fewer latents.
    """
    model, y = profile.model, profile.y
    return _num_parameters(model, y) - _num_parameters(model.with_latents(torch.arange(model.num_latents - 1)), y)


def _num_parameters(model: Any, y: Tensor) -> int:
    return sum(value.numel() for value in tensors_of(model, y).values())
