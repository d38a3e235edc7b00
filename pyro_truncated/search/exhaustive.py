"""Exhaustive search: every state of the space is a candidate."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_truncated.search.base import Search, SearchBatch
from pyro_truncated.states.population import Population, join
from pyro_truncated.utils.arguments import check_count, names_arguments
from pyro_truncated.utils.budget import rows_per_block


class ExhaustiveSearch(Search):
    """Scores all states of the space and keeps the best.

    It is exact EM where a population holds the whole space.

    Example:
        >>> y = linear_bars(20, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)  # the 16 best of 256 states
        >>> best = guide.population().free_energy()
        >>> some = AutoTruncated(model, num_states=16).infer(y, EvolutionarySearch(4, 3), steps=1).population().free_energy()
        >>> bool((best >= some).all())
        True

    Args:
        max_states: largest number of states in the space that it consents to score for every data point.
    """

    @names_arguments
    def __init__(self, max_states: int = 2**20) -> None:
        self.max_states = check_count("max_states", max_states)

    def propose(self, batch: SearchBatch) -> Population:
        """Returns all states, ``(N, space.size)``, for small spaces and batches.

        :meth:`step` needs no such memory.
        """
        return join([batch.scored(words) for words in self._blocks(batch)])

    def step(self, batch: SearchBatch) -> Population:
        """The best states of the space, found block by block.

        Raises:
            ValueError: if the space holds more than ``max_states`` states.
        """
        population = batch.population
        for words in self._blocks(batch):
            population = population.merge(dataclasses.replace(population, words=words, log_joint=batch.score(words)))
        return population

    def _blocks(self, batch: SearchBatch) -> Iterator[Tensor]:
        """All states in blocks ``(N, C, num_words)``."""
        space, num_data = batch.space, len(batch.population)
        if space.size > self.max_states:
            raise ValueError(
                f"exhaustive search would score {space.readable_size} states for each data point, more than max_states={self.max_states}; "
                "use EvolutionarySearch, or raise max_states"
            )
        words = space.enumerate(batch.population.words.device)
        # A state takes 64 bytes for packing, scoring and merging.
        for block in torch.split(words, rows_per_block(64 * num_data)):
            yield block.expand(num_data, -1, -1).contiguous()
