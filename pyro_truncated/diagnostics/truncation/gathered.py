"""Gathers a guide's data points from all processes on the first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pyro.poutine as poutine
import torch
from torch.utils._pytree import tree_leaves, tree_map

from pyro_truncated.diagnostics.truncation.scoring import truncated_part
from pyro_truncated.distributed import world
from pyro_truncated.distributed.shards import Shard, portion_of
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.utils.isolation import spare_random_numbers

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class AllData:
    """A guide of the data points of all processes.

    Attributes:
        guide: it has the populations of all; of other guides it takes what they say, as a guide for new data does.
        args: the model's arguments, with the data of all processes.
        kwargs: its keyword arguments, likewise.
    """

    guide: AutoTruncated
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def is_spread(*arguments: Any) -> bool:
    """Whether a model's data are a shard of several processes' data."""
    portion = portion_of(arguments)
    return portion is not None and portion.is_part


def asked_of_all(ask: Callable[..., T], guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> T:
    """Sends the first process's answer about the guide to all processes.

    All of them must call it.

    Args:
        ask: is given a guide and the model's arguments.
        guide: the guide of the data points here.
        args: the model's arguments.
        kwargs: its keyword arguments.
    """
    with world.failing_together(), spare_random_numbers():
        every = gathered(guide, args, kwargs)
        found = world.agree(None if every is None else ask(every.guide, *every.args, **every.kwargs))
    assert found is not None
    return found


def gathered(guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AllData | None:
    """Returns the guide of all data on the first process, elsewhere ``None``.

    All processes must call it.

    Raises:
        TypeError: if the guide holds no ``AutoTruncated``.
    """
    part = truncated_part(guide)
    rows = [leaf.as_subclass(torch.Tensor) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Shard)]
    held = world.collect([part.words, part.log_joint, *rows])
    if held is None:
        return None
    words, log_joint, *data = (torch.cat(parts) for parts in zip(*held, strict=True))
    remaining = iter(data)
    args, kwargs = tree_map(lambda leaf: next(remaining) if isinstance(leaf, Shard) else leaf, (args, dict(kwargs)))
    whole = AutoTruncated(part.model, part.num_states, **part.options)
    whole.load_state_dict(
        {"populations.words": words, "populations.log_joint": log_joint, "populations.cardinalities": part.populations.cardinalities}
    )
    with spare_random_numbers(), torch.no_grad(), poutine.block():
        whole.setup(*args, **kwargs)
        whole.inherit(part.siblings)
    return AllData(whole, args, kwargs)
