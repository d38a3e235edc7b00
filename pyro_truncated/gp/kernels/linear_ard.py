"""Covariance functions beyond those of :mod:`pyro.contrib.gp.kernels`."""

from __future__ import annotations

import torch
from pyro.contrib.gp.kernels import Kernel
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.utils.arguments import check_count, names_arguments
from pyro_truncated.utils.arrays import takes_arrays
from pyro_truncated.utils.constraints import check_entries, nonnegative_finite
from pyro_truncated.utils.parameter_store import UniqueModule


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
        """Returns the covariance ``(N, M)`` of ``X (N, Q)`` and ``Z (M, Q)``.

        ``Z`` is ``X`` by default. Or it returns the diagonal ``(N,)``.
        """
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
