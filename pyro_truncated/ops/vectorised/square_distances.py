"""Square distances from the means of components in plain torch."""

from __future__ import annotations

from torch import Tensor

from pyro_truncated.ops.grouped import Grouped


def square_distances(rows: Tensor, row: Tensor, component: Tensor, loc: Tensor, whitening: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.square_distances.square_distances`: those of one component together, as products of matrices."""
    grouped = Grouped.of(component, len(loc))
    found = []
    for part in grouped.parts(3 * rows.element_size() * rows.shape[1]):
        distance = rows[row[part.entry]] - loc[part.group].unsqueeze(1)
        found.append((distance @ whitening[part.group]).square().sum(-1))
    return grouped.gather(found)
