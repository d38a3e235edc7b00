"""Some of the data points, drawn at random, to learn from where all of them would take too long."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_truncated.gp.data_kernels import DataKernel, RestrictedKernel
from pyro_truncated.gp.subset.subset_search import random_subset
from pyro_truncated.utils.counts import check_count

_MANY_ROWS, _SOME_ROWS = 50_000, 20_000


class RowSample(NamedTuple):
    """Data points to learn from.

    Attributes:
        kernel: the kernel on these alone.
        targets: ``(r, H)``.
        inducing: where the inducing inputs are among them, ``(m,)``.
        rows: where they are among all data points, ``(r,)``; None if they are all.
    """

    kernel: DataKernel
    targets: Tensor
    inducing: Tensor
    rows: Tensor | None

    def among_all(self, index: Tensor) -> Tensor:
        """Positions among all data points of those at ``index`` in the sample."""
        return index if self.rows is None else self.rows[index]


def sample_rows(kernel: DataKernel, targets: Tensor, index: Tensor, num: int, generator: torch.Generator | None = None) -> RowSample:
    """The inducing inputs at positions ``index`` ``(m,)`` and random others, ``num`` in all; all data points if there are no more."""
    if num >= len(targets):
        return RowSample(kernel, targets, index, None)
    order = random_subset(len(targets), len(targets), generator, targets.device)
    others = order[~torch.isin(order, index)][: max(0, num - len(index))]
    rows = torch.cat([index, others])
    inside = torch.arange(len(index), device=rows.device)
    return RowSample(RestrictedKernel(kernel, rows, borrowed=True), targets[rows], inside, rows)


def rows_of_alternation(num_data: int, num_inducing: int, max_rows: int | None) -> int:
    """How many data points an alternation looks at, where at most ``max_rows`` are wanted, or nothing is said of it.

    Raises:
        ValueError: if there would be fewer than inducing inputs.
    """
    if max_rows is None:
        return num_data if num_data <= _MANY_ROWS else max(_SOME_ROWS, 4 * num_inducing)
    if check_count("max_rows", max_rows) < num_inducing:
        raise ValueError(f"max_rows must be at least num_inducing={num_inducing}; got {max_rows}")
    return max_rows
