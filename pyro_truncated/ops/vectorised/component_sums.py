"""Sums over data points for components in plain torch, for any device."""

from __future__ import annotations

from torch import Tensor


def component_sums(component: Tensor, weight: Tensor, rows: Tensor, number: int) -> Tensor:
    """See :func:`pyro_truncated.ops.component_sums.component_sums`."""
    total = rows.new_zeros(number, rows.shape[1])
    for own, share in zip(component.mT, weight.mT, strict=True):
        total.index_add_(0, own, share.unsqueeze(-1) * rows)
    return total
