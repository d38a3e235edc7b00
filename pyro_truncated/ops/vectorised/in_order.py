"""What plain torch computes with in the order of the kernels."""

from __future__ import annotations

from torch import Tensor

from pyro_truncated.ops.backend import backend


def exp(values: Tensor) -> Tensor:
    """Exponentials as kernels compute them."""
    return backend("binary_chains", values).exp(values)


def log(values: Tensor) -> Tensor:
    """Logarithms as kernels compute them."""
    return backend("binary_chains", values).log(values)


def total(values: Tensor) -> Tensor:
    """Sums of rows, from the first entry to the last."""
    return values.cumsum(-1)[..., -1]


def add(sums: Tensor, index: Tensor, values: Tensor) -> None:
    """Adds values at places of the flattened sums, one after the other."""
    sums.view(-1).index_add_(0, index.flatten(), values.flatten())
