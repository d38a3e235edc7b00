"""Compiled kernels behind :mod:`pyro_truncated.ops.selection`: hash sets of packed states, one per data point."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.compiled.random import STEP
from pyro_truncated.ops.compiled.threads import parallel_kernel

# Rows that share their scratch memory; small enough to balance the load, large enough to make allocation negligible.
ROWS_PER_TASK = 64


def repeated(words: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.repeated`."""
    out = torch.empty(words.shape[:2], dtype=torch.bool, device="cpu")
    _distinct(words.contiguous().numpy(), out.numpy())
    return ~out


def select_top(words: Tensor, log_joint: Tensor, extra_words: Tensor, extra_log_joint: Tensor, size: int) -> tuple[Tensor, Tensor, int]:
    """Best ``size`` distinct states, and the smallest number of distinct states that a row with too few of them has (else -1)."""
    out_words = words.new_empty(words.shape[0], size, words.shape[2])
    out_log_joint = log_joint.new_empty(words.shape[0], size)
    fewest = np.empty(-(-len(words) // ROWS_PER_TASK), np.int64)
    inputs = (tensor.contiguous().numpy() for tensor in (words, log_joint, extra_words, extra_log_joint))
    _select_tasks(*inputs, out_words.numpy(), out_log_joint.numpy(), fewest)
    too_few = len(fewest) > 0 and fewest.min() <= words.shape[1] + extra_words.shape[1]
    return out_words, out_log_joint, int(fewest.min()) if too_few else -1


@njit(cache=True, nogil=True)
def new_table(capacity):
    """An empty open-addressing table, never more than a quarter full with ``capacity`` states."""
    size = 8
    while size < 4 * capacity:
        size *= 2
    table = np.empty(size, np.int32)
    clear(table)
    return table


@njit(cache=True, nogil=True)
def clear(table):
    """Frees all places."""
    for slot in range(len(table)):
        table[slot] = -1


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
def _kth_largest(values, count, k):
    """The k-th largest of the first values (k = 1: the largest) by quickselect, reordering them; swaps without branches."""
    left, right, goal = 0, count, k - 1
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
    bounded = num_first >= size
    floor = keys.dtype.type(np.inf)
    for s in range(num_first):
        keys[s] = log_joint[s]
        floor = min(floor, log_joint[s])
        for w in range(num_words):
            pool[s, w] = words[s, w]
    count = num_first
    for c in range(len(extra_log_joint)):
        # The first states alone fill all places with log joints of at least `floor`.
        keys[count] = extra_log_joint[c]
        for w in range(num_words):
            pool[count, w] = extra_words[c, w]
        count += (not bounded) or extra_log_joint[c] > floor
    if count == num_first:
        return count
    clear(table)
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
    for i in range(count):
        scratch[i] = keys[i]
    cut = _kth_largest(scratch, count, size)
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


@njit(cache=True, nogil=True)
def _select_rows(words, log_joint, extra_words, extra_log_joint, first, last, out_words, out_log_joint):
    """Fills the rows ``first .. last - 1`` of the outputs; returns the fewest states of a row with too few, else more than any has."""
    num_words = words.shape[2]
    capacity = words.shape[1] + extra_words.shape[1]
    size = out_words.shape[1]
    # One place more than states, because moving without branches writes before it knows whether to keep.
    pool = np.empty((capacity + 1, num_words), np.int64)
    keys = np.empty(capacity + 1, log_joint.dtype)
    scratch = np.empty(capacity + 1, log_joint.dtype)
    fresh = np.empty(capacity + 1, np.bool_)
    table = new_table(capacity)
    fewest = capacity + 1
    for n in range(first, last):
        count = _gather(words[n], log_joint[n], extra_words[n], extra_log_joint[n], size, pool, keys, fresh, table)
        if count < size:
            fewest = min(fewest, count)
            continue
        _keep_best(pool, keys, count, size, scratch)
        for s in range(size):
            out_log_joint[n, s] = keys[s]
            for w in range(num_words):
                out_words[n, s, w] = pool[s, w]
    return fewest


@parallel_kernel()
def _select_tasks(words, log_joint, extra_words, extra_log_joint, out_words, out_log_joint, fewest):
    """Many rows at a time; ``fewest`` gets what :func:`_select_rows` returns."""
    num_data = len(words)
    for task in prange(len(fewest)):
        first = task * ROWS_PER_TASK
        last = min(num_data, first + ROWS_PER_TASK)
        fewest[task] = _select_rows(words, log_joint, extra_words, extra_log_joint, first, last, out_words, out_log_joint)


@njit(cache=True, nogil=True)
def _distinct_rows(words, first, last, out):
    num_states = words.shape[1]
    table = new_table(num_states)
    for n in range(first, last):
        clear(table)
        insert(table, words[n], 0, num_states, out[n])


@parallel_kernel()
def _distinct(words, out):
    """Marks the states that equal no earlier state of their row."""
    num_data = len(words)
    for task in prange((num_data + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
        first = task * ROWS_PER_TASK
        _distinct_rows(words, first, min(num_data, first + ROWS_PER_TASK), out)
