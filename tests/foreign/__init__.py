"""Models not written for this library: after public descriptions of Pyro, NumPyro, PyMC, Stan and BUGS examples, at small sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A model, its arguments, and what the brute force must know of it.

    Attributes:
        model: the Pyro model.
        args: its positional arguments.
        kwargs: its keyword arguments.
        plates: plates whose members have independent posteriors; empty where all discrete latents form one state.
        max_count: upper bounds of count sites.
        new: positional arguments for data that the guide has not seen; default: ``args``.
        options: further options of the guide.
        refused: pattern of the library's own message, if it refuses the model.
        limits: by habit, the pattern of the library's message where a habit cannot work with this model.
        reference: what the brute force runs in place of the model; default: the model.
        indices: positions of the data points that the model selects; default: it takes all.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    plates: tuple[str, ...] = ("data",)
    max_count: Mapping[str, int] | None = None
    new: tuple[Any, ...] | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    refused: str | None = None
    limits: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reference: Callable[..., Any] | None = None
    indices: Any = None


Make = Callable[[], Foreign]
MODELS: dict[str, Make] = {}


def foreign(make: Make) -> Make:
    """Registers a function that makes a model; its docstring names where the idea comes from."""
    if make.__name__ in MODELS:
        raise ValueError(f"two foreign models are called {make.__name__}")
    MODELS[make.__name__] = make
    return make
