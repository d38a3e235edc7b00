"""Batches of guides on sets of states, and that of a product.

It has a free energy and a gradient, and a search improves its sets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Self, TypeVar

import torch
from torch import Tensor

from pyro_truncated.guide.batch import ProgramBatch
from pyro_truncated.guide.product_store import ProductStore
from pyro_truncated.guide.set_search import SetSearch
from pyro_truncated.ops.elimination import IMPOSSIBLE, Messages
from pyro_truncated.program.chain_scorer import ChainScorer
from pyro_truncated.program.product_scorer import ProductScorer
from pyro_truncated.search.base import Search, check_search
from pyro_truncated.states.population import Population
from pyro_truncated.utils.parameter_store import isolate, spare_random_numbers

_Scorer = TypeVar("_Scorer", ProductScorer, ChainScorer)


@dataclasses.dataclass(frozen=True)
class SetBatch(ProgramBatch[_Scorer]):
    """Sets of states that a run of the model selects."""

    populations: ProductStore
    indices = None

    def rescore(self) -> list[Population]:
        """Returns the sets, scored in this run of the model."""
        raise NotImplementedError

    def keep_(self, populations: list[Population]) -> None:
        """Keeps sets with their log joints."""
        # A process without a part of the minibatch has run the model on another data point, to take part in what all do.
        if not self.is_idle:
            self.populations.store_(populations)

    def rescore_(self) -> list[Population]:
        """Stores and returns the sets, scored in this run."""
        populations = self.rescore()
        self.keep_(populations)
        return populations

    def search_(self, search: Search, steps: int = 1, *, is_new: bool = False) -> list[Population]:
        """Improves the sets in place, and returns them with their log joints."""
        raise NotImplementedError

    def after_search(self, search: Search, steps: int = 1) -> Self:
        """Returns the batch with sets that a search has improved."""
        self.search_(search, steps)
        return self

    def redraw(self) -> Self:
        """The same data in another run of the model."""
        again = type(self.scorer)(self.scorer.call, self.scorer.product, self.scorer.subsamples)
        return dataclasses.replace(self, scorer=again)


@dataclasses.dataclass(frozen=True)
class ProductBatch(SetBatch[ProductScorer]):
    r"""The sets of the nodes that a run of the model selects.

    They come with the scorer of this run.

    .. math:: \mathcal F = \log \sum_{s_1 \in K_1} \cdots \sum_{s_V \in K_V} p(s, y), \qquad
              \nabla \mathcal F = \sum_f \sum_{s} q_f(s) \nabla \log \psi_f(s).
    """

    def check(self) -> None:
        """Checks that the populations are of these data."""
        self._check_device()
        for number, (group, own) in enumerate(zip(self.scorer.product.groups, self.populations.stores, strict=True)):
            sizes = [self.scorer.plate_size(name) for name in group.plates]
            if len(group.nodes) * math.prod(sizes) != len(own.words):
                raise ValueError(
                    f"the populations of {group.sites[:4]} have {len(own.words)} rows, the model's plates {list(group.plates)} now the "
                    f"sizes {sizes}. Make a guide for these data: guide.infer(...), or a new AutoTruncated."
                )
            own.check_indices(self.scorer.population_rows[number])
        seen, scorer = self.populations.seen, self.scorer
        if scorer.first_sets is None or seen.knows(scorer.call):
            seen.compare(scorer)
        else:
            with torch.no_grad(), spare_random_numbers():
                seen.compare(ProductScorer(scorer.call, scorer.product, scorer.values))

    # --- the sets ---

    def sets(self) -> list[Tensor]:
        """The words ``(rows, S, num_words)`` of each group, with what is known put in."""
        populations = self._take_populations()
        return [self.scorer.insert_known_values(population.words, number) for number, population in enumerate(populations)]

    def _take_populations(self) -> list[Population]:
        return [store.take(rows) for store, rows in zip(self.populations.stores, self.scorer.population_rows, strict=True)]

    # --- reading ---

    @torch.no_grad()
    def rescore(self) -> list[Population]:
        """Returns the populations of all groups, scored in this run."""
        sets = self.sets()
        return self._populations(sets, self.scorer.messages(sets))

    def _populations(self, sets: Sequence[Tensor], messages: Messages) -> list[Population]:
        """Sets with the log joints that messages give them, see :class:`ProductStore`."""
        product, scorer, roots = self.scorer.product, self.scorer, self.scorer.product.tree.roots
        beliefs, evidence = messages.beliefs(), product.evidence_by_node(messages)
        populations = []
        for number, (population, words) in enumerate(zip(self._take_populations(), sets, strict=True)):
            nodes = product.groups[number].nodes
            sizes = scorer.plate_sizes(nodes[0])
            belief, weight, total = (product.group_rows(number, tables, sizes) for tables in (beliefs, messages.weights, evidence))
            log_q = belief + weight - total
            # A node that is the last of its component has the evidence of that.
            is_root = torch.tensor([roots[node] == node for node in nodes], device=log_q.device).repeat_interleave(len(log_q) // len(nodes))
            log_joint = torch.where(is_root.unsqueeze(-1), log_q + total, log_q).masked_fill(log_q < IMPOSSIBLE / 2, -math.inf)
            populations.append(dataclasses.replace(population, words=words, log_joint=log_joint))
        return populations

    # --- the free energy and its gradient ---

    @torch.no_grad()
    def evidence(self, sets: Sequence[Tensor] | None = None) -> Tensor:
        """Returns each data point's evidence ``(N,)`` on its sets or others."""
        scorer = self.scorer
        total = torch.zeros(scorer.sizes, dtype=torch.float64, device=scorer.device)
        for root, rows in zip(scorer.product.roots, scorer.evidence(scorer.messages(self.sets() if sets is None else sets)), strict=True):
            total = total + scorer.sum_by_data(root, rows)
        return total.flatten()

    def free_energy(self) -> Tensor:
        """The scaled free energy, differentiable in whatever the model is."""
        return self.outside() if self.is_idle else self.scorer.free_energy(self.sets()) + self.outside()

    def backward_(self, temperature: float = 1.0, particles: int = 1) -> float:
        """See :meth:`Batch.backward_`."""
        losses = [batch._backward_(temperature, particles) for batch in self.draws(particles)]
        return sum(losses) / len(losses)

    def _backward_(self, temperature: float, particles: int) -> float:
        scorer, sets = self.scorer, self.sets()
        with torch.enable_grad():
            tables, weights, outside = scorer.tables(sets), scorer.weights(sets), self.outside()
            value, messages = scorer.free_energy_with_messages(tables, weights, temperature)
            objective = outside if self.is_idle else value + outside
            if objective.requires_grad:
                (-objective / self.num_draws(particles)).backward()
        with torch.no_grad():
            if temperature != 1.0:
                messages = Messages(scorer.product.tree, tables, weights)
                objective = outside if self.is_idle else scorer.sum_evidence(scorer.evidence(messages)) + outside
            self.keep_(self._populations(sets, messages))
            return -float(objective)

    # --- the search ---

    @torch.no_grad()
    def search_(self, search: Search, steps: int = 1, *, is_new: bool = False) -> list[Population]:
        """Improves the sets in place by :class:`SetSearch`, see :meth:`Batch.search_`."""
        check_search(search)
        self.populations.seen.is_new |= is_new
        with isolate():
            scored_sets = self.set_search(is_new=is_new).improve(self.sets(), search, steps)
            populations = self._populations(scored_sets.sets, scored_sets.messages)
            self.keep_(populations)
        return populations

    def after_search(self, search: Search, steps: int = 1) -> Self:
        """Returns the batch after a search, unless all sets hold all states."""
        pairs = zip(self.populations.stores, self.scorer.product.groups, strict=True)
        is_complete = all(store.words.shape[1] >= group.space.size for store, group in pairs)
        return self if is_complete else super().after_search(search, steps)

    def set_search(self, *, is_new: bool = False) -> SetSearch:
        """A search of sets with random numbers of its own."""
        random = self.populations.stores[0].next_search_()
        if not self.populations.is_part:
            return SetSearch(self.scorer, random, is_new)
        every = [store.global_rows(torch.arange(len(store.words), device=self.scorer.device)) for store in self.populations.stores]
        positions = [rows if own is None else rows[own] for rows, own in zip(every, self.scorer.population_rows, strict=True)]
        return SetSearch(self.scorer, random, is_new, positions, self.is_idle)
