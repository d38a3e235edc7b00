"""What models may say of themselves to those who train them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from pyro_truncated.em.closed_form import ClosedFormModel
from pyro_truncated.program.candidate_runs import Conditional
from pyro_truncated.program.layout import Layout
from pyro_truncated.search.base import Search
from pyro_truncated.states.space import StateSpace


@runtime_checkable
class ResizableModel(Protocol):
    """A model of exchangeable discrete latents, off at zero, that can have more or fewer of them."""

    num_latents: int

    def with_latents(self, index: Tensor) -> Self:
        """A new model whose latent ``i`` is a copy of latent ``index[i]`` of this one."""


@runtime_checkable
class SearchedModel(Protocol):
    """A model that says itself how its states are found."""

    def default_search(self, num_states: int) -> Search:
        """A search for populations of so many states per data point."""


@runtime_checkable
class ConditionalModel(Protocol):
    """A model that says itself how its continuous latents are sampled given the discrete ones."""

    def default_conditional(self) -> Conditional:
        """What :class:`~pyro_truncated.AutoTruncated` takes as its ``conditional``."""


@runtime_checkable
class StartingModel(Protocol):
    """A model trained by gradients that says itself where a start may lie, otherwise than by ``initialize``; starts are not annealed."""

    def draw_start(self, y: Tensor, generator: torch.Generator | None = None) -> Self:
        """Goes there, for each start anew."""


def starts_near_the_end(model: Any) -> bool:
    """Whether ``initialize`` finds the components by a search of its own, as the model says by an attribute of this name.

    Starts then need no annealing, and they and the training end as soon as little rises any more. Only of models with closed-form M-steps:
    the first steps of an optimiser may lose more than what it finds in the end, and of how much little is they say nothing.
    """
    return isinstance(model, ClosedFormModel) and bool(getattr(model, "starts_near_the_end", False))


def is_mixture(model: Any, space: StateSpace | None) -> bool:
    """Whether a model has closed-form M-steps, a single discrete latent per data point, and a search of its own for the likeliest values.

    That is the component of a mixture. A single cause that is on or off is none, which such models have no search of their own for; nor are
    models whose ``initialize`` finds the components.
    """
    has_one = space is not None and space.num_latents == 1
    return has_one and isinstance(model, ClosedFormModel) and isinstance(model, SearchedModel) and not starts_near_the_end(model)


def has_others_beside(model: Any, layout: Layout | None) -> bool:
    """Whether continuous latents are left to a guide beside the truncated one."""
    return layout is not None and bool(layout.other_latents) and not isinstance(model, ConditionalModel)


@contextlib.contextmanager
def starting(model: Any) -> Iterator[None]:
    """Tells a model that has the attribute ``is_starting`` that starts are being made: details may wait for the training on all data."""
    if not hasattr(model, "is_starting"):
        yield
        return
    model.is_starting = True
    try:
        yield
    finally:
        model.is_starting = False
