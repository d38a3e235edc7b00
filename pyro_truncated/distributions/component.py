"""The component of a data point, for mixtures of many components."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions import Categorical
from torch import Tensor

from pyro_truncated.distributions.deferred_validation import defer_constraints


class Component(Categorical):
    """A ``Categorical`` whose cost does not depend on the number of values.

    All data points share their probabilities.

    What a plate expands is neither copied when it is drawn from nor when its logarithm is taken.

    Example:
        >>> with pyro.plate("data", 1000):
        ...     k = pyro.sample("k", Component(torch.full((50,), 0.02)))
        >>> k.shape
        torch.Size([1000])
    """

    arg_constraints = defer_constraints(Categorical.arg_constraints)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Component:
        """The same probabilities for a larger batch."""
        # The one is expanded with the other if it has been computed before.
        _ = self.logits, self.probs
        larger: Component = super().expand(batch_shape, _instance)  # type: ignore[no-untyped-call]
        return larger

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws values."""
        probs = self.probs
        if not probs.is_cpu:
            return self._sample_by_inversion(torch.Size(sample_shape) + self.batch_shape)
        if any(probs.stride()[:-1]) or probs.dim() == 1:
            drawn: Tensor = super().sample(sample_shape)  # type: ignore[no-untyped-call]
            return drawn
        shape = torch.Size(sample_shape) + self.batch_shape
        with torch.no_grad():
            return torch.multinomial(probs[(0,) * (probs.dim() - 1)], max(1, shape.numel()), True)[: shape.numel()].reshape(shape)

    @torch.no_grad()
    def _sample_by_inversion(self, shape: torch.Size) -> Tensor:
        """Draws for which no device is waited for."""
        probs = self.probs
        is_shared = not any(probs.stride()[:-1])
        cumulative = (probs[(0,) * (probs.dim() - 1)] if is_shared else probs).cumsum(-1)
        uniform = torch.rand(shape, dtype=probs.dtype, device=probs.device) * cumulative[..., -1]
        # The last value takes what rounding leaves over.
        inner = cumulative[..., :-1].contiguous()
        return torch.searchsorted(inner, uniform, right=True) if is_shared else (uniform.unsqueeze(-1) >= inner).sum(-1)


def categorical(probs: Tensor) -> Categorical:
    """Returns a ``Categorical`` on the CPU, elsewhere a :class:`Component`.

    The latter waits for no device.

    Example:
        >>> type(categorical(torch.tensor([0.25, 0.75]))).__name__
        'Categorical'

    Args:
        probs: probabilities of the values, ``(*batch, K)``.
    """
    return Categorical(probs) if probs.is_cpu else Component(probs)
