"""E-step of closed-form EM: better populations and their statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_truncated.distributed import world
from pyro_truncated.distributed.shards import current_batch
from pyro_truncated.em.closed_form import ClosedForm, Statistics
from pyro_truncated.guide.batch import Batch
from pyro_truncated.guide.chain_batch import ChainBatch
from pyro_truncated.ops import defer_checks, flush_checks, lazy_values
from pyro_truncated.program.call import Call
from pyro_truncated.search.automatic import AutomaticSearch
from pyro_truncated.search.base import Search
from pyro_truncated.states.population import Population
from pyro_truncated.utils.budget import memory_budget, rows_per_block


class EMStep:
    """Collects statistics of batches, and remembers their population versions."""

    def __init__(self) -> None:
        self._revision: int | None = None

    @torch.no_grad()
    def __call__(
        self, closed_form: ClosedForm, batch: Batch, improve: Callable[[Batch], Population], temperature: float, *, is_annealed: bool
    ) -> float:
        """Improves a batch's populations, collects statistics, returns the loss.

        Args:
            closed_form: what collects.
            batch: the batch.
            improve: improves its populations and stores their log joints.
            temperature: temperature of the posteriors in the statistics.
            is_annealed: whether the temperature changes from step to step.

        Raises:
            NotImplementedError: if data are shared out that the model needs together.
            ValueError: if statistics would have to be taken out of the sums at another temperature than they went in with.
        """
        call, store, scorer = batch.scorer.call, batch.populations, batch.scorer
        if store.is_part:
            _refuse_local_steps(closed_form.model)
        with poutine.block(), memory_budget(scorer.memory_budget):
            # Another caller scored or searched: the sums do not hold the old contribution.
            is_stale = self._revision is not None and self._revision != store.revision and closed_form.visited is not None
            chosen = _chosen(batch)
            previous = closed_form.previous(store.take(batch.indices if chosen is batch.chosen else chosen), chosen)
            if previous is not None and is_annealed:
                raise ValueError("incremental minibatches cannot follow a changing temperature; use ClosedForm(model, minibatch='online')")
            old = None if previous is None else _statistics(closed_form, previous, temperature, call)
            with defer_checks():
                population = improve(batch)
                # A model that looks at its statistics brings it along.
                known = lazy_values(batch.scale * population.free_energy().sum() + batch.outside())
                new = _statistics(closed_form, population, temperature, call)
                (free_energy,) = known()
                flush_checks()
            self._revision = store.revision
            closed_form.collect(new, old, chosen, scorer.full_size, scale=batch.data_per_row, is_part=store.is_part)
            if closed_form.visited is not None and chosen is not None and _anywhere(is_stale, store.is_part):
                visited = closed_form.visited.nonzero().squeeze(-1).to(store.words.device)
                closed_form.renew(_statistics(closed_form, store.population(visited), temperature, call), is_part=store.is_part)
            return -free_energy


@torch.no_grad()
def collect_on_chains(closed_form: ClosedForm, batch: ChainBatch, search: Search | None, search_steps: int) -> float:
    """Improves the sets of sequences, collects statistics, returns the loss.

    The model takes the posterior of the sequences in place of a population.
    """
    call, scorer = batch.scorer.call, batch.scorer
    with poutine.block():
        # No search step scores the sets and keeps their log joints.
        posterior = batch.improved_(AutomaticSearch(), 0) if search is None else batch.improved_(search, search_steps)
        loss = -float(scorer.scale * posterior.free_energy().sum() + batch.outside())
        new = closed_form.model.sufficient_statistics(posterior, *call.args, **call.kwargs)
    closed_form.collect(new, None, scorer.chosen, scorer.full_size, scale=scorer.full_size / scorer.num_data)
    return loss


def _chosen(batch: Batch) -> Tensor | None:
    """Returns positions of the data points, ``None`` for all.

    All means all of all processes: others may have more.
    """
    indices, minibatch = batch.chosen, current_batch()
    if not batch.populations.is_part:
        return indices
    is_minibatch = _anywhere(indices is not None, True) if minibatch is None else minibatch.scale > 1
    return torch.arange(batch.scorer.full_size) if indices is None and is_minibatch else indices


def _anywhere(condition: bool, is_part: bool) -> bool:
    """Whether it holds in one of the processes that train together."""
    return bool(world.add([torch.tensor(float(condition))])[0]) if is_part else condition


def _refuse_local_steps(model: Any) -> None:
    """Refuses models whose M-step looks only at this process's data."""
    if not getattr(model, "statistics_are_additive", True) and not getattr(model, "statistics_span_processes", False):
        raise NotImplementedError(
            f"{type(model).__name__} chooses its M-step where the data are at hand, and these are spread over processes: train it in one"
        )


def _statistics(closed_form: ClosedForm, population: Population, temperature: float, call: Call) -> Statistics:
    """Returns sufficient statistics, by blocks where they add up."""
    model = closed_form.model
    rows = len(population)
    if getattr(model, "statistics_are_additive", True):
        rows = rows_per_block(64 * population.num_states)
    total: Statistics = {}
    for block in population.split(rows):
        with defer_checks():
            part = model.sufficient_statistics(block, *call.args, temperature=temperature, **call.kwargs)
        total = {name: total[name] + value for name, value in part.items()} if total else part
    return total
