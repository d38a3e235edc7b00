"""What normal distributions of the components of a mixture have in common."""

from __future__ import annotations

from typing import Any, Self

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.distributions.deferred_validation import validate_later
from pyro_truncated.ops.component_sums import as_integers, check_below

HALF_LOG_TWO_PI = 0.9189385332046727


class ComponentGaussian(TorchDistribution):
    """A normal distribution whose parameters belong to components.

    Those parameters are named in ``arg_constraints``, in the order of its arguments.

    Args:
        component: components ``z``, integers from 0 to ``K - 1`` of any shape and size.
        loc: means ``(K, D)``.
        validate_args: whether to check arguments and values.

    Raises:
        ValueError: if components are no integers, or, on the CPU and where checked, if there are others.
    """

    support = constraints.real_vector
    has_rsample = True
    _validate_sample = validate_later

    def __init__(self, component: Tensor, loc: Tensor, validate_args: bool | None) -> None:
        self.component, self.loc = as_integers(component), loc
        super().__init__(component.shape, loc.shape[-1:], validate_args=validate_args)
        # A device finds them itself where it looks them up; to look beforehand is five more kernels to launch.
        if self._validate_args and component.is_cpu:
            check_below(self.component, len(loc))

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """The same distribution over a larger batch."""
        kind: Any = type(self)
        component = self.component.expand(torch.Size(batch_shape))
        larger: Self = kind(component, *(getattr(self, name) for name in self.arg_constraints), validate_args=False)
        larger._validate_args = self._validate_args
        return larger

    @property
    def mean(self) -> Tensor:
        """Means ``(*batch, D)``."""
        return self.loc[self.component]

    def standard(self, sample_shape: Any, size: int) -> Tensor:
        """So many standard normal numbers for every draw, ``(*sample_shape, *batch, size)``."""
        shape = torch.Size(sample_shape) + self.batch_shape
        return torch.randn(*shape, size, dtype=self.loc.dtype, device=self.loc.device)

    def entries(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor, torch.Size]:
        """Returns values ``(N, D)``, pairs with components ``(E,)``, and the result's shape.

        A pair says which value and which component belong together.
        """
        batch = value.shape[:-1]
        row = torch.arange(batch.numel(), device=value.device).reshape(batch)
        row, component = torch.broadcast_tensors(row, self.component)
        return value.reshape(batch.numel(), -1), row.flatten(), component.flatten(), row.shape
