"""Compiled CPU kernel that sorts rows by their groups, which are small numbers: they are counted, and no two compared."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import njit


def order_of(group: Tensor, num_groups: int) -> Tensor:
    """The entries ``(E,)`` of one group after the other, each in order."""
    return torch.from_numpy(rows_of_groups(group.contiguous().numpy().reshape(-1, 1), num_groups)[0])


@njit(cache=True, nogil=True)
def rows_of_groups(group, num_groups):
    """The rows that are in each group ``(N, L)``, one group after the other, and where each begins, ``(G + 1,)``."""
    num_rows, most = group.shape
    start = np.zeros(num_groups + 1, np.int64)
    for n in range(num_rows):
        for i in range(most):
            start[group[n, i] + 1] += 1
    for g in range(num_groups):
        start[g + 1] += start[g]
    free, rows = start[:-1].copy(), np.empty(num_rows * most, np.int64)
    for n in range(num_rows):
        for i in range(most):
            g = group[n, i]
            rows[free[g]] = n
            free[g] += 1
    return rows, start
