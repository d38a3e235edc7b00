"""Components of mixtures: the choice of one, and their Gaussians."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from pyro.distributions import Categorical, TorchDistribution
from pyro.distributions.util import broadcast_shape
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.distributions.deferred_validation import defer_constraints, validate_later
from pyro_truncated.ops.components import (
    HALF_LOG_TWO_PI,
    as_integers,
    check_below,
    kalman_gain,
    log_densities,
    posterior_means,
    square_distances,
)
from pyro_truncated.utils.constraints import larger_batch


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
        """Draws components ``(*sample_shape, *batch)``, without gradients.

        On a device they are drawn by inversion of the cumulative probabilities.
        """
        probs = self.probs
        if not probs.is_cpu:
            return self._sample_by_inversion(torch.Size(sample_shape) + self.batch_shape)
        if any(probs.stride()[:-1]) or probs.dim() == 1:
            draws: Tensor = super().sample(sample_shape)  # type: ignore[no-untyped-call]
            return draws
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


class ComponentGaussian(TorchDistribution):
    """A normal distribution whose parameters belong to components.

    Those parameters are named in ``arg_constraints``, in the order of its arguments. Components are integers of any shape and size; on the
    CPU, where checked, others than those of ``loc (K, D)`` are refused.
    """

    support = constraints.real_vector
    has_rsample = True
    _validate_sample = validate_later

    def __init__(self, component: Tensor, loc: Tensor, validate_args: bool | None) -> None:
        # Densities take the type of the means.
        loc = loc if loc.is_floating_point() else loc.to(torch.get_default_dtype())
        self.component, self.loc = as_integers(component), loc
        super().__init__(component.shape, loc.shape[-1:], validate_args=validate_args)
        # A device finds them itself where it looks them up; to look beforehand is five more kernels to launch.
        if self._validate_args and component.is_cpu:
            check_below(self.component, len(loc))

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """The same distribution over a larger batch."""
        return larger_batch(self, batch_shape, _instance, component=self.component.expand(batch_shape))

    @property
    def mean(self) -> Tensor:
        """Means ``(*batch, D)``."""
        return self.loc[self.component]

    def standard(self, sample_shape: Any, size: int) -> Tensor:
        """So many standard normal numbers for every draw, ``(*sample_shape, *batch, size)``."""
        shape = torch.Size(sample_shape) + self.batch_shape
        return torch.randn(*shape, size, dtype=self.loc.dtype, device=self.loc.device)

    def entries(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor, torch.Size]:
        """Returns values ``(N, D)``, pairs with components ``(E,)``, and the result's shape."""
        batch = value.shape[:-1]
        row = torch.arange(batch.numel(), device=value.device).reshape(batch)
        row, component = torch.broadcast_tensors(row, self.component)
        return value.reshape(batch.numel(), -1), row.flatten(), component.flatten(), row.shape


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
        """Variances of the chosen components, ``(*batch, D)``."""
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
        # What is looked up for components that all values share is not copied for every value.
        component = self.component[tuple(slice(None) if stride else slice(1) for stride in self.component.stride())]
        distance = value - self.loc[component]
        if self.scale.shape[1] == 1:
            energy = (self.scale**-2).squeeze(-1)[component] * distance.square().sum(-1)
        else:
            distance = distance * self.scale.reciprocal()[component]
            energy = torch.einsum("...d,...d->...", distance, distance)
        shape = broadcast_shape(self.component.shape, value.shape[:-1])
        return (constant[component] - 0.5 * energy).to(self.loc.dtype).expand(shape)


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
        """Diagonals of the chosen components' covariances, ``(*batch, D)``."""
        return self._factors().square().sum(-1)[self.component]

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws values that are differentiable in means and factors."""
        noise = self.standard(sample_shape, self.loc.shape[1]).unsqueeze(-1)
        return self.mean + (self._factors()[self.component] @ noise).squeeze(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns log densities of values ``(*batch, D)``, in the means' type.

        They are computed in the values' type where it is wider, and in single precision at least.
        """
        if self._validate_args:
            self._validate_sample(value)
        dtype = torch.promote_types(torch.promote_types(value.dtype, self.loc.dtype), torch.float32)
        value, loc, whitening = value.to(dtype), self.loc.to(dtype), self._whitening().to(dtype)
        size: Tensor = self.scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1) + loc.shape[1] * HALF_LOG_TWO_PI
        if self.scale_tril.dim() == 2:
            return -size - 0.5 * ((value - loc[self.component]) @ whitening).square().sum(-1).to(self.loc.dtype)
        rows, row, component, shape = self.entries(value)
        energy = square_distances(rows, row, component, loc, whitening).to(self.loc.dtype)
        return (-size[component] - 0.5 * energy).reshape(shape)

    def _whitening(self) -> Tensor:
        """Returns transposed inverses of the factors."""
        # In float64 where a device has it, as inverses lose more precision than products.
        factors = self.scale_tril if self.scale_tril.device.type == "mps" else self.scale_tril.double()
        identity = torch.eye(factors.shape[-1], dtype=factors.dtype, device=factors.device)
        inverse: Tensor = torch.linalg.solve_triangular(factors, identity.expand_as(factors), upper=False)
        return inverse.mT

    def _factors(self) -> Tensor:
        return self.scale_tril.expand(len(self.loc), *self.scale_tril.shape[-2:])


class ComponentLowRankNormal(ComponentGaussian):
    r"""A low-rank normal distribution with the parameters of a component.

    .. math:: \mathcal N(\mu_z, W_z W_z^\top + \sigma_z^2 I)

    Only matrices ``(R, R)`` are factored, once for each component rather than for every data point
    and candidate. With :math:`d = y - \mu` and :math:`h = (\sigma^2 I + W^\top W)^{-1} W^\top d` the
    squared distance is :math:`|d - W h|^2 / \sigma^2 + |h|^2`, exact for directions of any length. Values
    are sorted by component for products of matrices, at a cost of ``2 D R`` for each of them.

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
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (loc, factor, scale))
            raise ValueError(f"loc must have shape (K, D), factor (K, D, R) and scale (K,) or (); got {shapes}")
        self.factor, self.scale = factor, scale
        super().__init__(component, loc, validate_args)

    @property
    def variance(self) -> Tensor:
        r"""Diagonals of the chosen components' covariances :math:`F F^\top + \sigma^2 I`, ``(*batch, D)``."""
        noise = self._scales().square().unsqueeze(-1)
        return (self.factor.square().sum(-1) + noise)[self.component]

    @property
    def precision_matrix(self) -> Tensor:
        r""":math:`\sigma^{-2} (I - W (\sigma^2 I + W^\top W)^{-1} W^\top)` (Woodbury), ``(*batch, D, D)``."""
        scale = self._scales()
        gain, _ = kalman_gain(self.factor, scale)
        identity = torch.eye(self.loc.shape[1], dtype=self.loc.dtype, device=self.loc.device)
        return (scale[:, None, None] ** -2 * (identity - gain @ self.factor.mT))[self.component]

    @property
    def half_log_determinant(self) -> Tensor:
        r""":math:`\frac12 \log |W W^\top + \sigma^2 I|`, ``(*batch)``."""
        return kalman_gain(self.factor, self._scales())[1][self.component]

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws values that are differentiable in all parameters."""
        directions = self.standard(sample_shape, self.factor.shape[-1])
        noise = self._scales()[self.component].unsqueeze(-1) * self.standard(sample_shape, self.loc.shape[1])
        return self.mean + (self.factor[self.component] @ directions.unsqueeze(-1)).squeeze(-1) + noise

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns log densities of values ``(*batch, D)``, in the means' type.

        They are computed in the values' type where it is wider, and in single precision at least.
        """
        if self._validate_args:
            self._validate_sample(value)
        rows, row, component, shape = self.entries(value)
        dtype = torch.promote_types(torch.promote_types(value.dtype, self.loc.dtype), torch.float32)
        parameters = (value.to(dtype) for value in (self.loc, self.factor, self._scales()))
        return log_densities(rows.to(dtype), row, component, *parameters).reshape(shape).to(self.loc.dtype)

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
