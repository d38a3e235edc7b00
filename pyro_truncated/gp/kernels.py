"""Calls of kernels of :mod:`pyro.contrib.gp.kernels`, and covariances of better precision.

A call of such a kernel reads its parameters from Pyro's store. Outside of Pyro programs a kernel should be a function of its own parameters
and leave no trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.contrib.gp import kernels
from pyro.contrib.gp.kernels import Kernel
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.utils.arguments import check_count, names_arguments
from pyro_truncated.utils.arrays import takes_arrays
from pyro_truncated.utils.constraints import check_entries, nonnegative_finite
from pyro_truncated.utils.parameter_store import UniqueModule, empty_store

# Covariances of inputs, called as the kernels of pyro.contrib.gp.kernels are.
Covariance = Callable[..., Tensor]


def refuse_foreign_kernel(kernel: Any) -> None:
    """Refuses classes and kernels of scikit-learn; names what to take."""
    kind = kernel if isinstance(kernel, type) else type(kernel)
    if kernel is kind and issubclass(kind, kernels.Kernel):
        raise TypeError(f"kernel must be made first: {kind.__name__}(input_dim=...); got the class")
    if kind.__module__.startswith("sklearn.gaussian_process"):
        others = {"Matern": "Matern32 or Matern52", "ExpSineSquared": "Periodic", "DotProduct": "Linear", "ConstantKernel": "Constant"}
        own = others.get(kind.__name__, kind.__name__)
        advice = f"take pyro.contrib.gp.kernels.{own}, whose parameters are learned"
        if kind.__name__ == "WhiteKernel":
            advice = "leave it out, as the noise is learned anyway"
        raise TypeError(f"kernel must be one of pyro.contrib.gp.kernels; got {kind.__name__} of scikit-learn: {advice}")


@contextlib.contextmanager
def outside_programs() -> Iterator[None]:
    """A context in which kernels depend on their own parameters only."""
    with poutine.block(), empty_store():
        yield


def evaluate(kernel: Any, *points: Tensor, diag: bool = False) -> Tensor:
    """Covariances of points ``(N, D)`` and ``(M, D)``, or the diagonal ``(N,)``.

    Inside a Pyro program parameters may be random, and are the store's; outside they are those the kernel holds.
    """
    is_inside = kernel._pyro_context.active or poutine.runtime.am_i_wrapped()
    with contextlib.nullcontext() if is_inside else outside_programs():
        if type(kernel) is kernels.RBF and len(points) == 2 and not diag:
            # What a call of the kernel enters: random parameters are drawn once.
            with kernel._pyro_context:
                lengthscale, variance = (torch.as_tensor(parameter) for parameter in (kernel.lengthscale, kernel.variance))
            if not variance.dim() and lengthscale.dim() < 2:
                first, second = (kernel._slice_input(some) for some in points)
                return squared_exponential(first, second, lengthscale, variance)
        return kernel(*points, diag=diag)


def covariance_at(kernel: kernels.Kernel, parameters: Mapping[str, Tensor]) -> Covariance:
    """The kernel as a function of inputs at other unconstrained parameters."""

    def covariances(X: Tensor, Z: Tensor | None = None, diag: bool = False) -> Tensor:
        with outside_programs():
            return torch.func.functional_call(kernel, dict(parameters), (X, Z), {"diag": diag})

    return covariances


def squared_exponential(first: Tensor, second: Tensor, lengthscale: Tensor, variance: Tensor) -> Tensor:
    r"""The squared exponential kernel ``(a, b)`` in one product and one exponential.

    With inputs divided by the length-scales, :math:`\log k(x, z) = x^\top z - \frac12 |x|^2 - \frac12 |z|^2 + \log v`, in fewer passes than
    Pyro's own way.
    """
    # Distances do not depend on the origin; rounding errors do.
    centre = second.detach().mean(0)
    x, z = (first - centre) / lengthscale, (second - centre) / lengthscale
    x_size, z_size = -0.5 * x.square().sum(1, keepdim=True), -0.5 * z.square().sum(1, keepdim=True)
    left = torch.cat([x, x_size, torch.ones_like(x_size)], 1)
    right = torch.cat([z, torch.ones_like(z_size), z_size + variance.log()], 1)
    return (left @ right.mT).exp()


def squared_distances(X: Tensor, Z: Tensor) -> Tensor:
    """Squared distances ``(*batch, N, M)`` of rows, accumulated in float64."""
    centre = Z.detach().double().mean(-2, keepdim=True)
    X64, Z64 = X.double() - centre, Z.double() - centre
    squares = X64.square().sum(-1).unsqueeze(-1) - 2 * X64 @ Z64.mT + Z64.square().sum(-1).unsqueeze(-2)
    return squares.clamp(min=0.0).to(X.dtype)


def covariance(kernel: kernels.Kernel, X: Tensor, Z: Tensor) -> Tensor:
    """Kernel matrix of latents ``(*batch, N, Q)`` and ``(*batch, M, Q)``.

    Distances of the RBF and Matérn kernels of :mod:`pyro.contrib.gp` are taken in float64.
    """
    profile = _PROFILES.get(type(kernel))
    if profile is not None:
        dims = list(kernel.active_dims)
        return kernel.variance * profile(squared_distances(X[..., dims] / kernel.lengthscale, Z[..., dims] / kernel.lengthscale))
    if X.dim() == 2 and Z.dim() == 2:
        return evaluate(kernel, X, Z)
    batch = torch.broadcast_shapes(X.shape[:-2], Z.shape[:-2])
    rows, columns = (T.expand(batch + T.shape[-2:]).flatten(0, -3) for T in (X, Z))
    many: Tensor = torch.func.vmap(lambda a, b: evaluate(kernel, a, b))(rows, columns)
    return many.reshape(batch + many.shape[-2:])


def prior_variance(kernel: kernels.Kernel, X: Tensor) -> Tensor:
    """Prior variances ``(*batch, N)`` of the function at latents ``(*batch, N, Q)``."""
    if type(kernel) in _PROFILES:
        return kernel.variance.expand(X.shape[:-1])
    return evaluate(kernel, X.reshape(-1, X.shape[-1]), diag=True).reshape(X.shape[:-1])


def _root(squares: Tensor) -> Tensor:
    # At distance zero the root has no derivative, but the squared distance has one, which is zero.
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)


# Known stationary kernels as functions of the squared scaled distance, by their exact type: a subclass may compute something else.
_PROFILES: dict[type, Callable[[Tensor], Tensor]] = {
    kernels.RBF: lambda r2: (-0.5 * r2).exp(),
    kernels.Exponential: lambda r2: (-_root(r2)).exp(),
    kernels.Matern32: lambda r2: (1 + _root(3 * r2)) * (-_root(3 * r2)).exp(),
    kernels.Matern52: lambda r2: (1 + _root(5 * r2) + 5 / 3 * r2) * (-_root(5 * r2)).exp(),
}


class LinearARD(UniqueModule, Kernel):
    r"""Linear covariance with one weight per dimension, :math:`k(x, x') = \sum_q a_q x_q x'_q`.

    Example:
        >>> LinearARD(2, variance=torch.tensor([1.0, 4.0]))(torch.eye(2))
        tensor([[1., 0.],
                [0., 4.]], grad_fn=<...>)

    Args:
        input_dim: number of dimensions ``Q``.
        variance: weights :math:`a`, ``(Q,)``. Default: ones.
        active_dims: the dimensions of the input that it acts on. Default: all.

    Attributes:
        variance: weights :math:`a`, ``(Q,)``; a dimension of weight zero is of no use to the kernel.

    Raises:
        ValueError: if there is not one weight per dimension, or one is negative or not finite.
    """

    variance: Tensor

    @names_arguments
    @takes_arrays
    def __init__(self, input_dim: int, variance: Tensor | None = None, active_dims: list[int] | None = None) -> None:
        input_dim = check_count("input_dim", input_dim)
        super().__init__(input_dim, active_dims)
        variance = torch.ones(input_dim) if variance is None else variance
        if variance.shape != (input_dim,):
            raise ValueError(f"variance must have shape ({input_dim},), one weight per dimension; got {tuple(variance.shape)}")
        check_entries(nonnegative_finite, variance=variance)
        self.variance = PyroParam(variance, constraints.positive)  # type: ignore[assignment]

    def forward(self, X: Tensor, Z: Tensor | None = None, diag: bool = False) -> Tensor:
        """The covariance ``(N, M)`` of ``X`` and ``Z``, or the diagonal ``(N,)``."""
        weight = self.variance
        # Of two types the finer one, as in Pyro's kernels.
        dtype = torch.promote_types(X.dtype, weight.dtype)
        X, weight = self._slice_input(X).to(dtype), weight.to(dtype)  # type: ignore[no-untyped-call]
        if diag:
            return X.square() @ weight
        other = X if Z is None else self._slice_input(Z).to(dtype)  # type: ignore[no-untyped-call]
        if other.shape[1] != X.shape[1]:
            raise ValueError(f"inputs must have the same number of dimensions; got {X.shape[1]} and {other.shape[1]}")
        return (X * weight) @ other.mT
