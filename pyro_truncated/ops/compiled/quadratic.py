"""Compiled CPU kernels for quadratic functions of packed states, in float64.

Data points are split into blocks whose number does not depend on that of threads. So sums do not depend on it either, here and in the other
kernels. Plain torch takes 30 to 450 times as long for energies and 15 to 350 for moments (5000 data points with 120 states of 20 latents,
2000 with 200 of 300). For squared errors it takes 40 times as long.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import njit, parallel_kernel
from pyro_truncated.ops.compiled.iterate_active import (
    MAX_BLOCKS,
    active_latents,
    add_to_rows,
    as_array,
    as_words,
    count_blocks,
    ever_active,
    find_observed_entries,
    gather,
    least_weight,
    round_up,
    trailing_zeros,
)


def pair_energy(words: Tensor, linear: Tensor, pairwise: Tensor | None) -> Tensor:
    """See :func:`pyro_truncated.ops.pair_energy`; float64 ``(N, C)``."""
    out = linear.new_empty(linear.shape[0], words.shape[1], dtype=torch.float64)
    if pairwise is None:
        _linear_energy(as_words(words), as_array(linear), out.numpy())
        return out
    pairwise = pairwise.double()
    # Each unordered pair is visited once: fold the matrix into its lower triangle. The square of a binary value is the value.
    folded = pairwise.tril() + pairwise.mT.tril(-1)
    # Sums over all latents of a table have no place for infinite energies.
    if pairwise.dim() == 2 and 0 < linear.shape[1] <= _MOST_TABULATED and bool(pairwise.isfinite().all()):
        _tabulated_energy(as_words(words), as_array(linear), *_tabulate(folded), out.numpy())
    else:
        _pair_energy(as_words(words), as_array(linear), as_array(folded if folded.dim() == 3 else folded.unsqueeze(0)), out.numpy())
    return out


# Of so many latents the energies of all states of any four, and of any four beside four others, fit into the fastest memory.
# Pairs one by one take 4.6 times as long for states with 5 active latents of 20.
_MOST_TABULATED = 20


def _tabulate(pairwise: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Energies of each four latents' states, alone and beside another four."""
    number = -(-len(pairwise) // 4)
    padded = torch.nn.functional.pad(pairwise, (0, 4 * number - len(pairwise)) * 2)
    states = (torch.arange(16).unsqueeze(1) >> torch.arange(4) & 1).double()
    energies = states @ padded.view(number, 4, number, 4).transpose(1, 2) @ states.mT
    first, second = torch.tril_indices(number, number, -1)
    alone = energies.diagonal(dim1=0, dim2=1).diagonal(dim1=0, dim2=1)
    return alone.flatten().numpy(), energies[first, second].flatten().numpy()


def moments(words: Tensor, weights: Tensor, num_latents: int, per_datum: bool) -> tuple[Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.moments`."""
    num_data = weights.shape[0]
    first = weights.new_zeros(num_data, num_latents, dtype=torch.float64)
    num_blocks = num_data if per_datum else count_blocks(num_data, num_latents**2)
    second = weights.new_zeros(num_blocks, num_latents, num_latents, dtype=torch.float64)
    _moments(as_words(words), as_array(weights), first.numpy(), second.numpy())
    second = second if per_datum else second.sum(0)
    return first, second + second.tril(-1).mT


def first_moments(words: Tensor, weights: Tensor, num_latents: int) -> Tensor:
    """The first of the two :func:`pyro_truncated.ops.moments`."""
    first = weights.new_zeros(len(weights), num_latents, dtype=torch.float64)
    _first_moments(as_words(words), weights.detach().contiguous().numpy(), first.numpy())
    return first


@parallel_kernel()
def _linear_energy(words, linear, out):
    num_rows, num_candidates, num_words = words.shape
    num_data = len(linear)
    num_blocks = min(num_data, MAX_BLOCKS)
    for block in prange(num_blocks):
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            row = n if num_rows > 1 else 0
            for c in range(num_candidates):
                energy = 0.0
                for w in range(num_words):
                    word = words[row, c, w]
                    while word != 0:
                        energy += linear[n, 64 * w + trailing_zeros(word)]
                        word &= word - 1
                out[n, c] = energy


@njit(forceinline=True)
def _look_up(words, own, pairs, num_chunks, out):
    """Sums the energies of states' chunks, and of all pairs of chunks."""
    low, four, size = np.uint64(15), np.uint64(4), np.uint64(256)
    for c in range(len(out)):
        word, energy = np.uint64(words[c, 0]), 0.0
        left, place, table = word, np.uint64(0), np.uint64(0)
        for i in range(num_chunks):
            state = left & low
            energy += own[place + state]
            others = word
            for _ in range(i):
                energy += pairs[table + (state << four) + (others & low)]
                others >>= four
                table += size
            left >>= four
            place += np.uint64(16)
        out[c] = energy


@parallel_kernel()
def _tabulated_energy(words, linear, alone, pairs, out):
    num_rows = len(words)
    num_data, num_latents = linear.shape
    num_chunks = (num_latents + 3) // 4
    num_blocks = min(num_data, MAX_BLOCKS)
    for block in prange(num_blocks):
        own = np.empty(16 * num_chunks)
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            for i in range(num_chunks):
                own[16 * i] = 0.0
            for h in range(num_latents):
                start, bit = h // 4 * 16, 1 << (h & 3)
                for state in range(bit):
                    own[start + bit + state] = own[start + state] + linear[n, h]
            for place in range(len(own)):
                own[place] += alone[place]
            row = n if num_rows > 1 else 0
            states, energies = words[row], out[n]
            # With a constant number of chunks the compiler leaves no loop.
            if num_chunks == 5:
                _look_up(states, own, pairs, 5, energies)
            elif num_chunks == 4:
                _look_up(states, own, pairs, 4, energies)
            elif num_chunks == 3:
                _look_up(states, own, pairs, 3, energies)
            elif num_chunks == 2:
                _look_up(states, own, pairs, 2, energies)
            else:
                _look_up(states, own, pairs, 1, energies)


@parallel_kernel()
def _pair_energy(words, linear, tables, out):
    num_rows, num_candidates, num_words = words.shape
    total, row_length = linear.shape[0] * num_candidates, max(1, num_candidates)
    for block in prange(MAX_BLOCKS):
        active = np.empty(64 * num_words, np.int64)
        first, last = total * block // MAX_BLOCKS, total * (block + 1) // MAX_BLOCKS
        for n in range(first // row_length, (last + row_length - 1) // row_length):
            states = words[n if num_rows > 1 else 0]
            field = linear[n]
            table = tables[n if tables.shape[0] > 1 else 0]
            for c in range(max(0, first - n * num_candidates), min(num_candidates, last - n * num_candidates)):
                # Terms are added as latents are found: on sparse states a second pass would take as long as the first.
                energy = 0.0
                count = 0
                for w in range(num_words):
                    word = states[c, w]
                    while word != 0:
                        h = 64 * w + trailing_zeros(word)
                        word &= word - 1
                        energy += field[h] + table[h, h]
                        for b in range(count):
                            energy += table[h, active[b]]
                        active[count] = h
                        count += 1
                out[n, c] = energy


@parallel_kernel()
def _moments(words, weights, first, second):
    num_rows, num_candidates, num_words = words.shape
    num_data, num_blocks = weights.shape[0], second.shape[0]
    for block in prange(num_blocks):
        active = np.empty(64 * num_words, np.int64)
        table = second[block]
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            least = least_weight(weights[n])
            for c in range(num_candidates):
                weight = weights[n, c]
                if abs(weight) <= least:
                    continue
                count = active_latents(words, n if num_rows > 1 else 0, c, active)
                for a in range(count):
                    h = active[a]
                    first[n, h] += weight
                    for b in range(a + 1):
                        table[h, active[b]] += weight


@parallel_kernel()
def _first_moments(words, weights, first):
    num_rows, num_candidates, num_words = words.shape
    for n in prange(len(weights)):
        states = words[np.int64(n) if num_rows > 1 else 0]
        for c in range(num_candidates):
            weight = weights[n, c]
            for w in range(num_words):
                word = states[c, w]
                while word != 0:
                    first[n, 64 * w + trailing_zeros(word)] += weight
                    word &= word - 1


def square_error(words: Tensor, value: Tensor, weight: Tensor, precision: Tensor, by_maximum: bool = False) -> Tensor:
    """See :func:`pyro_truncated.ops.quadratic`; float64 ``(N, C)``. The mean is a sum, or ``by_maximum``."""
    out = value.new_empty(value.shape[0], words.shape[1], dtype=torch.float64)
    _square_error(as_words(words), as_array(value), as_array(weight.mT), as_array(precision), by_maximum, out.numpy())
    return out


def square_error_gradients(words: Tensor, grad: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``(grad * square_error).sum()`` with respect to value, weight and precision."""
    num_data, (num_observed, num_latents) = value.shape[0], weight.shape
    grad_value = value.new_zeros(num_data, num_observed, dtype=torch.float64)
    num_blocks = count_blocks(num_data, (num_latents + 1) * num_observed)
    # The last row collects the gradient of the precision.
    sums = value.new_zeros(num_blocks, num_latents + 1, num_observed, dtype=torch.float64)
    parameters = as_array(weight.mT), as_array(precision)
    _square_error_gradients(as_words(words), as_array(grad), as_array(value), *parameters, grad_value.numpy(), sums.numpy())
    sums = sums.sum(0).mT
    return grad_value, sums[:, :-1], sums[:, -1]


@njit
def _residual(start, weight, active, count, size, residual):
    for j in range(size):
        residual[j] = start[j]
    for a in range(count):
        row = weight[active[a]]
        for j in range(size):
            residual[j] -= row[j]


@njit
def largest(start, rows, active, count, size, out):
    """The largest of the active rows and of the start."""
    for j in range(size):
        out[j] = start[j]
    for a in range(count):
        row = rows[active[a]]
        for j in range(size):
            out[j] = row[j] if row[j] > out[j] else out[j]


@njit(fastmath={"reassoc", "contract"})
def _weighted_square(residual, precision, size):
    """Sum of weighted squares."""
    total = 0.0
    for j in range(size):
        total += precision[j] * residual[j] * residual[j]
    return total


@parallel_kernel(cost=4)
def _square_error(words, value, weight, precision, by_maximum, out):
    num_rows, num_candidates, num_words = words.shape
    (num_data, num_observed), num_latents = value.shape, weight.shape[0]
    num_blocks = min(num_data, MAX_BLOCKS)
    for block in prange(num_blocks):
        active = np.empty(64 * num_words, np.int64)
        index = np.empty(num_observed + 1, np.int64)
        near_weight = np.empty((num_latents, round_up(num_observed)))
        start, near_precision = np.empty(round_up(num_observed)), np.empty(round_up(num_observed))
        residual, zeros = np.empty(round_up(num_observed)), np.zeros(round_up(num_observed))
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            row = n if num_rows > 1 else 0
            num_used = ever_active(words, row, active)
            count = find_observed_entries(value[n], index)
            size = round_up(count)
            gather(value[n], index, count, 0.0, start)
            gather(precision, index, count, 0.0, near_precision)
            for a in range(num_used):
                gather(weight[active[a]], index, count, 0.0, near_weight[active[a]])
            for c in range(num_candidates):
                num_active = active_latents(words, row, c, active)
                if by_maximum:
                    largest(zeros, near_weight, active, num_active, size, residual)
                    for j in range(size):
                        residual[j] -= start[j]
                else:
                    _residual(start, near_weight, active, num_active, size, residual)
                out[n, c] = _weighted_square(residual, near_precision, size)


@parallel_kernel(cost=4)
def _square_error_gradients(words, grad, value, weight, precision, grad_value, sums):
    num_rows, num_candidates, num_words = words.shape
    (num_data, num_observed), num_latents = value.shape, weight.shape[0]
    num_blocks = sums.shape[0]
    for block in prange(num_blocks):
        active = np.empty(64 * num_words, np.int64)
        start, residual, total = np.empty(num_observed), np.empty(num_observed), np.empty(num_observed)
        mask = np.empty(num_observed)
        table = sums[block]
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            for d in range(num_observed):
                mask[d] = 0.0 if np.isnan(value[n, d]) else 1.0
                start[d] = 0.0 if np.isnan(value[n, d]) else value[n, d]
                total[d] = 0.0
            least = least_weight(grad[n])
            for c in range(num_candidates):
                g = grad[n, c]
                if abs(g) <= least:
                    continue
                num_active = active_latents(words, n if num_rows > 1 else 0, c, active)
                _residual(start, weight, active, num_active, num_observed, residual)
                for d in range(num_observed):
                    table[num_latents, d] += g * mask[d] * residual[d] * residual[d]
                    residual[d] *= -2.0 * g * precision[d] * mask[d]
                    total[d] -= residual[d]
                add_to_rows(table, active, num_active, residual, num_observed)
            for d in range(num_observed):
                grad_value[n, d] = total[d]
