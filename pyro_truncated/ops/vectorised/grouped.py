"""Sorting by groups in plain torch, for any device."""

from __future__ import annotations

from torch import Tensor


def order_of(group: Tensor, num_groups: int) -> Tensor:
    """The entries ``(E,)`` of one group after the other, each in order."""
    return group.argsort(stable=True)
