"""The states that a search has scored, under the same parameters, and states drawn from those that are kept."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.search.base import SearchBatch
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace

# In the place of the log joints of states of probability zero, and of repetitions.
_LOWEST = -1e30


@dataclasses.dataclass(frozen=True)
class ScoredStates:
    """States ``(N, M, W)`` of data points at these positions, and their log joints ``(N, M)`` in float64."""

    space: StateSpace
    positions: Tensor
    words: Tensor
    log_joint: Tensor

    @classmethod
    def of(cls, batch: SearchBatch, before: ScoredStates | None) -> ScoredStates:
        """The states of a batch's populations, and those scored before if their log joints are still the same."""
        population = batch.population
        log_joint = population.log_joint.double().clamp(min=_LOWEST)
        if before is not None and before._hold(batch, log_joint):
            return before.with_more(population, before.words.shape[1])
        return cls(batch.space, batch.positions, population.words, log_joint)

    def _hold(self, batch: SearchBatch, log_joint: Tensor) -> bool:
        """Whether the best state of every data point is among these, with the same log joint."""
        population = batch.population
        if self.space is not batch.space or not torch.equal(self.positions, batch.positions):
            return False
        best, at = log_joint.max(1, keepdim=True)
        is_best = (self.words == population.take(at)).all(-1) & (self.log_joint == best)
        return bool(is_best.any(1).all())

    def with_more(self, found: Population, size: int) -> ScoredStates:
        """These and others, at most so many, the best; what is there twice comes last."""
        words = torch.cat([self.words, found.words], 1)
        log_joint = torch.cat([self.log_joint, found.log_joint.double().clamp(min=_LOWEST)], 1)
        log_joint = log_joint.masked_fill(ops.repeated(words), _LOWEST)
        kept = log_joint.topk(min(size, words.shape[1]), 1).indices
        return dataclasses.replace(self, words=ops.take(words, kept), log_joint=log_joint.gather(1, kept))

    def states(self) -> Tensor:
        """The states' values, ``(N, M, L)`` in float64."""
        return self.space.unpack(self.words).double()


def drawn_by_weight(batch: SearchBatch, number: int, generator: torch.Generator | None) -> Tensor:
    """States of the populations drawn by their posterior weights, as words ``(N, number, W)``."""
    weight = batch.population.weights().double().cumsum(1)
    at = ops.uniform(shape=(number,), **batch.draws(generator)).double() * weight[:, -1:]
    return batch.population.take(torch.searchsorted(weight, at).clamp(max=weight.shape[1] - 1))
