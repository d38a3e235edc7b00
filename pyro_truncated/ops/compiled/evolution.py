"""Compiled kernels behind :mod:`pyro_truncated.ops.evolution`. Every data point has its own stream of random numbers.

Which number of a stream serves for what is fixed, whatever the numbers before it were used for, so that
:mod:`pyro_truncated.ops.vectorised.evolution` can draw all of them at once.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.compiled.random import STEP, below, mix, stream, uniform
from pyro_truncated.ops.compiled.threads import parallel_kernel
from pyro_truncated.ops.compiled.walk import trailing_zeros
from pyro_truncated.ops.fields import Fields
from pyro_truncated.ops.sparse_flips import IMPOSSIBLE, UNFIT, SparseFlips


def select_parents(log_joint: Tensor, num_parents: int, by_fitness: bool, rows: Tensor, seed: int) -> Tensor:
    """See :func:`pyro_truncated.ops.select_parents`."""
    out = torch.empty(log_joint.shape[0], num_parents, dtype=torch.int64, device="cpu")
    _select_parents(log_joint.detach().contiguous().numpy(), by_fitness, rows.numpy(), seed, out.numpy())
    return out


def cross(parents: Tensor, fields: Fields, rows: Tensor, seed: int) -> Tensor:
    """See :func:`pyro_truncated.ops.cross`."""
    num_data, num_parents, num_words = parents.shape
    out = parents.new_empty(num_data, num_parents * (num_parents - 1), num_words)
    _cross(parents.contiguous().numpy(), fields.word.numpy(), fields.shift.numpy(), rows.numpy(), seed, out.numpy())
    return out


def flip_random(words: Tensor, fields: Fields, rows: Tensor, seed: int) -> Tensor:
    """See :func:`pyro_truncated.ops.flip_random`."""
    out = torch.empty_like(words, memory_format=torch.contiguous_format)
    _flip_random(words.contiguous().numpy(), fields.rows(fields.mutable).numpy(), rows.numpy(), seed, out.numpy())
    return out


def flip_sparse(words: Tensor, fields: Fields, flips: SparseFlips, rows: Tensor, seed: int) -> Tensor:
    """See :func:`pyro_truncated.ops.flip_sparse`."""
    out = torch.empty_like(words, memory_format=torch.contiguous_format)
    tables = (fields.rows(latents).numpy() for latents in (fields.binary, fields.several, fields.mutable))
    chances = flips.log_stay_off.numpy(), flips.switch_off.numpy(), flips.log_stay_other, flips.num_on, flips.num_other
    _flip_sparse(words.contiguous().numpy(), fields.binary_bits.numpy(), *tables, *chances, rows.numpy(), seed, out.numpy())
    return out


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def _total(weights):
    """Sum of finite weights; reassociation lets the compiler use vector instructions."""
    total = 0.0
    for weight in weights:
        total += weight
    return total


@njit(cache=True, nogil=True)
def _fitness(log_joint, by_fitness, weights):
    """Selection weights of one data point: the offset fitness, or one; next to nothing without fitness, still less if impossible."""
    lowest, highest = np.inf, -np.inf
    for value in log_joint:
        if value > -np.inf:
            lowest, highest = min(lowest, np.float64(value)), max(highest, np.float64(value))
    scale = (highest - lowest) + abs(lowest) if by_fitness and lowest < np.inf else 1.0
    if scale == 0.0:
        scale = 1.0
    for s in range(len(log_joint)):
        if log_joint[s] == -np.inf:
            weights[s] = scale * IMPOSSIBLE
        elif by_fitness:
            fitness = (log_joint[s] - lowest) + abs(lowest)
            weights[s] = fitness if fitness > 0.0 else scale * UNFIT
        else:
            weights[s] = 1.0


@njit(cache=True, nogil=True)
def _draw(weights, threshold):
    """Position at which the running sum of the weights reaches the threshold; rounding can only lead to the last that added to it."""
    running = 0.0
    last = 0
    for s in range(len(weights)):
        before = running
        running += weights[s]
        if running > before:
            last = s
            if running >= threshold:
                break
    return last


@parallel_kernel()
def _select_parents(log_joint, by_fitness, rows, seed, out):
    """Successive draws without replacement, ``out`` ``(N, P)``."""
    num_data, num_states = log_joint.shape
    for n in prange(num_data):
        state = stream(seed, rows[n])
        weights = np.empty(num_states)
        _fitness(log_joint[n], by_fitness, weights)
        for p in range(out.shape[1]):
            state += STEP
            chosen = _draw(weights, (1.0 - uniform(state)) * _total(weights))
            out[n, p] = chosen
            weights[chosen] = 0.0


@parallel_kernel()
def _cross(parents, word, shift, rows, seed, out):
    """Both offspring of every pair of parents, pair after pair."""
    num_data, num_parents, num_words = parents.shape
    for n in prange(num_data):
        state = stream(seed, rows[n])
        child = 0
        for i in range(num_parents):
            for j in range(i + 1, num_parents):
                state += STEP
                cut = 1 + below(state, len(word) - 1)
                for w in range(num_words):
                    a, b = parents[n, i, w], parents[n, j, w]
                    swapped = a ^ b
                    if w < word[cut]:
                        swapped = np.int64(0)
                    elif w == word[cut]:
                        # The field of latent `cut` starts at its shift: what lies below stays, the rest is swapped.
                        swapped &= ~((np.int64(1) << shift[cut]) - 1)
                    out[n, child, w] = a ^ swapped
                    out[n, child + 1, w] = b ^ swapped
                child += 2


@njit(cache=True, nogil=True, inline="always")
def change_latent(state_words, word, shift, cardinality, draw):
    """Moves one latent to another of its values, all of them equally probable."""
    if cardinality == 2:
        state_words[word] ^= np.int64(1) << shift
        return
    field = np.int64(2)
    while field < cardinality:
        field *= 2
    old = (state_words[word] >> shift) & (field - 1)
    new = (old + 1 + below(draw, cardinality - 1)) % cardinality
    state_words[word] ^= (old ^ new) << shift


@parallel_kernel()
def _flip_random(words, fields, rows, seed, out):
    """Changes one latent of every state; ``fields`` are rows word, shift, cardinality of the latents that can change."""
    num_data, num_states, num_words = words.shape
    for n in prange(num_data):
        state = stream(seed, rows[n])
        for c in range(num_states):
            for w in range(num_words):
                out[n, c, w] = words[n, c, w]
            state += STEP
            h = below(state, fields.shape[1])
            state += STEP
            change_latent(out[n, c], fields[0, h], fields[1, h], fields[2, h], state)


@njit(cache=True, nogil=True, inline="always")
def _count_ones(words, mask):
    count = 0
    for w in range(len(words)):
        bits = np.uint64(words[w] & mask[w])
        while bits:
            bits &= bits - np.uint64(1)
            count += 1
    return count


@njit(cache=True, nogil=True)
def _switch_off(words, mask, threshold, state, out):
    """Switches active binary latents off with probability ``threshold / 2**32``; returns whether anything changed.

    Two neighbouring latents share a random word, so that a word is needed for every other one.
    """
    changed = False
    for w in range(len(words)):
        bits = words[w] & mask[w]
        while bits != 0:
            place = trailing_zeros(bits)
            lowest = bits & -bits
            bits ^= lowest
            word = mix(state + np.uint64(32 * w + (place >> 1) + 1) * STEP)
            half = (word >> np.uint64(32 * (place & 1))) & np.uint64(0xFFFFFFFF)
            if np.int64(half) < threshold:
                out[w] ^= lowest
                changed = True
    return changed


@njit(cache=True, nogil=True)
def _switch_on(words, fields, log_stay, num_draws, state, out):
    """Switches idle binary latents on with probability ``1 - exp(log_stay)``, skipping from one to the next; returns whether any changed.

    The gap between changes is geometric, so the cost is the number of changes and not that of latents.
    """
    changed = False
    position = 0
    if log_stay < 0.0:
        for _ in range(num_draws):
            state += STEP
            gap = math.log(1.0 - uniform(state)) / log_stay
            if gap >= fields.shape[1] - position:
                break
            position += int(gap)
            word, bit = fields[0, position], np.int64(1) << fields[1, position]
            if words[word] & bit == 0:
                out[word] ^= bit
                changed = True
            position += 1
    return changed


@njit(cache=True, nogil=True)
def _move(fields, log_stay, num_draws, state, out):
    """Moves latents of several values with probability ``1 - exp(log_stay)``, as :func:`_switch_on`; returns whether any changed."""
    changed = False
    position = 0
    for _ in range(num_draws):
        state += STEP
        gap = math.log(1.0 - uniform(state)) / log_stay
        if gap >= fields.shape[1] - position:
            break
        position += int(gap)
        state += STEP
        change_latent(out, fields[0, position], fields[1, position], fields[2, position], state)
        changed = True
        position += 1
    return changed


@parallel_kernel()
def _flip_sparse(words, mask, binary, others, mutable, log_stay_off, switch_off, log_stay_other, num_on, num_other, rows, seed, out):
    """Sparsity-driven flips. ``binary``, ``others`` and ``mutable`` are rows word, shift, cardinality of the latents of that kind."""
    num_data, num_states, num_words = words.shape
    # Every child has its own part of the stream, as long as it can need.
    part = np.uint64(num_on + 2 * num_other + 2 + 32 * num_words) * STEP
    for n in prange(num_data):
        row = stream(seed, rows[n]) - part
        for c in range(num_states):
            row += part
            state = row
            parent, child = words[n, c], out[n, c]
            child[:] = parent
            active = _count_ones(parent, mask)
            changed = _switch_on(parent, binary, log_stay_off[active], num_on, state, child)
            state += np.uint64(num_on) * STEP
            changed |= _move(others, log_stay_other, num_other, state, child)
            state += np.uint64(2 * num_other) * STEP
            if switch_off[active] > 0:
                changed |= _switch_off(parent, mask, switch_off[active], state + np.uint64(2) * STEP, child)
            if not changed:
                state += STEP
                h = below(state, mutable.shape[1])
                state += STEP
                change_latent(child, mutable[0, h], mutable[1, h], mutable[2, h], state)
