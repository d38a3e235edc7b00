"""Observations with missing entries: the constraint they satisfy, and densities evaluated over them in blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import biject_to, constraints, transform_to
from torch.utils.checkpoint import checkpoint

from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.budget import current_budget
from pyro_truncated.utils.facts import known_of, note_of


class or_missing(constraints.Constraint):
    """Values that are finite and satisfy ``base``, or are NaN, which marks a missing entry.

    Example:
        >>> or_missing(dist.constraints.positive).check(torch.tensor([1.0, float("nan"), -1.0]))
        tensor([ True,  True, False])

    Args:
        base: constraint on the entries that are not missing.
    """

    @names_arguments
    def __init__(self, base: constraints.Constraint) -> None:
        self.base_constraint = base
        super().__init__()

    def __repr__(self) -> str:
        return f"{self.base_constraint} or missing (NaN)"

    @property
    def is_discrete(self) -> bool:  # type: ignore[override]
        """Whether the base constraint is discrete."""
        return bool(self.base_constraint.is_discrete)

    @property
    def event_dim(self) -> int:  # type: ignore[override]
        """Event dimension of the base constraint."""
        return int(self.base_constraint.event_dim)

    def check(self, value: Tensor) -> Tensor:
        """True where the entry is valid or missing."""
        valid: Tensor = self.base_constraint.check(value)
        # Infinity is a real number to torch.
        return (valid & value.isfinite()) | value.isnan()


# A value that is not observed is not missing either: it is inferred where the base constraint says.
biject_to.register(or_missing, lambda constraint: biject_to(constraint.base_constraint))
transform_to.register(or_missing, lambda constraint: transform_to(constraint.base_constraint))


def without_missing(value: Tensor) -> tuple[Tensor, Tensor | None]:
    """Values in float64 with zeros in the place of missing entries, and which entries are observed; ``None`` if all of them are."""
    if not has_missing(value):
        return value.double(), None
    is_missing = value.isnan()
    return value.double().masked_fill(is_missing, 0.0), ~is_missing


def has_missing(value: Tensor) -> bool:
    """Whether entries are missing."""
    return known_of(value, "has missing entries", lambda: value.isnan().any())


def missing_where(value: Tensor, other: Tensor) -> Tensor:
    """Values that were computed from others; on a device they count as having missing entries if the others have."""
    if not value.is_cpu:
        note_of(value, "has missing entries", has_missing(other))
    return value


def in_blocks(
    function: Callable[[Tensor, Tensor], Tensor], states: Tensor, value: Tensor, batch_shape: torch.Size, numbers_each: int | None = None
) -> Tensor:
    """Evaluates ``function(states, value) -> batch_shape`` on slices of the largest batch dimension, under a memory budget.

    Intermediate results of a slice are recomputed for its gradient instead of being kept.

    Args:
        function: elementwise in the batch.
        states: states ``(*batch, H)``.
        value: observations ``(*batch, D)``.
        batch_shape: the shape both broadcast to.
        numbers_each: how many numbers the function needs at a time for one element of the batch; default ``max(H, D)``.

    Returns:
        The values of the function, ``batch_shape``.
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
    results = [checkpoint(function, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    return torch.cat(results, dim)
