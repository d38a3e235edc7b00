"""Data-parallel training: equal starts, and losses of all data."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.distributed import world
from pyro_truncated.distributed.launch import UnsharedDataWarning, launched_processes, start_as_first
from pyro_truncated.distributed.shards import Portion, portion_of
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.program.call import Call


def is_shared_run(guide: Any, arguments: Any) -> bool:
    """Whether other processes take the same steps with other data.

    Arguments are shards, or the guide belongs to one.
    """
    return shared_portion(guide, arguments) is not None


def shared_portion(guide: Any, arguments: Any) -> Portion | None:
    """Returns this process's data points if others have the rest, else ``None``."""
    if not world.is_shared():
        return None
    portion = portion_of(arguments)
    if portion is None and isinstance(guide, AutoTruncated):
        portion = guide.populations.portion
    return portion if portion is not None and portion.is_part else None


def watched(guide: Any, arguments: Any) -> AbstractContextManager[None]:
    """A context whose errors also end processes with the same steps."""
    return world.failing_together() if is_shared_run(guide, arguments) else nullcontext()


def are_shared(parts: Sequence[AutoTruncated]) -> bool:
    """Whether other processes hold other populations of these truncated parts."""
    return any(part.populations.is_part for part in parts)


def total(parts: Sequence[AutoTruncated], loss: float) -> float:
    """Sums the losses of processes that hold parts of the data."""
    return float(world.add([torch.tensor(loss, dtype=torch.float64)])[0]) if are_shared(parts) else loss


def averaged_by_others(parts: Sequence[AutoTruncated], loss: Tensor) -> Tensor:
    """Returns the total loss for ``DistributedDataParallel``.

    The mean of its gradients over processes is that of the total loss.
    """
    if not are_shared(parts):
        return loss
    own = world.size() * loss
    return own + (world.add([loss.detach()])[0] - own.detach())


def start_alike(call: Call, guide: Any, elbo: Any) -> None:
    """Broadcasts parameters, buffers, generators and searches before the first step.

    Warns:
        UnsharedDataWarning: if each of several processes trains on data that are no shard.
    """
    portion = portion_of((call.args, dict(call.kwargs)))
    if isinstance(guide, AutoTruncated) and guide.siblings is None:
        portion = guide.populations.portion
    if portion is None and launched_processes() > 1:
        warnings.warn(
            f"this is one of {launched_processes()} processes, each of which trains a model of its own on all data. "
            "Call distributed.start(), and train on distributed.shard(data)",
            UnsharedDataWarning,
            stacklevel=6,
        )
    if portion is not None and portion.is_part:
        start_as_first(call.model, guide, elbo.search)
