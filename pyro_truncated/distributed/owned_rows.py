"""Rows of data points that lie in several processes.

They are those of tensors, for which others ask and send gradients, and those in the states of searches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.weak import WeakIdKeyDictionary

from pyro_truncated.distributed import world
from pyro_truncated.distributed.shards import Portion, Shard, is_spread

_left: Any = WeakIdKeyDictionary()


def leave_to_owners(parameter: Tensor) -> None:
    """Marks a parameter whose rows belong to this process's data points.

    No gradients of other processes are added to it.
    """
    _left[parameter] = True


def take_from_owners(parameter: Tensor) -> None:
    """Marks a parameter that holds the rows of all data points."""
    _left.pop(parameter, None)


def is_owned(parameter: Tensor) -> bool:
    """Whether :func:`leave_to_owners` has said so."""
    return parameter in _left


def gather_owned_rows(own: Tensor, portion: Portion, positions: Tensor) -> Tensor:
    """Returns rows at global positions ``(n,)``, the same on each process.

    Gradients add up and go to the owners.

    Every process must ask for them, and take the gradient of what it makes of them if one of them does.

    Args:
        own: the rows of this process, ``(m, ...)``.
        portion: which these are.
        positions: the same on every process.
    """
    rows: Tensor = _RowsOfOwners.apply(own, portion, positions)  # type: ignore[no-untyped-call]
    return rows


def gather_all_rows(own: Tensor, y: Any) -> Tensor:
    """Gathers rows of all processes in order, unless data are whole."""
    return torch.cat(world.gather(own.detach().clone())) if is_spread(y) else own


def as_shard_like(values: Tensor, y: Any) -> Tensor:
    """Returns rows computed from a shard as such a shard."""
    return Shard.of(values, y.portion) if isinstance(y, Shard) else values


def own_positions(positions: Tensor, portion: Portion | None) -> Tensor:
    """Selects this process's data points among global positions.

    Returns them with their places here. Of whole data these are all.
    """
    if portion is None:
        return positions
    return positions[(positions >= portion.first) & (positions < portion.first + portion.size)] - portion.first


def ending_together(arguments: Any) -> AbstractContextManager[None]:
    """A context whose errors end all processes, if arguments hold shards."""
    return world.failing_together() if is_spread(arguments) else nullcontext()


class _RowsOfOwners(Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, portion: Portion, positions: Tensor) -> Tensor:
        """Sends what is here, and zeros for what is elsewhere."""
        ctx.is_mine = (positions >= portion.first) & (positions < portion.first + portion.size)
        ctx.places, ctx.shape = positions[ctx.is_mine] - portion.first, own.shape
        rows = own.new_zeros(len(positions), *own.shape[1:])
        rows[ctx.is_mine] = own[ctx.places]
        return world.add([rows])[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The sum over all processes of the gradients of what is here."""
        total = world.add([gradients[0]])[0]
        return total.new_zeros(ctx.shape).index_add_(0, ctx.places, total[ctx.is_mine]), None, None


def rows_of(state: Any) -> dict[str, Tensor]:
    """Returns all tensors of rows in a nested state, by their path.

    Kept apart, any number of processes can share them. A state with rows is a dictionary. Its ``rows`` are tensors with a row for each
    of the first data points of this process; zeros mark unknown ones. Its ``first_position`` is the position of the first row among all
    data. Its ``is_spread`` says whether other processes have the rest.
    """
    found: dict[str, Tensor] = {}

    def note(name: str, tensor: Tensor) -> Tensor:
        found[name] = tensor
        return tensor

    _map(state, note, {}, "")
    return found


def without_rows(state: Any) -> Any:
    """The state with empty tensors in their places."""
    # No view: what is saved of one is all that it is a view of.
    return _map(state, lambda _, tensor: tensor[:0].clone(), {}, "")


def with_rows(state: Any, rows: Mapping[str, Tensor], portion: Portion) -> Any:
    """Returns the state with these rows of this process's data points."""
    where = {"first_position": portion.first, "is_spread": portion.is_part}
    return _map(state, lambda name, tensor: rows.get(name, tensor), where, "")


def _map(state: Any, change: Callable[[str, Tensor], Tensor], where: Mapping[str, Any], name: str) -> Any:
    if isinstance(state, list):
        return [_map(value, change, where, f"{name}.{number}") for number, value in enumerate(state)]
    if not isinstance(state, Mapping):
        return state
    if "rows" in state:
        return {**state, **where, "rows": {key: change(f"{name}.{key}", tensor) for key, tensor in state["rows"].items()}}
    return {key: _map(value, change, where, f"{name}.{key}") for key, value in state.items()}
