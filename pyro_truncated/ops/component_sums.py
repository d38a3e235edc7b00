"""Sums over data points for each of many components."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from pyro_truncated.ops.backend import are_differentiated, backend, use_backend
from pyro_truncated.ops.deferred_checks import raise_if
from pyro_truncated.utils.arguments import check_count


def component_sums(component: Tensor, weight: Tensor, rows: Tensor, number: int) -> Tensor:
    r""":math:`\sum_n r_{nk} x_n` for all components ``k``, in float64; differentiable in weights and rows.

    Example:
        >>> component_sums(torch.tensor([[1], [0], [1]]), torch.ones(3, 1), torch.tensor([[1.0], [2.0], [3.0]]), 2).tolist()
        [[2.0], [4.0]]

    Args:
        component: which components a data point has, integers from 0 to ``K - 1``, ``(N, S)``.
        weight: with which weights, ``(N, S)``.
        rows: ``(N, D)``.
        number: how many components ``K``.

    Returns:
        ``(K, D)``; the order of the sums does not depend on the number of threads.

    Raises:
        ValueError: if shapes do not fit, the number is below 1, or there are other components.
    """
    number = check_count("number", number)
    component = check_components(component, weight, rows, number)
    with use_backend("vectorised") if are_differentiated(weight, rows) else contextlib.nullcontext():
        sums: Tensor = backend("component_sums", rows).component_sums(component, weight.double(), rows.double(), number)
    return sums


def check_components(component: Tensor, weight: Tensor, rows: Tensor, number: int) -> Tensor:
    """Checks that components, weights and rows fit; returns 64-bit components.

    Components ``(N, S)`` are below the number, weights are ``(N, S)`` and rows ``(N, D)``.

    Raises:
        ValueError: if shapes do not fit, or there are other components.
    """
    if component.dim() != 2 or component.shape != weight.shape or rows.dim() != 2 or len(rows) != len(component):
        shapes = ", ".join(str(tuple(given.shape)) for given in (component, weight, rows))
        raise ValueError(f"component and weight must have shape (N, S) and rows (N, D); got {shapes}")
    component = as_integers(component)
    check_below(component, number)
    return component


def as_integers(component: Tensor) -> Tensor:
    """Components in 64 bits, as indices must be.

    Raises:
        ValueError: if they are no integers.
    """
    if component.is_floating_point() or component.is_complex() or component.dtype == torch.bool:
        raise ValueError(f"component must hold integers; got {component.dtype}")
    return component.long()


def check_below(component: Tensor, number: int) -> None:
    """Refuses components that are negative, or not below the number.

    Raises:
        ValueError: saying from where to where they are.
    """
    if component.numel():
        lowest, highest = component.aminmax()
        raise_if((lowest < 0) | (highest >= number), lambda: _complain_of(lowest, highest, number))


def _complain_of(lowest: Tensor, highest: Tensor, number: int) -> None:
    raise ValueError(f"component must be from 0 to {number - 1}; got {int(lowest)} to {int(highest)}")
