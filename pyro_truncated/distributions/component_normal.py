"""Normal distributions of the components of a mixture."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.distributions.component_gaussian import HALF_LOG_TWO_PI, ComponentGaussian
from pyro_truncated.distributions.deferred_validation import defer_constraints


class ComponentNormal(ComponentGaussian):
    r"""Independent normal entries with the means and deviations of a component, :math:`\mathcal N(\mu_z, \mathrm{diag}\,\sigma_z^2)`.

    The same density as ``Normal(loc[z], scale[z]).to_event(1)``. Terms of the component alone are
    computed once for each component, not for every data point and candidate.

    Example:
        >>> loc, scale, z = torch.randn(10, 3), torch.rand(10, 1), torch.tensor([4, 4, 7])
        >>> y = ComponentNormal(z, loc, scale).sample()
        >>> y.shape
        torch.Size([3, 3])

    Args:
        component: components ``z``, integers from 0 to ``K - 1`` of any shape and size.
        loc: means ``(K, D)``.
        scale: standard deviations ``(K, D)``, or ``(K, 1)`` where all entries share one.
        validate_args: whether to check arguments and values.

    Raises:
        ValueError: if means and deviations disagree about the number of components or entries. Also
            if components are no integers or, on the CPU with checks, out of range.
    """

    arg_constraints: ClassVar[dict[str, Any]] = defer_constraints(
        {"loc": constraints.real_vector, "scale": constraints.independent(constraints.positive, 1)}
    )

    def __init__(self, component: Tensor, loc: Tensor, scale: Tensor, validate_args: bool | None = None) -> None:
        if loc.dim() != 2 or scale.shape not in (loc.shape, (len(loc), 1)):
            raise ValueError(f"loc must have shape (K, D) and scale (K, D) or (K, 1); got {tuple(loc.shape)} and {tuple(scale.shape)}")
        self.scale = scale
        super().__init__(component, loc, validate_args)

    @property
    def variance(self) -> Tensor:
        """Variances ``(*batch, D)``."""
        return self.scale.square()[self.component].expand(self.batch_shape + self.event_shape)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws values that are differentiable in means and deviations."""
        return self.mean + self.scale[self.component] * self.standard(sample_shape, self.loc.shape[1])

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns log densities of values ``(*batch, D)``, in the means' type.

        They are computed in the values' type where it is wider.
        """
        if self._validate_args:
            self._validate_sample(value)
        size = self.loc.shape[1]
        constant = -self.scale.log().expand_as(self.loc).sum(-1) - size * HALF_LOG_TWO_PI
        distance = value - self.loc[self.component]
        if self.scale.shape[1] == 1:
            energy = (self.scale**-2).squeeze(-1)[self.component] * distance.square().sum(-1)
        else:
            energy = (distance * self.scale.reciprocal()[self.component]).square().sum(-1)
        return (constant[self.component] - 0.5 * energy).to(self.loc.dtype)
