"""Normal distributions of the components of a mixture that have full covariances."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.distributions.component_gaussian import HALF_LOG_TWO_PI, ComponentGaussian
from pyro_truncated.distributions.deferred_validation import defer_constraints
from pyro_truncated.ops.square_distances import square_distances


class ComponentMultivariateNormal(ComponentGaussian):
    r"""A normal distribution with a component's mean and full covariance.

    It is :math:`\mathcal N(\mu_z, L_z L_z^\top)`.

    The same density as ``MultivariateNormal(loc[z], scale_tril=scale_tril[z])``, but matrices are inverted once for each component, and
    copied for no data point and no candidate. Values are sorted by component for products of matrices.

    Example:
        >>> loc, scale_tril = torch.randn(10, 3), torch.eye(3).repeat(10, 1, 1)
        >>> y = ComponentMultivariateNormal(torch.tensor([4, 4, 7]), loc, scale_tril).sample()
        >>> y.shape
        torch.Size([3, 3])

    Args:
        component: components ``z``, integers from 0 to ``K - 1`` of any shape and size.
        loc: means :math:`\mu`, ``(K, D)``.
        scale_tril: Cholesky factors :math:`L`, ``(K, D, D)``, or ``(D, D)`` if all components share one.
        validate_args: whether to check arguments and values.

    Raises:
        ValueError: if means and factors disagree about the number of components or entries. Also if
            components are no integers or, on the CPU with checks, out of range.
    """

    arg_constraints: ClassVar[dict[str, Any]] = defer_constraints(
        {"loc": constraints.real_vector, "scale_tril": constraints.lower_cholesky}
    )

    def __init__(self, component: Tensor, loc: Tensor, scale_tril: Tensor, validate_args: bool | None = None) -> None:
        square = (*loc.shape[1:], *loc.shape[1:])
        if loc.dim() != 2 or scale_tril.shape not in ((len(loc), *square), square):
            shapes = f"{tuple(loc.shape)} and {tuple(scale_tril.shape)}"
            raise ValueError(f"loc must have shape (K, D) and scale_tril (K, D, D) or (D, D); got {shapes}")
        self.scale_tril = scale_tril
        super().__init__(component, loc, validate_args)

    @property
    def variance(self) -> Tensor:
        """Variances ``(*batch, D)``."""
        return self._factors().square().sum(-1)[self.component]

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws values that are differentiable in means and factors."""
        noise = self.standard(sample_shape, self.loc.shape[1]).unsqueeze(-1)
        return self.mean + (self._factors()[self.component] @ noise).squeeze(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns log densities of values ``(*batch, D)``, in the means' type.

        They are computed in the values' type where it is wider.
        """
        if self._validate_args:
            self._validate_sample(value)
        dtype = torch.promote_types(value.dtype, self.loc.dtype)
        value, loc, whitening = value.to(dtype), self.loc.to(dtype), self._whitening().to(dtype)
        size: Tensor = self.scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1) + loc.shape[1] * HALF_LOG_TWO_PI
        if self.scale_tril.dim() == 2:
            return -size - 0.5 * ((value - loc[self.component]) @ whitening).square().sum(-1).to(self.loc.dtype)
        rows, row, component, shape = self.entries(value)
        energy = square_distances(rows, row, component, loc, whitening).to(self.loc.dtype)
        return (-size[component] - 0.5 * energy).reshape(shape)

    def _whitening(self) -> Tensor:
        """Returns transposed inverses of the factors.

        They are in float64 where a device has it, as inverses lose more precision than products.
        """
        factors = self.scale_tril if self.scale_tril.device.type == "mps" else self.scale_tril.double()
        identity = torch.eye(factors.shape[-1], dtype=factors.dtype, device=factors.device)
        inverse: Tensor = torch.linalg.solve_triangular(factors, identity.expand_as(factors), upper=False)
        return inverse.mT

    def _factors(self) -> Tensor:
        return self.scale_tril.expand(len(self.loc), *self.scale_tril.shape[-2:])
