"""Constraints of finite numbers and of observations with missing entries."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributions import Distribution, biject_to, constraints, transform_to
from torch.utils.checkpoint import checkpoint

from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.arrays import as_data
from pyro_truncated.utils.budget import current_budget
from pyro_truncated.utils.devices import cached_answer, cached_answers

_Distribution = TypeVar("_Distribution", bound=Distribution)


class _Finite(constraints.Constraint):
    """Finite numbers, or those of them that compare to zero."""

    def __init__(self, name: str, compare: Callable[[Tensor, float], Tensor] | None = None) -> None:
        self._name, self._compare = name, compare
        super().__init__()

    def check(self, value: Any) -> Tensor:
        """Whether entries are finite, and compare to zero."""
        # Two passes; torch's ``isfinite`` takes four.
        is_finite: Tensor = value.abs() < torch.inf
        return is_finite if self._compare is None else self._compare(value, 0) & is_finite

    def __repr__(self) -> str:
        return self._name


finite = _Finite("finite")
positive_finite, nonnegative_finite = _Finite("positive and finite", torch.gt), _Finite("finite and not negative", torch.ge)


# Sums of squares of larger numbers are infinite in float64.
LARGEST = 1e150


def first_invalid(values: Tensor, is_valid: Tensor) -> str:
    """Names the first entry that is not valid, and counts the others."""
    places = (~is_valid).nonzero()
    first = tuple(places[0].tolist())
    value = "NaN" if bool(values[first].isnan()) else f"{values[first].item():g}"
    return f"{value} at {first}" + (f" and {len(places) - 1} more" if len(places) > 1 else "")


def in_double(name: str, values: Any) -> Tensor:
    """A tensor, an array or a list in float64."""
    values = as_data(name, values)
    if values.is_complex():
        raise ValueError(f"{name} must be real; got {values.dtype}")
    tensor: Tensor = values.double()
    is_valid = tensor.abs() <= LARGEST
    if not bool(is_valid.all()):
        raise ValueError(f"{name} must be finite, of magnitude {LARGEST:g} at most; got {first_invalid(tensor, is_valid)}")
    return tensor


def check_entries(constraint: constraints.Constraint, **tensors: Tensor) -> None:
    """Refuses tensors of which an entry is outside of a constraint."""
    for name, tensor in tensors.items():
        if tensor.is_complex() or tensor.dtype == torch.bool:
            raise ValueError(f"{name} must be {constraint!r}; got {tensor.dtype} of shape {tuple(tensor.shape)}")
        is_valid = constraint.check(tensor)
        if not bool(is_valid.all()):
            raise ValueError(f"{name} must be {constraint!r}; got {first_invalid(tensor, is_valid)}")


class or_missing(constraints.Constraint):
    """Values that satisfy ``base`` and are finite, or NaN where missing.

    Example:
        >>> or_missing(dist.constraints.positive).check(torch.tensor([1.0, float("nan"), -1.0]))
        tensor([ True,  True, False])

    Args:
        base: constraint on the entries that are not missing.
    """

    @names_arguments
    def __init__(self, base: constraints.Constraint) -> None:
        self.base_constraint = base
        self.is_discrete, self.event_dim = base.is_discrete, base.event_dim
        super().__init__()

    def __repr__(self) -> str:
        return f"{self.base_constraint} or missing (NaN)"

    def check(self, value: Tensor) -> Tensor:
        """True where the entry is valid or missing."""
        valid: Tensor = self.base_constraint.check(value)
        # Infinity is a real number to torch.
        return (valid & (finite.check(value) if value.is_floating_point() else value.isfinite())) | value.isnan()


# A value that is not observed is not missing either: it is inferred where the base constraint says.
biject_to.register(or_missing, lambda constraint: biject_to(constraint.base_constraint))
transform_to.register(or_missing, lambda constraint: transform_to(constraint.base_constraint))


def without_missing(value: Tensor) -> tuple[Tensor, Tensor | None]:
    """Values in float64 with zeros where missing, and a mask or ``None``."""
    if not has_missing(value):
        return value.double(), None
    is_missing = value.isnan()
    return value.double().masked_fill(is_missing, 0.0), ~is_missing


def at_least_single(value: Tensor) -> Tensor:
    """Floating-point numbers in single precision where they have half of it."""
    return value.float() if value.dtype.itemsize < 4 else value


def has_missing(value: Tensor) -> bool:
    """Whether entries are missing.

    Where their sum is a finite number none is: a pass that writes nothing.
    """
    return cached_answer(value, "has missing entries", lambda: ~value.detach().sum().isfinite() and value.isnan().any())


def missing_where(value: Tensor, other: Tensor) -> Tensor:
    """Values computed from others, whose missing entries they share on devices."""
    if not value.is_cpu:
        cached_answers(value)["has missing entries"] = has_missing(other)
    return value


def in_blocks(
    function: Callable[[Tensor, Tensor], Tensor], states: Tensor, value: Tensor, batch_shape: torch.Size, numbers_each: int | None = None
) -> Tensor:
    """Evaluates ``function(states, value) -> batch_shape`` on slices under a memory budget.

    Of ``states (*batch, H)`` and ``value (*batch, D)`` it needs ``numbers_each`` numbers at a time for one element of the batch, by default
    ``max(H, D)``. Intermediate results of a slice are recomputed for its gradient.
    """
    numbers_each = max(states.shape[-1], value.shape[-1]) if numbers_each is None else numbers_each
    num_blocks = -(-8 * batch_shape.numel() * numbers_each // current_budget())
    if num_blocks <= 1 or not batch_shape:
        return function(states, value)
    states = states.expand(batch_shape + states.shape[-1:])
    value = value.expand(batch_shape + value.shape[-1:])
    dim = max(range(len(batch_shape)), key=lambda i: batch_shape[i])
    num_blocks = min(num_blocks, batch_shape[dim])
    pieces = zip(states.tensor_split(num_blocks, dim), value.tensor_split(num_blocks, dim), strict=True)
    if not torch.is_grad_enabled():
        # The first checkpoint of a process loads torch's compiler, for more than a second.
        return torch.cat([function(*piece) for piece in pieces], dim)
    results = [checkpoint(function, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    return torch.cat(results, dim)


def larger_batch(fn: _Distribution, batch_shape: Any, instance: Any, **attributes: Any) -> _Distribution:
    """A distribution over a larger batch, which has these attributes."""
    new: _Distribution = copy.copy(fn) if instance is None else instance
    # Whether values are checked is that of now, as in all distributions of torch.
    vars(new).update(vars(fn) | attributes, _batch_shape=torch.Size(batch_shape), _validate_args=fn._validate_args)
    return new


_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def selected_rows(y: Tensor | None, index: Tensor | None) -> Tensor | None:
    """Returns the data points that a plate selects.

    They are ``y[index]``, or ``y`` itself if these are all in order: what is known of it, such as that nothing is missing, need not be
    computed again.

    Example:
        >>> def model(y, batch_size=None):
        ...     with pyro.plate("data", len(y), batch_size) as index:
        ...         pyro.sample("y", dist.Normal(0.0, 1.0).expand([3]).to_event(1), obs=selected_rows(y, index))
        >>> pyro.poutine.trace(model).get_trace(torch.zeros(5, 3), 2).nodes["y"]["value"].shape
        torch.Size([2, 3])

    Args:
        y: all data points, in rows; without data there are no rows.
        index: positions of the selected ones; ``None`` of a plate without a size.
    """
    if y is None or index is None:
        return y if y is None else as_signed(y)
    if index.is_cpu and len(index) == len(y) and torch.equal(index, torch.arange(len(y), device="cpu")):
        return as_signed(y)
    return as_signed(missing_where(y.index_select(0, index.to(y.device, non_blocking=True)), y))


def as_signed(y: Tensor) -> Tensor:
    """The data, with unsigned integers above eight bits made signed."""
    return y.long() if y.dtype in _UNSIGNED else y
