"""Per-data-point rows in the nested states of searches, kept apart.

Any number of processes can then share them.

A state with rows is a dictionary. Its ``rows`` are tensors with a row for each of the first data points of this process; zeros mark
unknown ones. Its ``first_position`` is the position of the first row among all data. Its ``is_spread`` says whether other processes have
the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from pyro_truncated.distributed.shards import Portion

_ROWS = "rows"


def rows_of(state: Any) -> dict[str, Tensor]:
    """Returns all tensors of rows in a nested state, by their path."""
    found: dict[str, Tensor] = {}

    def note(name: str, tensor: Tensor) -> Tensor:
        found[name] = tensor
        return tensor

    _mapped(state, note, {}, "")
    return found


def without_rows(state: Any) -> Any:
    """The state with empty tensors in their places."""
    # No view: what is saved of one is all that it is a view of.
    return _mapped(state, lambda _, tensor: tensor[:0].clone(), {}, "")


def with_rows(state: Any, rows: Mapping[str, Tensor], portion: Portion) -> Any:
    """Returns the state with these rows of this process's data points."""
    where = {"first_position": portion.first, "is_spread": portion.is_part}
    return _mapped(state, lambda name, tensor: rows.get(name, tensor), where, "")


def _mapped(state: Any, change: Callable[[str, Tensor], Tensor], where: Mapping[str, Any], name: str) -> Any:
    if isinstance(state, list):
        return [_mapped(value, change, where, f"{name}.{number}") for number, value in enumerate(state)]
    if not isinstance(state, Mapping):
        return state
    if _ROWS in state:
        return {**state, **where, _ROWS: {key: change(f"{name}.{key}", tensor) for key, tensor in state[_ROWS].items()}}
    return {key: _mapped(value, change, where, f"{name}.{key}") for key, value in state.items()}
