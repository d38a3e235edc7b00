"""Compiled kernel behind :mod:`pyro_truncated.packed.initial`."""

import math

import numpy as np
from numba import prange

from pyro_truncated.packed.compilation import njit
from pyro_truncated.packed.evolution_cpu import change_latent
from pyro_truncated.packed.random_cpu import STEP, below, stream, uniform
from pyro_truncated.packed.selection_cpu import insert, new_table
from pyro_truncated.packed.threads import parallel_kernel


@njit(cache=True, nogil=True)
def _fill_subset(choices, first, last, state, out):
    """Fills places ``first .. last - 1`` with random distinct rows of ``choices``, in order if all of them fit."""
    count = last - first
    if count == len(choices):
        out[first:last] = choices
        return state
    order = np.arange(len(choices))
    for i in range(count):
        state += STEP
        j = i + below(state, len(choices) - i)
        order[i], order[j] = order[j], order[i]
        out[first + i] = choices[order[i]]
    return state


@njit(cache=True, nogil=True)
def _change_any(state_words, fields, state):
    """Moves one latent, chosen uniformly, to another value."""
    state += STEP
    h = below(state, fields.shape[1])
    state += STEP
    change_latent(state_words, fields[0, h], fields[1, h], fields[2, h], state)
    return state


@njit(cache=True, nogil=True)
def _fill_sparse(fields, first, state, out):
    """Fills the places from ``first`` on with new states of two and a few more active latents."""
    table = new_table(len(out))
    fresh = np.empty(len(out), np.bool_)
    insert(table, out, 0, first, fresh)
    state += STEP
    limit = math.exp(-2.0 * uniform(state))
    for s in range(first, len(out)):
        out[s] = 0
        # Two changes and a Poisson number more, of a mean between 0 and 2 that belongs to the data point.
        state = _change_any(out[s], fields, _change_any(out[s], fields, state))
        product = 1.0
        while True:
            state += STEP
            product *= uniform(state)
            if product <= limit:
                break
            state = _change_any(out[s], fields, state)
        # A random walk leaves the region of states that are taken, however crowded it is.
        insert(table, out, s, s + 1, fresh)
        while not fresh[s]:
            state = _change_any(out[s], fields, state)
            insert(table, out, s, s + 1, fresh)
    return state


@parallel_kernel(cost=4)
def initial_states(zero, singletons, others, fields, seed, out):
    """The zero state, singletons, and then ``others`` if there are any, else random sparse states."""
    num_states = out.shape[1]
    num_singletons = min(len(singletons), num_states - 1)
    for n in prange(len(out)):
        state = stream(seed, n)
        out[n, 0] = zero
        state = _fill_subset(singletons, 1, 1 + num_singletons, state, out[n])
        if len(others) > 0:
            state = _fill_subset(others, 1 + num_singletons, num_states, state, out[n])
        elif 1 + num_singletons < num_states:
            state = _fill_sparse(fields, 1 + num_singletons, state, out[n])
