"""Models as Pyro's users know them: rewritten after its tutorials and examples, with the same sites, plates and annotations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass
class UserModel:
    """A model, data for it, and what a user would pass along.

    ``batch`` holds the additional keyword arguments of a call on a minibatch; ``create_plates`` lets the sizes of minibatches vary, as
    Pyro's autoguides ask for.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...]
    discrete: list[str]
    num_states: int
    max_plate_nesting: int
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    batch: dict[str, Any] | None = None
    create_plates: Callable[..., Any] | None = None
