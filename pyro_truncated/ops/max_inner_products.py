"""The largest linear functions of features: of all, in groups, along neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend

_TYPES = (torch.float32, torch.float64)


def max_inner_products(features: Tensor, coefficients: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The largest functions of every data point.

    Args:
        features: of the data points, ``(N, F)``.
        coefficients: of the functions, ``(K, F)``.
        number: how many functions, at most ``K``.

    Returns:
        Their values and their numbers, ``(N, number)``, the largest first; of equal ones, any. NaN counts as the largest, as in
        ``torch.topk``. Types that are not compiled are computed with in single precision.
    """
    features, coefficients = _computed(features, coefficients)
    found: tuple[Tensor, Tensor] = backend("max_inner_products", features).max_inner_products(features, coefficients, number)
    return found


def max_inner_products_in_groups(
    features: Tensor,
    coefficients: Tensor,
    group: Tensor,
    num_groups: int,
    visited: Tensor,
    number: int,
) -> tuple[Tensor, Tensor]:
    """The same among the functions of those groups that are looked at.

    Args:
        features: of the data points, ``(N, F)``.
        coefficients: of the functions, ``(K, F)``.
        group: of every function, ``(K,)``; none is empty.
        num_groups: how many there are.
        visited: different groups to look at for every data point, ``(N, L)``, which have at least ``number`` functions together.
        number: how many functions.
    """
    features, coefficients = _computed(features, coefficients)
    found: tuple[Tensor, Tensor]
    found = backend("max_inner_products", features).max_inner_products_in_groups(features, coefficients, group, num_groups, visited, number)
    return found


def follow_neighbours(
    features: Tensor,
    coefficients: Tensor,
    neighbours: Tensor,
    value: Tensor,
    index: Tensor,
    depth: int,
    also: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Follows neighbours of the best functions until all have been evaluated.

    Args:
        features: of the data points, ``(N, F)``.
        coefficients: of the functions, ``(K, F)``.
        neighbours: of every function, ``(K, W)``.
        value: the largest functions known, ``(N, S)``, the largest first.
        index: which functions these are; different ones.
        depth: how many of the best ones' neighbours are looked at; of at most ``S`` functions in all.
        also: functions to look at before, different ones, ``(N, A)``.

    Returns:
        The values and the numbers of the largest functions now known, ``(N, S)``, the largest first.
    """
    features, coefficients = _computed(features, coefficients)
    depth, also = min(depth, index.shape[1]), index[:, :0] if also is None else also
    found: tuple[Tensor, Tensor] = backend("max_inner_products", features).follow_neighbours(
        features, coefficients, neighbours, value.to(features), index, depth, also
    )
    return found


def _computed(features: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    dtype = features.dtype if features.dtype in _TYPES else torch.float32
    return features.detach().to(dtype), coefficients.detach().to(dtype)
