"""Compiled CPU kernels that score packed binary states by walking over their set bits.

Every function takes and returns tensors on the CPU, computes in float64, and splits the data points into blocks whose number does not
depend on the number of threads, so sums come out the same however many threads there are.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.compiled.threads import parallel_kernel
from pyro_truncated.ops.compiled.values import trailing_zeros

_MAX_BLOCKS = 64
_ACCUMULATOR_BYTES = 8 * 2**20
# A sum over many factors' logarithms takes one logarithm per group of factors; a group's product below _TINY may have lost bits.
_GROUP = 32
_TINY = 1e-290
# Rows are padded to whole vector registers, so the compiler's inner loops have no scalar remainder.
_LANES = 8


def pair_energy(words: Tensor, linear: Tensor, pairwise: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.pair_energy`; float64 ``(N, C)``."""
    pairwise = pairwise.double()
    # Each unordered pair is visited once: fold the matrix into its lower triangle.
    folded = (pairwise + pairwise.mT).tril(-1) + torch.diag_embed(pairwise.diagonal(dim1=-2, dim2=-1))
    out = linear.new_empty(linear.shape[0], words.shape[1], dtype=torch.float64)
    _pair_energy(_words(words), _array(linear), _array(folded.reshape(-1, *pairwise.shape[-2:])), out.numpy())
    return out


def moments(words: Tensor, weights: Tensor, num_latents: int, per_datum: bool) -> tuple[Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.moments`."""
    num_data = weights.shape[0]
    first = weights.new_zeros(num_data, num_latents, dtype=torch.float64)
    num_blocks = num_data if per_datum else _num_blocks(num_data, num_latents**2)
    second = weights.new_zeros(num_blocks, num_latents, num_latents, dtype=torch.float64)
    _moments(_words(words), _array(weights), first.numpy(), second.numpy())
    second = second if per_datum else second.sum(0)
    return first, second + second.tril(-1).mT


def noisy_or_log_prob(words: Tensor, value: Tensor, log_complement: Tensor, log_leak_complement: Tensor, linear: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.noisy_or_log_prob`; float64 ``(N, C)``."""
    complement, leak_complement = _array(log_complement.mT), _array(log_leak_complement)
    out = value.new_empty(value.shape[0], words.shape[1], dtype=torch.float64)
    weight, leak = -np.expm1(complement), -np.expm1(leak_complement)
    _noisy_or_log_prob(_words(words), _array(value), _array(linear), complement, weight, leak_complement, leak, out.numpy())
    return out


def noisy_or_statistics(
    words: Tensor, weights: Tensor, value: Tensor, log_complement: Tensor, log_leak_complement: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.noisy_or_statistics`."""
    num_data, (num_observed, num_latents) = value.shape[0], log_complement.shape
    first = value.new_zeros(num_data, num_latents, dtype=torch.float64)
    num_blocks = _num_blocks(num_data, (num_latents + 1) * num_observed)
    # The last row belongs to the leak: a latent that is always on.
    ratio = value.new_zeros(num_blocks, num_latents + 1, num_observed, dtype=torch.float64)
    weight, leak = -np.expm1(_array(log_complement.mT)), -np.expm1(_array(log_leak_complement))
    _noisy_or_statistics(_words(words), _array(weights), _array(value), weight, leak, first.numpy(), ratio.numpy())
    ratio = ratio.sum(0).mT
    return first, ratio[:, :-1], ratio[:, -1]


def square_error(words: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.square_error`; float64 ``(N, C)``."""
    out = value.new_empty(value.shape[0], words.shape[1], dtype=torch.float64)
    _square_error(_words(words), _array(value), _array(weight.mT), _array(precision), out.numpy())
    return out


def square_error_gradients(words: Tensor, grad: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``(grad * square_error).sum()`` with respect to value, weight and precision."""
    num_data, (num_observed, num_latents) = value.shape[0], weight.shape
    grad_value = value.new_zeros(num_data, num_observed, dtype=torch.float64)
    num_blocks = _num_blocks(num_data, (num_latents + 1) * num_observed)
    # The last row collects the gradient of the precision.
    sums = value.new_zeros(num_blocks, num_latents + 1, num_observed, dtype=torch.float64)
    parameters = _array(weight.mT), _array(precision)
    _square_error_gradients(_words(words), _array(grad), _array(value), *parameters, grad_value.numpy(), sums.numpy())
    sums = sums.sum(0).mT
    return grad_value, sums[:, :-1], sums[:, -1]


def _words(words: Tensor) -> np.ndarray:
    # States shared by all data points (an expanded tensor) stay one row.
    shared = words.shape[0] > 1 and words.stride(0) == 0
    return (words[:1] if shared else words).contiguous().numpy()


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().contiguous().numpy()


def _num_blocks(num_data: int, accumulator_size: int) -> int:
    return max(1, min(num_data, _MAX_BLOCKS, max(4, _ACCUMULATOR_BYTES // (8 * accumulator_size))))


@njit(cache=True, nogil=True)
def _active(words, n, c, active):
    """Writes the indices of the set bits of state ``c`` of row ``n`` into ``active``, in ascending order; returns how many there are."""
    count = 0
    for w in range(words.shape[2]):
        word = words[n, c, w]
        while word != 0:
            active[count] = 64 * w + trailing_zeros(word)
            word &= word - 1
            count += 1
    return count


@njit(cache=True, nogil=True)
def _ever_active(words, n, union, active):
    """Like :func:`_active` for the union of all states of row ``n``; ``union`` is scratch ``(1, 1, W)``."""
    union[:] = 0
    for c in range(words.shape[1]):
        for w in range(words.shape[2]):
            union[0, 0, w] |= words[n, c, w]
    return _active(union, 0, 0, active)


@njit(cache=True, nogil=True)
def _padded(count):
    return (count + _LANES - 1) // _LANES * _LANES


@parallel_kernel()
def _pair_energy(words, linear, folded, out):
    num_rows, num_candidates, num_words = words.shape
    total = linear.shape[0] * num_candidates
    for block in prange(_MAX_BLOCKS):
        active = np.empty(64 * num_words, np.int64)
        for i in range(total * block // _MAX_BLOCKS, total * (block + 1) // _MAX_BLOCKS):
            n = i // num_candidates
            c = i - n * num_candidates
            table = folded[n if folded.shape[0] > 1 else 0]
            count = _active(words, n if num_rows > 1 else 0, c, active)
            energy = 0.0
            for a in range(count):
                h = active[a]
                energy += linear[n, h]
                for b in range(a + 1):
                    energy += table[h, active[b]]
            out[n, c] = energy


@parallel_kernel()
def _moments(words, weights, first, second):
    num_rows, num_candidates, num_words = words.shape
    num_data, num_blocks = weights.shape[0], second.shape[0]
    for block in prange(num_blocks):
        active = np.empty(64 * num_words, np.int64)
        table = second[block]
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            for c in range(num_candidates):
                weight = weights[n, c]
                if weight == 0.0:
                    continue
                count = _active(words, n if num_rows > 1 else 0, c, active)
                for a in range(count):
                    h = active[a]
                    first[n, h] += weight
                    for b in range(a + 1):
                        table[h, active[b]] += weight


@njit(cache=True, nogil=True)
def _gather(row, index, count, padding, out):
    """Copies ``row[index[:count]]`` to the front of ``out`` and pads it to whole vectors."""
    for j in range(count):
        out[j] = row[index[j]]
    for j in range(count, _padded(count)):
        out[j] = padding


@njit(cache=True, nogil=True)
def _where(row, wanted, index):
    """Positions at which ``row`` equals ``wanted``; returns how many."""
    count = 0
    for d in range(row.shape[0]):
        index[count] = d
        count += row[d] == wanted
    return count


@njit(cache=True, nogil=True, fastmath={"contract"})
def _noisy_or(leak, weight, active, count, size, probability):
    """``probability[j] = 1 - (1 - leak[j]) prod_h (1 - weight[h, j])`` over the active latents, summed from positive terms only.

    Small probabilities so keep their precision.
    """
    for j in range(size):
        probability[j] = leak[j]
    for a in range(count):
        row = weight[active[a]]
        for j in range(size):
            probability[j] += row[j] * (1.0 - probability[j])


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def _sum_log(factors, size):
    total = 0.0
    for start in range(0, size, _GROUP):
        stop = min(start + _GROUP, size)
        product = 1.0
        for j in range(start, stop):
            product *= factors[j]
        if product > _TINY:
            total += np.log(product)
        else:
            for j in range(start, stop):
                total += np.log(factors[j])
    return total


@parallel_kernel(cost=4)
def _noisy_or_log_prob(words, value, linear, log_complement, weight, log_leak_complement, leak, out):
    num_rows, num_candidates, num_words = words.shape
    (num_data, num_observed), num_latents = value.shape, weight.shape[0]
    num_blocks = min(num_data, _MAX_BLOCKS)
    for block in prange(num_blocks):
        active = np.empty(64 * num_words, np.int64)
        union = np.empty((1, 1, num_words), np.int64)
        index = np.empty(num_observed + 1, np.int64)
        base = np.empty(num_latents)
        near_weight = np.empty((num_latents, _padded(num_observed)))
        near_leak = np.empty(_padded(num_observed))
        probability = np.empty(_padded(num_observed))
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            row = n if num_rows > 1 else 0
            num_used = _ever_active(words, row, union, active)
            # Pixels that are off contribute a term linear in the state.
            count = _where(value[n], 0.0, index)
            offset = 0.0
            for j in range(count):
                offset += log_leak_complement[index[j]]
            for a in range(num_used):
                h = active[a]
                base[h] = linear[n, h]
                for j in range(count):
                    base[h] += log_complement[h, index[j]]
            count = _where(value[n], 1.0, index)
            _gather(leak, index, count, 1.0, near_leak)
            for a in range(num_used):
                _gather(weight[active[a]], index, count, 1.0, near_weight[active[a]])
            for c in range(num_candidates):
                num_active = _active(words, row, c, active)
                energy = offset
                for a in range(num_active):
                    energy += base[active[a]]
                _noisy_or(near_leak, near_weight, active, num_active, _padded(count), probability)
                out[n, c] = energy + _sum_log(probability, _padded(count))


# Dividing by the probability of an impossible observation gives infinity, not an exception.
@parallel_kernel(cost=4, error_model="numpy")
def _noisy_or_statistics(words, weights, value, weight, leak, first, ratio):
    num_rows, num_candidates, num_words = words.shape
    (num_data, num_observed), num_latents = value.shape, weight.shape[0]
    num_blocks = ratio.shape[0]
    for block in prange(num_blocks):
        active, used = np.empty(64 * num_words + 1, np.int64), np.empty(64 * num_words + 1, np.int64)
        union = np.empty((1, 1, num_words), np.int64)
        index = np.empty(num_observed + 1, np.int64)
        near_weight = np.empty((num_latents + 1, _padded(num_observed)))
        near_ratio = np.empty((num_latents + 1, _padded(num_observed)))
        near_leak = np.empty(_padded(num_observed))
        probability = np.empty(_padded(num_observed))
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            row = n if num_rows > 1 else 0
            num_used = _ever_active(words, row, union, used)
            count = _where(value[n], 1.0, index)
            size = _padded(count)
            _gather(leak, index, count, 1.0, near_leak)
            for a in range(num_used):
                _gather(weight[used[a]], index, count, 1.0, near_weight[used[a]])
            used[num_used] = num_latents
            for a in range(num_used + 1):
                near_ratio[used[a], :size] = 0.0
            for c in range(num_candidates):
                if weights[n, c] == 0.0:
                    continue
                num_active = _active(words, row, c, active)
                _noisy_or(near_leak, near_weight, active, num_active, size, probability)
                for j in range(size):
                    probability[j] = weights[n, c] / probability[j]
                for a in range(num_active):
                    first[n, active[a]] += weights[n, c]
                active[num_active] = num_latents
                _add_to_rows(near_ratio, active, num_active + 1, probability, size)
            for a in range(num_used + 1):
                for j in range(count):
                    ratio[block, used[a], index[j]] += near_ratio[used[a], j]


@njit(cache=True, nogil=True)
def _add_to_rows(table, rows, num_rows, addend, size):
    for a in range(num_rows):
        row = table[rows[a]]
        for j in range(size):
            row[j] += addend[j]


@njit(cache=True, nogil=True)
def _residual(start, weight, active, count, size, residual):
    for j in range(size):
        residual[j] = start[j]
    for a in range(count):
        row = weight[active[a]]
        for j in range(size):
            residual[j] -= row[j]


@njit(cache=True, nogil=True)
def _observed(row, index):
    count = 0
    for d in range(row.shape[0]):
        index[count] = d
        count += not np.isnan(row[d])
    return count


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def _weighted_square(residual, precision, size):
    total = 0.0
    for j in range(size):
        total += precision[j] * residual[j] * residual[j]
    return total


@parallel_kernel(cost=4)
def _square_error(words, value, weight, precision, out):
    num_rows, num_candidates, num_words = words.shape
    (num_data, num_observed), num_latents = value.shape, weight.shape[0]
    num_blocks = min(num_data, _MAX_BLOCKS)
    for block in prange(num_blocks):
        active = np.empty(64 * num_words, np.int64)
        union = np.empty((1, 1, num_words), np.int64)
        index = np.empty(num_observed + 1, np.int64)
        near_weight = np.empty((num_latents, _padded(num_observed)))
        start, near_precision, residual = np.empty(_padded(num_observed)), np.empty(_padded(num_observed)), np.empty(_padded(num_observed))
        for n in range(num_data * block // num_blocks, num_data * (block + 1) // num_blocks):
            row = n if num_rows > 1 else 0
            num_used = _ever_active(words, row, union, active)
            count = _observed(value[n], index)
            _gather(value[n], index, count, 0.0, start)
            _gather(precision, index, count, 0.0, near_precision)
            for a in range(num_used):
                _gather(weight[active[a]], index, count, 0.0, near_weight[active[a]])
            for c in range(num_candidates):
                num_active = _active(words, row, c, active)
                _residual(start, near_weight, active, num_active, _padded(count), residual)
                out[n, c] = _weighted_square(residual, near_precision, _padded(count))


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
            for c in range(num_candidates):
                g = grad[n, c]
                if g == 0.0:
                    continue
                num_active = _active(words, n if num_rows > 1 else 0, c, active)
                _residual(start, weight, active, num_active, num_observed, residual)
                for d in range(num_observed):
                    table[num_latents, d] += g * mask[d] * residual[d] * residual[d]
                    residual[d] *= -2.0 * g * precision[d] * mask[d]
                    total[d] -= residual[d]
                _add_to_rows(table, active, num_active, residual, num_observed)
            for d in range(num_observed):
                grad_value[n, d] = total[d]
