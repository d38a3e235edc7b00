"""Compiled kernels behind :mod:`pyro_truncated.packed.selection`: hash sets of packed states, one per data point."""

import numpy as np
from numba import prange

from pyro_truncated.packed.compilation import njit
from pyro_truncated.packed.random_cpu import STEP
from pyro_truncated.packed.threads import parallel_kernel

# Rows that share their scratch memory; small enough to balance the load, large enough to make allocation negligible.
_ROWS_PER_TASK = 64


@njit(cache=True, nogil=True)
def new_table(capacity):
    """An empty open-addressing table, never more than a quarter full with ``capacity`` states."""
    size = 8
    while size < 4 * capacity:
        size *= 2
    return np.full(size, -1, np.int32)


@njit(cache=True, nogil=True)
def insert(table, pool, first, last, fresh):
    """Enters the states ``pool[first:last]`` and notes which were new. The table stores positions in ``pool``, -1 for free.

    It takes a range, not one state, because passing arrays to a function costs more than entering a state.
    """
    num_words = pool.shape[1]
    capacity = np.uint64(len(table) - 1)
    for index in range(first, last):
        code = np.uint64(0)
        for w in range(num_words):
            code = (code ^ (code >> np.uint64(32)) ^ np.uint64(pool[index, w])) * STEP
        slot = (code >> np.uint64(32)) & capacity
        found = False
        while table[slot] >= 0 and not found:
            other = table[slot]
            w = 0
            while w < num_words and pool[other, w] == pool[index, w]:
                w += 1
            found = w == num_words
            slot = (slot + np.uint64(1)) & capacity
        if not found:
            table[slot] = index
        fresh[index] = not found


@njit(cache=True, nogil=True)
def _kth_largest(values, k):
    """The k-th largest value (k = 1: the largest) by quickselect, reordering ``values``; swaps without branches."""
    left, right, goal = 0, len(values), k - 1
    while right - left > 1:
        a, b, c = values[left], values[(left + right) // 2], values[right - 1]
        pivot = max(min(a, b), min(max(a, b), c))
        # left .. larger: above the pivot; larger .. equal: the pivot's ties; the rest below.
        larger = left
        for i in range(left, right):
            value = values[i]
            values[i] = values[larger]
            values[larger] = value
            larger += value > pivot
        if goal < larger:
            right = larger
            continue
        equal = larger
        for i in range(larger, right):
            value = values[i]
            values[i] = values[equal]
            values[equal] = value
            equal += value == pivot
        if goal < equal:
            return pivot
        left = equal
    return values[left]


@njit(cache=True, nogil=True)
def _gather(words, log_joint, extra_words, extra_log_joint, size, pool, keys, fresh, table):
    """Collects the states that can be among the best ``size`` in ``pool`` and ``keys``; returns how many, all distinct."""
    num_first, num_words = words.shape
    pool[:num_first] = words
    keys[:num_first] = log_joint
    bounded = num_first >= size
    floor = log_joint.min() if bounded else keys.dtype.type(0)
    count = num_first
    for c in range(len(extra_log_joint)):
        # The first states alone fill all places with log joints of at least `floor`.
        keys[count] = extra_log_joint[c]
        for w in range(num_words):
            pool[count, w] = extra_words[c, w]
        count += (not bounded) or extra_log_joint[c] > floor
    if count == num_first:
        return count
    table[:] = -1
    insert(table, pool, 0, count, fresh)
    last, count = count, num_first
    for i in range(num_first, last):
        keys[count] = keys[i]
        for w in range(num_words):
            pool[count, w] = pool[i, w]
        count += fresh[i]
    return count


@njit(cache=True, nogil=True)
def _keep_best(pool, keys, count, size, scratch):
    """Moves the ``size`` largest of ``count`` keys to the front in their order; among equal keys the earlier ones win."""
    if count == size:
        return
    scratch[:count] = keys[:count]
    cut = _kth_largest(scratch[:count], size)
    ties = size
    for i in range(count):
        ties -= keys[i] > cut
    position = 0
    for i in range(count):
        key = keys[i]
        keys[position] = key
        for w in range(pool.shape[1]):
            pool[position, w] = pool[i, w]
        tied = (key == cut) & (ties > 0)
        ties -= tied
        position += (key > cut) | tied


@parallel_kernel()
def select_top(words, log_joint, extra_words, extra_log_joint, out_words, out_log_joint):
    """Fills the outputs row by row; returns the smallest number of distinct states that a row with too few of them has, else -1."""
    num_data, num_first, num_words = words.shape
    capacity = num_first + extra_words.shape[1]
    size = out_words.shape[1]
    num_tasks = (num_data + _ROWS_PER_TASK - 1) // _ROWS_PER_TASK
    shortage = np.full(num_tasks, capacity + 1)
    for task in prange(num_tasks):
        # One place more than states, because moving without branches writes before it knows whether to keep.
        pool = np.empty((capacity + 1, num_words), np.int64)
        keys = np.empty(capacity + 1, log_joint.dtype)
        scratch = np.empty(capacity + 1, log_joint.dtype)
        fresh = np.empty(capacity + 1, np.bool_)
        table = new_table(capacity)
        for n in range(task * _ROWS_PER_TASK, min(num_data, (task + 1) * _ROWS_PER_TASK)):
            count = _gather(words[n], log_joint[n], extra_words[n], extra_log_joint[n], size, pool, keys, fresh, table)
            if count >= size:
                _keep_best(pool, keys, count, size, scratch)
                out_words[n] = pool[:size]
                out_log_joint[n] = keys[:size]
            else:
                shortage[task] = min(shortage[task], count)
    fewest = shortage.min() if num_tasks > 0 else capacity + 1
    return fewest if fewest <= capacity else -1


@parallel_kernel()
def distinct(words, out):
    """Marks the states that equal no earlier state of their row."""
    num_data, num_states, _ = words.shape
    for task in prange((num_data + _ROWS_PER_TASK - 1) // _ROWS_PER_TASK):
        table = new_table(num_states)
        for n in range(task * _ROWS_PER_TASK, min(num_data, (task + 1) * _ROWS_PER_TASK)):
            table[:] = -1
            insert(table, words[n], 0, num_states, out[n])
