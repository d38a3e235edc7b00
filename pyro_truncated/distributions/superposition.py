"""What distributions of superposed latents have in common: states, a dictionary, parameters that broadcast, and larger batches."""

from __future__ import annotations

from typing import Any, Self

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor


class Superposition(TorchDistribution):
    """Observations ``(D,)`` of a superposition of ``H`` latents.

    Args:
        states: states ``(*batch, H)``.
        weight: dictionary ``(D, H)``, or with batch dimensions in front.
        validate_args: whether to check parameters and values.
        **parameters: what else the distribution has, by the names of its ``arg_constraints``: scalars, or tensors whose dimensions before
            the last are batch dimensions.

    Raises:
        ValueError: if states and weight disagree about the number of latents, or a parameter is invalid.
    """

    states: Tensor
    weight: Tensor

    def __init__(self, states: Tensor, weight: Tensor, validate_args: bool | None = None, **parameters: Tensor | float) -> None:
        if weight.dim() < 2 or states.dim() < 1 or states.shape[-1] != weight.shape[-1]:
            raise ValueError(f"states (*batch, H) and weight (D, H) must share H; got {tuple(states.shape)} and {tuple(weight.shape)}")
        self.states, self.weight = states, weight
        tensors = {name: torch.as_tensor(value, dtype=weight.dtype, device=weight.device) for name, value in parameters.items()}
        for name, tensor in tensors.items():
            setattr(self, name, tensor)
        batch_shape = torch.broadcast_shapes(states.shape[:-1], weight.shape[:-2], *(tensor.shape[:-1] for tensor in tensors.values()))
        super().__init__(batch_shape, weight.shape[-2:-1], validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """The same distribution over a larger batch; the distribution itself if the shape is its own."""
        batch_shape = torch.Size(batch_shape)
        if batch_shape == self.batch_shape:
            return self
        new: Self = self._get_checked_instance(type(self), _instance)  # type: ignore[no-untyped-call]
        for name in self.arg_constraints:
            setattr(new, name, getattr(self, name))
        new.states = self.states.expand(batch_shape + self.states.shape[-1:])
        super(Superposition, new).__init__(batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new
