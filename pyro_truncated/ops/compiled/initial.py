"""Compiled kernel behind :mod:`pyro_truncated.ops.initial`."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.compiled.evolution import change_latent
from pyro_truncated.ops.compiled.random import STEP, below, mix, stream, uniform
from pyro_truncated.ops.compiled.selection import clear, insert, new_table
from pyro_truncated.ops.compiled.threads import parallel_kernel
from pyro_truncated.ops.fields import Fields


def initial_states(singletons: Tensor, others: Tensor, fields: Fields, num_states: int, rows: Tensor, seed: int) -> Tensor:
    """See :func:`pyro_truncated.ops.initial_states`; ``others`` are the states of several active latents, if these are few, else empty."""
    out = torch.empty(len(rows), num_states, fields.num_words, dtype=torch.int64, device="cpu")
    _initial_states(singletons.numpy(), others.numpy(), fields.rows(fields.mutable).numpy(), rows.numpy(), seed, out.numpy())
    return out


_BLOCKS = 16
# A Poisson number with a mean of at most 2 exceeds this with probability below 1e-20.
MOST_CHANGES = 24


@njit(cache=True, nogil=True)
def _fill_subset(choices, first, last, order, state, out):
    """Fills places ``first .. last - 1`` with random distinct rows of ``choices``, in order if all of them fit.

    ``order`` counts from zero, here as before: what is shuffled of it is put back.
    """
    num_choices, num_words = choices.shape
    number = last - first
    other = np.arange(number)
    for i in range(number):
        if number < num_choices:
            state += STEP
            other[i] = i + below(state, num_choices - i)
            order[i], order[other[i]] = order[other[i]], order[i]
        for w in range(num_words):
            out[first + i, w] = choices[order[i], w]
    for i in range(number):
        order[i] = i
        order[other[i]] = other[i]
    return state


@njit(cache=True, nogil=True)
def _change_any(state_words, fields, state, step):
    """Moves one latent, chosen uniformly, to another value: one step of the walk of a state whose stream is given."""
    state += np.uint64(2 * step + 2) * STEP
    h = below(state, fields.shape[1])
    change_latent(state_words, fields[0, h], fields[1, h], fields[2, h], state + STEP)


@njit(cache=True, nogil=True)
def _poisson(uniform_number, mean):
    """A Poisson number by inversion, for means up to 2."""
    count = 0
    probability = math.exp(-mean)
    cumulative = probability
    while uniform_number >= cumulative and count < MOST_CHANGES:
        count += 1
        probability *= mean / count
        cumulative += probability
    return count


@njit(cache=True, nogil=True)
def _fill_sparse(fields, first, state, out):
    """Fills the places from ``first`` on with new states of two and a few more active latents.

    Each state walks at random from zero; those that equal an earlier one walk on, all at once, until there are none.
    """
    num_states = len(out)
    steps = np.zeros(num_states, np.int64)
    state += STEP
    mean = 2.0 * uniform(state)
    for s in range(first, num_states):
        for w in range(out.shape[1]):
            out[s, w] = 0
        walk = mix(state + np.uint64(s) * STEP)
        # Two changes and a Poisson number more, of a mean between 0 and 2 that belongs to the data point.
        steps[s] = 2 + _poisson(uniform(walk + STEP), mean)
        for step in range(steps[s]):
            _change_any(out[s], fields, walk, step)
    table = new_table(num_states)
    fresh = np.empty(num_states, np.bool_)
    while True:
        insert(table, out, 0, num_states, fresh)
        if fresh.all():
            break
        # A random walk leaves the region of states that are taken, however crowded it is.
        for s in range(first, num_states):
            if not fresh[s]:
                _change_any(out[s], fields, mix(state + np.uint64(s) * STEP), steps[s])
                steps[s] += 1
        clear(table)


@njit(cache=True, nogil=True)
def _fill(singletons, others, fields, order, state, out):
    """The states of one data point."""
    num_states, num_words = out.shape
    num_singletons = min(len(singletons), num_states - 1)
    for w in range(num_words):
        out[0, w] = 0
    state = _fill_subset(singletons, 1, 1 + num_singletons, order, state, out)
    if len(others) > 0:
        _fill_subset(others, 1 + num_singletons, num_states, order, state, out)
    elif 1 + num_singletons < num_states:
        _fill_sparse(fields, 1 + num_singletons, state, out)


@parallel_kernel(cost=4)
def _initial_states(singletons, others, fields, rows, seed, out):
    """The zero state, singletons, and then ``others`` if there are any, else random sparse states."""
    num_blocks = min(len(out), _BLOCKS)
    for block in prange(num_blocks):
        order = np.arange(max(len(singletons), len(others)))
        for n in range(len(out) * block // num_blocks, len(out) * (block + 1) // num_blocks):
            _fill(singletons, others, fields, order, stream(seed, rows[n]), out[n])
