"""Normal distributions of the components of a mixture."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.distributions.checked_later import each_checked_later, validate_later

_HALF_LOG_TWO_PI = 0.9189385332046727


class ComponentNormal(TorchDistribution):
    r"""Independent normal entries with the means and deviations of a component, :math:`\mathcal N(\mu_z, \mathrm{diag}\,\sigma_z^2)`.

    The same density as ``Normal(loc[z], scale[z]).to_event(1)``, but what depends on the component alone is computed once for each of them,
    not for every data point and every candidate.

    Example:
        >>> loc, scale, z = torch.randn(10, 3), torch.rand(10, 1), torch.tensor([4, 4, 7])
        >>> y = ComponentNormal(z, loc, scale).sample()
        >>> y.shape
        torch.Size([3, 3])

    Args:
        component: components ``z``, any shape.
        loc: means ``(K, D)``.
        scale: standard deviations ``(K, D)``, or ``(K, 1)`` where all entries share one.
        validate_args: whether to check parameters and values.

    Raises:
        ValueError: if means and deviations disagree about the number of components or entries.
    """

    arg_constraints: ClassVar[dict[str, Any]] = each_checked_later(
        {"loc": constraints.real_vector, "scale": constraints.independent(constraints.positive, 1)}
    )
    support = constraints.real_vector
    has_rsample = True
    _validate_sample = validate_later

    def __init__(self, component: Tensor, loc: Tensor, scale: Tensor, validate_args: bool | None = None) -> None:
        if loc.dim() != 2 or scale.shape not in (loc.shape, (len(loc), 1)):
            raise ValueError(f"loc must have shape (K, D) and scale (K, D) or (K, 1); got {tuple(loc.shape)} and {tuple(scale.shape)}")
        self.component, self.loc, self.scale = component, loc, scale
        super().__init__(component.shape, loc.shape[-1:], validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> ComponentNormal:
        """The same distribution over a larger batch."""
        larger = ComponentNormal(self.component.expand(torch.Size(batch_shape)), self.loc, self.scale, validate_args=False)
        larger._validate_args = self._validate_args
        return larger

    @property
    def mean(self) -> Tensor:
        """Means ``(*batch, D)``."""
        return self.loc[self.component]

    @property
    def variance(self) -> Tensor:
        """Variances ``(*batch, D)``."""
        return self.scale.square()[self.component].expand(self.batch_shape + self.event_shape)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws values that are differentiable in means and deviations."""
        noise = torch.randn(torch.Size(sample_shape) + self.batch_shape + self.event_shape, dtype=self.loc.dtype, device=self.loc.device)
        return self.mean + self.scale[self.component] * noise

    def log_prob(self, value: Tensor) -> Tensor:
        """Log densities of values ``(*batch, D)``."""
        if self._validate_args:
            self._validate_sample(value)
        size = self.loc.shape[1]
        constant = -self.scale.log().expand_as(self.loc).sum(-1) - size * _HALF_LOG_TWO_PI
        distance = value - self.loc[self.component]
        if self.scale.shape[1] == 1:
            precision = (self.scale**-2).squeeze(-1)[self.component]
            return constant[self.component] - 0.5 * precision * distance.square().sum(-1)
        return constant[self.component] - 0.5 * (distance * self.scale.reciprocal()[self.component]).square().sum(-1)
