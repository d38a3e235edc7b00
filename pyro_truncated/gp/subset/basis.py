"""Inducing inputs of a sparse regression, from the training inputs or anywhere: covariances with them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pyro_truncated.gp.data_kernels import DataKernel, InputKernel


class Basis:
    """Inducing inputs from the training inputs: covariances with them.

    Args:
        kernel: the kernel.
        index: their positions ``(m,)``.
    """

    def __init__(self, kernel: DataKernel, index: Tensor) -> None:
        self.kernel = kernel
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def columns(self, rows: Tensor | None = None) -> Tensor:
        """Covariances ``(n, m)`` of the training inputs, or those at ``rows``, in float64."""
        return self.kernel.columns(self.index, rows).double()

    def square(self) -> Tensor:
        """Covariances ``(m, m)`` of the inducing inputs, in float64."""
        return self.kernel.columns(self.index, self.index).double()

    def cross(self, new: Any) -> Tensor:
        """Covariances ``(n_new, m)`` of new inputs, in float64."""
        return self.kernel.cross(new, self.index).double()


class FreeBasis(Basis):
    """Inducing inputs anywhere in the input space.

    Args:
        kernel: a kernel of numeric inputs.
        inputs: the inducing inputs ``(m, D)``.
    """

    kernel: InputKernel

    def __init__(self, kernel: InputKernel, inputs: Tensor) -> None:
        self.kernel = kernel
        self.inputs = inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def columns(self, rows: Tensor | None = None) -> Tensor:
        """Covariances ``(n, m)`` of the training inputs, or those at ``rows``, in float64."""
        points = self.kernel.inputs if rows is None else self.kernel.inputs[rows]
        return self.kernel.between(points, self.inputs).double()

    def square(self) -> Tensor:
        """Covariances ``(m, m)`` of the inducing inputs, in float64."""
        return self.kernel.between(self.inputs, self.inputs).double()

    def cross(self, new: Any) -> Tensor:
        """Covariances ``(n_new, m)`` of new inputs, in float64."""
        return self.kernel.between(self.kernel.points(new), self.inputs).double()


def covariances_with(basis: Basis, new: Any) -> tuple[Tensor, Tensor]:
    """Covariances ``(n_new, m)`` of new inputs with inducing inputs, and variances ``(n_new,)``, in float64.

    Raises:
        ValueError: if one of them is not finite.
    """
    cross, prior = basis.cross(new), basis.kernel.diag_new(new).double()
    strange = ~(cross.isfinite().all(1) & prior.isfinite())
    if bool(strange.any()):
        raise ValueError(f"the kernel is not finite at new input {int(strange.nonzero()[0])}; check the new inputs")
    return cross, prior


def kernel_to_polish(kernel: DataKernel, is_exact: bool) -> InputKernel:
    """The kernel of a regression whose inducing inputs are to move.

    Raises:
        ValueError: if there are none.
        TypeError: if inputs are no numbers.
    """
    if is_exact:
        raise ValueError(
            "polish=True moves inducing inputs, of which an exact regression has none; give num_inducing, fewer than there are data"
        )
    if not isinstance(kernel, InputKernel):
        raise TypeError(f"polish=True needs a kernel of numeric inputs, such as PyroKernel; got {type(kernel).__name__}")
    return kernel
