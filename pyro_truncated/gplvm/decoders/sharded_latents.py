"""Latents of data points that several processes share out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_truncated.distributed import collectives
from pyro_truncated.distributed.shards import (
    Portion,
    find_part,
    gather_owned_rows,
    register_owned_rows,
    rows_at,
    synchronize_generator,
    unregister_owned_rows,
)
from pyro_truncated.gp.active_sets import (
    Split,
    split_weights,
)

_NAMES = ("z_loc", "z_scale")


def join_latents(module: torch.nn.Module, expected: Portion | None, x: Tensor) -> Portion | None:
    """Which data points a shard has, ``None`` for all.

    On the first call the latents of others are dropped, and all processes start like the first.
    """
    portion = find_part(x)
    if expected is None and portion is not None:
        _begin(module, portion)
    elif portion != expected:
        raise ValueError(f"data must be the shard of the latents, {expected}; got {portion}. Call gather_() on all processes before")
    for parameter in _latent_parameters(module) if portion is not None else ():
        # Copies of a module do not know of it.
        register_owned_rows(parameter)
    return portion


@torch.no_grad()
def gather_latents(module: torch.nn.Module) -> None:
    """Gives every process the latents of all data points."""
    for parameter in _latent_parameters(module):
        parameter.data = torch.cat(collectives.gather(parameter.detach().clone()))
        parameter.grad = None
        unregister_owned_rows(parameter)


@torch.no_grad()
def _begin(module: torch.nn.Module, portion: Portion) -> None:
    latents = _latent_parameters(module)
    for parameter in latents:
        parameter.data = parameter.detach()[portion.first : portion.first + portion.size].clone()
        parameter.grad = None
    own = {id(parameter) for parameter in latents}
    common = [tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) not in own]
    for tensor, value in zip(common, collectives.agree([tensor.detach() for tensor in common]), strict=True):
        tensor.copy_(value)
    synchronize_generator(None)


def _latent_parameters(module: torch.nn.Module) -> list[Tensor]:
    return [value for name, value in module.named_parameters(recurse=False) if name.removesuffix("_unconstrained") in _NAMES]


@dataclasses.dataclass(frozen=True)
class SharedSplit(Split):
    """A process's part of a minibatch, whose results add up.

    Attributes:
        within: positions ``(b,)`` of its data points within the minibatch.
        batch_size: data points of the minibatch, ``B``.
        portion: the data points of this process.
    """

    within: Tensor
    batch_size: int
    portion: Portion

    @classmethod
    def from_split(cls, split: Split, portion: Portion) -> SharedSplit:
        """That of a minibatch of data points of all processes."""
        if not split.num_active:
            raise ValueError("on several processes a minibatch needs an active set of at least one data point (num_active)")
        is_own = (split.indices >= portion.first) & (split.indices < portion.first + portion.size)
        is_own[: split.num_active] = True
        within = is_own.nonzero().squeeze(-1)
        return cls(split.indices[within], split.num_active, within, len(split.indices), portion)

    def weights(self, num_data: int, like: Tensor | None = None) -> Tensor:
        """Weights ``(b,)`` that correct a plate's scale ``N / b``."""
        weights = split_weights(self.batch_size, self.num_active, num_data, like)[self.within] * (len(self.within) / self.batch_size)
        weights[: self.num_active] /= collectives.size()
        return weights

    def rows(self, x: Tensor) -> Tensor:
        """The data ``(b, D)``, of which the active points come from their owners."""
        return torch.cat([rows_at(x, self.active), x[self.rest - self.portion.first]])

    def latents(self, variables: Sequence[Tensor]) -> list[Tensor]:
        """Gathers rows ``(b, Q)``; gradients of active ones go to owners."""
        every = torch.cat(list(variables), -1)
        rows = torch.cat([gather_owned_rows(every, self.portion, self.active), every[self.rest - self.portion.first]])
        return list(rows.split([values.shape[-1] for values in variables], -1))

    def normal(self, loc: Tensor, scale: Tensor) -> Any:
        """Those that draw for all of the minibatch, alike on all processes."""
        return dist.Independent(RowNormal(loc, scale, self.within, self.batch_size), 1)


class RowNormal(dist.Normal):
    """Normal distributions of some ``rows (b,)`` of ``num_rows``, ``(..., b, Q)``."""

    def __init__(self, loc: Tensor, scale: Tensor, rows: Tensor, num_rows: int) -> None:
        super().__init__(loc, scale)
        self.rows, self.num_rows = rows, num_rows

    def expand(self, batch_shape: Any, _instance: Any = None) -> RowNormal:
        """The same with further dimensions on the left."""
        return RowNormal(self.loc.expand(batch_shape), self.scale.expand(batch_shape), self.rows, self.num_rows)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws for all rows, and takes its own."""
        shape = torch.Size(sample_shape) + self.batch_shape
        noise = torch.randn(*shape[:-2], self.num_rows, shape[-1], dtype=self.loc.dtype, device=self.loc.device)
        return self.loc + noise[..., self.rows, :] * self.scale
