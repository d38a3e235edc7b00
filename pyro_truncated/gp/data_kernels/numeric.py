"""Kernels of numeric inputs; a kernel and inputs made one :class:`DataKernel`."""

from __future__ import annotations

from typing import Any

import torch
from pyro.contrib.gp import kernels
from torch import Tensor

from pyro_truncated.gp.data_kernels.protocol import DataKernel, KernelColumns, as_data_kernel
from pyro_truncated.gp.kernels import evaluate
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.arrays import as_tensors


class InputKernel(DataKernel):
    """A kernel of numeric inputs ``(n, D)``.

    It gives covariances of arbitrary points, so that :class:`SubsetGPRegression` can optimise
    inputs.

    Args:
        inputs: training inputs ``(n, D)`` or ``(n,)``, finite.
    """

    inputs: Tensor

    def __init__(self, inputs: Tensor) -> None:
        inputs = as_tensors(inputs)
        if not isinstance(inputs, Tensor) or inputs.dim() not in (1, 2) or not inputs.is_floating_point():
            raise TypeError(f"inputs must be a floating point tensor of shape (n, D) or (n,); got {_describe(inputs)}")
        if not bool(inputs.isfinite().all()):
            raise ValueError("inputs must be finite; they hold NaN or infinity")
        super().__init__(len(inputs))
        self.register_buffer("inputs", inputs, persistent=False)

    def between(self, first: Tensor, second: Tensor) -> Tensor:
        """Covariances ``(a, b)`` of points ``(a, D)`` and ``(b, D)``, differentiable in both."""
        raise NotImplementedError

    def variances(self, points: Tensor) -> Tensor:
        """Variances ``(a,)`` of points ``(a, D)``."""
        raise NotImplementedError

    def diag(self, rows: Tensor | None = None) -> Tensor:
        """Variances of the training inputs, ``(n,)``, or only those at ``rows``."""
        return self.variances(self.inputs if rows is None else self.inputs[rows])

    def columns(self, index: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns covariances ``(n, b)`` with training inputs at positions ``index`` ``(b,)``.

        They are those of all training inputs, or those at ``rows``.
        """
        return self.between(self.inputs if rows is None else self.inputs[rows], self.inputs[index])

    def cross(self, new: Any, index: Tensor) -> Tensor:
        """Returns covariances ``(n_new, b)`` of new inputs ``(n_new, D)``.

        They are those with the training inputs at positions ``index``.
        """
        return self.between(self.points(new), self.inputs[index])

    def diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new inputs ``(n_new, D)``."""
        return self.variances(self.points(new))

    def among(self, new: Any) -> Tensor:
        """Covariances ``(n_new, n_new)`` of new inputs ``(n_new, D)`` with each other."""
        points = self.points(new)
        return self.between(points, points)

    def points(self, new: Any) -> Tensor:
        """Returns new inputs ``(n_new, D)`` in the training inputs' type and device.

        Raises:
            ValueError: if they are not of this shape, or not finite.
        """
        new = as_tensors(new)
        if not isinstance(new, Tensor) or new.is_complex() or new.shape[1:] != self.inputs.shape[1:]:
            raise ValueError(f"new inputs must be real and have shape {('n_new', *self.inputs.shape[1:])}; got {_describe(new)}")
        if not bool(new.isfinite().all()):
            raise ValueError("new inputs must be finite; they hold NaN or infinity")
        return new.to(self.inputs)


class PyroKernel(InputKernel):
    """A kernel of :mod:`pyro.contrib.gp.kernels` on training inputs.

    Outside of Pyro models its parameters are those that the module holds. Entries of Pyro's
    parameter store, such as ``"variance"``, neither change them nor are changed.

    Example:
        >>> kernel = PyroKernel(pyro.contrib.gp.kernels.RBF(2), torch.randn(10, 2))
        >>> kernel.columns(torch.tensor([0, 3])).shape
        torch.Size([10, 2])

    Args:
        kernel: the kernel; used, not copied.
        inputs: training inputs ``(n, D)``.
    """

    @names_arguments
    def __init__(self, kernel: kernels.Kernel, inputs: Tensor) -> None:
        if not isinstance(kernel, kernels.Kernel):
            raise TypeError(f"kernel must be one of pyro.contrib.gp.kernels; got {type(kernel).__name__}")
        super().__init__(inputs)
        self.kernel = kernel

    def between(self, first: Tensor, second: Tensor) -> Tensor:
        """Covariances ``(a, b)`` of points ``(a, D)`` and ``(b, D)``, differentiable in both."""
        return evaluate(self.kernel, first, second)

    def variances(self, points: Tensor) -> Tensor:
        """Variances ``(a,)`` of points ``(a, D)``."""
        return evaluate(self.kernel, points, diag=True)


class GPyTorchKernel(InputKernel):
    """A GPyTorch kernel on training inputs.

    It is only called, so that this module does not import GPyTorch.

    Example::

        import gpytorch

        kernel = GPyTorchKernel(gpytorch.kernels.MaternKernel(), X)
        model = SubsetGPRegression(kernel, y, num_inducing=10)

    Args:
        kernel: a ``gpytorch.kernels.Kernel`` without batch dimensions; used, not copied.
        inputs: training inputs ``(n, D)``.
    """

    @names_arguments
    def __init__(self, kernel: torch.nn.Module, inputs: Tensor) -> None:
        if not isinstance(kernel, torch.nn.Module):
            raise TypeError(f"kernel must be a GPyTorch kernel; got {type(kernel).__name__}")
        super().__init__(inputs)
        self.kernel = kernel

    def between(self, first: Tensor, second: Tensor) -> Tensor:
        """Covariances ``(a, b)`` of points ``(a, D)`` and ``(b, D)``, differentiable in both."""
        found: Tensor = self.kernel(first, second).to_dense()
        return found

    def variances(self, points: Tensor) -> Tensor:
        """Variances ``(a,)`` of points ``(a, D)``."""
        found: Tensor = self.kernel(points, diag=True)
        return found


@names_arguments
def smooth_rbf(inputs: Tensor) -> PyroKernel:
    r"""A squared exponential kernel with one length-scale per dimension.

    Length-scales start at :math:`2 \sqrt D` standard deviations of the inputs.

    Inputs need not be standardised; those that never vary start from a length-scale of :math:`2 \sqrt D`.

    Example:
        >>> kernel = smooth_rbf(torch.randn(10, 4))
        >>> kernel.diag().shape
        torch.Size([10])

    Args:
        inputs: training inputs ``(n, D)``, or ``(n,)`` for one dimension.
    """
    inputs = as_tensors(inputs)
    points = inputs if inputs.dim() == 2 else inputs[:, None]
    dim = points.shape[1]
    spread = points.std(0, correction=0)
    lengthscale = 2 * dim**0.5 * torch.where(spread > 0, spread, torch.ones_like(spread))
    return PyroKernel(kernels.RBF(dim, points.new_ones(()), lengthscale), points)


def _describe(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def bound_kernel(X: Any, kernel: Any = None) -> DataKernel:
    """A kernel on training inputs.

    Args:
        X: the training inputs, of any type that the kernel takes. Or a kernel with its own inputs:
            a :class:`DataKernel`, or an object with ``diag()``, ``columns(index)`` and ``cross(new,
            index)``.
        kernel: a kernel of :mod:`pyro.contrib.gp.kernels` or of GPyTorch, or a function that makes a :class:`DataKernel` of the inputs,
            such as :class:`CountKernel`. Default for numeric inputs: :func:`smooth_rbf`.

    Raises:
        TypeError: if there is no kernel for such inputs, or there are inputs twice.
    """
    if is_bound(X):
        if kernel is not None:
            raise TypeError("X is a kernel that holds its inputs already: leave kernel out")
        return as_data_kernel(X)
    if is_bound(kernel):
        raise TypeError("kernel holds its inputs already: give it in the place of X")
    inputs = as_tensors(X)
    if isinstance(kernel, kernels.Kernel):
        return PyroKernel(kernel, inputs)
    if isinstance(kernel, torch.nn.Module):
        return GPyTorchKernel(kernel, inputs)
    if callable(kernel):
        return as_data_kernel(kernel(inputs))
    if kernel is not None:
        raise TypeError(f"kernel must be a kernel of Pyro or GPyTorch, or make a DataKernel of the inputs; got {type(kernel).__name__}")
    if isinstance(inputs, Tensor) and inputs.is_floating_point() and inputs.dim() in (1, 2):
        return smooth_rbf(inputs)
    if isinstance(X, kernels.Kernel):
        raise TypeError("kernel has no data yet: give inputs, targets, kernel in this order")
    raise TypeError(f"kernel is needed where X is neither a floating point matrix nor a DataKernel; X is {type(X).__name__}")


def is_bound(value: Any) -> bool:
    """Whether a value is a kernel that holds its inputs."""
    return isinstance(value, (DataKernel, KernelColumns)) and not isinstance(value, type)
