"""The search that is used where none is named."""

from __future__ import annotations

from typing import ClassVar

import torch

from pyro_truncated.search.base import Search, SearchBatch
from pyro_truncated.search.combined_flips import CombinedFlips
from pyro_truncated.search.conditional import ConditionalSearch
from pyro_truncated.search.exhaustive import ExhaustiveSearch
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.arguments import check_kinds, names_arguments
from pyro_truncated.utils.notes import note_once


class AutomaticSearch(Search):
    """Chooses the search by the space it meets, and says so in one line.

    Spaces that have not more states than a step of the :class:`ConditionalSearch` scores are searched exhaustively
    (:class:`ExhaustiveSearch`), others by the conditional search. Of more than 256 binary latents its changes at random hit few that
    matter: sums of causes that are independent a priori, observed under :class:`~pyro_truncated.distributions.LinearSuperposition`, are
    searched by :class:`CombinedFlips` then, other models by both, because flips of single latents lead nowhere where neighbours agree, as
    in sticky chains. Populations that hold the whole space are left as they are, as by every search.

    Example:
        >>> y = linear_bars(20, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, AutomaticSearch(), steps=2)

    Args:
        generator: source of randomness; default: torch's global generator.

    Attributes:
        chosen: the search in use, ``None`` before it has met a population.
        MANY: the number of binary latents above which their flips are combined.
    """

    MANY: ClassVar[int] = 256

    @names_arguments
    def __init__(self, *, generator: torch.Generator | None = None) -> None:
        self.chosen: Search | None = None
        check_kinds(AutomaticSearch.__init__, generator=generator)
        self.generator = generator
        self._conditional = ConditionalSearch(generator=generator)

    def propose(self, batch: SearchBatch) -> Population:
        """What the chosen search proposes."""
        return self._choose(batch).propose(batch)

    def step(self, batch: SearchBatch) -> Population:
        """What the chosen search makes of the populations."""
        return self._choose(batch).step(batch)

    def improve(self, batch: SearchBatch, steps: int = 1) -> Population:
        """What the chosen search makes of the populations; one exhaustive step is as good as many."""
        search = self._choose(batch)
        return search.improve(batch, 1 if isinstance(search, ExhaustiveSearch) else steps)

    def __repr__(self) -> str:
        return f"AutomaticSearch(chosen={self.chosen!r})"

    def _choose(self, batch: SearchBatch) -> Search:
        space, size = batch.space, self._conditional.candidates_of(batch.population.num_states)
        how = "by full conditionals (ConditionalSearch)"
        self.chosen = self._conditional
        if space.size <= size:
            self.chosen, how = ExhaustiveSearch(), "exhaustively"
        elif is_of_many(space):
            flips, by_flips = CombinedFlips(), "by the most promising flips of the best one (CombinedFlips)"
            self.chosen, how = (flips, by_flips) if batch.is_linear else (self._conditional + flips, f"{how} and {by_flips}")
        if not batch.population.is_complete:
            note_once(f"no search is named: the {space.readable_size} states of a data point are searched {how}")
        return self.chosen


def is_of_many(space: StateSpace) -> bool:
    """Whether a space has so many binary latents that all flips of one state are worth more than some of many."""
    return space.is_binary and space.num_latents > AutomaticSearch.MANY
