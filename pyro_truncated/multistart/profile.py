"""What a model is, and how it is trained: found out once."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_truncated.distributed.shards import drawn_rows, find_part, some_rows, total_rows
from pyro_truncated.em.closed_form import ClosedFormModel
from pyro_truncated.em.gibbs import GibbsModel
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.multistart.config import Initializer, LearnConfig
from pyro_truncated.multistart.model_parameters import ModelParameters
from pyro_truncated.program.chain_scorer import ChainLayout
from pyro_truncated.program.sites import is_subsampled
from pyro_truncated.search.automatic import AutomaticSearch, has_many_latents
from pyro_truncated.search.base import Search
from pyro_truncated.search.evolutionary import EvolutionarySearch
from pyro_truncated.search.preselection import Preselection
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.annealing import cooling
from pyro_truncated.utils.arrays import as_data, holds_arrays, is_array
from pyro_truncated.utils.parameter_store import spare_random_numbers

Optimizer = Literal["closed-form M-steps", "Gibbs sampling", "gradients"]


@dataclasses.dataclass(frozen=True)
class Profile:
    """A model, its data, and all that decides how it is trained.

    :func:`profile_model` makes it; nothing else asks what a model is. Optional methods of models: :doc:`/how-to/models`.
    """

    model: Any  # its parameters are changed in place
    y: Tensor
    search: Search | None  # fills the populations; None for the model's own
    num_states: int  # per data point
    lr: float  # learning rate of gradient steps
    optimizer: Optimizer
    initialization: str  # name of where restarts begin
    initializer: Initializer | None  # goes there; None where noise is added to one place
    num_posteriors: float  # of all rows of data: fewer than rows where these share latents
    config: LearnConfig
    space: StateSpace | None = None  # states of a data point; None for Gibbs samplers
    temperature: Callable[[int], float] = lambda step: 1.0  # of a restart, by its step
    tolerance: float = 0.0  # largest difference in nats per data point of two restarts that agree
    max_count: int | Mapping[str, int] | None = None  # largest value of count sites without an upper end
    generator: torch.Generator | None = None
    is_product: bool = False  # each node of the program has a set of states
    is_chain: bool = False  # these are steps of chains
    is_informed: bool = False  # initialize searches for the components itself: no annealing
    is_mixture: bool = False  # one with closed-form M-steps and a search of its own
    is_resizable: bool = False  # a model of causes that can have more of them
    is_network: bool = False  # two or more of torch's layers hold weights
    layers: frozenset[str] = frozenset()  # names of weights and biases of torch's own layers
    has_companion: bool = False  # continuous latents are left to a guide beside the truncated one
    is_conditional: bool = False  # the model samples its continuous latents given the discrete ones
    max_restarts: int | None = None  # most of them, if said
    watch: Callable[[float], None] = lambda free_energy: None  # is told the free energy after every step
    # The guide that has read the program, which those of restarts are set up like.
    _guides: list[AutoTruncated] = dataclasses.field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def parameters(self) -> ModelParameters:
        """What the model has learned, by name."""
        return ModelParameters(self.model, self.y)

    @property
    def num_data(self) -> int:
        """How many rows the data of all processes have."""
        return total_rows(self.y)

    @property
    def spans_processes(self) -> bool:
        """Whether other processes hold other rows of the data."""
        return find_part(self.y) is not None

    @property
    def shares_latents(self) -> bool:
        """Whether rows of data share latents."""
        return self.num_posteriors < self.num_data and not self.is_product

    @property
    def is_large(self) -> bool:
        """Whether there are so many latents that to evaluate each is dear."""
        return self.space is not None and has_many_latents(self.space)

    @property
    def learns_causes(self) -> bool:
        """Whether closed-form M-steps learn causes that are off at zero."""
        return self.is_resizable and self.optimizer == "closed-form M-steps"

    @property
    def has_decoder(self) -> bool:
        """Whether gradients train a network with a posterior for each row."""
        return self.is_network and self.optimizer == "gradients" and not self.shares_latents and not self.is_product

    def initialize(self) -> None:
        """Goes where a restart begins, if an initialiser draws it."""
        if self.initializer is not None:
            self.initializer(self.model, self.y, self.generator)

    def make_guide(self) -> AutoTruncated:
        """A truncated guide that has not seen its data yet."""
        conditional = self.model.default_conditional() if self.is_conditional else None
        guide = AutoTruncated(self.model, num_states=self.num_states, conditional=conditional, max_count=self.max_count)
        if self._guides:
            guide.set_up_like(self._guides[0])
        return guide

    def set_up_guide(self) -> AutoTruncated:
        """A truncated guide that knows the latents of its data."""
        guide = self.make_guide()
        with spare_random_numbers():
            guide.setup(self.y)
        if not self._guides:
            self._guides.append(guide)
        return guide

    def make_search(self, space: StateSpace) -> Search:
        """What fills populations: the search that was named, or one that fits."""
        if self.search is not None:
            return self.search
        if hasattr(self.model, "default_search") and not self.is_product:
            return self.model.default_search(self.num_states)
        is_crossed = 2 * space.cardinalities.count(2) > space.num_latents or self.is_resizable
        if self.is_product or not is_crossed or space.size <= self.num_states or has_many_latents(space):
            return AutomaticSearch()
        # Under user-defined models scores dominate the cost: one generation of 30 children reached as much as two,
        # and as the 56 of eight parents. Four parents once ended in a worse optimum.
        return EvolutionarySearch(6, generations=1, crossover=True) if self.optimizer == "gradients" else EvolutionarySearch(crossover=True)

    def replace(self, **fields: Any) -> Profile:
        """Returns a profile with other fields."""
        return dataclasses.replace(self, **fields)

    def for_restarts(self) -> Profile:
        """Returns the profile of restarts, of a part of the data.

        A model with details that lead to worse optima is simplified. Half the states are enough to compare restarts from one place, or near
        the end. Populations that hold all states stay whole.
        """
        config, space = self.config, self.space
        num_causes = self.model.num_latents if space is None else space.num_latents
        if space is not None and num_causes == 1:
            num_causes = space.cardinalities[0]
        number = max(config.min_data, config.data_per_latent * num_causes)
        if self.is_mixture:
            num_parameters = sum(value.numel() for value in self.parameters.learned().values())
            number = max(number, config.mixture_min_data, config.mixture_data_per_parameter * num_parameters)
        is_all = self.shares_latents or self.is_product or self.num_data <= number
        part = some_rows(self.y, self.num_data) if is_all else drawn_rows(self.y, number, self.generator)
        is_full = self.max_restarts == 1 or self.is_product or (self.initializer is not None and not self.is_informed)
        has_all_states = is_full or space is None or space.size <= self.num_states
        num_posteriors = self.num_posteriors * total_rows(part) / self.num_data
        model = self.model.simplified() if hasattr(self.model, "simplified") else self.model
        return self.replace(
            model=model,
            y=part,
            num_posteriors=num_posteriors,
            num_states=self.num_states if has_all_states else max(1, self.num_states // 2),
        )


def profile_model(
    model: Any,
    y: Tensor,
    search: Search | None = None,
    *,
    num_states: int | None = None,
    max_restarts: int | None = None,
    max_count: int | Mapping[str, int] | None = None,
    generator: torch.Generator | None = None,
    config: LearnConfig | None = None,
) -> Profile:
    """Finds out what a model is; arguments are those of :func:`~pyro_truncated.learn`."""
    config = LearnConfig() if config is None else config
    is_gibbs: bool = isinstance(model, GibbsModel)
    is_conditional = hasattr(model, "default_conditional")
    has_closed_form: bool = isinstance(model, ClosedFormModel)
    _check_arguments(model, search, is_gibbs, max_count)
    lr = (config.conditional_lr if is_conditional else config.gradient_lr) if config.lr is None else config.lr
    optimizer: Optimizer = "Gibbs sampling" if is_gibbs else "closed-form M-steps" if has_closed_form else "gradients"
    name, initializer = _find_initializer(model, config.initializer)
    profile = Profile(
        model,
        y,
        search,
        num_states or 1,
        lr,
        optimizer,
        name,
        initializer,
        total_rows(y),
        config,
        max_count=max_count,
        generator=generator,
        is_conditional=is_conditional,
        # The first steps of an optimiser may lose more than they gain in the end.
        is_informed=optimizer != "gradients" and config.initializer is None and bool(getattr(model, "has_informed_init", False)),
        is_resizable=hasattr(model, "with_latents") and not is_gibbs and initializer is not None,
        max_restarts=max_restarts,
    )
    if not is_gibbs:
        profile = _with_latents(profile)
    first, tolerance = _annealing(profile)
    temperature = cooling(first if config.temperature is None else config.temperature, config.restart_steps)
    is_many = profile.is_mixture and profile.space is not None and profile.space.size > config.num_states
    num_states = num_states or (config.mixture_num_states if is_many else config.num_states)
    if search is not None and profile.space is not None and profile.space.size > num_states:
        search.check_space(profile.space)
    tolerance = max(tolerance, config.total_tolerance / profile.num_posteriors) if config.tolerance is None else config.tolerance
    return profile.replace(num_states=num_states, temperature=temperature, tolerance=tolerance)


_SIDE_BY_SIDE = (
    "A model of several arrays takes them side by side: learn(lambda rows: model(rows[:, :p], rows[:, p:]), torch.cat([x, y], 1))"
)


def check_one_array(y: Any) -> Tensor:
    """Returns data as a tensor."""
    if isinstance(y, (tuple, Mapping)) and holds_arrays(tuple(y.values()) if isinstance(y, Mapping) else y):
        raise TypeError(f"y must be one array of data; got a {type(y).__name__} of {len(y)}. {_SIDE_BY_SIDE}")
    rows = as_data("y", y)
    if not rows.shape or not total_rows(rows):
        got = f"shape {tuple(rows.shape)}" if rows.shape else f"one number, {rows.item()}"
        raise ValueError(f"y must have a row for each data point, (N, ...) with N > 0; got {got}")
    # Linear algebra knows no half precision.
    return rows.float() if rows.is_floating_point() and rows.dtype.itemsize < 4 else rows


def _check_arguments(model: Any, search: Any, is_gibbs: bool, max_count: Any) -> None:
    if isinstance(model, (type, AutoGuide)) or not callable(model):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"model must be a Pyro model: a function, or an instance of a class that can be called; got {kind}")
    if isinstance(search, Tensor) or is_array(search):
        raise TypeError(f"learn takes one array of data, and the argument after it is a search. {_SIDE_BY_SIDE}")
    if search is not None and not isinstance(search, Preselection if is_gibbs else Search):
        raise TypeError(
            "search must be one of pyro_truncated.search, such as EvolutionarySearch(), and for a Gibbs sampler one that selects latents, "
            f"such as GPSelect(5); got {search!r}"
        )
    if max_count is not None and is_gibbs:
        raise ValueError("max_count bounds count sites, and a Gibbs sampler has none: leave it out")


def _find_initializer(model: Any, initializer: Initializer | None) -> tuple[str, Initializer | None]:
    """Returns an initialiser and its name, the given one first."""
    if initializer is not None:
        return getattr(initializer, "__name__", type(initializer).__name__), initializer
    if hasattr(model, "draw_start"):
        return "draw_start", lambda model, y, generator: model.draw_start(y, generator)
    if not hasattr(model, "initialize"):
        return "parameters", None
    if len(inspect.signature(model.initialize).parameters) > 1:
        return "initialize", lambda model, y, generator: model.initialize(y, generator)
    return "fixed initialize", None


def _with_latents(profile: Profile) -> Profile:
    """Returns the profile of a model with truncated posteriors, given its latents."""
    guide, model, y = profile.set_up_guide(), profile.model, profile.y
    parameters, tensors = profile.parameters, profile.parameters.tensors()
    for frame in filter(is_subsampled, guide.frames.values()):
        raise ValueError(
            f"learn trains on all rows in every step, but the plate '{frame.name}' subsamples {frame.size} of {frame.full_size}. "
            "Leave subsample_size out, or train with SVI and Truncated_ELBO"
        )
    chain = guide.product if isinstance(guide.product, ChainLayout) else None
    if chain is not None and profile.config.temperature not in (None, 1.0):
        raise ValueError(f"temperature must be 1 for sites of chains, whose sets are not annealed; got {profile.config.temperature}")
    has_one = guide.space.num_latents == 1
    # Rows may share latents; without a plate all data have one posterior. Of sequences of chains every step has one.
    num_posteriors = (1 if chain is None else chain.num_steps) * profile.num_data * min(1.0, guide.layout.num_data / len(y))
    return profile.replace(
        space=guide.space,
        num_posteriors=num_posteriors,
        is_product=guide.product is not None,
        is_chain=chain is not None,
        # Models of a single binary cause have no search of their own.
        is_mixture=has_one and profile.optimizer != "gradients" and hasattr(model, "default_search") and not profile.is_informed,
        is_network=sum(tensors[name].dim() > 1 for name in parameters.layers) > 1,
        layers=parameters.layers,
        has_companion=bool(guide.layout.other_latents) and not profile.is_conditional,
    )


def _annealing(profile: Profile) -> tuple[float, float]:
    """Returns the first temperature and the tolerance.

    Mixture components that a high temperature makes equal do not separate. Gibbs chains and gradients lose most components at the high
    temperature, and recover too slowly. Beside continuous latents the free energy bounds the evidence, where a nat in all tells models
    apart.
    """
    config = profile.config
    if profile.has_companion:
        return 1.0, config.fine_tolerance
    if profile.is_product or profile.is_informed or profile.initialization == "draw_start":
        return 1.0, config.coarse_tolerance
    if profile.space is not None and profile.space.num_latents == 1:
        return 1.0, config.fine_tolerance
    return config.em_temperature if profile.optimizer == "closed-form M-steps" else config.slow_temperature, config.coarse_tolerance
