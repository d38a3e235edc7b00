"""Sums over data points for each of many components, of which a data point has few."""

from __future__ import annotations

from torch import Tensor

from pyro_truncated.ops.backend import backend


def sums_of_components(component: Tensor, weight: Tensor, rows: Tensor, number: int) -> Tensor:
    r""":math:`\sum_n r_{nk} x_n` for all components ``k``, in float64.

    Example:
        >>> sums_of_components(torch.tensor([[1], [0], [1]]), torch.ones(3, 1), torch.tensor([[1.0], [2.0], [3.0]]), 2).tolist()
        [[2.0], [4.0]]

    Args:
        component: which components a data point has, ``(N, S)``.
        weight: with which weights, ``(N, S)``.
        rows: ``(N, D)``.
        number: how many components ``K``.

    Returns:
        ``(K, D)``; the order of the sums does not depend on the number of threads.
    """
    sums: Tensor = backend("component_sums", rows).sums_of_components(component, weight.double(), rows.double(), number)
    return sums
