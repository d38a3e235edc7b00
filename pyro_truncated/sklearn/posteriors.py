"""Posteriors of data points under a fitted model, each found by itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.search.exhaustive import ExhaustiveSearch
from pyro_truncated.sklearn.ascent import SteepestAscent
from pyro_truncated.states.population import Population

_ROWS_PER_BLOCK = 4096


def binary_posteriors(
    model: Any, y: Tensor, num_latents: int, num_states: int, max_steps: int = 200
) -> Iterator[tuple[Tensor, Population]]:
    """Yields blocks of the data with updated populations of binary latents.

    All data points start from the same states: none active, then single latents, then pairs.

    Args:
        model: called with data points ``(N, D)``.
        y: the data points.
        num_latents: number of binary latents ``H``.
        num_states: states per data point.
        max_steps: most steps of the search.
    """
    num_states = min(num_states, 2**num_latents)
    first = _sparsest(num_latents, num_states)
    for rows in y.split(_ROWS_PER_BLOCK):
        guide = AutoTruncated(model, num_states, init=first.expand(len(rows), -1, -1))
        yield rows, guide.search_(SteepestAscent(), guide.log_joint_of(rows), max_steps)


def mixture_posteriors(model: Any, y: Tensor, num_states: int) -> Iterator[tuple[Tensor, Population]]:
    """Yields blocks of the data with the most probable of all components.

    Args:
        model: called with data points ``(N, D)``.
        y: the data points.
        num_states: components kept per data point.
    """
    for rows in y.split(_ROWS_PER_BLOCK):
        guide = AutoTruncated(model, num_states)
        yield rows, guide.search_(ExhaustiveSearch(), guide.log_joint_of(rows))


def _sparsest(num_latents: int, num_states: int) -> Tensor:
    """Returns the first states ``(S, H)``, ordered by their number of active latents."""
    sizes = (itertools.combinations(range(num_latents), size) for size in range(num_latents + 1))
    states = torch.zeros(num_states, num_latents, dtype=torch.uint8)
    for row, active in zip(states, itertools.chain.from_iterable(sizes), strict=False):
        row[list(active)] = 1
    return states
