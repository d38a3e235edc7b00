"""A minibatch of data points of which processes have parts: what travels are gradients of what belongs to no data point."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.distributed import world
from pyro_truncated.distributed.shards import portion_of, sums_of
from pyro_truncated.utils.generators import device_of

# Parameters with a row per data point.
_LOCAL = ("loc", "scale")


@dataclasses.dataclass(frozen=True)
class Minibatch:
    """Data points of a minibatch.

    Attributes:
        positions: where those of this process lie among the latents of all.
        rows: where they lie among its data.
        scale: number of all data points per one in the minibatch.
        share: of this process in what belongs to no data point.
        total: sums over processes.
    """

    positions: Tensor | slice
    rows: Tensor | slice
    scale: float
    share: float = 1.0
    total: Callable[[Sequence[Tensor]], list[Tensor]] = list


def is_part(views: Sequence[Tensor]) -> bool:
    """Whether other processes have the rest of the data."""
    portion = portion_of(views)
    return portion is not None and portion.is_part


def drawn(model: Any, views: Sequence[Tensor], size: int, generator: torch.Generator | None) -> Minibatch:
    """A random minibatch, the same for any number of processes."""
    portion = portion_of(views)
    index = torch.randperm(model.num_data, generator=generator, device=device_of(generator))[:size].to(model.loc.device)
    scale = model.num_data / len(index)
    if portion is None or not portion.is_part:
        return Minibatch(index, index, scale)
    own = index[(index >= portion.first) & (index < portion.first + portion.size)]
    return Minibatch(own, own - portion.first, scale, 1 / world.size(), sums_of(views[0]))


def add_gradients(model: torch.nn.Module, batch: Minibatch) -> None:
    """Sums the gradients of all parameters but those of data points, in one message."""
    if batch.total is list:
        return
    shared = [p for name, p in model.named_parameters() if p.requires_grad and name.removesuffix("_unconstrained") not in _LOCAL]
    has_one = torch.tensor([p.grad is not None for p in shared], dtype=torch.float64)
    has_one, *gradients = batch.total([has_one, *(torch.zeros_like(p) if p.grad is None else p.grad for p in shared)])
    for parameter, gradient, is_known in zip(shared, gradients, has_one.bool().tolist(), strict=True):
        # Where there is none, the optimiser takes no step.
        parameter.grad = gradient if is_known else None


@torch.no_grad()
def latents_of_owners(model: torch.nn.Module, views: Sequence[Tensor]) -> None:
    """Gives every process the latents of all data points, each from the process that has its data."""
    portion = portion_of(views)
    assert portion is not None
    for name, parameter in model.named_parameters():
        if name.removesuffix("_unconstrained") in _LOCAL:
            parameter.copy_(torch.cat(world.gather(parameter[portion.first : portion.first + portion.size].detach().clone())))
