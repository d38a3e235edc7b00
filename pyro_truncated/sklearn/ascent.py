"""A deterministic search among neighbours of the best states."""

from __future__ import annotations

import dataclasses

import torch

from pyro_truncated import ops
from pyro_truncated.search.base import Search, SearchBatch
from pyro_truncated.search.moves import Moves
from pyro_truncated.states.population import Population
from pyro_truncated.utils.counts import check_count

_MIN_GAIN_NATS = 1e-6


class SteepestAscent(Search):
    """Scores all changes of one latent of the best states.

    It stops when a data point gains nothing more.

    The result for a data point depends on that data point and its first population only. It depends
    neither on the others nor on chance. Estimators need this, which must say the same of a data
    point in whatever company it comes.

    Args:
        parents: number of states of each population whose neighbours are scored in a step.
    """

    def __init__(self, parents: int = 8) -> None:
        self.parents = check_count("parents", parents)

    def propose(self, batch: SearchBatch) -> Population:
        """The neighbours of the best states."""
        population = batch.population
        best = population.log_joint.topk(min(self.parents, population.num_states)).indices
        return batch.scored(Moves(batch.space, population.words.device).neighbours(ops.gather_states(population.words, best)))

    def improve(self, batch: SearchBatch, steps: int = 1) -> Population:
        """Returns the populations after at most so many steps.

        The population of a data point is final once a step has gained nothing.
        """
        population = batch.population
        moving = torch.full((len(population),), not population.is_complete, device=population.words.device)
        for _ in range(steps):
            if not bool(moving.any()):
                break
            found = self.step(dataclasses.replace(batch, population=population))
            moving = moving & (found.free_energy() > population.free_energy() + _MIN_GAIN_NATS)
            words = torch.where(moving[:, None, None], found.words, population.words)
            log_joint = torch.where(moving[:, None], found.log_joint, population.log_joint)
            population = dataclasses.replace(population, words=words, log_joint=log_joint)
        return population
