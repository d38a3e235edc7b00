"""The search on a product of sets.

Proposals are for all nodes of a group together, selection for one node after the other.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from pyro.distributions.util import broadcast_shape
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.guide.batch import mean_active
from pyro_truncated.ops.elimination import IMPOSSIBLE, LogTables, Messages
from pyro_truncated.program.factor_graph import CLIQUE_LIMIT
from pyro_truncated.program.product_scorer import ProductScorer
from pyro_truncated.search.base import Search, SearchBatch, propose_with
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace

# The most joint values of a block of latents, which are proposed for all nodes at once.
_BLOCK_STATES = 16


@dataclasses.dataclass(frozen=True)
class ScoredSets:
    """Sets of states of all nodes with the tables of their densities."""

    scorer: ProductScorer  # a run of the model
    sets: Sequence[Tensor]  # the words (rows, S, num_words) of each group
    tables: Sequence[tuple[tuple[int, ...], Tensor]]  # log densities over the sets, with the nodes that they are of

    @classmethod
    def from_scorer(cls, scorer: ProductScorer, sets: Sequence[Tensor]) -> ScoredSets:
        """Sets, scored in a run of the model."""
        return cls(scorer, list(sets), scorer.tables(sets).parts)

    @cached_property
    def messages(self) -> Messages:
        """The messages on these sets."""
        return self.collect(self.scorer.weights(self.sets))

    @cached_property
    def _log_tables(self) -> LogTables:
        return LogTables.from_parts(self.tables)

    def collect(self, weights: dict[int, Tensor], *, maximum: bool = False) -> Messages:
        """Messages with some log weights of the states."""
        return Messages(self.scorer.product.tree, self._log_tables, weights, maximum=maximum)

    def join(self, others: ScoredSets, number: int) -> ScoredSets:
        """Returns one group's sets joined with others; other groups share tables."""
        nodes = self.scorer.product.groups[number].nodes
        dim = self.scorer.product.tree.dim(nodes[0])
        sets = list(self.sets)
        sets[number] = torch.cat([self.sets[number], others.sets[number]], 1)
        sizes = self.sets[number].shape[1], others.sets[number].shape[1]
        tables = [
            (scope, _concatenate((own, other), sizes, dim) if set(nodes).intersection(scope) else own)
            for (scope, own), (_, other) in zip(self.tables, others.tables, strict=True)
        ]
        return dataclasses.replace(self, sets=sets, tables=tables)

    def take(self, positions: Mapping[int, Tensor]) -> ScoredSets:
        """Returns the states at positions ``(rows, S)``, by group."""
        scorer, product = self.scorer, self.scorer.product
        sets, spread = list(self.sets), {}
        for number, own in positions.items():
            sets[number] = ops.gather_states(self.sets[number], own)
            for node, rows in zip(product.groups[number].nodes, scorer.split_nodes(own, number), strict=True):
                spread[node] = product.spread(node, rows, scorer.plate_sizes(node))
        tables = [(scope, self._entries(table, {node: spread[node] for node in scope if node in spread})) for scope, table in self.tables]
        return dataclasses.replace(self, sets=sets, tables=tables)

    def log_weights(self, number: int) -> Tensor:
        """Log weights ``(rows, S)`` of a group's states."""
        return self.scorer.log_weights(self.sets[number], number)

    def rows(self, tables: Mapping[int, Tensor], number: int) -> Tensor:
        """The rows of the tables of a group's nodes."""
        return self.scorer.product.group_rows(number, tables, self.scorer.plate_sizes(self.scorer.product.groups[number].nodes[0]))

    def _entries(self, table: Tensor, positions: Mapping[int, Tensor]) -> Tensor:
        """The entries of a table at positions of states, by node."""
        tree = self.scorer.product.tree
        index = {tree.dim(node): own for node, own in positions.items() if table.shape[tree.dim(node)] > 1}
        if not index:
            return table
        dims = range(-tree.num_dims, 0)
        every = (torch.arange(table.shape[dim], device=table.device).view(-1, *(1,) * (-1 - dim)) for dim in dims)
        return table[tuple(index.get(dim, own) for dim, own in zip(dims, every, strict=True))]


def _concatenate(tables: tuple[Tensor, Tensor], sizes: tuple[int, int], dim: int) -> Tensor:
    """Concatenates tables over sets."""
    one, other = tables
    if one.shape[dim] == 1 and other.shape[dim] == 1 and torch.equal(one, other):
        return one
    shape = list(broadcast_shape(one.select(dim, 0).shape, other.select(dim, 0).shape))
    place = dim % one.dim()
    return torch.cat([own.expand(*shape[:place], size, *shape[place:]) for own, size in zip(tables, sizes, strict=True)], dim)


@dataclasses.dataclass(frozen=True)
class SetSearch:
    """Improves the sets of the nodes of a factor graph.

    The evidence of no component ever falls.

    What a candidate adds to the evidence, given the sets of all other nodes, is exact and additive. It is the fitness that a
    :class:`Search` sees, and the best ``S`` states by it are the best set. A step has two parts:

    1. for each group of nodes, the search proposes, and a sweep selects for one node after the other;
    2. blocks: a few latents take all their joint values at all nodes at once, around the most probable joint state. What is wrong over a
       stretch of a sequence is mended where no change of a single node helps.

    The model is run for candidates only: tables of states that are kept are taken from those of old and new states.
    """

    scorer: ProductScorer  # densities of a run of the model as tables over sets
    random: ops.Stream  # the seeds of this search
    is_new: bool = False  # whether the data are new. Searches do not learn from new data.
    # By group, the positions of the rows among those of all processes, where others have the rest
    # of the data.
    positions: Sequence[Tensor] | None = None
    is_idle: bool = False  # whether the rows are not searched in this process; its search only takes part in sums over all processes

    def improve(self, sets: Sequence[Tensor], search: Search, steps: int) -> ScoredSets:
        """Returns the sets after some steps."""
        current = ScoredSets.from_scorer(self.scorer, sets)
        groups = self.scorer.product.groups
        open_ = [number for number, group in enumerate(groups) if current.sets[number].shape[1] < group.space.size]
        spaces = {groups[number].space for number in open_}
        # Two in a step; where all states are proposed at once a second time changes nothing.
        num_colours = self.scorer.product.graph.num_colours
        cliques = {space for space in spaces if space.num_latents == 1 and space.size**num_colours <= CLIQUE_LIMIT}
        whole = cliques | {space for space in spaces if space.size <= _BLOCK_STATES}
        blocks = 2 if spaces - whole else min(len(spaces), 1)
        for _ in range(steps):
            for number in open_:
                current = self._search_group(search, current, number)
            for _ in range(blocks):
                current = self._search_block(current, spaces, whole, open_)
        return current

    # --- proposals for one group ---

    def _search_group(self, search: Search, current: ScoredSets, number: int) -> ScoredSets:
        scorer, messages = self.scorer, current.messages
        beliefs = messages.beliefs()
        # What is impossible adds nothing.
        adds = current.rows({node: beliefs[node] + messages.weights[node] for node in scorer.product.groups[number].nodes}, number)
        rows = scorer.population_rows[number] if self.positions is None else self.positions[number]
        population = Population(scorer.product.groups[number].space, current.sets[number], adds, rows)
        scores, keys = NodeScores(current, number), dict[str, Any](is_new=self.is_new, random=self.random)
        if self.positions is not None:
            keys |= {
                "is_spread": True,
                "mean_active": mean_active(population, is_idle=self.is_idle, is_part=True) if search.takes_activity else None,
            }
        proposals = propose_with(search, SearchBatch(population, scores, {}, **keys))
        places, is_free = _select_new(population, proposals)
        if not bool(is_free.any()):
            return current
        choices = {number: _append_candidates(current.sets[number], is_free)}
        return self._exchange(current, current.join(scores.take(proposals.words, places), number), choices)

    # --- proposals that are coherent over many nodes ---

    def _search_block(
        self, current: ScoredSets, spaces: Collection[StateSpace], whole: Collection[StateSpace], open_: Sequence[int]
    ) -> ScoredSets:
        """One step with blocks of latents of some spaces."""
        scorer, product = self.scorer, self.scorer.product
        best = current.collect(scorer.weights(current.sets), maximum=True).draw(None)
        union, choices = list(current.sets), {}
        for space in spaces:
            block, values = self._draw_block(space, space in whole)
            for number in open_:
                if product.groups[number].space != space:
                    continue
                own = current.sets[number]
                if len(values) == space.size:
                    # In the same order for all members of the plates: the model is run on them once.
                    union[number] = space.enumerate(own.device).expand(len(own), -1, -1)
                    choices[number] = _Choice(space.positions(own), None)
                else:
                    place = current.rows({node: best[node][0][0] for node in product.groups[number].nodes}, number)
                    levels = space.unpack(ops.gather_states(own, place), torch.int64).repeat(1, len(values), 1)
                    levels[..., block] = values.to(levels.device)
                    union[number] = torch.cat([own, space.pack(levels)], 1)
                    choices[number] = _append_candidates(own, ~ops.find_duplicates(union[number])[:, own.shape[1] :])
        return self._exchange(current, ScoredSets.from_scorer(scorer, union), choices, look_ahead=True)

    def _draw_block(self, space: StateSpace, is_whole: bool) -> tuple[list[int], Tensor]:
        """Draws latents, with all their joint values ``(C, latents)`` or a few."""
        if is_whole:
            block = list(range(space.num_latents))
        else:
            order = self._shuffle(space.num_latents)
            sizes = itertools.accumulate((space.cardinalities[latent] for latent in order), lambda total, size: total * size)
            block = [latent for latent, size in zip(order, sizes, strict=True) if size <= _BLOCK_STATES]
            if not block:
                values = self._shuffle(space.cardinalities[order[0]])[:_BLOCK_STATES]
                return order[:1], torch.tensor(values).unsqueeze(-1)
        return block, torch.cartesian_prod(*(torch.arange(space.cardinalities[latent]) for latent in block)).reshape(-1, len(block))

    def _shuffle(self, number: int) -> list[int]:
        """Returns the numbers from zero in random order."""
        uniform = ops.uniform(shape=(number,), rows=torch.zeros(1, dtype=torch.int64), generator=self.random)
        return uniform.argsort(-1)[0].tolist()

    # --- selection ---

    def _exchange(self, current: ScoredSets, union: ScoredSets, choices: Mapping[int, _Choice], *, look_ahead: bool = False) -> ScoredSets:
        """Returns the best of old and new states.

        They are chosen for one node after the other, of each component that does not lose by it.
        """
        scorer, product = self.scorer, self.scorer.product
        weights, limits = scorer.weights(union.sets), {}
        for number, choice in choices.items():
            log_weights = union.log_weights(number)
            if choice.is_free is not None:
                log_weights.masked_fill_(~choice.is_free, -math.inf)
            start = log_weights.clamp(min=IMPOSSIBLE) if look_ahead else _exclude_others(choice.old, log_weights)
            parts = (scorer.split_nodes(rows, number) for rows in (log_weights, start))
            for node, limit, own in zip(product.groups[number].nodes, *parts, strict=True):
                limits[node] = limit
                weights[node] = product.spread(node, own, scorer.plate_sizes(node))
        messages = union.collect(weights)
        best: dict[int, Tensor] = {}

        def choose(node: int, belief: Tensor) -> Tensor | None:
            if node not in limits:
                return None
            size = current.sets[product.place[node][0]].shape[1]
            scores = product.rows(node, belief, scorer.plate_sizes(node)) + limits[node]
            best[node] = scores.topk(size, -1).indices
            return product.spread(node, _exclude_others(best[node], limits[node]), scorer.plate_sizes(node))

        messages.select(choose)
        positions = {number: torch.cat([best[node] for node in product.groups[number].nodes]) for number in choices}
        return self._accept(current, union, positions, choices)

    def _accept(self, current: ScoredSets, union: ScoredSets, positions: dict[int, Tensor], choices: Mapping[int, _Choice]) -> ScoredSets:
        """Returns the new sets where the evidence does not fall."""
        # It might where members of one plate change together.
        product, result = self.scorer.product, union.take(positions)
        old, new = product.evidence_by_node(current.messages), product.evidence_by_node(result.messages)
        # A billionth may be lost by rounding.
        falls = {node: (new[node] < old[node] - 1e-9 * old[node].abs().clamp(min=1.0)).double() for node in product.tree.order}
        is_worse = False
        for number, own in positions.items():
            is_worse_row = current.rows({node: falls[node] for node in product.groups[number].nodes}, number) > 0
            is_worse |= bool(is_worse_row.any())
            positions[number] = torch.where(is_worse_row, choices[number].old, own)
        return union.take(positions) if is_worse else result


@dataclasses.dataclass(frozen=True)
class _Choice:
    """Which states of a joined set may be chosen."""

    old: Tensor  # the positions of those that were there before, (rows, S)
    is_free: Tensor | None  # a mask (rows, C), None where all may be


def _append_candidates(own: Tensor, is_new: Tensor) -> _Choice:
    """The choice between states and candidates that stand behind them."""
    old = torch.arange(own.shape[1], device=own.device).expand(own.shape[:2])
    return _Choice(old, torch.cat([torch.ones_like(old, dtype=torch.bool), is_new], 1))


def _exclude_others(positions: Tensor, log_weights: Tensor) -> Tensor:
    """Log weights of the states at some positions; all others are impossible."""
    own_weights = log_weights.gather(1, positions).clamp(min=IMPOSSIBLE)
    return torch.full_like(log_weights, IMPOSSIBLE).scatter(1, positions, own_weights)


class NodeScores:
    """Scores candidate states of a group of nodes."""

    def __init__(self, current: ScoredSets, number: int) -> None:
        self._current, self._number = current, number
        self._runs: list[ScoredSets] = []

    def __call__(self, words: Tensor) -> Tensor:
        """What candidates ``(rows, C, num_words)`` add to the evidence of their component, ``(rows, C)``."""
        current, number, tree = self._current, self._number, self._current.scorer.product.tree
        candidates = self._run(words)
        self._runs.append(candidates)
        union = current.join(candidates, number)
        weights, size = current.scorer.weights(union.sets), current.sets[number].shape[1]
        for node in current.scorer.product.groups[number].nodes:
            is_member = torch.arange(union.sets[number].shape[1], device=words.device) < size
            shape = [1] * tree.num_dims
            shape[tree.dim(node)] = len(is_member)
            weights[node] = torch.where(is_member.view(shape), weights[node], IMPOSSIBLE)
        # What this call observes has one belief for all states.
        scores = union.rows(union.collect(weights).beliefs(), number).expand(union.sets[number].shape[:2])
        return scores[:, size:] + union.log_weights(number)[:, size:]

    def take(self, words: Tensor, places: Tensor) -> ScoredSets:
        """Returns some of the candidates, scored as in their run."""
        if len(self._runs) == 1 and torch.equal(self._runs[0].sets[self._number], words):
            return self._runs[0].take({self._number: places})
        return self._run(ops.gather_states(words, places))

    def _run(self, words: Tensor) -> ScoredSets:
        sets = list(self._current.sets)
        sets[self._number] = words
        return ScoredSets.from_scorer(self._current.scorer, sets)


def _select_new(population: Population, proposals: Population) -> tuple[Tensor, Tensor]:
    """Returns the positions of each row's best proposals, and which are new."""
    every = torch.cat([population.words, proposals.words], 1)
    is_new = ~ops.find_duplicates(every)[:, population.num_states :]
    scores = proposals.log_joint.masked_fill(~is_new, -math.inf)
    best = scores.topk(min(population.num_states, scores.shape[1]), -1).indices
    return best, is_new.gather(1, best)
