"""Normal distributions of components that vary in few directions beside noise."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.distributions.component_gaussian import HALF_LOG_TWO_PI, ComponentGaussian
from pyro_truncated.distributions.deferred_validation import defer_constraints
from pyro_truncated.ops.low_rank import log_densities, posterior_means, whiten


class ComponentLowRankNormal(ComponentGaussian):
    r"""A low-rank normal distribution with the parameters of a component.

    .. math:: \mathcal N(\mu_z, W_z W_z^\top + \sigma_z^2 I)

    Only matrices ``(R, R)`` are factored, once for each component rather than for every data point
    and candidate. With :math:`L L^\top = I + W^\top W / \sigma^2` and :math:`d = y - \mu` the
    squared distance is :math:`|d|^2 / \sigma^2 - |L^{-1} W^\top d|^2 / \sigma^4` (Woodbury). Values
    are sorted by component for products of matrices, at a cost of ``D R`` for each of them.

    Example:
        >>> loc, factor, scale = torch.randn(10, 6), torch.randn(10, 6, 2), torch.rand(10)
        >>> y = ComponentLowRankNormal(torch.tensor([4, 4, 7]), loc, factor, scale).sample()
        >>> y.shape
        torch.Size([3, 6])

    Args:
        component: components ``z``, integers from 0 to ``K - 1`` of any shape and size.
        loc: means ``(K, D)``.
        factor: :math:`W`, ``(K, D, R)``.
        scale: standard deviations of the noise :math:`\sigma`, ``(K,)``, or ``()`` if all components share one.
        validate_args: whether to check arguments and values.

    Raises:
        ValueError: if means, factors and deviations disagree about the number of components or
            entries. Also if components are no integers or, on the CPU with checks, out of range.

    Reference:
        Tipping and Bishop, "Mixtures of probabilistic principal component analyzers", Neural Computation 11, 1999.
    """

    arg_constraints: ClassVar[dict[str, Any]] = defer_constraints(
        {"loc": constraints.real_vector, "factor": constraints.independent(constraints.real, 2), "scale": constraints.positive}
    )

    def __init__(self, component: Tensor, loc: Tensor, factor: Tensor, scale: Tensor, validate_args: bool | None = None) -> None:
        if loc.dim() != 2 or factor.dim() != 3 or factor.shape[:2] != loc.shape or scale.shape not in (loc.shape[:1], ()):
            shapes = ", ".join(str(tuple(given.shape)) for given in (loc, factor, scale))
            raise ValueError(f"loc must have shape (K, D), factor (K, D, R) and scale (K,) or (); got {shapes}")
        self.factor, self.scale = factor, scale
        super().__init__(component, loc, validate_args)

    @property
    def variance(self) -> Tensor:
        """Variances ``(*batch, D)``."""
        noise = self._scales().square().unsqueeze(-1)
        return (self.factor.square().sum(-1) + noise)[self.component]

    @property
    def precision_matrix(self) -> Tensor:
        r""":math:`\sigma^{-2} I - A A^\top` with what the Woodbury identity gives for :math:`A`, ``(*batch, D, D)``."""
        scale = self._scales()
        whitened, _ = whiten(self.factor, scale)
        identity = torch.eye(self.loc.shape[1], dtype=self.loc.dtype, device=self.loc.device)
        return (scale[:, None, None] ** -2 * identity - whitened @ whitened.mT)[self.component]

    @property
    def half_log_determinant(self) -> Tensor:
        r""":math:`\frac12 \log |W W^\top + \sigma^2 I|`, ``(*batch)``."""
        return whiten(self.factor, self._scales())[1][self.component]

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws values that are differentiable in all parameters."""
        directions = self.standard(sample_shape, self.factor.shape[-1])
        noise = self._scales()[self.component].unsqueeze(-1) * self.standard(sample_shape, self.loc.shape[1])
        return self.mean + (self.factor[self.component] @ directions.unsqueeze(-1)).squeeze(-1) + noise

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns log densities of values ``(*batch, D)``, in the means' type.

        They are computed in the values' type where it is wider.
        """
        if self._validate_args:
            self._validate_sample(value)
        rows, row, component, shape = self.entries(value)
        dtype = torch.promote_types(value.dtype, self.loc.dtype)
        loc, scale = self.loc.to(dtype), self._scales().to(dtype)
        whitened, log_volume = whiten(self.factor.to(dtype), scale)
        constant = -log_volume - loc.shape[1] * HALF_LOG_TWO_PI
        return log_densities(rows.to(dtype), row, component, loc, whitened, scale, constant).reshape(shape).to(self.loc.dtype)

    def without_noise(self, value: Tensor) -> tuple[Tensor, Tensor]:
        r"""Posterior means of :math:`x = \mu_z + W_z h` given :math:`y = x + \sigma_z \varepsilon`, and the variances of its entries.

        .. math:: \langle x \rangle = \mu + W M^{-1} W_O^\top (y - \mu)_O, \quad M = \sigma^2 I + W_O^\top W_O

        Args:
            value: :math:`y`, ``(*batch, D)``; of entries that are NaN nothing is known, the others are :math:`O`.

        Returns:
            The means and the variances, ``(*batch, D)`` both.
        """
        rows, row, component, shape = self.entries(value)
        means, variances = posterior_means(rows, row, component, self.loc, self.factor, self._scales())
        return means.reshape(*shape, -1), variances.reshape(*shape, -1)

    def _scales(self) -> Tensor:
        return self.scale.expand(len(self.loc))
