"""Batch: populations and scorer of one run of the model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.distributed import collectives
from pyro_truncated.distributed.shards import current_batch
from pyro_truncated.guide.plates import refuse_other_size
from pyro_truncated.guide.store import PopulationStore
from pyro_truncated.program.log_joint import LogJoint, RowScorer
from pyro_truncated.program.probe import Probe
from pyro_truncated.search.base import Search, SearchBatch, check_search, improve_with
from pyro_truncated.states.population import Population
from pyro_truncated.utils.budget import memory_budget
from pyro_truncated.utils.parameter_store import isolate

_Scorer = TypeVar("_Scorer", bound=Probe)


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramBatch(Generic[_Scorer]):
    """Selected populations with the scorer of the run that selects them."""

    populations: Any  # where the states of all data points are kept
    scorer: _Scorer  # scores states of the data points of this batch
    # Whether none of the minibatch's data points belong to this process, so that nothing is scored
    # or kept.
    is_idle: bool = dataclasses.field(default_factory=lambda: getattr(current_batch(), "is_idle", False), kw_only=True)

    def _check_device(self) -> None:
        device = self.populations.stores[0].words.device
        if self.scorer.device != device:
            raise ValueError(
                f"the populations are on {device}, the model's states on {self.scorer.device}; call guide.to({str(self.scorer.device)!r})"
            )

    def outside(self) -> Tensor:
        """Returns the log probability of what is observed outside of data plates.

        Processes that have the rest of the data share it equally. Of new data it is without priors of parameters, which are known.
        """
        share, own_share = self.share, 0.0 if self.is_idle else 1.0
        return self.scorer.outside(with_parameters=not self.populations.seen.is_new, share=share, own_share=own_share)

    @property
    def share(self) -> float:
        """The share of this process in what belongs to no data point."""
        return 1 / collectives.size() if self.populations.is_part else 1.0

    @property
    def plate_indices(self) -> Tensor | None:
        """Returns positions ``(N,)`` of the data points, ``None`` for all in order."""
        return torch.empty(0, dtype=torch.int64) if self.is_idle else self.scorer.plate_indices

    @property
    def data_per_row(self) -> float:
        """How many data points each one of the batch stands for."""
        batch = current_batch()
        return self.scorer.full_size / self.scorer.num_data if batch is None else batch.scale

    def free_energy(self) -> Tensor:
        """The scaled free energy, differentiable in whatever the model is."""
        raise NotImplementedError

    def mean_free_energy(self, particles: int) -> Tensor:
        """Returns the free energy, averaged over draws."""
        return torch.stack([batch.free_energy() for batch in self.draws(particles)]).mean()

    def num_draws(self, particles: int) -> int:
        """How many draws there are: one, where guides cover all latents."""
        return particles if self.scorer.layout.other_latents else 1

    def draws(self, particles: int) -> Iterator[Self]:
        """Yields batches of the same data, this one first."""
        yield self
        for _ in range(self.num_draws(particles) - 1):
            yield self.redraw()

    def redraw(self) -> Self:
        """The same data in another run of the model."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class Batch(ProgramBatch[LogJoint]):
    r"""The populations of selected data points with a scorer.

    One run of the model selected them and is scored.

    .. math:: \mathcal F = c \sum_{n \in \text{batch}} \log \sum_{s \in K_n} p(s, y_n) + \log p(\text{observed outside of the data plates})

    with the scale :math:`c` that Pyro gives to subsampled plates. If other processes hold other data
    points, this is the share of this process, and the free energy is the sum of all shares. Each
    share holds an equal part of what is observed outside of the data plates.
    """

    populations: PopulationStore
    scored_population: Population | None = None  # the populations as this run has scored them, where it has

    def check(self) -> None:
        """Checks that the populations belong to these data and this device."""
        store, scorer = self.populations, self.scorer
        refuse_other_size(len(store.words), scorer.full_size, scorer.layout.plates)
        self._check_device()
        store.check_indices(self.plate_indices)
        store.seen.compare(scorer)

    @property
    def indices(self) -> Tensor | None:
        """:attr:`plate_indices`, where the states are."""
        return self.populations.words.new_empty(0) if self.is_idle else self.scorer.indices

    @property
    def scale(self) -> float | Tensor:
        """What the sum over the data points is scaled by."""
        return 0.0 if self.is_idle else self.scorer.scale

    @property
    def holds_all_states(self) -> bool:
        """Whether data points have all states: there is nothing to search."""
        return self.scorer.known_levels is None and not self.scorer.is_vectorized and self.populations.are_alike

    def population(self) -> Population:
        """Returns the stored populations with the model's observed states inserted."""
        population = self.populations.take(self.indices)
        if self.is_idle:
            return population
        if self.holds_all_states:
            return dataclasses.replace(population, words=self.populations.words[:1].expand_as(population.words))
        return dataclasses.replace(population, words=self.scorer.insert_observed_values(population.words))

    def rescore(self) -> Population:
        """Returns the populations with log joints in this run."""
        population = self.population()
        if self.is_idle:
            return population
        blocks = [self.scorer.score(population.words[rows], rows) for rows in self.scorer.row_blocks(population.num_states)]
        return dataclasses.replace(population, log_joint=torch.cat(blocks))

    def rescore_(self) -> Population:
        """Stores and returns the populations with log joints in this run."""
        population = self.rescore()
        return self._store_(population.log_joint, population.words)

    def _store_(self, log_joint: Tensor, words: Tensor) -> Population:
        return self.populations.store_(log_joint, self.indices, words if self.scorer.known_levels is not None else None)

    @torch.no_grad()
    def search_(self, search: Search, steps: int = 1, *, is_new: bool = False) -> Population:
        """Improves the populations in place, and returns them with their log joints.

        Args:
            search: proposes the states.
            steps: number of search steps.
            is_new: whether the data are new. A search that learns from data does not learn from
                them. Until the guide is trained, priors of parameters (sites with
                ``infer={"of_parameters": True}``) are no part of their free energy.
        """
        check_search(search)
        store, observations = self.populations, self.scorer.observations()
        store.seen.is_new |= is_new
        store.begin_(self.indices)
        random, blocks = store.next_search_(), self.scorer.row_blocks(2 * store.num_states, search.max_proposals(store.num_states))
        is_steered = search.takes_activity and (len(blocks) > 1 or store.is_part)
        activity = mean_active(self.rescore(), is_idle=self.is_idle, is_part=store.is_part) if is_steered else None
        keys: dict[str, Any] = {"is_new": is_new, "first_position": store.first_position, "is_spread": store.is_part}
        keys["is_linear"] = self.scorer.packed_model is not None and self.scorer.packed_model.is_linear
        keys["is_global"] = not self.scorer.layout.plates
        if search.learns and store.portion is not None:
            keys["is_met"] = True
            own = self.rescore()
            met = {name: value[: len(own)] for name, value in observations.items()}
            search.meet(SearchBatch(own, self.scorer.score, met, random=random.again(), **keys))
        if self.is_idle:
            return store.take(self.indices)
        if self.holds_all_states:
            with isolate():
                return self.rescore_()
        with isolate(), memory_budget(self.scorer.memory_budget):
            for rows in blocks:
                where = rows if self.indices is None else self.indices[rows]
                own_observations = {name: value[rows] for name, value in observations.items()}
                with ops.defer_checks():
                    words = store.words[where] if isinstance(where, slice) else store.words.index_select(0, where)
                    words = self.scorer.insert_observed_values(words)
                    score = RowScorer(self.scorer, rows)
                    log_joint, moments = score.with_moments(words) if search.takes_moments else (score(words), None)
                    current = Population(store.space, words, log_joint, self._positions(rows))
                    batch = SearchBatch(
                        current, score, own_observations, mean_active=activity, random=random.again(), moments=moments, **keys
                    )
                    population = improve_with(search, batch, steps)
                    store.keep_(population.log_joint, where, population.words)
                if len(blocks) > 1:
                    # What is found for one block need not be held until all others have been searched.
                    ops.flush_checks()
        return population if len(blocks) == 1 else store.take(self.indices)

    def after_search(self, search: Search, steps: int = 1) -> Batch:
        """Returns the batch with populations that a search has improved."""
        if self.holds_all_states:
            return self
        return dataclasses.replace(self, scored_population=self.search_(search, steps))

    def _positions(self, rows: slice) -> Tensor | None:
        """Returns positions of a slice in the full data set."""
        if self.indices is not None:
            return self.indices[rows]
        words = self.populations.words
        return None if (rows.start, rows.stop) == (0, len(words)) else torch.arange(rows.start, rows.stop, device=words.device)

    # --- the free energy and its gradient ---

    def free_energy(self) -> Tensor:
        """The scaled free energy, differentiable in whatever the model is."""
        if self.is_idle:
            return self.outside()
        words = self.population().words
        blocks = [self.scorer.score(words[rows], rows).double().logsumexp(-1).sum() for rows in self.scorer.row_blocks(words.shape[1])]
        return self.scale * torch.stack(blocks).sum() + self.outside()

    def redraw(self) -> Batch:
        """The same data points in another run of the model."""
        scorer = self.scorer
        options = {name: getattr(scorer, name) for name in ("conditional", "memory_budget", "run_mode")}
        with torch.set_grad_enabled(scorer.takes_gradients):
            again = LogJoint(scorer.call, scorer.layout, values=scorer.subsamples, **options)
        return dataclasses.replace(self, scorer=again, scored_population=None)

    def backward_(self, temperature: float = 1.0, particles: int = 1) -> float:
        r"""Accumulates the gradient of :math:`-\mathcal F`, stores the log joints, and returns :math:`-\mathcal F`.

        Args:
            temperature: :math:`\tau`: the gradient weighs states by :math:`q \propto p^{1/\tau}`.
            particles: draws of the latents that no guide covers. Gradient and value are means over them.
        """
        number = self.num_draws(particles)
        if self.is_idle:
            _accumulate(-self.outside())
            return -float(self.outside().detach())
        # With a conditional, the draws that score the states must be the ones that are differentiated. States that have not been scored
        # are scored once if they fit into memory.
        is_one_run = self.scored_population is None and len(list(self.scorer.gradient_blocks(self.populations.num_states))) == 1
        is_at_once = self.scorer.conditional is not None or (is_one_run and self.holds_all_states)
        step = Batch._backward_at_once_ if is_at_once else Batch._backward_by_blocks_
        with torch.enable_grad(), ops.defer_checks():
            return sum(step(batch, temperature, number) for batch in self.draws(particles)) / number

    def _backward_by_blocks_(self, temperature: float, particles: int) -> float:
        """Differentiates one block of states after the other.

        The gradient is a weighted sum, so the graphs of all states need never exist together.
        """
        scorer, outside = self.scorer, self.outside()
        _accumulate(-outside / particles)
        with torch.no_grad():
            population = self.rescore() if self.scored_population is None else self.scored_population
            words, weights = _without_negligible(population, (population.log_joint / temperature).softmax(-1))
            weights = (self.scale / particles) * weights
        blocks = list(scorer.gradient_blocks(words.shape[1]))
        for rows, states in blocks:
            scores, shares = scorer.score(words[rows, states], rows), weights[rows, states]
            # States of probability zero have weight zero but an infinite score.
            _accumulate(-torch.where(shares > 0, shares * scores, 0.0).sum())
            if len(blocks) > 1:
                # The graphs of all blocks never exist together.
                ops.flush_checks()
        return self._loss_(population.log_joint, population.words, outside)

    def _backward_at_once_(self, temperature: float, particles: int) -> float:
        words = self.population().words
        scores, outside = self.scorer.score(words), self.outside()
        # Data points without a possible state have no gradient; what is stored is checked.
        possible = scores.masked_fill((scores.detach() == -math.inf).all(-1, keepdim=True), 0.0)
        objective = temperature * (possible / temperature).logsumexp(-1).sum() * self.scale + outside
        _accumulate(-objective / particles)
        return self._loss_(scores.detach(), words, outside)

    def _loss_(self, log_joint: Tensor, words: Tensor, outside: Tensor) -> float:
        """Stores new log joints and returns minus their free energy."""
        with torch.no_grad(), ops.defer_checks():
            population = self._store_(log_joint, words)
            return -ops.read_number(self.scale * population.free_energy().sum() + outside)


def mean_active(population: Population, *, is_idle: bool, is_part: bool) -> Tensor:
    """Mean probabilities ``(L,)`` that latents are active."""
    sums, number = population.marginals().sum(0), torch.tensor(float(len(population)))
    if is_part:
        share = 0.0 if is_idle else 1.0
        sums, number = collectives.add([share * sums, share * number])
    return sums / number


def _without_negligible(population: Population, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the states that count, up to a rounding error."""
    if ops.is_vectorised(weights):  # to ask a device how many they are would wait for it
        return population.words, weights
    # Of float64 whatever the type: optimisers that scale gradients follow those of tiny weights, too.
    number = int((weights > torch.finfo(torch.float64).eps / weights.shape[1]).sum(-1).max())
    if number == population.num_states:
        return population.words, weights
    best = weights.topk(max(1, number), -1)
    return population.take(best.indices), best.values


def _accumulate(loss: Tensor) -> None:
    """Adds to the gradients, after all checks have passed."""
    # Blocks share the graph that they all depend on.
    if loss.requires_grad:
        ops.on_success(lambda: loss.backward(retain_graph=True))
