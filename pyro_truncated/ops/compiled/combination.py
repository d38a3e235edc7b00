"""Compiled kernel behind :mod:`pyro_truncated.ops.combination`."""

from numba import prange

from pyro_truncated.ops.compiled.threads import parallel_kernel


@parallel_kernel()
def combine(chosen, parent, last, out):
    """Fills ``out`` ``(N, S, W)``: state 0 is zero, any other its parent, which comes before it, and one of ``chosen`` ``(N, K, W)``."""
    num_data, num_states, num_words = out.shape
    for n in prange(num_data):
        out[n, 0] = 0
        for s in range(1, num_states):
            for w in range(num_words):
                out[n, s, w] = out[n, parent[s], w] | chosen[n, last[s], w]
