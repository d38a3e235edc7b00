"""learn: a model trained from several annealed starts, until two of them agree."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from pyro.optim import ClippedAdam
from torch import Tensor
from tqdm.auto import tqdm

from pyro_truncated.em import ClosedForm, ClosedFormModel, GibbsEM, GibbsGuide, GibbsModel
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.search.automatic import AutomaticSearch
from pyro_truncated.search.base import Search
from pyro_truncated.search.evolutionary import EvolutionarySearch
from pyro_truncated.search.gp_select import GPSelect
from pyro_truncated.search.preselection import Preselection
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.training.elbo import Temperature, Truncated_ELBO
from pyro_truncated.training.redundancy import losses_without
from pyro_truncated.training.temperature import cooling
from pyro_truncated.utils.arrays import as_tensors
from pyro_truncated.utils.counts import check_counts
from pyro_truncated.utils.isolation import spare_random_numbers
from pyro_truncated.utils.own_store import empty_store

# Chosen on bars of other seeds than those of the tables.
_GROWTH = 2
_SHORT_DATA = 1000
_SETTLING, _SETTLED = 3, 10


class DisagreeingStartsWarning(UserWarning):
    """No two starts reached the same free energy: the best one may be a local optimum."""


@runtime_checkable
class ResizableModel(Protocol):
    """A model of exchangeable binary latents that can have more or fewer of them."""

    num_latents: int

    def with_latents(self, index: Tensor) -> Self:
        """A new model whose latent ``i`` is a copy of latent ``index[i]`` of this one."""


def learn(
    model: Any,
    y: Tensor,
    search: Search | None = None,
    *,
    num_states: int = 64,
    steps: int = 100,
    starts: int = 8,
    short_steps: int | None = None,
    temperature: float = 20.0,
    tolerance: float = 0.05,
    lr: float = 0.02,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> Any:
    r"""Trains a model from several annealed starts, until two of them agree, and returns the trained guide.

    Example::

        model = BinarySparseCoding(100, 20)
        guide = learn(model, y)
        guide.marginals()["s"]

    EM finds the local optimum that its start leads to. Here short runs on a part of the data start from different points, each at a
    temperature that falls to one (:func:`cooling`), until two of them have reached the same free energy, which chance hardly does in a bad
    optimum; the best one is then trained on all data.

    Models of binary causes (those with :meth:`ResizableModel.with_latents`: sparse coding, noisy-OR, maximal causes) start with twice as
    many latents as asked for. Optima in which two causes share a latent are rare there. Afterwards those latents are removed, a third of
    the surplus at a time, without which the best states lose least (:func:`~pyro_truncated.training.redundancy.losses_without`).

    Closed-form M-steps are used where the model has them, :class:`~pyro_truncated.GibbsEM` where it has a Gibbs sampler, and gradients
    (``ClippedAdam``) otherwise. Continuous latents of a model trained by gradients get an
    :class:`~pyro.infer.autoguide.AutoNormal` beside the truncated guide, without annealing.

    Args:
        model: a model that is called with the data; its parameters are changed in place. With ``initialize(y, generator)`` it says
            itself where a start may lie; other models start where they are, then from disturbed parameters.
        y: data, ``(N, ...)``, the model's argument.
        search: fills the populations; default: exhaustive where a population holds all states, evolutionary with crossover for binary
            latents, otherwise an :class:`~pyro_truncated.search.AutomaticSearch`.
        num_states: states per data point.
        steps: training steps on all data after the best start.
        starts: the most starts.
        short_steps: steps of a start; default: 60 with closed-form M-steps, else half of ``steps``.
        temperature: temperature that a start begins with.
        tolerance: free energies per data point, in nats, that differ by less than this are the same.
        lr: learning rate of gradient steps.
        generator: source of randomness of the starts; default: torch's global one.
        progress: whether to show a progress bar; default: if the output is a terminal.

    Returns:
        The trained :class:`~pyro_truncated.AutoTruncated`, :class:`~pyro_truncated.GibbsGuide`, or an ``AutoGuideList`` whose last part
        is the truncated guide. Its attribute ``starts`` holds the free energy per data point that each start reached.

    Warns:
        DisagreeingStartsWarning: if no two starts agree.

    Raises:
        ValueError: if a number is out of range.
        TypeError: if the search selects no latents for a Gibbs sampler.
    """
    closed_form = isinstance(model, ClosedFormModel)
    short = short_steps if short_steps is not None else 60 if closed_form else max(1, steps // 2)
    num_states, steps, starts, short = check_counts(num_states=num_states, steps=steps, starts=starts, short_steps=short)
    if search is not None and not isinstance(search, Preselection if isinstance(model, GibbsModel) else Search):
        raise TypeError(
            "search must be one of pyro_truncated.search, such as EvolutionarySearch(), and for a Gibbs sampler one that selects latents, "
            f"such as GPSelect(5); got {search!r}"
        )
    if not tolerance >= 0.0 or not lr > 0.0:
        raise ValueError(f"tolerance must not be negative and lr must be positive; got {tolerance} and {lr}")
    y = as_tensors(y)
    part = y if len(y) <= _SHORT_DATA else y[_permutation(len(y), generator)[:_SHORT_DATA].to(y.device)]
    settings = _Settings(search, num_states, lr)
    reached: list[float] = []
    best = _Start(-math.inf, {}, None)
    with _undriven(model), tqdm(total=starts * short + steps, disable=None if progress is None else not progress) as bar:
        for number in range(starts):
            bar.set_description(f"start {number + 1}")
            found = _start(model, part, settings, cooling(temperature, short), short, number, generator)
            reached.append(found.free_energy)
            best = max(best, found, key=lambda start: start.free_energy)
            bar.update(short)
            if _agree(reached, tolerance):
                break
        _put_back(model, part, best.parameters)
        bar.total, bar.desc = bar.n + steps, "training"
        run = _Run(model, y, settings)
        if best.states is not None and part is y:
            _offer(run, y, best.states)
        for _ in range(steps):
            bar.set_postfix(free_energy=f"{run.step(y):.2f}", refresh=False)
            bar.update()
        run.end()
    if starts > 1 and not _agree(reached, tolerance):
        _warn(reached)
    run.guide.starts = reached
    return run.guide


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What all runs of a call have in common."""

    search: Search | None
    num_states: int
    lr: float


class _Run:
    """A model with its guide, and the SVI that trains them in the way that the model allows."""

    def __init__(self, model: Any, y: Tensor, settings: _Settings, temperature: Temperature = 1.0) -> None:
        self.truncated: AutoTruncated | None = None
        self._driver = ClosedForm(model) if isinstance(model, (ClosedFormModel, GibbsModel)) else None
        if settings.search is not None:
            settings.search.forget()
        if isinstance(model, GibbsModel):
            search: Any = settings.search or GPSelect(5)
            self.guide: Any = GibbsGuide(model)
            elbo: Any = GibbsEM(search, temperature=temperature)
        else:
            self.guide, self.truncated, space = _guides(model, y, settings.num_states)
            search = settings.search or _default_search(space, settings.num_states)
            is_alone = self.guide is self.truncated
            elbo = Truncated_ELBO(search, temperature=temperature if is_alone else 1.0)
        self._svi = SVI(model, self.guide, self._driver or ClippedAdam({"lr": settings.lr}), elbo)

    def step(self, y: Tensor) -> float:
        """One step of training; the free energy per data point before it."""
        return -float(self._svi.step(y)) / len(y)

    def end(self) -> None:
        """Leaves the model to whoever trains it next."""
        if self._driver is not None:
            self._driver.release()


def _guides(model: Any, y: Tensor, num_states: int) -> tuple[Any, AutoTruncated, StateSpace]:
    """The guide of all latents of a model, the part of it that is truncated, and the space of its states."""
    truncated = AutoTruncated(model, num_states=num_states)
    with spare_random_numbers():
        truncated.setup(y)
    layout = truncated.layout
    if not layout.other_latents:
        return truncated, truncated, layout.space
    guide = AutoGuideList(model)
    guide.append(AutoNormal(poutine.block(model, hide=list(layout.sites))))
    truncated = AutoTruncated(model, num_states=num_states)
    guide.append(truncated)
    return guide, truncated, layout.space


def _default_search(space: StateSpace, num_states: int) -> Search:
    return EvolutionarySearch(crossover=True) if space.is_binary and space.size > num_states else AutomaticSearch()


# --- one start ---


class _Start(NamedTuple):
    """What a short run reached: the free energy per data point, the model's parameters, and the states of binary latents."""

    free_energy: float
    parameters: dict[str, Tensor]
    states: Tensor | None


def _start(
    model: Any, y: Tensor, settings: _Settings, temperature: Temperature, steps: int, number: int, generator: torch.Generator | None
) -> _Start:
    if isinstance(model, ResizableModel) and not isinstance(model, GibbsModel):
        with empty_store():
            return _grown_and_shrunk(model, y, settings, temperature, steps, generator)
    if hasattr(model, "initialize"):
        model.initialize(y, generator)
    elif number:
        _disturb(model, y, generator)
    with _forgetting_guides(model, y):
        free_energy = _trained(_Run(model, y, settings, temperature), y, steps)
    return _Start(free_energy, _copies(model, y), None)


def _grown_and_shrunk(
    model: Any, y: Tensor, settings: _Settings, temperature: Temperature, steps: int, generator: torch.Generator | None
) -> _Start:
    """Trains a model of more latents, and takes away those that it misses least."""
    number = model.num_latents
    model = model.with_latents(torch.arange(number).repeat(_GROWTH)).initialize(y, generator)
    run = _Run(model, y, settings, temperature)
    free_energy = _trained(run, y, steps)
    while model.num_latents > number:
        kept = _needed(run, y, max(number, model.num_latents - max(1, (model.num_latents - number) // 3)))
        states = _states(run)[..., kept]
        model = model.with_latents(kept)
        run = _Run(model, y, settings)
        _offer(run, y, states)
        free_energy = _trained(run, y, _SETTLING if model.num_latents > number else _SETTLED)
    return _Start(free_energy, _copies(model, y), _states(run))


def _states(run: _Run) -> Tensor:
    assert run.truncated is not None
    return run.truncated.population().states()


def _trained(run: _Run, y: Tensor, steps: int) -> float:
    for _ in range(steps):
        free_energy = run.step(y)
    run.end()
    return free_energy


def _needed(run: _Run, y: Tensor, number: int) -> Tensor:
    """The latents that are missed most, in order."""
    assert run.truncated is not None
    losses = losses_without(run.truncated.population(), run.truncated.log_joint_of(y))
    return losses.topk(number).indices.sort().values


@torch.no_grad()
def _offer(run: _Run, y: Tensor, states: Tensor) -> None:
    """Merges states, which may repeat each other, into the populations of a guide that has just been made."""
    guide = run.truncated
    assert guide is not None
    log_joint = guide.log_joint_of(y)
    words = guide.space.pack(states)
    population = guide.rescored(log_joint)
    merged = population.merge(Population(guide.space, words, log_joint.score(words).to(population.log_joint)))
    guide.populations.store_(merged.log_joint, None, merged.words)


# --- parameters ---


def _tensors(model: Any, y: Tensor) -> dict[str, Tensor]:
    """The tensors that hold what a model has learned, by name."""
    if isinstance(model, torch.nn.Module):
        return model.state_dict()
    with spare_random_numbers(), poutine.block(), torch.no_grad():
        nodes = poutine.trace(model, param_only=True).get_trace(y).nodes
    return {name: _unconstrained(node["value"]) for name, node in nodes.items() if node["type"] == "param"}


def _copies(model: Any, y: Tensor) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in _tensors(model, y).items()}


@contextmanager
def _forgetting_guides(model: Any, y: Tensor) -> Iterator[None]:
    """Takes parameters that are not the model's out of Pyro's store: those of a guide, whose name the next one will bear."""
    store = pyro.get_param_store()
    before = set(store)
    try:
        yield
    finally:
        for name in set(store) - before - _tensors(model, y).keys():
            del store[name]


def _unconstrained(value: Any) -> Tensor:
    return value.unconstrained().detach() if hasattr(value, "unconstrained") else value.detach()  # type: ignore[no-any-return]


@torch.no_grad()
def _disturb(model: Any, y: Tensor, generator: torch.Generator | None) -> None:
    """Adds noise to the (unconstrained) parameters, of half their root mean square, or of a half to those that are zero."""
    named = dict(model.named_parameters()) if isinstance(model, torch.nn.Module) else _tensors(model, y)
    for value in named.values():
        size = value.square().mean().sqrt()
        noise = torch.randn(value.shape, generator=generator, dtype=value.dtype, device=None if generator is None else generator.device)
        value.add_(0.5 * torch.where(size > 0, size, torch.ones_like(size)) * noise.to(value.device))


@torch.no_grad()
def _put_back(model: Any, y: Tensor, state: dict[str, Tensor]) -> None:
    """Writes values in place, so that Pyro's parameter store and optimisers keep the tensors they know."""
    for name, value in _tensors(model, y).items():
        value.copy_(state[name])


@contextmanager
def _undriven(model: Any) -> Iterator[None]:
    """Hands a model back to who trained it before."""
    driver = ClosedForm.driving(model)
    try:
        yield
    finally:
        if driver is not None:
            driver.drive()


# --- agreement ---


def _agree(reached: Sequence[float], tolerance: float) -> bool:
    ordered = sorted(reached, reverse=True)
    return len(ordered) > 1 and ordered[0] - ordered[1] <= tolerance


def _warn(reached: Sequence[float]) -> None:
    ordered = ", ".join(f"{value:.2f}" for value in sorted(reached, reverse=True))
    warnings.warn(
        f"no two of {len(reached)} starts reached the same free energy per data point ({ordered}): the best one may be a local optimum. "
        "Try more starts, more short_steps, or a higher temperature.",
        DisagreeingStartsWarning,
        stacklevel=3,
    )


def _permutation(number: int, generator: torch.Generator | None) -> Tensor:
    return torch.randperm(number, generator=generator, device=None if generator is None else generator.device)
