"""Data-parallel training: equal starts, and losses of all data."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_truncated.distributed import collectives
from pyro_truncated.distributed.launch import UnsharedDataWarning, launcher_world_size, start_as_first
from pyro_truncated.distributed.shards import Portion, current_batch, find_portion
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.program.call import Call
from pyro_truncated.program.sites import sample_nodes
from pyro_truncated.utils.parameter_store import isolate, spare_random_numbers


def shared_portion(guide: Any, arguments: Any) -> Portion | None:
    """Returns this process's data points if others have the rest, else ``None``.

    Arguments are shards, or the guide belongs to one. The others take the same steps.
    """
    if collectives.size() == 1:
        return None
    portion = find_portion(arguments)
    if portion is None and isinstance(guide, AutoTruncated):
        portion = guide.populations.portion
    return portion if portion is not None and portion.is_part else None


def propagate_errors(guide: Any, arguments: Any) -> AbstractContextManager[None]:
    """A context whose errors also end processes with the same steps."""
    return nullcontext() if shared_portion(guide, arguments) is None else collectives.propagate_errors()


def span_processes(parts: Sequence[AutoTruncated]) -> bool:
    """Whether other processes hold other populations of these truncated parts."""
    return any(part.populations.is_part for part in parts)


def total(parts: Sequence[AutoTruncated], loss: float) -> float:
    """Sums the losses of processes that hold parts of the data."""
    return float(collectives.add([torch.tensor(loss, dtype=torch.float64)])[0]) if span_processes(parts) else loss


def total_loss_for_ddp(parts: Sequence[AutoTruncated], loss: Tensor) -> Tensor:
    """Returns the total loss for ``DistributedDataParallel``.

    The mean of its gradients over processes is that of the total loss.
    """
    if not span_processes(parts):
        return loss
    own = collectives.size() * loss
    return own + (collectives.add([loss.detach()])[0] - own.detach())


def broadcast_start(call: Call, guide: Any, elbo: Any) -> None:
    """Broadcasts parameters, buffers, generators and searches before the first step."""
    portion = find_portion((call.args, dict(call.kwargs)))
    if isinstance(guide, AutoTruncated) and guide.companions is None:
        portion = guide.populations.portion
    if portion is None and launcher_world_size() > 1:
        warnings.warn(
            f"this is one of {launcher_world_size()} processes, each of which trains a model of its own on all data. "
            "Call distributed.start(), and train on distributed.shard(data)",
            UnsharedDataWarning,
            stacklevel=6,
        )
    if portion is not None and portion.is_part:
        start_as_first(call.model, guide, elbo.search)


# Searches are numbered from zero on.
_LISTS = 2**40


class EqualShares(Messenger):
    """Divides global log probabilities by the number of processes that add them."""

    def __init__(self, plates: frozenset[str]) -> None:
        super().__init__()
        self.plates = plates

    def _pyro_sample(self, msg: Any) -> None:
        if not any(frame.name in self.plates for frame in msg["cond_indep_stack"]):
            msg["scale"] = msg["scale"] / collectives.size()


@contextmanager
def share_draws(call: Call, guide: Any, number: int) -> Iterator[None]:
    """A context in which other guides draw as for all data."""
    parts = [part for part in guide.modules() if isinstance(part, AutoTruncated)] if isinstance(guide, torch.nn.Module) else []
    portion = find_portion((call.args, dict(call.kwargs)))
    if portion is None or not parts:
        yield
        return
    store = parts[0].populations
    store.seed_()
    if portion.is_part and not all(own.is_filled for own in store.stores):
        store.seed = collectives.agree(store.seed)
    with spare_random_numbers():
        torch.manual_seed(store.stream(number - _LISTS).seed)
        yield


def divide_loss(parts: Sequence[AutoTruncated]) -> AbstractContextManager[Any]:
    """A context that divides the loss over processes with shards."""
    return EqualShares(_data_plates(parts)) if span_processes(parts) else nullcontext()


def refuse_local_draws(parts: Sequence[AutoTruncated], guide: Call, is_new: bool) -> None:
    """Refuses minibatches, and local draws of a new guide, on several processes."""
    if not span_processes(parts):
        return
    if current_batch() is not None:
        raise NotImplementedError("distributed.Batches beside other guides needs one process; leave the minibatches out, or train in one")
    if not is_new:
        return
    with spare_random_numbers(), torch.no_grad(), isolate():
        nodes = sample_nodes(guide.trace())
    own, plates = {name for part in parts for name in part.layout.sites}, _data_plates(parts)
    others = [
        name
        for name, node in nodes.items()
        if name not in own and "truncated" not in node["infer"] and any(frame.name in plates for frame in node["cond_indep_stack"])
    ]
    if others:
        raise NotImplementedError(
            f"other guides sample {others} for each data point, which several processes do not draw alike; train in one process"
        )


def _data_plates(parts: Sequence[AutoTruncated]) -> frozenset[str]:
    return frozenset(name for part in parts for name in part.layout.plates)
