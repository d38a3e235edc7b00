"""How much posterior mass the populations leave out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pyro.poutine as poutine
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pyro_truncated import ops
from pyro_truncated.distributed import collectives
from pyro_truncated.distributed.shards import Shard
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.guide.averaging import rescore_over_draws
from pyro_truncated.program.call import Call
from pyro_truncated.program.log_joint import LogJoint, RowScorer
from pyro_truncated.search import AutomaticSearch, Search, SearchBatch
from pyro_truncated.search.base import check_search
from pyro_truncated.search.conditional import Moves
from pyro_truncated.states.population import Population, initial_population
from pyro_truncated.utils.arguments import check_count
from pyro_truncated.utils.budget import row_slices, rows_per_block
from pyro_truncated.utils.parameter_store import spare_random_numbers


def find_truncated_guide(guide: Any) -> AutoTruncated:
    """The ``AutoTruncated`` that a guide is, or that a guide list holds."""
    if isinstance(guide, AutoTruncated):
        return guide
    parts = [part for part in guide if isinstance(part, AutoTruncated)] if isinstance(guide, torch.nn.ModuleList) else []
    if not parts:
        raise TypeError(f"guide must be an AutoTruncated, or an AutoGuideList that holds one; got {type(guide).__name__}")
    return parts[0]


def set_up_part(guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AutoTruncated:
    """Returns the truncated part of a guide, which has met its model."""
    part = find_truncated_guide(guide)
    if part.prototype_trace is None:
        with spare_random_numbers(), poutine.block():
            guide(*args, **kwargs)
    return part


@torch.no_grad()
def score_populations(guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[AutoTruncated, LogJoint, Population]:
    """The truncated part, scorer, and populations scored under the current model.

    Latents of other guides take the medians of their guides. Every result is then about the posterior of the states given these.
    """
    part = set_up_part(guide, args, kwargs)
    if part.product is not None:
        raise NotImplementedError(
            "the guide has a set of states for each node of the model's factor graph, not a list of whole states. Call "
            "check_truncation(guide, ...), or make the guide with AutoTruncated(..., whole_states=True)."
        )
    call = Call(part.model, args, kwargs)
    others = part.other_values(call, median=True)
    with poutine.block():
        batch = part.batch(call, others)
        return part, batch.scorer, rescore_over_draws(part, batch)


def plain(value: Tensor) -> Tensor:
    """A result: detached, on the CPU."""
    return value.detach().cpu()


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class AllData:
    """A guide of the data points of all processes."""

    guide: AutoTruncated  # with the populations of all. Of other guides it takes what they say, as a guide for new data does.
    args: tuple[Any, ...]  # the model's arguments, with the data of all processes
    kwargs: Mapping[str, Any]  # its keyword arguments, likewise


def broadcast_answer(function: Callable[..., T], guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> T:
    """Sends the first process's answer about the guide to all processes."""
    with collectives.propagate_errors(), spare_random_numbers():
        every = gather_guide(guide, args, kwargs)
        answer = collectives.agree(None if every is None else function(every.guide, *every.args, **every.kwargs))
    assert answer is not None
    return answer


def gather_guide(guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AllData | None:
    """The guide of all data on the first process, elsewhere ``None``."""
    part = find_truncated_guide(guide)
    rows = [leaf.as_subclass(torch.Tensor) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Shard)]
    shards = collectives.collect([part.words, part.log_joint, *rows])
    if shards is None:
        return None
    words, log_joint, *data = (torch.cat(parts) for parts in zip(*shards, strict=True))
    leaves = iter(data)
    args, kwargs = tree_map(lambda leaf: next(leaves) if isinstance(leaf, Shard) else leaf, (args, dict(kwargs)))
    whole = AutoTruncated(part.model, part.num_states, **part.options)
    whole.load_state_dict(
        {"populations.words": words, "populations.log_joint": log_joint, "populations.cardinalities": part.populations.cardinalities}
    )
    with spare_random_numbers(), torch.no_grad(), poutine.block():
        whole.setup(*args, **kwargs)
        whole.inherit(part.companions)
    return AllData(whole, args, kwargs)


MOST_MOVES = 32  # of one latent: a certificate needs no more, and counts may have thousands of values


@torch.no_grad()
def covered_mass(guide: Any, *args: Any, num_parents: int | None = None, **kwargs: Any) -> Tensor:
    r"""Upper bound of each population's posterior mass, from neighbours of its states.

    With :math:`\mathcal N_n` the states outside the population :math:`K_n` that differ from one of its states in one latent,

    .. math:: c_n = \frac{\sum_{s \in K_n} p(s, y_n)}{\sum_{s \in K_n \cup \mathcal N_n} p(s, y_n)} \ge
              \frac{\sum_{s \in K_n} p(s, y_n)}{\sum_s p(s, y_n)} = p(s \in K_n \mid y_n) ,

    as the denominator lacks non-negative terms. So a small :math:`c_n` proves that at least :math:`-\log c_n` nats of the log evidence are
    missing. A large one proves nothing, since modes that no single move reaches go unseen.

    Assumed are distinct states and exact log joints: with an approximate ``conditional`` no bound holds. Latents of other guides are held
    at their medians. Cost: :math:`N \cdot P \cdot M` log joints for ``P`` parents and ``M`` moves (the latents, if binary).

    Example:
        >>> y = linear_bars(20, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=256).infer(y, ExhaustiveSearch(), steps=1)  # all states there are
        >>> torch.allclose(covered_mass(guide, y), torch.ones(20, dtype=torch.float64))
        True

    Args:
        guide: an ``AutoTruncated``, or an ``AutoGuideList`` that holds one.
        *args: the model's arguments.
        num_parents: use only the neighbours of so many most probable states. Cheaper, looser, still a bound. Default: all.
        **kwargs: the model's keyword arguments.

    Returns:
        ``(N,)`` in float64, for the data points that the model selects.

    Raises:
        ValueError: if ``num_parents`` is below 1.
        TypeError: if the guide has no ``AutoTruncated``.
    """
    num_parents = None if num_parents is None else check_count("num_parents", num_parents)
    _, log_joint, population = score_populations(guide, args, kwargs)
    return plain(certificate(log_joint, population, num_parents))


def certificate(log_joint: LogJoint, population: Population, num_parents: int | None = None) -> Tensor:
    """:func:`covered_mass` of scored populations."""
    moves = Moves(population.space, population.words.device, MOST_MOVES)
    best = population.log_joint.topk(min(num_parents or population.num_states, population.num_states), -1).indices
    parents = population.take(best)
    free_energy = population.free_energy()
    missing = torch.full_like(free_energy, -torch.inf)
    for rows in log_joint.row_blocks(population.num_states + parents.shape[1] * moves.count):
        is_new = _new_neighbours(moves, population.words[rows], parents[rows], log_joint.memory_budget)
        for columns in row_slices(parents.shape[1] if moves.count else 0, 64 * len(is_new) * moves.count, log_joint.memory_budget):
            scores = log_joint.score(moves.neighbours(parents[rows, columns]), rows).double()
            new = is_new[:, columns.start * moves.count : columns.stop * moves.count]
            missing[rows] = torch.logaddexp(missing[rows], scores.masked_fill(~new, -torch.inf).logsumexp(-1))
    # Where all states are impossible the sums are zero, and nothing is covered.
    return (free_energy - torch.logaddexp(free_energy, missing)).exp().masked_fill(free_energy == -torch.inf, 0.0)


def _new_neighbours(moves: Moves, words: Tensor, parents: Tensor, memory_budget: int) -> Tensor:
    """Returns which neighbours are outside the population and not repeated, ``(n, P * M)``."""
    size = rows_per_block(32 * words.shape[-1] * (words.shape[1] + parents.shape[1] * moves.count), memory_budget)
    blocks = [
        ~ops.find_duplicates(torch.cat([own, moves.neighbours(roots)], 1))[:, words.shape[1] :]
        for own, roots in zip(words.split(size), parents.split(size), strict=True)
    ]
    return torch.cat(blocks)


@dataclasses.dataclass(frozen=True)
class Growth:
    """Free energies ``(N,)`` of populations as they are, and of larger ones.

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=5.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> growth = population_growth(guide, y, steps=2)
        >>> growth.by_size.shape
        torch.Size([20])

    Attributes:
        free_energy: as they are.
        searched: of the best states that more search finds, as many as now.
        doubled: of twice as many.
    """

    free_energy: Tensor
    searched: Tensor
    doubled: Tensor

    @property
    def by_search(self) -> Tensor:
        """The gain of more search, never negative; large without convergence."""
        return torch.where(self.searched == self.free_energy, 0.0, self.searched - self.free_energy)

    @property
    def by_size(self) -> Tensor:
        """The further gain of twice the states, never negative."""
        return torch.where(self.doubled == self.searched, 0.0, self.doubled - self.searched)


@torch.no_grad()
def population_growth(guide: Any, *args: Any, search: Search | None = None, steps: int = 10, **kwargs: Any) -> Growth:
    r"""Gains of the free energy by further search and twice the states.

    A large enough population gains little from being doubled. The gain is at least :math:`\log` of the ratio of the masses covered. The
    populations of the guide stay as they are.

    Example:
        >>> y = linear_bars(10, 3, mean_active=2.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> bool((population_growth(guide, y).by_size >= 0).all())
        True

    Args:
        guide: an ``AutoTruncated``, or an ``AutoGuideList`` that holds one.
        *args: the model's arguments.
        search: improves both populations. Default: the :class:`~pyro_truncated.search.AutomaticSearch`. One that learns from data
            keeps what it knows and takes these for new ones, so ``GPSelect(inputs=...)`` needs a function here.
        steps: search steps.
        **kwargs: the model's keyword arguments.

    Returns:
        The free energies; in float64, on the CPU.
    """
    steps = check_count("steps", steps)
    search = AutomaticSearch() if search is None else search
    check_search(search)
    # Before the model draws as many numbers as it has data points.
    random = ops.Stream(ops.draw_seed())
    part, log_joint, population = score_populations(guide, args, kwargs)
    observations = log_joint.observations()
    size = min(2 * population.num_states, population.space.size)
    positions = torch.arange(len(population), device=population.words.device) if population.indices is None else population.indices
    searched, doubled = [], []
    for rows in log_joint.row_blocks(3 * size):
        current = Population(population.space, population.words[rows], population.log_joint[rows], positions[rows])
        own_observations = {name: value[rows] for name, value in observations.items()}
        # A search that has learned from its training data keeps what it knows.
        keys: dict[str, Any] = {"first_position": part.populations.first_position, "random": random.again()}
        keys["is_linear"] = log_joint.packed_model is not None and log_joint.packed_model.is_linear
        keys["is_global"] = not log_joint.layout.plates
        batch = SearchBatch(current, RowScorer(log_joint, rows), own_observations, is_new=True, **keys)
        spare = batch.evaluate(
            initial_population(current.space, len(current), size, batch.random, current.words.device, rows=batch.positions)
        )
        small = search.improve(batch, steps)
        large = search.improve(dataclasses.replace(batch, population=current.merge(spare, size)), steps)
        # Of all that either search has found, so that the two numbers differ by the size alone.
        large = large.merge(small)
        doubled.append(large.free_energy())
        searched.append(small.merge(large).free_energy())
    return Growth(plain(population.free_energy()), plain(torch.cat(searched)), plain(torch.cat(doubled)))


@torch.no_grad()
def effective_states(guide: Any, *args: Any, **kwargs: Any) -> Tensor:
    r"""The effective number of states, :math:`\exp(-\sum_s q_n(s) \log q_n(s))`, ``(N,)``.

    Near ``S`` the population is exhausted and should be larger; near 1 it could be smaller. It says nothing about mass outside.

    Example:
        >>> y = linear_bars(10, 3, mean_active=2.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> bool((effective_states(guide, y) <= 16).all())
        True
    """
    return plain(score_populations(guide, args, kwargs)[2].effective_states().double())
