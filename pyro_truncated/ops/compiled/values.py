"""Compiled kernels behind :mod:`pyro_truncated.ops.values`."""

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.compiled.random import STEP, stream, uniform
from pyro_truncated.ops.compiled.threads import parallel_kernel


@intrinsic
def trailing_zeros(typing_context, word):
    """Number of zero bits below the lowest set bit of a non-zero int64, in one machine instruction."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), generate


@njit(cache=True, nogil=True)
def first_beyond(words, beyond):
    """Position of the first state, counted through all rows, whose last word has any of the given bits; -1 if there is none."""
    num_rows, num_states, num_words = words.shape
    for n in range(num_rows):
        for c in range(num_states):
            if words[n, c, num_words - 1] & beyond:
                return n * num_states + c
    return -1


@parallel_kernel()
def unpack_bits(words, out):
    """Bits of ``words`` ``(R, W)`` as numbers ``(R, L)``, one bit per latent."""
    num_latents = out.shape[1]
    for r in prange(len(words)):
        for w in range(words.shape[1]):
            bits = words[r, w]
            for i in range(min(64, num_latents - 64 * w)):
                # By way of a small integer, because few processors convert vectors of 64-bit integers to floats.
                out[r, 64 * w + i] = np.int8((bits >> i) & 1)


@parallel_kernel()
def unpack_fields(words, word, shift, mask, out):
    """Fields of ``words`` ``(R, W)`` as numbers ``(R, L)``."""
    for r in prange(len(words)):
        for h in range(len(word)):
            out[r, h] = np.int32((words[r, word[h]] >> shift[h]) & mask[h])


@parallel_kernel()
def add_weights_of_bits(words, weights, out):
    """Adds each state's weight to ``out`` ``(N, L)`` wherever its bit is set."""
    num_data, num_states, num_words = words.shape
    for n in prange(num_data):
        for s in range(num_states):
            weight = weights[n, s]
            for w in range(num_words):
                bits = words[n, s, w]
                while bits != 0:
                    out[n, 64 * w + trailing_zeros(bits)] += weight
                    bits &= bits - 1


@parallel_kernel()
def add_weights_of_values(words, weights, word, shift, mask, cardinality, out):
    """Adds each state's weight to ``out`` ``(N, L, V)`` at its values; returns how many values are none of their latents'."""
    num_data, num_states, _ = words.shape
    num_invalid = 0
    for n in prange(num_data):
        for s in range(num_states):
            for h in range(len(word)):
                value = (words[n, s, word[h]] >> shift[h]) & mask[h]
                if value < cardinality[h]:
                    out[n, h, value] += weights[n, s]
                else:
                    num_invalid += 1
    return num_invalid


@parallel_kernel()
def draw_values(tails, word, shift, seed, out):
    """Independent latents by inversion: the value is the number of tail probabilities ``P(value > v)`` above a uniform number."""
    num_data, num_samples, num_words = out.shape
    for n in prange(num_data):
        state = stream(seed, n)
        for c in range(num_samples):
            for w in range(num_words):
                out[n, c, w] = 0
            for h in range(len(word)):
                state += STEP
                u = uniform(state)
                value = 0
                while value < tails.shape[2] and u < tails[n, h, value]:
                    value += 1
                out[n, c, word[h]] |= np.int64(value) << shift[h]
