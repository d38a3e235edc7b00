"""Constraints of parameters that stock ones leave open: infinity is no real number, and sums with it are NaN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.utils.arrays import as_tensors


class _Finite(constraints.Constraint):
    """Finite numbers."""

    def check(self, value: Any) -> Tensor:
        """Whether entries are finite."""
        # Two passes; torch's ``isfinite`` takes four.
        found: Tensor = value.abs() < torch.inf
        return found

    def __repr__(self) -> str:
        return "finite"


class _PositiveFinite(_Finite):
    """Positive finite numbers."""

    def check(self, value: Any) -> Tensor:
        """Whether entries are positive and finite."""
        found: Tensor = (value > 0) & super().check(value)
        return found

    def __repr__(self) -> str:
        return "positive and finite"


class _NonNegativeFinite(_Finite):
    """Finite numbers that are not negative."""

    def check(self, value: Any) -> Tensor:
        """Whether entries are finite and not negative."""
        found: Tensor = (value >= 0) & super().check(value)
        return found

    def __repr__(self) -> str:
        return "finite and not negative"


finite, positive_finite, nonnegative_finite = _Finite(), _PositiveFinite(), _NonNegativeFinite()


# Sums of squares of larger numbers are infinite in float64.
LARGEST = 1e150


def in_double(name: str, values: Any) -> Tensor:
    """A tensor or an array in float64, of which sums of squares are finite, too.

    Raises:
        TypeError: naming the argument, if it is neither.
        ValueError: naming the argument, if one is not, or they are complex.
    """
    values = as_tensors(values)
    if not isinstance(values, Tensor):
        raise TypeError(f"{name} must be a tensor or an array; got {type(values).__name__}")
    if values.is_complex():
        raise ValueError(f"{name} must be real; got {values.dtype}")
    found = values.double()
    if not bool((found.abs() <= LARGEST).all()):
        raise ValueError(f"{name} must be finite, of magnitude {LARGEST:g} at most; got NaN, infinity or more")
    return found


def check_entries(constraint: constraints.Constraint, **tensors: Tensor) -> None:
    """Refuses tensors of which an entry is outside of a constraint.

    Raises:
        ValueError: naming the argument.
    """
    for name, tensor in tensors.items():
        if tensor.is_complex() or tensor.dtype == torch.bool or not bool(constraint.check(tensor).all()):
            raise ValueError(f"{name} must be {constraint!r}; got {tensor.dtype} of shape {tuple(tensor.shape)} with other entries")
