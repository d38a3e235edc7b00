"""Latents of data points that are shared out to processes: while they train, each holds those of its own."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from pyro_truncated.distributed import world
from pyro_truncated.distributed.owned_rows import leave_to_owners, take_from_owners
from pyro_truncated.distributed.shards import Portion, draw_alike, portion_of
from pyro_truncated.utils.unique_names import UniqueModule

_NAMES = ("z_loc", "z_scale")


class SharedLatents(UniqueModule):
    """A module with a latent for every data point, those of all or of the shard that it is trained on.

    Attributes:
        z_loc: free latents ``(N, Q)``, or their means.
        z_scale: their standard deviations ``(N, Q)``, if Bayesian.
        portion: the data points that they are of, ``None`` for all.
    """

    # Descriptors of Pyro: tensors when read, parameters when set.
    z_loc: Any
    z_scale: Any
    portion: Portion | None = None

    @torch.no_grad()
    def gather_(self) -> Self:
        """Gives every process the latents of all data points, as one process has them: to save them, say. All processes call it.

        An optimiser that has moved them cannot go on with them. Without other processes it does nothing.
        """
        if self.portion is not None:
            for parameter in self._latent_parameters():
                parameter.data = torch.cat(world.gather(parameter.detach().clone()))
                parameter.grad = None
                take_from_owners(parameter)
            self.portion = None
        return self

    def _join(self, x: Tensor) -> Portion | None:
        """Which data points a shard is of, ``None`` for all; at its first sight the latents of others go, and all begin as the first."""
        portion = portion_of(x)
        portion = None if portion is None or not portion.is_part else portion
        if self.portion is None and portion is not None:
            self._begin(portion)
        if portion != self.portion:
            raise ValueError(f"the latents here are those of {self.portion}; call gather_() on all processes before other data, {portion}")
        for parameter in self._latent_parameters() if portion is not None else ():
            # Copies of a module do not know of it.
            leave_to_owners(parameter)
        return portion

    @torch.no_grad()
    def _begin(self, portion: Portion) -> None:
        latents = self._latent_parameters()
        for parameter in latents:
            parameter.data = parameter.detach()[portion.first : portion.first + portion.size].clone()
            parameter.grad = None
        own = {id(parameter) for parameter in latents}
        common = [tensor for tensor in (*self.parameters(), *self.buffers()) if id(tensor) not in own]
        for tensor, value in zip(common, world.agree([tensor.detach() for tensor in common]), strict=True):
            tensor.copy_(value)
        draw_alike(None)
        self.portion = portion

    def _latent_parameters(self) -> list[Tensor]:
        return [value for name, value in self.named_parameters(recurse=False) if name.removesuffix("_unconstrained") in _NAMES]
