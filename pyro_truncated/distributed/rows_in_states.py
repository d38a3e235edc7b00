"""What searches have learned of every data point, in nested states: apart from the rest, so that any number of processes can share it out.

A state with rows is a dictionary of ``rows``, tensors with a row for each of the first data points of this process (zeros are what nothing
is known of), ``first_position``, that of the first of them among all data, and ``is_spread``, whether other processes have the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from pyro_truncated.distributed.shards import Portion

_ROWS = "rows"


def rows_of(state: Any) -> dict[str, Tensor]:
    """All tensors of rows in a nested state, by the way to them."""
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
    """The state with these rows of the data points of this process, where they are given."""
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
