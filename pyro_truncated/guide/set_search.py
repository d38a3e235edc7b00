"""The search on a product of sets.

Proposals are for all nodes of a group together, selection for one node after the other.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.ops.elimination import IMPOSSIBLE, Messages
from pyro_truncated.program.product_scorer import ProductScorer
from pyro_truncated.search.base import Search, SearchBatch
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace

# Evidence (relative) that a component may lose by rounding where sets are exchanged.
_ROUNDING = 1e-9
# The most joint values of a block of latents, which are proposed for all nodes at once.
_BLOCK_STATES = 16
_BLOCKS_PER_STEP = 2


@dataclasses.dataclass(frozen=True)
class SetSearch:
    r"""Improves the sets of the nodes of a factor graph.

    The evidence of no component ever falls.

    What a candidate adds to the evidence, given the sets of all other nodes, is exact and additive: it is the fitness that a
    :class:`Search` sees, and the best ``S`` states by it are the best set. A step has two parts:

    1. for each group of nodes, the search proposes, and a sweep selects for one node after the other;
    2. blocks: a few latents take all their joint values at all nodes at once, around the most probable joint state. What is wrong over a
       stretch of a sequence is mended where no change of a single node helps.

    Attributes:
        scorer: densities of a run of the model as tables over sets.
        random: the seeds of this search.
        is_new: whether the data are new ones, of which a search that learns from data shall not learn.
    """

    scorer: ProductScorer
    random: ops.Stream
    is_new: bool = False

    def improve(self, sets: Sequence[Tensor], search: Search, steps: int) -> list[Tensor]:
        """Returns the sets after some steps.

        Those that hold all states stay as they are.
        """
        found = list(sets)
        groups = self.scorer.product.groups
        open_ = [number for number, group in enumerate(groups) if found[number].shape[1] < group.space.size]
        for _ in range(steps):
            for number in open_:
                found = self._search_group(search, found, number)
            for _ in range(_BLOCKS_PER_STEP if open_ else 0):
                found = self._search_block(found, open_)
        return found

    # --- proposals for one group ---

    def _search_group(self, search: Search, sets: list[Tensor], number: int) -> list[Tensor]:
        scorer = self.scorer
        messages = scorer.messages(sets)
        rows = scorer.rows_of(number)
        known = Population(scorer.product.groups[number].space, sets[number], self._scores(messages, number), rows)
        proposed = search.propose(SearchBatch(known, NodeScores(scorer, sets, number), {}, is_new=self.is_new, random=self.random))
        words, is_free = _best_new(known, proposed)
        return self._exchanged(sets, {number: (words, is_free)}, messages) if bool(is_free.any()) else sets

    def _scores(self, messages: Messages, number: int) -> Tensor:
        """Returns what the states of a group add to the evidence.

        The evidence is that of their component, ``(rows, S)``; what is impossible adds nothing.
        """
        product, beliefs = self.scorer.product, messages.beliefs()
        nodes = product.groups[number].nodes
        return torch.cat([product.rows(node, beliefs[node] + messages.weights[node], self.scorer.sizes_of(node)) for node in nodes])

    # --- proposals that are coherent over many nodes ---

    def _search_block(self, sets: list[Tensor], open_: Sequence[int]) -> list[Tensor]:
        scorer, product = self.scorer, self.scorer.product
        spaces = {product.groups[number].space for number in open_}
        best = scorer.messages(sets, maximum=True).draw(None)
        proposals = {}
        for space in spaces:
            block = self._draw_block(space)
            for number in open_:
                if product.groups[number].space == space:
                    state = self._members(best, sets[number], number)
                    words = _with_block(space, state, block)
                    is_free = ~ops.repeated(torch.cat([sets[number], words], 1))[:, sets[number].shape[1] :]
                    proposals[number] = words, is_free
        return self._exchanged(sets, proposals, scorer.messages(sets), look_ahead=True)

    def _members(self, drawn: dict[int, tuple[Tensor, Tensor]], words: Tensor, number: int) -> Tensor:
        """The states ``(rows, num_words)`` of a group that a drawn joint state has."""
        scorer, product = self.scorer, self.scorer.product
        nodes = product.groups[number].nodes
        place = torch.cat([product.rows(node, drawn[node][0][0], scorer.sizes_of(node)) for node in nodes])
        return ops.gather_states(words, place).squeeze(1)

    def _draw_block(self, space: StateSpace) -> list[int]:
        """Latents at random, as many as have few enough joint values."""
        order = (
            ops.uniform(shape=(space.num_latents,), rows=torch.zeros(1, dtype=torch.int64), generator=self.random).argsort(-1)[0].tolist()
        )
        sizes = itertools.accumulate((space.cardinalities[latent] for latent in order), lambda total, size: total * size)
        return [latent for latent, size in zip(order, sizes, strict=True) if size <= _BLOCK_STATES] or order[:1]

    # --- selection ---

    def _exchanged(
        self, sets: list[Tensor], proposals: dict[int, tuple[Tensor, Tensor]], before: Messages, *, look_ahead: bool = False
    ) -> list[Tensor]:
        """Returns the best of old and new states.

        They are chosen for one node after the other, of each component that does not lose by it.

        Args:
            sets: the sets as they are.
            proposals: by group, candidates ``(rows, C, num_words)``, and which of them are new.
            before: the messages of the sets as they are.
            look_ahead: whether nodes that are still to come count with their candidates, so that these find partners.
        """
        scorer, product = self.scorer, self.scorer.product
        joined = list(sets)
        for number, (words, _) in proposals.items():
            joined[number] = torch.cat([sets[number], words], 1)
        weights, limits = scorer.weights(joined), {}
        for number, (_, is_free) in proposals.items():
            size = sets[number].shape[1]
            allowed = scorer.log_weights(joined[number], number)
            allowed[:, size:].masked_fill_(~is_free, -math.inf)
            for node, rows in zip(product.groups[number].nodes, scorer.nodes_of(allowed, number), strict=True):
                limits[node] = rows
                start = rows.clamp(min=IMPOSSIBLE)
                if not look_ahead:
                    start[:, size:] = IMPOSSIBLE
                weights[node] = product.spread(node, start, scorer.sizes_of(node))
        messages = product.tree.collect(scorer.tables(joined), weights)
        chosen: dict[int, Tensor] = {}

        def choose(node: int, belief: Tensor) -> Tensor | None:
            if node not in limits:
                return None
            limit = limits[node]
            size = sets[product.place[node][0]].shape[1]
            scores = product.rows(node, belief, scorer.sizes_of(node)) + limit
            best = chosen[node] = scores.topk(size, -1).indices
            kept = torch.full_like(limit, IMPOSSIBLE).scatter(1, best, limit.gather(1, best).clamp(min=IMPOSSIBLE))
            return product.spread(node, kept, scorer.sizes_of(node))

        messages.select(choose)
        found = list(sets)
        for number in proposals:
            found[number] = ops.gather_states(joined[number], torch.cat([chosen[node] for node in product.groups[number].nodes]))
        return self._accepted(sets, found, proposals, before)

    def _accepted(
        self, sets: list[Tensor], found: list[Tensor], changed: Sequence[int] | dict[int, tuple[Tensor, Tensor]], before: Messages
    ) -> list[Tensor]:
        """Returns the new sets where the evidence does not fall.

        It might fall where members of one plate change together.
        """
        scorer, product = self.scorer, self.scorer.product
        old, new = product.evidence_by_node(before), product.evidence_by_node(scorer.messages(found))
        for number in changed:
            keep = []
            for node in product.groups[number].nodes:
                is_better = (new[node] >= old[node] - _ROUNDING * old[node].abs().clamp(min=1.0)).double()
                keep.append(product.rows(node, is_better, scorer.sizes_of(node)).squeeze(-1) > 0)
            found[number] = torch.where(torch.cat(keep)[:, None, None], found[number], sets[number])
        return found


@dataclasses.dataclass(frozen=True)
class NodeScores:
    """Scores candidate states of a group of nodes.

    The sets of all nodes are given.

    Attributes:
        scorer: densities of a run of the model as tables over sets.
        sets: the sets of all groups.
        number: the group.
    """

    scorer: ProductScorer
    sets: Sequence[Tensor]
    number: int

    def __call__(self, words: Tensor) -> Tensor:
        """What candidates ``(rows, C, num_words)`` add to the evidence of their component, ``(rows, C)``."""
        scorer, number, product = self.scorer, self.number, self.scorer.product
        nodes, size = product.groups[number].nodes, self.sets[number].shape[1]
        joined = [*self.sets[:number], torch.cat([self.sets[number], words], 1), *self.sets[number + 1 :]]
        weights = scorer.weights(joined)
        for node in nodes:
            weights[node].narrow(product.tree.dim(node), size, words.shape[1]).fill_(IMPOSSIBLE)
        beliefs = product.tree.collect(scorer.tables(joined), weights).beliefs()
        scores = torch.cat([product.rows(node, beliefs[node], scorer.sizes_of(node)) for node in nodes])
        return scores[:, size:] + scorer.log_weights(joined[number], number)[:, size:]


def _best_new(known: Population, proposed: Population) -> tuple[Tensor, Tensor]:
    """Returns the best proposals of each row.

    There are at most as many as the row has states. A mask tells which are neither members nor repetitions.
    """
    every = torch.cat([known.words, proposed.words], 1)
    is_new = ~ops.repeated(every)[:, known.num_states :]
    scores = proposed.log_joint.masked_fill(~is_new, -math.inf)
    best = scores.topk(min(known.num_states, scores.shape[1]), -1).indices
    return ops.gather_states(proposed.words, best), is_new.gather(1, best)


def _with_block(space: StateSpace, words: Tensor, block: Sequence[int]) -> Tensor:
    """States ``(rows, num_words)`` with all joint values of some latents, ``(rows, C, num_words)``."""
    values = torch.cartesian_prod(*(torch.arange(space.cardinalities[latent]) for latent in block)).reshape(-1, len(block))
    levels = space.unpack(words, torch.int64).unsqueeze(1).repeat(1, len(values), 1)
    levels[..., list(block)] = values.to(levels.device)
    return space.pack(levels)
