"""Compiled kernel behind :mod:`pyro_truncated.ops.initial`."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.compiled.evolution import change_latent
from pyro_truncated.ops.compiled.random import STEP, below, stream, uniform
from pyro_truncated.ops.compiled.selection import insert, new_table
from pyro_truncated.ops.compiled.threads import parallel_kernel
from pyro_truncated.ops.fields import Fields


def initial_states(singletons: Tensor, others: Tensor, fields: Fields, shape: tuple[int, int], seed: int) -> Tensor:
    """See :func:`pyro_truncated.ops.initial_states`; ``others`` are the states of several active latents, if these are few, else empty."""
    out = torch.empty(*shape, fields.num_words, dtype=torch.int64, device="cpu")
    _initial_states(singletons.numpy(), others.numpy(), fields.rows(fields.mutable).numpy(), seed, out.numpy())
    return out


@njit(cache=True, nogil=True)
def _fill_subset(choices, first, last, state, out):
    """Fills places ``first .. last - 1`` with random distinct rows of ``choices``, in order if all of them fit."""
    num_choices, num_words = choices.shape
    order = np.empty(num_choices, np.int64)
    for i in range(num_choices):
        order[i] = i
    for i in range(last - first):
        if last - first < num_choices:
            state += STEP
            j = i + below(state, num_choices - i)
            order[i], order[j] = order[j], order[i]
        for w in range(num_words):
            out[first + i, w] = choices[order[i], w]
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
        for w in range(out.shape[1]):
            out[s, w] = 0
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


@njit(cache=True, nogil=True)
def _fill(singletons, others, fields, state, out):
    """The states of one data point."""
    num_states, num_words = out.shape
    num_singletons = min(len(singletons), num_states - 1)
    for w in range(num_words):
        out[0, w] = 0
    state = _fill_subset(singletons, 1, 1 + num_singletons, state, out)
    if len(others) > 0:
        _fill_subset(others, 1 + num_singletons, num_states, state, out)
    elif 1 + num_singletons < num_states:
        _fill_sparse(fields, 1 + num_singletons, state, out)


@parallel_kernel(cost=4)
def _initial_states(singletons, others, fields, seed, out):
    """The zero state, singletons, and then ``others`` if there are any, else random sparse states."""
    for n in prange(len(out)):
        _fill(singletons, others, fields, stream(seed, n), out[n])
