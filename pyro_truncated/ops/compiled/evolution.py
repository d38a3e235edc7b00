"""Compiled kernels behind :mod:`pyro_truncated.ops.evolution`. Every data point has its own stream of random numbers."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.compiled.random import STEP, below, stream, uniform
from pyro_truncated.ops.compiled.threads import parallel_kernel
from pyro_truncated.ops.fields import Fields


def select_parents(log_joint: Tensor, num_parents: int, by_fitness: bool, seed: int) -> Tensor:
    """See :func:`pyro_truncated.ops.select_parents`."""
    out = torch.empty(log_joint.shape[0], num_parents, dtype=torch.int64, device="cpu")
    _select_parents(log_joint.detach().contiguous().numpy(), by_fitness, seed, out.numpy())
    return out


def cross(parents: Tensor, fields: Fields, seed: int) -> Tensor:
    """See :func:`pyro_truncated.ops.cross`."""
    num_data, num_parents, num_words = parents.shape
    out = parents.new_empty(num_data, num_parents * (num_parents - 1), num_words)
    _cross(parents.contiguous().numpy(), fields.word.numpy(), fields.shift.numpy(), seed, out.numpy())
    return out


def flip_random(words: Tensor, fields: Fields, seed: int) -> Tensor:
    """See :func:`pyro_truncated.ops.flip_random`."""
    out = torch.empty_like(words, memory_format=torch.contiguous_format)
    _flip_random(words.contiguous().numpy(), fields.rows(fields.mutable).numpy(), seed, out.numpy())
    return out


def flip_sparse(words: Tensor, fields: Fields, switch_on: Tensor, switch_off: Tensor, rate: float, seed: int) -> Tensor:
    """See :func:`pyro_truncated.ops.flip_sparse`; given the probabilities for every number of active binary latents."""
    out = torch.empty_like(words, memory_format=torch.contiguous_format)
    binary = fields.binary
    mask = torch.zeros(fields.num_words, dtype=torch.int64, device="cpu").index_add_(0, fields.word[binary], 1 << fields.shift[binary])
    tables = (fields.rows(latents).numpy() for latents in (binary, fields.several, fields.mutable))
    stay_other = float(torch.log1p(torch.tensor(-rate, dtype=torch.double, device="cpu")))
    chances = torch.log1p(-switch_on).numpy(), switch_off.numpy(), stay_other
    _flip_sparse(words.contiguous().numpy(), mask.numpy(), *tables, *chances, seed, out.numpy())
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
    """Selection weights of one data point: the offset fitness, or one; zero for states of probability zero."""
    lowest = np.inf
    for value in log_joint:
        if value > -np.inf:
            lowest = min(lowest, np.float64(value))
    for s in range(len(log_joint)):
        if log_joint[s] == -np.inf:
            weights[s] = 0.0
        elif by_fitness:
            weights[s] = (log_joint[s] - lowest) + abs(lowest)
        else:
            weights[s] = 1.0


@njit(cache=True, nogil=True)
def _refill(log_joint, taken, weights):
    """Equal weights for what is left when no positive weight is: states of positive probability first, then all others."""
    possible = False
    for s in range(len(log_joint)):
        weights[s] = 0.0 if taken[s] or log_joint[s] == -np.inf else 1.0
        possible |= weights[s] > 0.0
    if not possible:
        for s in range(len(log_joint)):
            weights[s] = 0.0 if taken[s] else 1.0


@njit(cache=True, nogil=True)
def _draw(weights, threshold):
    """Position at which the running sum of the weights exceeds the threshold; rounding can only lead to the last positive weight."""
    running = 0.0
    last = 0
    for s in range(len(weights)):
        if weights[s] > 0.0:
            running += weights[s]
            last = s
            if running > threshold:
                break
    return last


@parallel_kernel()
def _select_parents(log_joint, by_fitness, seed, out):
    """Successive draws without replacement, ``out`` ``(N, P)``."""
    num_data, num_states = log_joint.shape
    for n in prange(num_data):
        state = stream(seed, n)
        weights = np.empty(num_states)
        taken = np.zeros(num_states, np.bool_)
        _fitness(log_joint[n], by_fitness, weights)
        for p in range(out.shape[1]):
            total = _total(weights)
            if not total > 0.0:
                _refill(log_joint[n], taken, weights)
                total = _total(weights)
            state += STEP
            chosen = _draw(weights, uniform(state) * total)
            out[n, p] = chosen
            taken[chosen] = True
            weights[chosen] = 0.0


@parallel_kernel()
def _cross(parents, word, shift, seed, out):
    """Both offspring of every pair of parents, pair after pair."""
    num_data, num_parents, num_words = parents.shape
    for n in prange(num_data):
        state = stream(seed, n)
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
def _flip_random(words, fields, seed, out):
    """Changes one latent of every state; ``fields`` are rows word, shift, cardinality of the latents that can change."""
    num_data, num_states, num_words = words.shape
    for n in prange(num_data):
        state = stream(seed, n)
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
def _switch_off(words, mask, probability, state, out):
    """Switches every active binary latent off with the given probability; returns the stream and whether anything changed."""
    changed = False
    for w in range(len(words)):
        bits = np.uint64(words[w] & mask[w])
        while bits:
            lowest = bits & (~bits + np.uint64(1))
            bits ^= lowest
            state += STEP
            if uniform(state) < probability:
                out[w] ^= np.int64(lowest)
                changed = True
    return state, changed


@njit(cache=True, nogil=True)
def _walk(words, fields, log_stay, only_zeros, state, out):
    """Changes latents independently with probability ``1 - exp(log_stay)``, skipping from one change to the next.

    The gap between changes is geometric, so the cost is the number of changes and not that of latents.
    """
    changed = False
    position = 0
    while log_stay < 0.0:
        state += STEP
        gap = math.log(1.0 - uniform(state)) / log_stay
        if gap >= fields.shape[1] - position:
            break
        position += int(gap)
        word, shift, cardinality = fields[0, position], fields[1, position], fields[2, position]
        if not (only_zeros and (words[word] >> shift) & 1):
            state += STEP
            change_latent(out, word, shift, cardinality, state)
            changed = True
        position += 1
    return state, changed


@parallel_kernel()
def _flip_sparse(words, mask, binary, others, mutable, log_stay_off, switch_off, log_stay_other, seed, out):
    """Sparsity-driven flips. ``binary``, ``others`` and ``mutable`` are rows word, shift, cardinality of the latents of that kind."""
    num_data, num_states, _ = words.shape
    for n in prange(num_data):
        state = stream(seed, n)
        for c in range(num_states):
            parent, child = words[n, c], out[n, c]
            child[:] = parent
            active = _count_ones(parent, mask)
            state, up = _walk(parent, binary, log_stay_off[active], True, state, child)
            state, down = _switch_off(parent, mask, switch_off[active], state, child)
            state, moved = _walk(parent, others, log_stay_other, False, state, child)
            if not (up or down or moved):
                state += STEP
                h = below(state, mutable.shape[1])
                state += STEP
                change_latent(child, mutable[0, h], mutable[1, h], mutable[2, h], state)
