"""All combinations of a few single-latent states in plain torch, for any device: level by level."""

from __future__ import annotations

import math

from torch import Tensor


def combine(chosen: Tensor, parent: Tensor, last: Tensor, max_active: int) -> Tensor:
    """See :func:`pyro_truncated.ops.combination.combine`; given each combination's parent and what it adds to that, ``(S,)``."""
    num_data, num_selected, num_words = chosen.shape
    out = chosen.new_zeros(num_data, len(parent), num_words)
    start = 1
    for k in range(1, max_active + 1):
        level = slice(start, start + math.comb(num_selected, k))
        out[:, level] = out[:, parent[level]] | chosen[:, last[level]]
        start = level.stop
    return out
