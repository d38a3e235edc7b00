"""The search that is used where none is named."""

from __future__ import annotations

from typing import ClassVar

import torch

from pyro_truncated.search.base import Search, SearchBatch
from pyro_truncated.search.conditional import ConditionalSearch, IteratedLocalSearch, single_changes
from pyro_truncated.search.exhaustive import ExhaustiveSearch
from pyro_truncated.search.preselection import CombinedFlips
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.arguments import check_kinds, names_arguments
from pyro_truncated.utils.console import note_once


class AutomaticSearch(Search):
    """Chooses the search by the space, and logs its choice.

    Spaces with no more states than a step of the :class:`ConditionalSearch` scores are searched by
    :class:`ExhaustiveSearch`, others by the conditional search. Its random changes rarely hit the few relevant ones
    of many binary latents. There :class:`CombinedFlips` help.

    Additive causes are independent a priori and observed under
    :class:`~pyro_truncated.distributions.LinearSuperposition`. Of more than 64 such causes both searches are used, of
    more than 256 the flips alone. Other models of more than 256 binary latents use both, because single flips lead
    nowhere where neighbours agree, as in sticky chains. Where all latents of a program are one decision, and not too many,
    an iterated local search helps. Populations that hold the whole space are left as they are.

    Example:
        >>> y = linear_bars(20, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, AutomaticSearch(), steps=2)

    Args:
        generator: source of randomness. Default: torch's global generator.

    Attributes:
        chosen: the search in use, ``None`` before it has met a population.
        SEVERAL, MANY: the numbers of binary latents above which their flips are combined, in sums of causes and in other models.
    """

    SEVERAL: ClassVar[int] = 64
    MANY: ClassVar[int] = 256

    @names_arguments
    def __init__(self, *, generator: torch.Generator | None = None) -> None:
        self.chosen: Search | None = None
        check_kinds(AutomaticSearch.__init__, generator=generator)
        self.generator = generator
        self._conditional = ConditionalSearch(generator=generator)

    def max_proposals(self, num_states: int) -> int:
        """What the full conditionals propose, and the flips beside them."""
        return self._conditional.max_proposals(num_states) + CombinedFlips().max_proposals(num_states)

    def propose(self, batch: SearchBatch) -> Population:
        """What the chosen search proposes."""
        return self._choose(batch).propose(batch)

    def step(self, batch: SearchBatch) -> Population:
        """What the chosen search makes of the populations."""
        return self._choose(batch).step(batch)

    def improve(self, batch: SearchBatch, steps: int = 1) -> Population:
        """Improves populations; one exhaustive step is as good as many."""
        search = self._choose(batch)
        return search.improve(batch, 1 if isinstance(search, ExhaustiveSearch) else steps)

    def __repr__(self) -> str:
        return f"AutomaticSearch(chosen={self.chosen!r})"

    def _choose(self, batch: SearchBatch) -> Search:
        space, device = batch.space, batch.population.words.device
        size = self._conditional.num_candidates_for(batch.population.num_states)
        how, by_flips = "by full conditionals (ConditionalSearch)", "by the most promising flips of the best one (CombinedFlips)"
        self.chosen = self._conditional
        if space.size <= size:
            self.chosen, how = ExhaustiveSearch(), "exhaustively"
        elif has_many_latents(space) and batch.is_linear:
            self.chosen, how = CombinedFlips(), by_flips
        elif has_many_latents(space) or (space.is_binary and space.num_latents > self.SEVERAL and batch.is_linear):
            self.chosen, how = self._conditional + CombinedFlips(), f"{how} and {by_flips}"
        # Chains score four times as much as the conditional search.
        elif batch.is_global and (chains := 4 * size // (single_changes(space, device).count * IteratedLocalSearch.ROUNDS)):
            self.chosen, how = self._conditional + IteratedLocalSearch(chains, generator=self.generator), f"{how} and iterated local search"
        if not batch.population.is_complete:
            note_once(f"no search was given: spaces of {space.readable_size} states are searched {how}")
        return self.chosen


def has_many_latents(space: StateSpace) -> bool:
    """Whether a space has too many binary latents for random flips."""
    return space.is_binary and space.num_latents > AutomaticSearch.MANY
