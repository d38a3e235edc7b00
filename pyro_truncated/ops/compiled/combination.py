"""Compiled kernel behind :mod:`pyro_truncated.ops.combination`."""

from __future__ import annotations

from numba import prange
from torch import Tensor

from pyro_truncated.ops.compiled.threads import parallel_kernel


def combine(chosen: Tensor, parent: Tensor, last: Tensor, max_active: int) -> Tensor:
    """See :func:`pyro_truncated.ops.combination.combine`; given each combination's parent and what it adds to that, ``(S,)``."""
    del max_active  # Parents come before their children, whatever their level.
    out = chosen.new_empty(chosen.shape[0], len(parent), chosen.shape[2])
    _combine(chosen.contiguous().numpy(), parent.numpy(), last.numpy(), out.numpy())
    return out


@parallel_kernel()
def _combine(chosen, parent, last, out):
    """Fills ``out`` ``(N, S, W)``: state 0 is zero, any other its parent, which comes before it, and one of ``chosen`` ``(N, K, W)``."""
    num_data, num_states, num_words = out.shape
    for n in prange(num_data):
        out[n, 0] = 0
        for s in range(1, num_states):
            for w in range(num_words):
                out[n, s, w] = out[n, parent[s], w] | chosen[n, last[s], w]
