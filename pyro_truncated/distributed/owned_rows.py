"""Tensors with a row per data point, of which every process has those of its own: the others ask for them, and send gradients back."""

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
    """Says of a parameter that its rows belong to the data points of this process, so that no gradients of other processes are added."""
    _left[parameter] = True


def take_from_owners(parameter: Tensor) -> None:
    """Says that its rows are those of all data points, and the same on all processes."""
    _left.pop(parameter, None)


def is_left_to_owners(parameter: Tensor) -> bool:
    """Whether :func:`leave_to_owners` has said so."""
    return parameter in _left


def rows_of_owners(own: Tensor, portion: Portion, positions: Tensor) -> Tensor:
    """Rows at some positions ``(n,)`` among those of all processes, the same on each; gradients add up and go to the owners.

    Every process must ask for them, and take the gradient of what it makes of them if one of them does.

    Args:
        own: the rows of this process, ``(m, ...)``.
        portion: which these are.
        positions: the same on every process.
    """
    rows: Tensor = _RowsOfOwners.apply(own, portion, positions)  # type: ignore[no-untyped-call]
    return rows


def rows_of_everyone(own: Tensor, y: Any) -> Tensor:
    """What all processes have computed of each of their data points, in order; where the data are no shard, what is here is all."""
    return torch.cat(world.gather(own.detach().clone())) if isinstance(y, Shard) and y.portion.is_part else own


def as_shard_of(values: Tensor, y: Any) -> Tensor:
    """What was computed of each data point of a shard, as a shard of the same ones; what was computed of whole data as it is."""
    return Shard.of(values, y.portion) if isinstance(y, Shard) else values


def own_positions(positions: Tensor, portion: Portion | None) -> Tensor:
    """Of positions among all data points those of this process, and where they lie here; of whole data all."""
    if portion is None:
        return positions
    return positions[(positions >= portion.first) & (positions < portion.first + portion.size)] - portion.first


def ending_together(arguments: Any) -> AbstractContextManager[None]:
    """A context whose errors end the other processes, too, if there are shards of the data among the arguments."""
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
