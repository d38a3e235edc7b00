"""The largest linear functions of features: of all, in groups, along neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend

_TYPES = (torch.float32, torch.float64)


def max_inner_products(features: Tensor, coefficients: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The ``number`` largest functions of every data point, and which, ``(N, number)``.

    Functions have ``coefficients (K, F)`` of ``features (N, F)``. Of equal ones any; NaN counts as the largest, as in ``torch.topk``.
    """
    features, coefficients = _compute(features, coefficients)
    return backend("max_inner_products", features).max_inner_products(features, coefficients, number)


def max_inner_products_in_groups(
    features: Tensor,
    coefficients: Tensor,
    group: Tensor,
    num_groups: int,
    probes: Tensor,
    number: int,
) -> tuple[Tensor, Tensor]:
    """The same among the functions of the groups ``probes (N, L)``.

    These have at least ``number`` functions together; ``group (K,)`` is that of every function.
    """
    features, coefficients = _compute(features, coefficients)
    result: tuple[Tensor, Tensor]
    result = backend("max_inner_products", features).max_inner_products_in_groups(features, coefficients, group, num_groups, probes, number)
    return result


def follow_neighbours(
    features: Tensor,
    coefficients: Tensor,
    neighbours: Tensor,
    value: Tensor,
    index: Tensor,
    depth: int,
    also: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Follows ``neighbours (K, W)`` of the best functions until all have been evaluated.

    It starts from the largest functions known, ``value`` and ``index (N, S)``, and those of ``also (N, A)``, looks at the neighbours of the
    best ``depth``, and returns both for the largest now known.
    """
    features, coefficients = _compute(features, coefficients)
    depth, also = min(depth, index.shape[1]), index[:, :0] if also is None else also
    result: tuple[Tensor, Tensor] = backend("max_inner_products", features).follow_neighbours(
        features, coefficients, neighbours, value.to(features), index, depth, also
    )
    return result


def _compute(features: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    dtype = features.dtype if features.dtype in _TYPES else torch.float32
    return features.detach().to(dtype), coefficients.detach().to(dtype)
