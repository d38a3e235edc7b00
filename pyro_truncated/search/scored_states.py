"""States scored under the same parameters, and draws from kept ones."""

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
    """States ``(N, M, W)`` of data points with log joints ``(N, M)`` in float64."""

    space: StateSpace
    positions: Tensor
    words: Tensor
    log_joint: Tensor

    @classmethod
    def of(cls, batch: SearchBatch, before: ScoredStates | None) -> ScoredStates:
        """Returns a batch's states, and earlier ones with unchanged log joints."""
        population = batch.population
        log_joint = population.log_joint.double().clamp(min=_LOWEST)
        if before is not None and before.holds(batch):
            return before.with_more(population)
        return cls(batch.space, batch.positions, population.words, log_joint)

    def holds(self, batch: SearchBatch) -> bool:
        """Whether the best are still in populations, with equal log joints.

        Populations may have better states, too, that others have found.
        """
        population = batch.population
        if self.space is not batch.space or not torch.equal(self.positions, batch.positions):
            return False
        best, at = self.log_joint.max(1, keepdim=True)
        is_there = (population.words == ops.take(self.words, at)).all(-1)
        is_same = is_there & (population.log_joint.double().clamp(min=_LOWEST) == best)
        return bool(is_there.any()) and bool((is_same.any(1) | ~is_there.any(1)).all())

    def with_more(self, found: Population) -> ScoredStates:
        """Appends other states, without repetitions within a data point."""
        words = torch.cat([self.words, found.words], 1)
        is_new = ~ops.repeated(words)
        log_joint = torch.cat([self.log_joint, found.log_joint.double().clamp(min=_LOWEST)], 1).masked_fill(~is_new, _LOWEST)
        size = max(1, int(is_new.sum(1).max()))
        order = is_new.long().sort(dim=1, descending=True, stable=True).indices[:, :size]
        return self._at(order, words, log_joint)

    def kept(self, size: int) -> ScoredStates:
        """Keeps the best half, and the latest of the others.

        The latest say where expectations failed.
        """
        number = self.log_joint.shape[1]
        if number <= size:
            return self
        age = torch.arange(number, device=self.log_joint.device).expand_as(self.log_joint)
        best = self.log_joint.topk(size - size // 2, 1).indices
        rank = age.masked_fill(self.log_joint <= _LOWEST, -1).scatter(1, best, number)
        return self._at(rank.topk(size, 1).indices.sort(1).values, self.words, self.log_joint)

    def of_rows(self, rows: slice) -> ScoredStates:
        """Those of some data points."""
        return dataclasses.replace(self, positions=self.positions[rows], words=self.words[rows], log_joint=self.log_joint[rows])

    def num_since_best(self) -> Tensor:
        """Returns how many states were scored after the best one, ``(N,)``.

        Initial states count in the order of the population.
        """
        return self.log_joint.shape[1] - 1 - self.log_joint.argmax(1)

    def _at(self, order: Tensor, words: Tensor, log_joint: Tensor) -> ScoredStates:
        return dataclasses.replace(self, words=ops.take(words, order), log_joint=log_joint.gather(1, order))

    def states(self) -> Tensor:
        """The states' values, ``(N, M, L)`` in float64."""
        return self.space.unpack(self.words).double()


def drawn_by_weight(batch: SearchBatch, number: int, generator: torch.Generator | None) -> Tensor:
    """States of the populations drawn by their posterior weights, as words ``(N, number, W)``."""
    weight = batch.population.weights().double().cumsum(1)
    at = ops.uniform(shape=(number,), **batch.draws(generator)).double() * weight[:, -1:]
    return batch.population.take(torch.searchsorted(weight, at).clamp(max=weight.shape[1] - 1))
