"""Compiled messages along trees of variables, behind :mod:`pyro_truncated.ops.elimination`.

One pass over all variables replaces some ten calls of torch for each. Gradient steps of a thousand variables of 4 states take 1.4 to 1.9
times as long by torch. Until it is compiled Python runs the same functions, in less time than they take to compile.
"""

from __future__ import annotations

import contextlib
import math

import numpy as np

from pyro_truncated.ops.backend import NoKernelError, compile_first
from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.elimination import MEMBERS, MESSAGES, PAIR_MEMBERS, PAIRS, PARENT, ROOT, SIZE, STATES

# Up to so many states and entries of tables Python takes less than a second.
_MAX_PYTHON_ENTRIES = 2**18


def propagate(
    order: np.ndarray, variables: np.ndarray, tables: np.ndarray, entries: np.ndarray, weights: np.ndarray, impossible: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """See :func:`_propagate`."""
    is_large = len(entries) + len(weights) * variables[:, SIZE].max() > _MAX_PYTHON_ENTRIES
    with compile_first() if is_large else contextlib.nullcontext():
        try:
            return _propagate(order, variables, tables, entries, weights, impossible)
        except NoKernelError:
            return _propagate.py_func(order, variables, tables, entries, weights, impossible)


@njit(cache=True, later=True)
def _propagate(order, variables, tables, entries, weights, impossible):
    """Sends messages to the roots and back.

    Numbers of a variable lie at ``STATES + state * MEMBERS + member``, messages to its parent likewise by the parent's states. Tables are
    rows of (variable, begin, strides of the variable's states, of the parent's, of members, whether they have two variables).

    Returns:
        What each state adds to the evidence, the messages to the parents, and the gradient of the evidence in all entries.
    """
    num_messages = num_pairs = 0
    for own in variables:
        above = variables[own[PARENT], SIZE] if own[PARENT] >= 0 else 1
        num_messages += own[MEMBERS] * above
        num_pairs += own[PAIR_MEMBERS] * above * own[SIZE]
    sums, counts, inner = np.zeros(len(weights)), np.zeros(len(weights), np.int64), np.zeros(len(weights))
    up, down, is_blocked = np.zeros(num_messages), np.zeros(num_messages), np.zeros(num_messages, np.bool_)
    pairs = np.zeros(num_pairs)
    for table in tables:
        _add_table(table, variables, entries, sums, pairs)
    for variable in order:
        _send_up(variables[variable], variables, sums, counts, weights, pairs, up, is_blocked, impossible)
    for place in range(len(order)):
        own = variables[order[-1 - place]]
        if own[PARENT] >= 0:
            _send_down(own, variables, sums, counts, weights, pairs, up, is_blocked, impossible, inner, down)
    states, beliefs, gradient = np.empty(len(weights)), np.empty(len(weights)), np.zeros(len(entries))
    for place in range(len(weights)):
        own_sum = impossible if counts[place] > 0 else sums[place]
        states[place], beliefs[place] = own_sum + weights[place], own_sum + inner[place]
    for table in tables:
        _add_gradient(table, variables, states, inner, pairs, up, down, impossible, gradient)
    return beliefs, up, gradient


@njit
def _add_table(table, variables, entries, sums, pairs):
    """Adds a table to those of the same variables."""
    variable, begin, of_own, of_parent, of_members, has_two = table
    own = variables[variable]
    if has_two:
        target, place, num_above, num_members = pairs, own[PAIRS], variables[own[PARENT], SIZE], own[PAIR_MEMBERS]
    else:
        target, place, num_above, num_members = sums, own[STATES], 1, own[MEMBERS]
    for state in range(own[SIZE]):
        for above in range(num_above):
            for member in range(num_members):
                target[place] += entries[begin + state * of_own + above * of_parent + member * of_members]
                place += 1


@njit
def _send_up(own, variables, sums, counts, weights, pairs, up, is_blocked, impossible):
    """Sums a variable out, and sends the rest to its parent."""
    parent = own[PARENT]
    for above in range(variables[parent, SIZE] if parent >= 0 else 1):
        for member in range(own[MEMBERS]):
            message = _sum_states(own, variables, above, member, sums, counts, weights, pairs, impossible)
            place = own[MESSAGES] + above * own[MEMBERS] + member
            if parent >= 0:
                there = variables[parent, STATES] + above * own[MEMBERS] + member
                if message < impossible / 2:
                    is_blocked[place] = True
                    counts[there] += 1
                    message = 0.0
                sums[there] += message
            up[place] = message


@njit
def _send_down(own, variables, sums, counts, weights, pairs, up, is_blocked, impossible, inner, down):
    """Sends what the parent knows from elsewhere, and sums that out."""
    parent, num_members = own[PARENT], own[MEMBERS]
    for above in range(variables[parent, SIZE]):
        for member in range(num_members):
            place, there = own[MESSAGES] + above * num_members + member, variables[parent, STATES] + above * num_members + member
            rest = impossible if counts[there] > is_blocked[place] else sums[there] - up[place]
            down[place] = rest + weights[there] + inner[there]
    for state in range(own[SIZE]):
        for member in range(num_members):
            inner[own[STATES] + state * num_members + member] = _sum_parent(own, variables, state, member, down, pairs)


@njit
def _add_gradient(table, variables, states, inner, pairs, up, down, impossible, gradient):
    """Adds the posterior of a table's states, summed where members share it."""
    variable, begin, of_own, of_parent, of_members, has_two = table
    own = variables[variable]
    for state in range(own[SIZE]):
        for member in range(own[MEMBERS]):
            evidence = up[variables[own[ROOT], MESSAGES] + member]
            if evidence < impossible / 2:
                continue
            there = own[STATES] + state * own[MEMBERS] + member
            entry = begin + state * of_own + member * of_members
            if not has_two:
                gradient[entry] += math.exp(states[there] + inner[there] - evidence)
                continue
            for above in range(variables[own[PARENT], SIZE]):
                message = down[own[MESSAGES] + above * own[MEMBERS] + member]
                pair = pairs[_pair(own, variables, state, above, member)]
                gradient[entry + above * of_parent] += math.exp(pair + (states[there] - evidence) + message)


@njit
def _pair(own, variables, state, above, member):
    """Where a table holds states of a variable and its parent."""
    of_member = member if own[PAIR_MEMBERS] > 1 else 0
    return own[PAIRS] + (state * variables[own[PARENT], SIZE] + above) * own[PAIR_MEMBERS] + of_member


@njit
def _sum_states(own, variables, above, member, sums, counts, weights, pairs, impossible):
    """Sums the states of a variable out, given one of its parent's."""
    top, total = -math.inf, 0.0
    for state in range(own[SIZE]):
        place = own[STATES] + state * own[MEMBERS] + member
        term = (impossible if counts[place] > 0 else sums[place]) + weights[place]
        if own[PARENT] >= 0:
            term += pairs[_pair(own, variables, state, above, member)]
        top, total = _add_log(top, total, term)
    return top + math.log(total)


@njit
def _sum_parent(own, variables, state, member, down, pairs):
    """Sums the parent out, given a state of the variable."""
    top, total = -math.inf, 0.0
    for above in range(variables[own[PARENT], SIZE]):
        term = pairs[_pair(own, variables, state, above, member)] + down[own[MESSAGES] + above * own[MEMBERS] + member]
        top, total = _add_log(top, total, term)
    return top + math.log(total)


@njit
def _add_log(top, total, term):
    """Adds the exponential of a term to ``total * exp(top)``."""
    if term <= top:
        return top, total + math.exp(term - top)
    return term, total * math.exp(top - term) + 1.0
