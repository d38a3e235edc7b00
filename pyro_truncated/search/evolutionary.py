"""Evolutionary search: parents selected by fitness, crossover, and mutations of their children."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.search.automatic import AutomaticSearch
from pyro_truncated.search.base import Search, SearchBatch
from pyro_truncated.states.population import Population, join
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.arguments import check_count, check_kinds, names_arguments

Selection = Literal["fitparents", "randparents"]
Mutation = Literal["randflips", "sparseflips"]


class EvolutionarySearch(Search):
    """Evolves the states of each data point by selection, crossover and mutation.

    After Guiraud, Drefs & Lücke (2018), "Evolutionary Expectation Maximization".

    Each generation selects ``parents`` distinct states per data point, makes children and scores these once. The next
    parents are selected from these children, as in the paper's algorithm 1, or with ``overlapping`` from all states
    so far. The children of all generations are proposed. The paper names the variants by their operators:

    ====================  ==========================================================================================
    ``"fitparents"``      parents in proportion to fitness, equation (7), see :func:`~pyro_truncated.ops.select_parents`
    ``"randparents"``     parents uniformly
    ``crossover``         "cross": both offspring of every pair of parents, cut at one random point, then mutated
    ``"randflips"``       exactly one random latent of each child changes
    ``"sparseflips"``     flips that pull the children's activity towards a target, see :func:`~pyro_truncated.ops.flip_sparse`
    ====================  ==========================================================================================

    Only the default target activity depends on the batches of data. Nothing depends on blocks or processes.

    ``EvolutionarySearch()``, in which nothing but perhaps a generator is named, is no algorithm of the paper. It is
    the :class:`AutomaticSearch`, which also copes with broad posteriors of categorical latents. With any other
    argument the paper's algorithm runs, with 8 parents, 7 children and 2 generations by default.

    Example:
        >>> search = EvolutionarySearch(parents=4, children=3, mutation="sparseflips", crossover=True)
        >>> y = linear_bars(20, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, search, steps=3)
        >>> guide.states()["s"].shape
        torch.Size([20, 16, 8])

    Args:
        parents: number of parents per data point (8). All states of a population that holds fewer.
        children: mutated copies of each parent (7). With crossover there are ``parents * (parents - 1)`` children in
            all, so that 8 parents have 56 children either way. A single parent, or a single latent, cannot be crossed
            and has mutated copies.
        generations: number of generations (2).
        selection: ``"fitparents"`` or ``"randparents"``.
        crossover: whether children come from pairs of parents.
        mutation: ``"randflips"`` or ``"sparseflips"``.
        overlapping: whether states of the population and of earlier generations can be parents in later generations.
            This often finds good states in slightly fewer generations.
        flip_probability: mean probability of a flip in ``"sparseflips"``; default ``1 / L``, one flip per child.
        target_activity: mean number of active binary latents that ``"sparseflips"`` aims at. Default: their mean
            number under the truncated posteriors of the batch, the sparsity learned by the model.
        generator: source of randomness. Default: torch's global generator.

    Raises:
        ValueError: if an argument is out of range or unknown.
    """

    @names_arguments
    def __init__(
        self,
        parents: int | None = None,
        children: int | None = None,
        generations: int | None = None,
        *,
        selection: Selection = "fitparents",
        crossover: bool = False,
        mutation: Mutation = "randflips",
        overlapping: bool = False,
        flip_probability: float | None = None,
        target_activity: float | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        given = {"parents": parents, "children": children, "generations": generations}
        numbers = [number if number is None else check_count(name, number) for name, number in given.items()]
        if selection not in ("fitparents", "randparents"):
            raise ValueError(f"selection must be 'fitparents' or 'randparents'; got {selection!r}")
        if mutation not in ("randflips", "sparseflips"):
            raise ValueError(f"mutation must be 'randflips' or 'sparseflips'; got {mutation!r}")
        if crossover and numbers[0] == 1:
            raise ValueError("crossover needs pairs, so at least 2 parents; got 1")
        if flip_probability is not None and not 0 < flip_probability <= 1:
            raise ValueError(f"flip_probability must lie in (0, 1]; got {flip_probability}")
        if target_activity is not None and not target_activity >= 0:
            raise ValueError(f"target_activity must not be negative; got {target_activity}")
        settings = (*numbers, flip_probability, target_activity, selection, crossover, mutation, overlapping)
        is_default = settings == (*[None] * 5, "fitparents", False, "randflips", False)
        self._automatic = AutomaticSearch(generator=generator) if is_default else None
        defaults = (8, 7, 2) if self._automatic is None else (0, 0, 0)
        self.parents, self.children, self.generations = (own or usual for own, usual in zip(numbers, defaults, strict=True))
        self.selection = selection
        self.crossover = crossover
        self.mutation = mutation
        self.overlapping = overlapping
        self.flip_probability = flip_probability
        self.target_activity = target_activity
        check_kinds(EvolutionarySearch.__init__, generator=generator)
        self.generator = generator

    @property
    def takes_activity(self) -> bool:
        """Whether flips are driven by the sparsity that has been learned."""
        return self.mutation == "sparseflips" and self.target_activity is None

    def propose(self, batch: SearchBatch) -> Population:
        """The children of all generations."""
        if self._automatic is not None:
            return self._automatic.propose(batch)
        target = self._target(batch) if self.mutation == "sparseflips" else math.nan
        pool, draws = batch.population, batch.draws(self.generator)
        ops.draw_ahead(self._count_words(pool), **draws)
        generations: list[Population] = []
        for _ in range(self.generations):
            children = batch.evaluate(self._breed(pool, target, draws, known_distinct=not generations))
            generations.append(children)
            pool = join([pool, children]) if self.overlapping else children
        return join(generations)

    def max_proposals(self, num_states: int) -> int:
        """Returns roughly how many states it proposes per data point."""
        return super().max_proposals(num_states) if self._automatic is None else self._automatic.max_proposals(num_states)

    def step(self, batch: SearchBatch) -> Population:
        """Returns the populations after one step of the search."""
        return super().step(batch) if self._automatic is None else self._automatic.step(batch)

    def improve(self, batch: SearchBatch, steps: int = 1) -> Population:
        """The populations after some steps."""
        return super().improve(batch, steps) if self._automatic is None else self._automatic.improve(batch, steps)

    def __repr__(self) -> str:
        return super().__repr__() if self._automatic is None else f"EvolutionarySearch({self._automatic.chosen or ''})"

    def _target(self, batch: SearchBatch) -> float:
        """The target number of active latents, of binary ones alone."""
        binary = batch.space.cardinality == 2
        if self.target_activity is not None:
            if self.target_activity > int(binary.sum()):
                raise ValueError(
                    f"target_activity, a mean number of active latents, must not exceed the number of binary latents, {int(binary.sum())}; "
                    f"got {self.target_activity}"
                )
            return self.target_activity
        activity = batch.activity()
        return float(activity[batch.space.fields.on(activity.device, "binary")].sum())

    def _count_words(self, pool: Population) -> list[int]:
        """Returns how many random words per data point all operators take."""
        counts: list[int] = []
        num_states = pool.num_states
        for _ in range(self.generations):
            num_parents = min(self.parents, num_states)
            is_crossed = self.crossover and num_parents > 1 and pool.space.num_latents > 1
            num_children = num_parents * (num_parents - 1 if is_crossed else self.children)
            counts += [num_parents, *([num_children // 2] if is_crossed else []), 2 * num_children if self.mutation == "randflips" else 0]
            num_states = num_children + (num_states if self.overlapping else 0)
        return counts

    def _breed(self, pool: Population, target: float, draws: dict[str, Any], known_distinct: bool) -> Tensor:
        """One generation of children ``(N, C, num_words)``."""
        space, fitness = pool.space, pool.log_joint
        if not known_distinct:
            # Siblings may be equal; without this, a state with many copies would be its own partner.
            fitness = fitness.masked_fill(ops.find_duplicates(pool.words), -math.inf)
        num_parents = min(self.parents, pool.num_states)
        index = ops.select_parents(fitness, num_parents, by_fitness=self.selection == "fitparents", **draws)
        parents = pool.take(index)
        if not self.crossover or num_parents < 2 or space.num_latents < 2:
            return self._mutate(parents.repeat_interleave(self.children, 1), space, target, draws)
        return self._mutate(ops.cross(parents, space.fields, **draws), space, target, draws)

    def _mutate(self, children: Tensor, space: StateSpace, target: float, draws: dict[str, Any]) -> Tensor:
        if self.mutation == "randflips":
            return ops.flip_random(children, space.fields, **draws)
        flip_probability = self.flip_probability or 1 / max(1, len(space.mutable))
        return ops.flip_sparse(children, space.fields, target, flip_probability, **draws)
