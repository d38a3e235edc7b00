"""What every check of a truncation starts from.

It is the truncated part of a guide, and a scorer of states under the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pyro.poutine as poutine
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pyro_truncated.distributed import world
from pyro_truncated.distributed.shards import Shard
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.guide.averaging import rescore_over_draws
from pyro_truncated.program.call import Call
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.states.population import Population
from pyro_truncated.utils.isolation import spare_random_numbers


def truncated_part(guide: Any) -> AutoTruncated:
    """The ``AutoTruncated`` that a guide is, or that a guide list holds.

    Raises:
        TypeError: if there is none.
    """
    if isinstance(guide, AutoTruncated):
        return guide
    parts = [part for part in guide if isinstance(part, AutoTruncated)] if isinstance(guide, torch.nn.ModuleList) else []
    if not parts:
        raise TypeError(f"guide must be an AutoTruncated, or an AutoGuideList that holds one; got {type(guide).__name__}")
    return parts[0]


def is_on_product(guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a guide has a set of states for each node.

    The nodes are those of the model's factor graph; other guides have whole states.
    """
    part = truncated_part(guide)
    if part.prototype_trace is None:
        with spare_random_numbers(), poutine.block():
            guide(*args, **kwargs)
    return part.product is not None


@torch.no_grad()
def scored_populations(
    guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], values: Mapping[str, Any] | None = None
) -> tuple[AutoTruncated, LogJoint, Population]:
    """Returns truncated part, scorer, and populations scored under the current model.

    The populations are those of the data points that the model selects.

    The populations are those of the data points that the model selects.

    Latents of other guides take ``values`` where given, else the medians of their guides. Every
    result is then about the posterior of the states given these.
    """
    part = truncated_part(guide)
    if is_on_product(guide, args, kwargs):
        raise NotImplementedError(
            "the guide has a set of states for each node of the model's factor graph, not a list of whole states: call "
            "check_truncation(guide, ...), or make the guide with AutoTruncated(..., whole_states=True)"
        )
    call = Call(part.model, args, kwargs)
    others = {**part.other_values(call, median=True), **(values or {})}
    with poutine.block():
        batch = part.batch(call, others)
        return part, batch.scorer, rescore_over_draws(part, batch)


def plain(value: Tensor) -> Tensor:
    """A result: detached, on the CPU."""
    return value.detach().cpu()


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class AllData:
    """A guide of the data points of all processes.

    Attributes:
        guide: it has the populations of all; Of other guides it takes what they say, as a guide for new data does.
        args: the model's arguments, with the data of all processes.
        kwargs: its keyword arguments, likewise.
    """

    guide: AutoTruncated
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def broadcast_answer(ask: Callable[..., T], guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> T:
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
