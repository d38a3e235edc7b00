"""Kernels that are plain Python functions of two objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.gp.data_kernels.fixed import FixedKernel
from pyro_truncated.utils.arguments import check_kinds, names_arguments


class FunctionKernel(FixedKernel):
    """A Python function ``k(x, z)`` of two objects of any type.

    Each column is computed once and cached.

    Example:
        >>> def common(a, b):
        ...     return len(a & b) / len(a | b)
        >>> kernel = FunctionKernel(common, [{1, 2}, {2, 3}, {4}])
        >>> kernel.columns(torch.tensor([0])).flatten()
        tensor([1.0000, 0.3333, 0.0000], dtype=torch.float64, grad_fn=<...>)

    Args:
        function: returns a number for two objects, or with ``batched`` a matrix ``(a, b)`` for two lists of objects.
        objects: the training inputs; new inputs are given as a sequence as well.
        batched: what the function takes.
        variance: a variance to start from, which multiplies the function.

    Raises:
        TypeError: if an argument is not of its kind, new inputs are no sequence, or the function has no number for two objects.
        ValueError: if with ``batched`` the matrix is of another shape.
    """

    @names_arguments
    def __init__(
        self, function: Callable[[Any, Any], Any], objects: Sequence[Any], *, batched: bool = False, variance: float = 1.0
    ) -> None:
        if not callable(function):
            raise TypeError(f"function must be callable; got {type(function).__name__}")
        check_kinds(FunctionKernel.__init__, objects=objects, batched=batched)
        super().__init__(len(objects), variance)
        self.function = function
        self.objects = objects
        self.batched = batched

    def base_columns(self, index: Tensor) -> Tensor:
        """Values ``(n, b)`` of the function."""
        return self.base_cross(self.objects, index)

    def base_cross(self, new: Any, index: Tensor) -> Tensor:
        """Values ``(n_new, b)`` of the function for new objects."""
        return self._values(new, [self.objects[i] for i in index.tolist()])

    def base_among(self, new: Any) -> Tensor:
        """Values ``(n_new, n_new)`` of the function for new objects."""
        return self._values(new, new)

    def _values(self, new: Sequence[Any], others: Sequence[Any]) -> Tensor:
        check_kinds(FunctionKernel._values, new=new)
        if self.batched:
            found = torch.as_tensor(self.function(list(new), list(others)), dtype=torch.float64)
            if found.shape != (len(new), len(others)):
                raise ValueError(f"function must return a matrix of shape {(len(new), len(others))}; got {tuple(found.shape)}")
            return found
        rows = [[_number(self.function, x, z) for z in others] for x in new]
        return torch.tensor(rows, dtype=torch.float64).reshape(len(new), len(others))

    def base_diag(self) -> Tensor:
        """Values ``(n,)`` of the function for equal objects."""
        if not hasattr(self, "_diagonal"):
            self._diagonal = self.base_diag_new(self.objects)
        return self._diagonal

    def base_diag_new(self, new: Any) -> Tensor:
        """Values ``(n_new,)`` of the function for equal new objects."""
        check_kinds(FunctionKernel._values, new=new)
        if self.batched:
            return torch.tensor([float(torch.as_tensor(self.function([x], [x])).reshape(())) for x in new], dtype=torch.float64)
        return torch.tensor([_number(self.function, x, x) for x in new], dtype=torch.float64)


def _number(function: Callable[[Any, Any], Any], first: Any, second: Any) -> float:
    """What a function returns for two objects."""
    try:
        value = function(first, second)
    except Exception as error:
        kinds = f"{type(first).__name__} and {type(second).__name__}"
        raise TypeError(f"function fails on two objects, {kinds}: {type(error).__name__}: {error}") from error
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"function must return a number for two objects; got {type(value).__name__}: {error}") from error
