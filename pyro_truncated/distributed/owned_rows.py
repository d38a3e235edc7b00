"""Tensors with a row per data point, spread over processes.

Other processes ask for rows, and send gradients back.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.weak import WeakIdKeyDictionary

from pyro_truncated.distributed import world
from pyro_truncated.distributed.shards import Portion, Shard, portion_of

_left: Any = WeakIdKeyDictionary()


def leave_to_owners(parameter: Tensor) -> None:
    """Marks a parameter whose rows belong to this process's data points.

    No gradients of other processes are added to it.
    """
    _left[parameter] = True


def take_from_owners(parameter: Tensor) -> None:
    """Marks a parameter that holds the rows of all data points."""
    _left.pop(parameter, None)


def is_left_to_owners(parameter: Tensor) -> bool:
    """Whether :func:`leave_to_owners` has said so."""
    return parameter in _left


def rows_of_owners(own: Tensor, portion: Portion, positions: Tensor) -> Tensor:
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


def rows_of_everyone(own: Tensor, y: Any) -> Tensor:
    """Gathers rows of all processes in order, unless data are whole."""
    return torch.cat(world.gather(own.detach().clone())) if isinstance(y, Shard) and y.portion.is_part else own


def as_shard_of(values: Tensor, y: Any) -> Tensor:
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
    portion = portion_of(arguments)
    return world.failing_together() if portion is not None and portion.is_part else nullcontext()


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
