"""Inputs and a kernel, as the constructors of regressions take them, made one :class:`DataKernel`."""

from __future__ import annotations

from typing import Any

import torch
from pyro.contrib.gp import kernels
from torch import Tensor

from pyro_truncated.gp.data_kernels.numeric import GPyTorchKernel, PyroKernel, smooth_rbf
from pyro_truncated.gp.data_kernels.protocol import DataKernel, KernelColumns, as_data_kernel
from pyro_truncated.utils.arrays import as_tensors


def bound_kernel(X: Any, kernel: Any = None) -> DataKernel:
    """A kernel on training inputs.

    Args:
        X: the training inputs, of any type that the kernel takes; or a kernel that holds them already: a :class:`DataKernel`, or an object
            with ``diag()``, ``columns(index)`` and ``cross(new, index)``.
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
