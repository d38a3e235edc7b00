"""Compiled kernels behind :mod:`pyro_truncated.ops.evolution`.

Each number of a data point's stream has a fixed purpose, so that :mod:`pyro_truncated.ops.vectorised.evolution` can draw all of them at
once. For 5000 data points with 120 states, or 2000 with 200, it takes 1.4 to 3.6 times as long for parents, and 4 to 5 for their children.
Sparse flips take 10 to 50 times as long, duplicates 4 to 7, the best states 7 to 14, and initial ones 17 to 32.
"""

from __future__ import annotations

import contextlib
import math

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.backend import compile_first
from pyro_truncated.ops.compiled.compilation import BLOCKS, njit, parallel_kernel
from pyro_truncated.ops.compiled.iterate_active import count_ones, trailing_zeros
from pyro_truncated.ops.compiled.random import STEP, below, mix, stream, uniform
from pyro_truncated.ops.evolution import IMPOSSIBLE, UNFIT, SparseFlips
from pyro_truncated.ops.packed_states import Fields

# Rows that share their scratch memory; small enough to balance the load, large enough to make allocation negligible.
ROWS_PER_TASK = 64
# Weights of parents that are summed together: about the square root of usual numbers of states.
_BLOCK_STATES = 16


def find_duplicates(words: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.find_duplicates`."""
    out = torch.empty(words.shape[:2], dtype=torch.bool, device="cpu")
    _distinct(words.contiguous().numpy(), out.numpy())
    return ~out


def select_top(words: Tensor, log_joint: Tensor, extra_words: Tensor, extra_log_joint: Tensor, size: int) -> tuple[Tensor, Tensor, int]:
    """The best ``size`` distinct states, and a row's too small number or -1."""
    out_words = words.new_empty(words.shape[0], size, words.shape[2])
    out_log_joint = log_joint.new_empty(words.shape[0], size)
    fewest = np.empty(-(-len(words) // ROWS_PER_TASK), np.int64)
    inputs = (tensor.contiguous().numpy() for tensor in (words, log_joint, extra_words, extra_log_joint))
    _select_tasks(*inputs, out_words.numpy(), out_log_joint.numpy(), fewest)
    too_few = len(fewest) > 0 and fewest.min() <= words.shape[1] + extra_words.shape[1]
    return out_words, out_log_joint, int(fewest.min()) if too_few else -1


@njit
def new_table(capacity):
    """An empty open-addressing table for ``capacity`` states, a quarter full at most."""
    size = 8
    while size < 4 * capacity:
        size *= 2
    table = np.empty(size, np.int32)
    clear(table)
    return table


@njit
def clear(table):
    """Frees all places."""
    for slot in range(len(table)):
        table[slot] = -1


@njit
def insert(table, pool, first, last, fresh):
    """Enters the positions of states ``pool[first:last]`` and notes which were new."""
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


@njit
def _kth_largest(values, count, k):
    """The k-th largest of the first values by quickselect, which reorders them.

    With numpy's partition the best states take 1.5 to 2 times as long.
    """
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


@njit
def _gather(words, log_joint, extra_words, extra_log_joint, size, pool, keys, fresh, table):
    """Collects distinct states that can be among the best; returns their number."""
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


@njit
def _keep_best(pool, keys, count, size, scratch):
    """Moves the ``size`` largest of ``count`` keys to the front, in order."""
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


@njit
def _select_rows(words, log_joint, extra_words, extra_log_joint, first, last, out_words, out_log_joint):
    """Fills rows ``first .. last - 1``; returns the fewest distinct states if too few."""
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


@parallel_kernel(has_plain=True)
def _select_tasks(words, log_joint, extra_words, extra_log_joint, out_words, out_log_joint, fewest):
    """Many rows at a time; ``fewest`` gets what :func:`_select_rows` returns."""
    num_data = len(words)
    for task in prange(len(fewest)):
        first = task * ROWS_PER_TASK
        last = min(num_data, first + ROWS_PER_TASK)
        fewest[task] = _select_rows(words, log_joint, extra_words, extra_log_joint, first, last, out_words, out_log_joint)


@parallel_kernel(has_plain=True)
def _distinct(words, out):
    """Marks the states that equal no earlier state of their row."""
    num_data, num_states = out.shape
    for task in prange((num_data + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
        table = new_table(num_states)
        for n in range(task * ROWS_PER_TASK, min(num_data, (task + 1) * ROWS_PER_TASK)):
            clear(table)
            insert(table, words[n], 0, num_states, out[n])


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


@njit(fastmath={"reassoc", "contract"})
def _total(weights):
    """Sum of finite weights; reassociation lets the compiler use vector instructions."""
    total = 0.0
    for weight in weights:
        total += weight
    return total


@njit
def _fitness(log_joint, by_fitness, weights):
    """Selection weights of one data point: the offset fitness, or one."""
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


@njit
def _reach(values, threshold):
    """Returns where a running sum reaches the threshold, and the sum before."""
    place, start, running = 0, 0.0, 0.0
    for s in range(len(values)):
        before = running
        running += values[s]
        if running > before:
            place, start = s, before
            if running >= threshold:
                break
    return place, start


@parallel_kernel(has_plain=True)
def _select_parents(log_joint, by_fitness, rows, seed, out):
    """Successive draws without replacement, ``out`` ``(N, P)``.

    A draw searches sums of blocks, and the block in which the threshold lies.
    """
    num_data, num_states = log_joint.shape
    num_blocks = (num_states + _BLOCK_STATES - 1) // _BLOCK_STATES
    for n in prange(num_data):
        state = stream(seed, rows[n])
        weights = np.empty(num_states)
        _fitness(log_joint[n], by_fitness, weights)
        sums = np.empty(num_blocks)
        for b in range(num_blocks):
            sums[b] = _total(weights[b * _BLOCK_STATES : (b + 1) * _BLOCK_STATES])
        for p in range(out.shape[1]):
            state += STEP
            threshold = (1.0 - uniform(state)) * _total(sums)
            b, before = _reach(sums, threshold)
            block = weights[b * _BLOCK_STATES : (b + 1) * _BLOCK_STATES]
            chosen, _ = _reach(block, threshold - before)
            out[n, p] = b * _BLOCK_STATES + chosen
            block[chosen] = 0.0
            sums[b] = _total(block)


@parallel_kernel(has_plain=True)
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


@njit(inline="always")
def change_latent(state_words, word, shift, cardinality, draw):
    """Moves one latent to another of its equally probable values."""
    if cardinality == 2:
        state_words[word] ^= np.int64(1) << shift
        return
    field = np.int64(2)
    while field < cardinality:
        field *= 2
    old = (state_words[word] >> shift) & (field - 1)
    new = (old + 1 + below(draw, cardinality - 1)) % cardinality
    state_words[word] ^= (old ^ new) << shift


@parallel_kernel(has_plain=True)
def _flip_random(words, fields, rows, seed, out):
    """Changes one latent (word, shift, cardinality in ``fields``) of every state."""
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


@njit(inline="always")
def _switch_off(words, mask, threshold, state, out):
    """Switches active binary latents off; returns whether anything changed.

    The probability is ``threshold / 2**32``. Two neighbouring latents share a random word.
    """
    changed = False
    for w in range(len(words)):
        bits = words[w] & mask[w]
        flips = np.int64(0)
        while bits != 0:
            place = trailing_zeros(bits)
            lowest = bits & -bits
            bits ^= lowest
            word = mix(state + np.uint64(32 * w + (place >> 1) + 1) * STEP)
            half = (word >> np.uint64(32 * (place & 1))) & np.uint64(0xFFFFFFFF)
            flips |= lowest * np.int64(np.int64(half) < threshold)
        out[w] ^= flips
        changed |= flips != 0
    return changed


@njit(inline="always")
def _switch_on(words, fields, log_stay, all_stay, num_draws, state, out):
    """Switches idle binary latents on; returns whether any changed.

    The probability is ``1 - exp(log_stay)``. The gap between changes is geometric, so the cost is the number of changes and not that of
    latents. Below ``all_stay``, the probability of none, the first gap is longer than all of them: no logarithm is taken.
    """
    changed = False
    position = 0
    if log_stay < 0.0:
        for _ in range(num_draws):
            state += STEP
            rest = 1.0 - uniform(state)
            if position == 0 and rest < all_stay:
                break
            gap = math.log(rest) / log_stay
            if gap >= fields.shape[1] - position:
                break
            position += int(gap)
            word, bit = fields[0, position], np.int64(1) << fields[1, position]
            if words[word] & bit == 0:
                out[word] ^= bit
                changed = True
            position += 1
    return changed


@njit(inline="always")
def _move(fields, log_stay, num_draws, state, out):
    """Moves latents of several values with probability ``1 - exp(log_stay)``."""
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


@parallel_kernel(has_plain=True)
def _flip_sparse(words, mask, binary, others, mutable, log_stay_off, switch_off, log_stay_other, num_on, num_other, rows, seed, out):
    """Sparsity-driven flips."""
    num_data, num_states, num_words = words.shape
    # Every child has its own part of the stream, as long as it can need.
    part = np.uint64(num_on + 2 * num_other + 2 + 32 * num_words) * STEP
    # A little less, so that what is rounded decides nothing.
    all_stay = (1.0 - 1e-12) * np.exp(binary.shape[1] * log_stay_off)
    for n in prange(num_data):
        row = stream(seed, rows[n]) - part
        for c in range(num_states):
            row += part
            state = row
            parent, child = words[n, c], out[n, c]
            active = 0
            for w in range(num_words):
                child[w] = parent[w]
                active += count_ones(parent[w] & mask[w])
            changed = _switch_on(parent, binary, log_stay_off[active], all_stay[active], num_on, state, child)
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


def initial_states(singletons: Tensor, others: Tensor, fields: Fields, num_states: int, rows: Tensor, seed: int) -> Tensor:
    """See :func:`pyro_truncated.ops.initial_states`."""
    out = torch.empty(len(rows), num_states, fields.num_words, dtype=torch.int64, device="cpu")
    with compile_first() if len(rows) * num_states > _MAX_PLAIN_STATES else contextlib.nullcontext():
        _initial_states(singletons.numpy(), others.numpy(), fields.rows(fields.mutable).numpy(), rows.numpy(), seed, out.numpy())
    return out


# More first states take torch longer than their kernel takes to compile.
_MAX_PLAIN_STATES = 2**20
# A Poisson number with a mean of at most 2 exceeds this with probability below 1e-20.
MOST_CHANGES = 24


@njit
def _fill_subset(choices, first, last, order, state, out):
    """Fills places with random distinct rows of ``choices``; restores ``order``."""
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


@njit
def _change_any(state_words, fields, state, step):
    """Moves one uniformly chosen latent to another value."""
    state += np.uint64(2 * step + 2) * STEP
    h = below(state, fields.shape[1])
    change_latent(state_words, fields[0, h], fields[1, h], fields[2, h], state + STEP)


@njit
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


@njit
def _fill_sparse(fields, first, state, out):
    """Adds new states of two and more active latents from ``first``.

    Each walks at random from zero; those that equal an earlier one walk on, until there are none.
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


@njit
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


@parallel_kernel(cost=4, has_plain=True)
def _initial_states(singletons, others, fields, rows, seed, out):
    """Returns the zero state, singletons, and ``others`` or random sparse states."""
    num_blocks = min(len(out), BLOCKS)
    for block in prange(num_blocks):
        order = np.arange(max(len(singletons), len(others)))
        for n in range(len(out) * block // num_blocks, len(out) * (block + 1) // num_blocks):
            _fill(singletons, others, fields, order, stream(seed, rows[n]), out[n])
