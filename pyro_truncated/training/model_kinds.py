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
    """A model of exchangeable discrete latents whose number can change.

    They are off at zero.
    """

    num_latents: int

    def with_latents(self, index: Tensor) -> Self:
        """Returns a model whose latent ``i`` copies latent ``index[i]``."""


@runtime_checkable
class SearchedModel(Protocol):
    """A model that says itself how its states are found."""

    def default_search(self, num_states: int) -> Search:
        """A search for populations of so many states per data point."""


@runtime_checkable
class ConditionalModel(Protocol):
    """A model that samples its continuous latents given the discrete ones."""

    def default_conditional(self) -> Conditional:
        """What :class:`~pyro_truncated.AutoTruncated` takes as its ``conditional``."""


@runtime_checkable
class StartingModel(Protocol):
    """A model that draws its own restarts, which are not annealed.

    It is trained by gradients.
    """

    def draw_start(self, y: Tensor, generator: torch.Generator | None = None) -> Self:
        """Goes there, for each start anew."""


def has_informed_init(model: Any) -> bool:
    """Whether ``initialize`` searches for the components itself.

    The model says so by an attribute of this name.

    Such restarts need no annealing, and end with the training as soon as gains are small. It holds only for closed-form M-steps: the
    first steps of an optimiser may lose more than they gain in the end.
    """
    return isinstance(model, ClosedFormModel) and bool(getattr(model, "has_informed_init", False))


def is_mixture(model: Any, space: StateSpace | None) -> bool:
    """Whether a model is a mixture with closed-form M-steps and own search.

    Each data point has a single discrete latent.

    The latent is the component. Models of a single binary cause have no search of their own, and models whose ``initialize`` finds the
    components do not count.
    """
    has_one = space is not None and space.num_latents == 1
    return has_one and isinstance(model, ClosedFormModel) and isinstance(model, SearchedModel) and not has_informed_init(model)


def has_companion_guides(model: Any, layout: Layout | None) -> bool:
    """Whether continuous latents are left to a guide beside the truncated one."""
    return layout is not None and bool(layout.other_latents) and not isinstance(model, ConditionalModel)


@contextlib.contextmanager
def starting(model: Any) -> Iterator[None]:
    """A context that sets a model's ``is_starting`` during restarts.

    Details may then wait for the training on all data.
    """
    if not hasattr(model, "is_starting"):
        yield
        return
    model.is_starting = True
    try:
        yield
    finally:
        model.is_starting = False
