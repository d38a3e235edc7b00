"""Distances from components in plain torch, for any device."""

from __future__ import annotations

from torch import Tensor

from pyro_truncated.ops.components import GroupBlocks


def square_distances(rows: Tensor, row: Tensor, component: Tensor, loc: Tensor, whitening: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.components.square_distances`: those of one component together, as products of matrices."""
    grouped = GroupBlocks.from_groups(component, len(loc))
    found = []
    for part in grouped.parts(3 * rows.element_size() * rows.shape[1]):
        distance = rows[row[part.entry]] - loc[part.group].unsqueeze(1)
        found.append((distance @ whitening[part.group]).square().sum(-1))
    return grouped.gather(found)
