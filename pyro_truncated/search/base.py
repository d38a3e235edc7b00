"""The interface of searches, which propose states for populations."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.states.population import Moments, Population, join
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.arguments import Renamed, names_arguments
from pyro_truncated.utils.console import ReprFromArguments
from pyro_truncated.utils.parameter_store import spare_random_numbers

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class SearchBatch:
    """What a search sees: populations of ``N`` data points, and scores.

    Example:
        >>> space = StateSpace([2, 2])
        >>> population = Population(space, space.enumerate()[None, :2], torch.zeros(1, 2))
        >>> batch = SearchBatch(population, score=lambda words: 1.0 - words.sum(-1))
        >>> batch.score(space.enumerate()[None])
        tensor([[ 1.,  0., -1., -2.]])

    Attributes:
        population: current populations, log joints up to date.
        score: maps packed states ``(N, C, num_words)`` to their log joints ``(N, C)``, for any ``C``. An attribute ``flip_gains`` maps a
            state of each data point ``(N, num_words)`` to the gain of each single flip, ``(N, L)``. It gives ``None`` where scoring the
            flips is as cheap. An attribute ``with_moments`` maps states to their log joints and the :class:`.Moments` of the observations
            in many of them, or ``None`` if unknown.
        observations: the batch's observed values by site name, data points first.
        marginals: posterior probabilities that the latents are active, ``(N, L)``, where they are known otherwise than from the
            populations: a sampler's, say.
        is_new: whether these are new data, of which a search that learns from data shall not learn.
        first_position: position of the first data point among all data, where those of other processes come before it.
        random: the seeds of this search. With :attr:`positions` they make draws for a data point independent of the batch. Without it,
            seeds come from the search's own generator or torch's global one.
        mean_active: mean probability that a latent is active, ``(L,)``, over all data points searched at a time, also those in other
            blocks and processes, for searches that take it.
        is_spread: whether other processes search other data points at the same time.
        is_met: whether a search that learns from data has met all that are searched at a time. Then it learns no more from this block.
        is_linear: whether the latents are binary causes, independent a priori, whose sum is observed under
            :class:`~pyro_truncated.distributions.LinearSuperposition`.
        is_global: whether all latents of the program are one decision, in no data plate.
        moments: moments of the observations in the populations' first states, or of some data points only.
    """

    population: Population
    score: Callable[[Tensor], Tensor]
    observations: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    marginals: Tensor | None = None
    is_new: bool = False
    first_position: int = 0
    random: ops.Stream | None = None
    mean_active: Tensor | None = None
    is_spread: bool = False
    is_met: bool = False
    is_linear: bool = False
    is_global: bool = False
    moments: Moments | None = None

    @functools.cached_property
    def positions(self) -> Tensor:
        """Positions ``(N,)`` of the data points among all, which key random numbers."""
        indices, device = self.population.indices, self.population.words.device
        if indices is None:
            return _in_order(self.first_position, len(self.population), device)
        return self.first_position + indices.to(device).long()

    def draws(self, generator: torch.Generator | None) -> dict[str, Any]:
        """Returns the arguments ``rows`` and ``generator`` of random operators."""
        return {"rows": self.positions, "generator": self.source(generator)}

    def source(self, generator: torch.Generator | None) -> ops.Source:
        """Returns the source of seeds for a search."""
        return generator if self.random is None else self.random.branch(generator)

    def activity(self) -> Tensor:
        """Returns :attr:`mean_active` ``(L,)``, by default that of this batch."""
        return self.population.marginals().mean(0) if self.mean_active is None else self.mean_active

    @property
    def space(self) -> StateSpace:
        """The state space of the populations."""
        return self.population.space

    def evaluate(self, words: Tensor) -> Population:
        """Returns candidates ``(N, C, num_words)`` with their log joints."""
        return dataclasses.replace(self.population, words=words, log_joint=self.score(words))

    def evaluate_with_moments(self, words: Tensor) -> tuple[Population, Moments | None]:
        """Returns scored states and the known moments of observations in them."""
        with_moments = getattr(self.score, "with_moments", None)
        log_joint, moments = (self.score(words), None) if with_moments is None else with_moments(words)
        return dataclasses.replace(self.population, words=words, log_joint=log_joint), moments

    scored = Renamed("evaluate")
    scored_with_moments = Renamed("evaluate_with_moments")


def flat_observations(batch: SearchBatch) -> Tensor:
    """Returns a batch's observations side by side, ``(n, D)`` in float64."""
    size = len(batch.population)
    parts = [value.reshape(size, math.prod(value.shape[1:])).double() for value in batch.observations.values() if len(value) == size]
    if not parts:
        shapes = {name: tuple(value.shape) for name, value in batch.observations.items()}
        raise ValueError(f"there is no observed site with one value per data point to regress on; give inputs. Shapes are {shapes}.")
    return torch.cat(parts, 1)


def regression_inputs(batch: SearchBatch, inputs: Callable[[SearchBatch], Tensor] | None) -> Tensor:
    """Returns what to regress on, ``(n, D)``: a function's values, or observations."""
    if inputs is None:
        return flat_observations(batch)
    values, size = apply_to_batch(inputs, batch), len(batch.population)
    if not isinstance(values, Tensor) or values.dim() != 2 or len(values) != size:
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"inputs must return a matrix of {size} rows, one per data point of the batch; got {got}")
    return values.detach().double()


@functools.lru_cache(maxsize=1)
def _in_order(first: int, number: int, device: torch.device) -> Tensor:
    # The same tensor in every step: what random numbers are made of for these positions is then known.
    return torch.arange(first, first + number, device=device)


class Stateful:
    """An object with its own generator, or that learns from data."""

    def forget(self) -> None:
        """Forgets what was learned of data; most searches learn nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what was learned of data, and the generator's state.

        It holds tensors, numbers, strings, lists and dictionaries. Subclasses that learn more add to it. States of generators are named
        ``generator``, and are as on the CPU.
        """
        generator: torch.Generator | None = getattr(self, "generator", None)
        return {} if generator is None else {"generator": generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, perhaps in another process."""
        generator: torch.Generator | None = getattr(self, "generator", None)
        if generator is not None and "generator" in state:
            generator.set_state(state["generator"])


class Search(ReprFromArguments, Stateful, abc.ABC):
    """Proposes states; the best distinct ones of population and proposals survive.

    Searches add up: ``a + b`` lets both propose for the same populations. A search that learns from data has :meth:`forget`,
    :meth:`state_dict` and :meth:`load_state_dict`, and so have affinities. A search that wraps another one passes on its requests
    (:attr:`takes_activity`, :attr:`takes_moments`, :attr:`learns`).

    Example:
        >>> class Neighbours(Search):
        ...     def propose(self, batch):
        ...         words = batch.population.words.roll(1, 0)
        ...         return Population(batch.space, words, batch.score(words))
        >>> y = linear_bars(20, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, Neighbours() + EvolutionarySearch(4, 3), steps=2)

    Attributes:
        binary_only: whether it refuses latents of more than two values.
        mixture_only: whether it refuses more than one latent.
    """

    binary_only: ClassVar[bool] = False
    mixture_only: ClassVar[bool] = False

    @property
    def takes_activity(self) -> bool:
        """Whether the search asks for :meth:`SearchBatch.activity`."""
        return False

    @property
    def takes_moments(self) -> bool:
        """Whether the search asks for :attr:`SearchBatch.moments`."""
        return False

    @property
    def learns(self) -> bool:
        """Whether the search learns from data, by :meth:`meet`."""
        return False

    def max_proposals(self, num_states: int) -> int:
        """Returns roughly how many states it proposes per data point."""
        return max(256, 4 * num_states)  # an estimate, for blocks that fit into memory

    def check_space(self, space: StateSpace) -> None:
        """Refuses a space in which the search can propose nothing.

        Raises:
            ValueError: naming the search and the space.
        """
        if self.binary_only and not space.is_binary:
            raise ValueError(f"{type(self).__name__} is for binary latents; the model has {space}")
        if self.mixture_only and space.num_latents != 1:
            what = "is for mixtures, whose one latent is the component"
            raise ValueError(f"{type(self).__name__} {what}; the model has {space.num_latents} latents")

    def meet(self, batch: SearchBatch) -> None:
        """Learns from shards of data, once for all; every process calls it.

        Searches that learn from whole data do so where they propose.
        """

    @abc.abstractmethod
    def propose(self, batch: SearchBatch) -> Population:
        """Returns candidates with log joints, ``(N, C)``; repetitions are allowed."""

    def step(self, batch: SearchBatch) -> Population:
        """Returns the best of old states and proposals: free energies never fall."""
        return batch.population.merge(propose_with(self, batch))

    def improve(self, batch: SearchBatch, steps: int = 1) -> Population:
        """Returns the populations after some steps; whole spaces stay unchanged."""
        for _ in range(0 if batch.population.is_complete else steps):
            batch = dataclasses.replace(batch, population=self.step(batch))
        return batch.population

    def __add__(self, other: Search) -> Search:
        return CombinedSearch((self, other))


def check_search(search: object, advice: str | None = None) -> None:
    """Refuses what is no search; the message may give advice."""
    if not isinstance(search, Search):
        kind = repr(search) if isinstance(search, type) else f"a {type(search).__name__}"
        hint = "" if advice is None else f"; {advice}"
        raise TypeError(f"search must be a pyro_truncated search, such as EvolutionarySearch(); got {kind}{hint}")


def _comes_with_library(function: Callable[..., Any]) -> bool:
    """Whether a function or method is the library's, not a user's."""
    return str(getattr(function, "__module__", None)).startswith("pyro_truncated.")


def apply_to_batch(function: Callable[[SearchBatch], _Result], batch: SearchBatch) -> _Result:
    """Calls a function; a user's gets copies, which it may change."""
    if _comes_with_library(function):
        return function(batch)
    words, log_joint = batch.population.words.clone(), batch.population.log_joint.clone()
    return function(dataclasses.replace(batch, population=dataclasses.replace(batch.population, words=words, log_joint=log_joint)))


class _CheckedScore:
    """Scores what a user's search proposes, if it is states."""

    def __init__(self, name: str, batch: SearchBatch) -> None:
        self._name, self._batch = name, batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch.score, name)

    def __call__(self, words: Tensor) -> Tensor:
        population = self._batch.population
        ops.check_words(f"states that {self._name} proposes", words)
        if words.shape[::2] != population.words.shape[::2]:
            expected = f"({len(population)}, C, {population.words.shape[2]})"
            raise ValueError(f"states that {self._name} proposes must have the shape {expected}; got {tuple(words.shape)}")
        self._batch.space.check(words)
        return self._batch.score(words) if words.shape[1] else population.log_joint[:, :0]


def propose_with(search: Search, batch: SearchBatch) -> Population:
    """Returns what a search proposes; what a user's own does is checked."""
    if _comes_with_library(search.propose):
        return search.propose(batch)
    name = type(search).__name__
    proposals: Any = apply_to_batch(search.propose, dataclasses.replace(batch, score=_CheckedScore(name, batch)))
    if not isinstance(proposals, Population):
        raise TypeError(f"{name}.propose must return a Population, such as batch.evaluate(words); got a {type(proposals).__name__}")
    if proposals.log_joint.shape != proposals.words.shape[:2]:
        shapes = f"{tuple(proposals.words.shape)} and {tuple(proposals.log_joint.shape)}"
        raise ValueError(f"{name}.propose must return a log joint for each state; got words and log joints of shapes {shapes}")
    _check_states(search, batch, proposals)
    return proposals


def _check_states(search: Search, batch: SearchBatch, population: Population, *, rtol: float = 1e-3, atol: float = 1e-2) -> None:
    """Refuses words that are no states, and log joints of another model.

    Of the log joints it looks at the largest of each data point, to these tolerances or those of their type.
    """
    batch.space.check(population.words)
    if not population.words.shape[1]:
        return
    name = type(search).__name__
    given, best = population.log_joint.max(1, keepdim=True)
    words, score = population.words.take_along_dim(best.unsqueeze(-1), 1), _CheckedScore(name, batch)
    with spare_random_numbers():
        scored = score(words)
        is_close = torch.isclose(given.to(scored), scored, rtol=max(rtol, 2 * torch.finfo(given.dtype).eps), atol=atol)
        # Impossible states raise no bound.
        is_wrong = ~is_close & (given != -torch.inf)
        # Given draws of a conditional, a second score of the same state is another one.
        if not bool(is_wrong.any()) or not torch.equal(score(words), scored):
            return
    row = int(is_wrong.flatten().nonzero()[0])
    raise ValueError(
        f"log joints that {name} returns must be those of the model, batch.score(words); "
        f"got {float(given[row]):g} in the place of {float(scored[row]):g} for data point {row} of the batch"
    )


def improve_with(search: Search, batch: SearchBatch, steps: int) -> Population:
    """Returns populations after some steps; those of a user's own are checked."""
    population = search.improve(batch, steps)
    if not (_comes_with_library(search.step) and _comes_with_library(search.improve)):
        _check_states(search, batch, population)
        population.assert_distinct()
    return population


class CombinedSearch(Search):
    """Several searches that propose for the same populations; written ``a + b``.

    Example:
        >>> EvolutionarySearch(4, 3) + SampledSearch(16)
        EvolutionarySearch(parents=4, children=3, generations=2) + SampledSearch(num_samples=16)

    Raises:
        TypeError: if one of them is no search.
        ValueError: if one of them replaces populations (``merge=False``), which the sum could not honour.
    """

    @names_arguments
    def __init__(self, searches: tuple[Search, ...]) -> None:
        for search in searches:
            if not isinstance(search, Search):
                raise TypeError(f"only searches can be added to searches; got {search!r}")
            if not getattr(search, "merge", True):
                raise ValueError(
                    f"{type(search).__name__}(merge=False) replaces populations and cannot be added to other searches; use merge=True"
                )
        self.searches = searches

    @property
    def takes_activity(self) -> bool:
        """Whether one of the searches does."""
        return any(search.takes_activity for search in self.searches)

    @property
    def takes_moments(self) -> bool:
        """Whether one of the searches does."""
        return any(search.takes_moments for search in self.searches)

    @property
    def learns(self) -> bool:
        """Whether one of the searches does."""
        return any(search.learns for search in self.searches)

    def max_proposals(self, num_states: int) -> int:
        """Returns the sum of all searches' ``max_proposals``."""
        return sum(search.max_proposals(num_states) for search in self.searches)

    def check_space(self, space: StateSpace) -> None:
        """Refuses what one of the searches refuses."""
        for search in self.searches:
            search.check_space(space)

    def meet(self, batch: SearchBatch) -> None:
        """Those that learn meet the data."""
        for search in self.searches:
            search.meet(batch)

    def propose(self, batch: SearchBatch) -> Population:
        """All proposals side by side."""
        return join([propose_with(search, batch) for search in self.searches])

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.searches))

    def forget(self) -> None:
        """Makes all searches forget what they have learned."""
        for search in self.searches:
            search.forget()

    def state_dict(self) -> dict[str, Any]:
        """The states of all searches, in order."""
        return {"searches": [search.state_dict() for search in self.searches]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Gives every search its own."""
        for search, own in zip(self.searches, state["searches"], strict=True):
            search.load_state_dict(own)
