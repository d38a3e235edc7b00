"""Compiled CPU kernels for messages along binary chains, in float64.

A step whose kind of transition is negative lies beyond the end of its sequence: its first member has all the weight.
Plain torch takes 50 to 400 times as long for one sequence of 2000 steps with sets of 16 states, and up to 6 times for 200 of 20 steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.binary_chains import LOST_NATS, PairTables, chances_if_full, likelihoods, pair_tables
from pyro_truncated.ops.compiled.compilation import HEAVY, njit, parallel_kernel
from pyro_truncated.ops.compiled.iterate_active import as_array, copy, trailing_zeros


def _tables(log_prob: Tensor) -> PairTables:
    return PairTables(*(table.numpy() for table in pair_tables(log_prob)))  # type: ignore[arg-type]


def _arrays(*tensors: Tensor) -> list[np.ndarray]:
    return [tensor.contiguous().numpy() if tensor.dtype == torch.int64 else as_array(tensor) for tensor in tensors]


def exp(values: Tensor) -> Tensor:
    """Exponentials as kernels compute them, where torch serves in their place."""
    return _map(_exp, values)


def log(values: Tensor) -> Tensor:
    """Logarithms as kernels compute them."""
    return _map(_log, values)


def _map(kernel: Callable[[np.ndarray, np.ndarray], None], values: Tensor) -> Tensor:
    out = torch.empty(values.shape, dtype=torch.float64)
    kernel(values.contiguous().view(-1).numpy(), out.view(-1).numpy())
    return out


@njit(cache=True, nogil=True)
def _exp(values, out):
    for i in range(len(values)):
        out[i] = np.exp(values[i])


@njit(cache=True, nogil=True)
def _log(values, out):
    for i in range(len(values)):
        out[i] = np.log(values[i])


def messages(words: Tensor, unary: Tensor, log_prob: Tensor, kind: Tensor, directions: Sequence[bool]) -> list[tuple[Tensor, Tensor]]:
    """See :func:`pyro_truncated.ops.binary_chains.messages`; messages and norms, forward or backward in turn."""
    found = [(torch.empty(unary.shape, dtype=torch.float64), torch.zeros(kind.shape, dtype=torch.float64)) for _ in directions]
    if (chances := chances_if_full(words, log_prob)) is None:
        arguments = *_arrays(words, unary, kind), _tables(log_prob)
        for forward, (out, log_norm) in zip(directions, found, strict=True):
            _messages(*arguments, forward, out.numpy(), log_norm.numpy())
        return found
    likelihood, best = likelihoods(unary)
    for forward, (out, norm) in zip(directions, found, strict=True):
        arrays = _arrays(likelihood, kind, chances if forward else chances.mT)
        _full_messages(*arrays, forward, out.numpy(), norm.fill_(1.0).numpy())
    best = torch.where(kind < 0, 0.0, best)
    return [(out.log_(), norm.log_().add_(best) if forward else norm) for forward, (out, norm) in zip(directions, found, strict=True)]


def select(
    words: Tensor, unary: Tensor, log_prob: Tensor, kind: Tensor, size: int, ahead: Tensor, forward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.binary_chains.select`."""
    chosen = torch.empty((*kind.shape, size), dtype=torch.int64)
    out = torch.empty(chosen.shape, dtype=torch.float64)
    log_norm = torch.zeros(kind.shape, dtype=torch.float64)
    arguments = _arrays(words, unary, kind, ahead)
    _select(*arguments, _tables(log_prob), forward, chosen.numpy(), out.numpy(), log_norm.numpy())
    return chosen, out, log_norm


def expected_pairs(
    words: Tensor, forward: Tensor, onward: Tensor, log_prob: Tensor, kind: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.vectorised.binary_chains.expected_pairs`."""
    num_kinds, num_latents = log_prob.shape[:2]
    number = torch.zeros(len(kind), num_kinds, dtype=torch.float64)
    previous, current, both = torch.zeros(3, len(kind), num_kinds, num_latents, dtype=torch.float64)
    sums = (number.numpy(), previous.numpy(), current.numpy(), both.numpy())
    if (chances := chances_if_full(words, log_prob)) is not None:
        _full_expected_pairs(*_arrays(forward.exp(), likelihoods(onward)[0], kind, weight, chances), *sums)
    else:
        _expected_pairs(*_arrays(words, forward, onward, kind, weight), _tables(log_prob), *sums)
    return number.sum(0), previous.sum(0), current.sum(0), both.sum(0)


def best_path(words: Tensor, unary: Tensor, log_prob: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.binary_chains.best_path`."""
    path, value = torch.zeros(kind.shape, dtype=torch.int64), torch.zeros(len(kind), dtype=torch.float64)
    _best_path(*_arrays(words, unary, kind), _tables(log_prob), path.numpy(), value.numpy())
    return path, value


def draw_paths(words: Tensor, forward: Tensor, log_prob: Tensor, kind: Tensor, uniform: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.binary_chains.draw_paths`."""
    path = torch.zeros(uniform.shape, dtype=torch.int64)
    _draw_paths(*_arrays(words, forward, kind, uniform), _tables(log_prob), path.numpy())
    return path


def flips(
    words: Tensor, log_weight: Tensor, gain: Tensor, forward: Tensor, onward: Tensor, log_prob: Tensor, kind: Tensor, rows: slice, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.binary_chains.best_flips`."""
    first, last = rows.start, rows.stop
    member, latent = torch.zeros(2, last - first, size, dtype=torch.int64)
    score = torch.full((last - first, size), -torch.inf, dtype=torch.float64)
    arguments = _arrays(words, log_weight, gain, forward, onward, kind)
    chances = as_array(torch.stack([log_prob, log_prob.mT]).double().exp())
    _flips(*arguments, _tables(log_prob), chances, first, member.numpy(), latent.numpy(), score.numpy())
    return member, latent, score


def masses(words: Tensor, unary: Tensor, others: Tensor, forward: Tensor, onward: Tensor, log_prob: Tensor, kind: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.vectorised.binary_chains.masses`."""
    out = torch.empty(unary.shape, dtype=torch.float64)
    _masses(*_arrays(words, unary, others, forward, onward, kind), _tables(log_prob), out.numpy())
    return out


def block_posteriors(unary: Tensor, log_prob: Tensor, kind: Tensor, block: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.binary_chains.block_posteriors`."""
    out = torch.empty(unary.shape, dtype=torch.float64)
    chances = log_prob.double().exp()
    _block_posteriors(*_arrays(likelihoods(unary)[0], kind, block, chances, chances.mT), out.numpy())
    return (out / out.sum(-1, keepdim=True)).log().nan_to_num(nan=-torch.inf)


def draw_blocks(unary: Tensor, log_prob: Tensor, kind: Tensor, block: Tensor, uniform: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.binary_chains.draw_blocks`."""
    out = torch.zeros(kind.shape, dtype=torch.int64)
    _draw_blocks(*_arrays(likelihoods(unary)[0], kind, block), as_array(log_prob.double().exp()), as_array(uniform), out.numpy())
    return out


@njit
def _by_octets(table, state):
    """The sum of a table's entries over the octets of a state."""
    total = 0.0
    for octet in range(table.shape[0]):
        total += table[octet, (state[octet >> 3] >> (8 * (octet & 7))) & 255]
    return total


@njit
def _is_forbidden(masks, other, state):
    """Whether the transition between two states is impossible."""
    for w in range(masks.shape[1] if masks.shape[0] > 0 else 0):
        a, b = other[w], state[w]
        if (~a & ~b & masks[0, w]) | (~a & b & masks[1, w]) | (a & ~b & masks[2, w]) | (a & b & masks[3, w]):
            return True
    return False


@njit
def _weigh_pairs(both, masks, near, others, state, out):
    """Writes weights of the others times transition factors; returns their sum."""
    total = 0.0
    num_words, num_octets = others.shape[1], both.shape[1]
    for j in range(others.shape[0]):
        x = near[1, j]
        if x > 0.0:
            if _is_forbidden(masks, others[j], state):
                x = 0.0
            else:
                for w in range(num_words):
                    common = others[j, w] & state[w]
                    for octet in range(8 * w, min(8 * w + 8, num_octets)):
                        x *= both[1, octet, common & 255]
                        common >>= 8
        out[j] = x
        total += x
    return total


@njit
def _log_pairs(both, masks, near, others, state, out):
    """Writes the logarithms of the same, and returns the largest."""
    best = -np.inf
    num_words, num_octets = others.shape[1], both.shape[1]
    for j in range(others.shape[0]):
        x = near[0, j]
        if x > -np.inf:
            if _is_forbidden(masks, others[j], state):
                x = -np.inf
            else:
                for w in range(num_words):
                    common = others[j, w] & state[w]
                    for octet in range(8 * w, min(8 * w + 8, num_octets)):
                        x += both[0, octet, common & 255]
                        common >>= 8
        out[j] = x
        best = max(best, x)
    return best


@njit
def _log_sum(values, best):
    if best == -np.inf:
        return best
    total = 0.0
    for j in range(values.shape[0]):
        below = values[j] - best
        if below > -LOST_NATS:
            total += np.exp(below)
    return best + np.log(total)


@njit
def _log_factor(smallest, both, masks, near, others, state, scratch):
    """Log sum over weights times transitions, but for ``state``'s own terms."""
    total = _weigh_pairs(both, masks, near, others, state, scratch)
    if smallest <= total < np.inf:
        return np.log(total)
    best = _log_pairs(both, masks, near, others, state, scratch)
    return _log_sum(scratch[: others.shape[0]], best)


@njit
def _share_pairs(tables, k, is_left, near, others, state, shares):
    """Writes the share of each of the others in that sum."""
    both, masks = tables.both[k], tables.forbidden[0 if is_left else 1, k]
    total = _weigh_pairs(both, masks, near, others, state, shares)
    if not tables.smallest[k] <= total < np.inf:
        best = _log_pairs(both, masks, near, others, state, shares)
        total = 0.0
        for j in range(others.shape[0]):
            below = shares[j] - best
            shares[j] = np.exp(below) if below > -LOST_NATS else 0.0
            total += shares[j]
    if total > 0.0:
        for j in range(others.shape[0]):
            shares[j] /= total


@njit
def _normalize(values):
    """Subtracts the log sum from values and returns it; impossible ones stay."""
    best = -np.inf
    for value in values:
        best = max(best, value)
    total = _log_sum(values, best)
    if total > -np.inf:
        for i in range(values.shape[0]):
            values[i] -= total
    return total


@njit
def _set_first(values):
    values[:] = -np.inf
    values[0] = 0.0


@njit
def _near(tables, k, is_left, others, message, near):
    """Writes (log) weights of a neighbouring step's members; returns the largest.

    They include the terms of the transition that depend on these members alone.
    """
    terms, best = tables.previous[k] if is_left else tables.current[k], -np.inf
    for j in range(others.shape[0]):
        near[0, j] = message[j] + tables.constant[k] + _by_octets(terms, others[j])
        best = max(best, near[0, j])
    if best == -np.inf:
        best = 0.0
    for j in range(others.shape[0]):
        near[0, j] -= best
        near[1, j] = np.exp(near[0, j])
    return best


@njit
def _message(tables, k, is_left, others, message, states, own, near, scratch, out):
    """Adds what a neighbouring step's members send to states to ``own``."""
    best = _near(tables, k, is_left, others, message, near)
    terms, both, masks = tables.current[k] if is_left else tables.previous[k], tables.both[k], tables.forbidden[0 if is_left else 1, k]
    for i in range(states.shape[0]):
        out[i] = own[i]
        if out[i] > -np.inf:
            factor = _log_factor(tables.smallest[k], both, masks, near, others, states[i], scratch)
            out[i] += _by_octets(terms, states[i]) + best + factor


@parallel_kernel(cost=HEAVY, has_plain=True)
def _messages(words, unary, kind, tables, forward, out, log_norm):
    num_data, num_steps, size, num_words = words.shape
    for n in prange(num_data):
        near, scratch, onward = np.zeros((2, size)), np.empty(size), np.zeros(size)
        zero_state, zero = np.zeros((1, num_words), np.int64), np.zeros(size)
        for step in range(num_steps):
            t = step if forward else num_steps - 1 - step
            if kind[n, t] < 0:
                _set_first(out[n, t])
            elif forward:
                others, message = (words[n, t - 1], out[n, t - 1]) if t > 0 else (zero_state, zero)
                _message(tables, kind[n, t], True, others, message, words[n, t], unary[n, t], near, scratch, out[n, t])
                log_norm[n, t] = _normalize(out[n, t])
            elif t + 1 == num_steps or kind[n, t + 1] < 0:
                out[n, t] = 0.0
            else:
                for j in range(size):
                    onward[j] = unary[n, t + 1, j] + out[n, t + 1, j]
                _message(tables, kind[n, t + 1], False, words[n, t + 1], onward, words[n, t], zero, near, scratch, out[n, t])
                log_norm[n, t] = _normalize(out[n, t])


@njit(inline="always")
def _step_one(vector, bit, off_off, off_on, on_off, on_on):
    """Takes one chain a step on, in place."""
    for first in range(0, vector.shape[0], 2 * bit):
        for c in range(first, first + bit):
            off, on = vector[c], vector[c + bit]
            vector[c] = off * off_off + on * on_off
            vector[c + bit] = off * off_on + on * on_on


@njit
def _step(vector, chances, block):
    """Takes all chains of a block one step on, in place."""
    for i in range(block.shape[0]):
        m = block[i]
        _step_one(vector, 1 << i, chances[m, 0, 0], chances[m, 0, 1], chances[m, 1, 0], chances[m, 1, 1])


@njit
def _multiply(vector, likelihood, scale):
    """Multiplies a vector by likelihoods and a scale; returns the sum."""
    total = 0.0
    for c in range(vector.shape[0]):
        vector[c] *= likelihood[c] * scale
        total += vector[c]
    return total


@parallel_kernel(cost=HEAVY, has_plain=True)
def _full_messages(likelihood, kind, chances, forward, out, norm):
    """Writes messages and norms, not logarithms, of all states."""
    num_data, num_steps, size = likelihood.shape
    for n in prange(num_data):
        vector, block, scale = np.zeros(size), np.arange(chances.shape[1]), 1.0
        vector[0] = 1.0
        for step in range(num_steps):
            t = step if forward else num_steps - 1 - step
            if kind[n, t] < 0:
                out[n, t] = 0.0
                out[n, t, 0] = 1.0
                continue
            at = t if forward else t + 1
            if at == num_steps or kind[n, at] < 0:
                vector[:] = 1.0
            else:
                if forward:
                    _step(vector, chances[kind[n, at]], block)
                total = _multiply(vector, likelihood[n, at], scale)
                # The next product is scaled, as the division takes as long as a step.
                scale = 1.0 / total if total > 0.0 else 0.0
                if forward:
                    norm[n, t] = total
                else:
                    _step(vector, chances[kind[n, at]], block)
            for c in range(size):
                out[n, t, c] = vector[c] * scale


@parallel_kernel(cost=HEAVY, has_plain=True)
def _full_expected_pairs(forward, onward, kind, weight, chances, number, previous, current, both):
    num_data, num_steps, size = forward.shape
    num_latents = chances.shape[1]
    for n in prange(num_data):
        left, rights = np.empty(size), np.empty((num_latents, size))
        for t in range(num_steps):
            k = kind[n, t]
            if k < 0 or weight[n] == 0.0:
                continue
            # To the right of each chain all later ones have made their step backward, to its left all earlier ones theirs forward.
            copy(onward[n, t], rights[num_latents - 1])
            for m in range(num_latents - 1, 0, -1):
                copy(rights[m], rights[m - 1])
                _step_one(rights[m - 1], 1 << m, chances[k, m, 0, 0], chances[k, m, 1, 0], chances[k, m, 0, 1], chances[k, m, 1, 1])
            left[:] = 0.0
            left[0] = 1.0
            if t > 0:
                copy(forward[n, t - 1], left)
            for m in range(num_latents):
                bit, off_on, on_off, on_on = 1 << m, chances[k, m, 0, 1], chances[k, m, 1, 0], chances[k, m, 1, 1]
                neither, after, before, twice = _pair_sums(left, rights[m], bit)
                neither, after, before, twice = neither * chances[k, m, 0, 0], after * off_on, before * on_off, twice * on_on
                total = neither + after + before + twice
                if total == 0.0:
                    break
                share = weight[n] / total
                if m == 0:
                    number[n, k] += weight[n]
                previous[n, k, m] += share * (before + twice)
                current[n, k, m] += share * (after + twice)
                both[n, k, m] += share * twice
                _step_one(left, bit, chances[k, m, 0, 0], off_on, on_off, on_on)


@njit
def _pair_sums(left, right, bit):
    """Weights of a chain's values (00, 01, 10, 11) around a step, without chances."""
    off_off = off_on = on_off = on_on = 0.0
    for first in range(0, left.shape[0], 2 * bit):
        for c in range(first, first + bit):
            off_off += left[c] * right[c]
            off_on += left[c] * right[c + bit]
            on_off += left[c + bit] * right[c]
            on_on += left[c + bit] * right[c + bit]
    return off_off, off_on, on_off, on_on


@njit
def _equal(a, b):
    difference = 0
    for w in range(a.shape[0]):
        difference |= a[w] ^ b[w]
    return difference == 0


@njit
def _best_distinct(score, states, index, best_states):
    """Writes the positions of the best distinct states, the best first.

    Where there are too few -1 fills up; where all are impossible the first ones are chosen. Scores are overwritten.
    """
    size = index.shape[0]
    index[:] = -1
    count = 0
    while count < size:
        best = 0
        for c in range(1, score.shape[0]):
            if score[c] > score[best]:
                best = c
        if score[best] == -np.inf:
            break
        is_new = True
        for i in range(count):
            is_new = is_new and not _equal(best_states[i], states[best])
        if is_new:
            index[count] = best
            copy(states[best], best_states[count])
            count += 1
        score[best] = -np.inf
    if count == 0:
        for i in range(min(size, score.shape[0])):
            index[i] = i
            copy(states[i], best_states[i])
        count = min(size, score.shape[0])
    for i in range(count, size):
        copy(states[index[0]], best_states[i])


@parallel_kernel(cost=HEAVY, has_plain=True)
def _select(words, unary, kind, ahead, tables, forward, index, out, log_norm):
    num_data, num_steps, num_candidates, num_words = words.shape
    size, width = index.shape[2], ahead.shape[2]
    for n in prange(num_data):
        largest = max(size, width)
        near, scratch, own = np.zeros((2, largest)), np.empty(largest), np.zeros(largest)
        left, right, score = np.empty(num_candidates), np.empty(num_candidates), np.empty(num_candidates)
        best_states, before, zero_state = (
            np.zeros((size, num_words), np.int64),
            np.zeros((size, num_words), np.int64),
            np.zeros((1, num_words), np.int64),
        )
        for step in range(num_steps):
            t = step if forward else num_steps - 1 - step
            if kind[n, t] < 0:
                _set_first(out[n, t])
                index[n, t] = -1
                index[n, t, 0] = 0
                continue
            if t == 0:
                others = zero_state
                own[0] = 0.0
            elif forward:
                others = before
                copy(out[n, t - 1], own[:size])
            else:
                others = words[n, t - 1, :width]
                copy(ahead[n, t - 1], own[:width])
            _message(tables, kind[n, t], True, others, own, words[n, t], unary[n, t], near, scratch, left)
            right[:] = 0.0
            if t + 1 < num_steps and kind[n, t + 1] >= 0:
                if forward:
                    others = words[n, t + 1, :width]
                    for i in range(width):
                        own[i] = unary[n, t + 1, i] + ahead[n, t + 1, i]
                else:
                    others = before
                    for i in range(size):
                        c = index[n, t + 1, i]
                        own[i] = unary[n, t + 1, c] + out[n, t + 1, i] if c >= 0 else -np.inf
                score[:] = 0.0
                _message(tables, kind[n, t + 1], False, others, own, words[n, t], score, near, scratch, right)
            for c in range(num_candidates):
                score[c] = left[c] + right[c]
            _best_distinct(score, words[n, t], index[n, t], best_states)
            message = left if forward else right
            for i in range(size):
                c = index[n, t, i]
                out[n, t, i] = message[c] if c >= 0 else -np.inf
            log_norm[n, t] = _normalize(out[n, t])
            best_states, before = before, best_states


@njit
def _posterior_pairs(tables, k, others, near, states, alone, pairs):
    """Writes the posterior of states and previous ones, ``(S, S')``, if possible."""
    both, masks = tables.both[k], tables.forbidden[0, k]
    num, highest, total = others.shape[0], -np.inf, 0.0
    for value in alone:
        highest = max(highest, value)
    if highest == -np.inf:
        return False
    for i in range(states.shape[0]):
        weight = np.exp(alone[i] - highest)
        if weight > 0.0:
            total += weight * _weigh_pairs(both, masks, near, others, states[i], pairs[i])
        for j in range(num):
            pairs[i, j] = weight * pairs[i, j] if weight > 0.0 else 0.0
    if not tables.smallest[k] <= total < np.inf:
        total = _log_posterior_pairs(others, near, states, alone, both, masks, pairs)
    if total > 0.0:
        for i in range(states.shape[0]):
            for j in range(num):
                pairs[i, j] /= total
    return total > 0.0


@njit
def _log_posterior_pairs(others, near, states, alone, both, masks, pairs):
    """The same by logarithms, which never vanish; returns the sum."""
    num, best, total = others.shape[0], -np.inf, 0.0
    for i in range(states.shape[0]):
        best = max(best, alone[i] + _log_pairs(both, masks, near, others, states[i], pairs[i]))
    if best == -np.inf:
        return 0.0
    for i in range(states.shape[0]):
        for j in range(num):
            below = alone[i] + pairs[i, j] - best
            pairs[i, j] = np.exp(below) if below > -LOST_NATS else 0.0
            total += pairs[i, j]
    return total


@parallel_kernel(cost=HEAVY, has_plain=True)
def _expected_pairs(words, forward, onward, kind, weight, tables, number, previous, current, both):
    num_data, num_steps, size, num_words = words.shape
    for n in prange(num_data):
        near, zero, alone, pairs = np.zeros((2, size)), np.zeros(size), np.empty(size), np.empty((size, size))
        zero_state = np.zeros((1, num_words), np.int64)
        for t in range(num_steps):
            k = kind[n, t]
            if k < 0 or weight[n] == 0.0:
                continue
            others, message = (words[n, t - 1], forward[n, t - 1]) if t > 0 else (zero_state, zero)
            _near(tables, k, True, others, message, near)
            for i in range(size):
                alone[i] = onward[n, t, i] + _by_octets(tables.current[k], words[n, t, i])
            if _posterior_pairs(tables, k, others, near, words[n, t], alone, pairs):
                number[n, k] += weight[n]
                _add_pairs(others, words[n, t], pairs, weight[n], previous[n, k], current[n, k], both[n, k])


@njit
def _add_pairs(others, states, pairs, weight, previous, current, both):
    """Adds the bits of pairs of neighbouring states to sums over them."""
    of_others, sums, inner = np.zeros(others.shape[0]), np.zeros((3, both.shape[0])), np.empty(both.shape[0])
    for i in range(states.shape[0]):
        state, total = states[i], 0.0
        inner[:] = 0.0
        for j in range(others.shape[0]):
            share = weight * pairs[i, j]
            if share != 0.0:
                total += share
                of_others[j] += share
                for w in range(state.shape[0]):
                    _add_bits(inner, w, others[j, w] & state[w], share)
        for w in range(state.shape[0]):
            _add_bits(sums[1], w, state[w], total)
        for m in range(inner.shape[0]):
            sums[2, m] += inner[m]
    for j in range(others.shape[0]):
        for w in range(others.shape[1]):
            _add_bits(sums[0], w, others[j, w], of_others[j])
    for m in range(inner.shape[0]):
        previous[m] += sums[0, m]
        current[m] += sums[1, m]
        both[m] += sums[2, m]


@njit
def _add_bits(sums, w, word, share):
    """Adds to the sums of the latents that are on."""
    while word != 0:
        sums[64 * w + trailing_zeros(word)] += share
        word &= word - 1


@parallel_kernel(cost=HEAVY, has_plain=True)
def _best_path(words, unary, kind, tables, path, value):
    num_data, num_steps, size, num_words = words.shape
    for n in prange(num_data):
        near, scratch, message, zero = np.zeros((2, size)), np.empty(size), np.zeros(size), np.zeros(size)
        zero_state = np.zeros((1, num_words), np.int64)
        origin = np.zeros((num_steps, size), np.int32)
        last = -1
        for t in range(num_steps):
            k = kind[n, t]
            if k < 0:
                break
            last = t
            others, weights = (words[n, t - 1], message) if t > 0 else (zero_state, zero)
            num = others.shape[0]
            highest = _near(tables, k, True, others, weights, near)
            for i in range(size):
                best = _log_pairs(tables.both[k], tables.forbidden[0, k], near, others, words[n, t, i], scratch)
                for j in range(num):
                    if scratch[j] == best:
                        origin[t, i] = j
                        break
                message[i] = unary[n, t, i] + _by_octets(tables.current[k], words[n, t, i]) + highest + best
        if last < 0:
            continue
        best_last = 0
        for i in range(size):
            if message[i] > message[best_last]:
                best_last = i
        value[n] = message[best_last]
        path[n, last] = best_last
        for t in range(last, 0, -1):
            path[n, t - 1] = origin[t, path[n, t]]


@njit
def _place(weights, uniform):
    """The position that a uniform number falls on, in proportion to weights."""
    total, place, passed = 0.0, 0, 0.0
    for weight in weights:
        total += weight
    total *= uniform
    for c in range(weights.shape[0]):
        if weights[c] > 0.0:
            place = c
            passed += weights[c]
            if passed > total:
                break
    return place


@parallel_kernel(cost=HEAVY, has_plain=True)
def _draw_paths(words, forward, kind, uniform, tables, path):
    num_draws, num_data, num_steps = uniform.shape
    size = words.shape[2]
    for n in prange(num_data):
        near, chances = np.zeros((2, size)), np.empty(size)
        for r in range(num_draws):
            following = -1
            for t in range(num_steps - 1, -1, -1):
                if kind[n, t] < 0:
                    continue
                if following < 0:
                    for i in range(size):
                        chances[i] = np.exp(forward[n, t, i])
                else:
                    k = kind[n, t + 1]
                    _near(tables, k, True, words[n, t], forward[n, t], near)
                    _share_pairs(tables, k, True, near, words[n, t], words[n, t + 1, following], chances)
                following = _place(chances, uniform[r, n, t])
                path[r, n, t] = following


@parallel_kernel(cost=HEAVY, has_plain=True)
def _masses(words, unary, members, forward, onward, kind, tables, out):
    num_data, num_steps, num_candidates, num_words = words.shape
    size = members.shape[2]
    for row in prange(num_data * num_steps):
        n, t = row // num_steps, row % num_steps
        near, scratch = np.zeros((2, size)), np.empty(size)
        right, zero = np.zeros(num_candidates), np.zeros(max(size, num_candidates))
        if kind[n, t] < 0:
            _set_first(out[n, t])
            continue
        zero_state = np.zeros((1, num_words), np.int64)
        others, message = (members[n, t - 1], forward[n, t - 1]) if t > 0 else (zero_state, zero)
        _message(tables, kind[n, t], True, others, message, words[n, t], unary[n, t], near, scratch, out[n, t])
        if t + 1 < num_steps and kind[n, t + 1] >= 0:
            _message(tables, kind[n, t + 1], False, members[n, t + 1], onward[n, t + 1], words[n, t], zero, near, scratch, right)
            for c in range(num_candidates):
                out[n, t, c] += right[c]


@njit
def _ratio(on, from_off, from_on, value):
    """By how much a sum over neighbours grows where one changes."""
    ratio = (1.0 - on) * from_off[1 - value] / from_off[value] if from_off[value] > 0.0 else 0.0
    return ratio + on * from_on[1 - value] / from_on[value] if from_on[value] > 0.0 else ratio


@njit
def _times_ratios(tables, k, is_left, near, others, state, chances, scratch, on, ratio):
    """Multiplies ratios ``(M,)`` by what each flip changes at a neighbouring step."""
    _share_pairs(tables, k, is_left, near, others, state, scratch)
    # The probability that each latent of the neighbouring step is on.
    on[:] = 0.0
    for j in range(others.shape[0]):
        for w in range(others.shape[1] if scratch[j] > 0.0 else 0):
            _add_bits(on, w, others[j, w], scratch[j])
    for m in range(ratio.shape[0]):
        value = (state[m >> 6] >> (m & 63)) & 1
        ratio[m] *= _ratio(on[m], chances[m, 0], chances[m, 1], value)


@njit
def _insert_flips(i, states, weights, gain, ratio, score, member, latent, best_states, state):
    """Puts member ``i``'s best new flips into the sorted list."""
    for m in range(ratio.shape[0]):
        log_mass, j = weights[i] + gain[m] + np.log(ratio[m]) if ratio[m] > 0.0 else -np.inf, score.shape[0] - 1
        if not log_mass > score[j]:
            continue
        copy(states[i], state)
        state[m >> 6] ^= np.int64(1) << (m & 63)
        is_new = True
        for c in range(states.shape[0]):
            is_new = is_new and not (weights[c] > -np.inf and _equal(states[c], state))
        # The flip of another member to the same state makes room.
        for c in range(score.shape[0]):
            if score[c] > -np.inf and _equal(best_states[c], state):
                is_new, j = is_new and log_mass > score[c], c
        if is_new:
            while j > 0 and score[j - 1] < log_mass:
                score[j], member[j], latent[j] = score[j - 1], member[j - 1], latent[j - 1]
                copy(best_states[j - 1], best_states[j])
                j -= 1
            score[j], member[j], latent[j] = log_mass, i, m
            copy(state, best_states[j])


@parallel_kernel(cost=HEAVY, has_plain=True)
def _flips(words, log_weight, gain, forward, onward, kind, tables, chances, first, member, latent, score):
    _, num_steps, size, num_words = words.shape
    num_rows, num_latents, num_kept = member.shape[0], gain.shape[2], member.shape[1]
    for row in prange(num_rows):
        n, t = (first + row) // num_steps, (first + row) % num_steps
        k, following = kind[n, t], kind[n, t + 1] if t + 1 < num_steps else -1
        if k < 0:
            continue
        left, right, scratch = np.zeros((2, size)), np.zeros((2, size)), np.empty(size)
        on, ratio = np.zeros(num_latents), np.ones(num_latents)
        kept, state = np.zeros((num_kept, num_words), np.int64), np.zeros(num_words, np.int64)
        zero_state, zero = np.zeros((1, num_words), np.int64), np.zeros(size)
        before, message = (words[n, t - 1], forward[n, t - 1]) if t > 0 else (zero_state, zero)
        _near(tables, k, True, before, message, left)
        if following >= 0:
            _near(tables, following, False, words[n, t + 1], onward[n, t + 1], right)
        for i in range(gain.shape[1]):
            if log_weight[n, t, i] == -np.inf:
                continue
            one = words[n, t, i]
            ratio[:] = 1.0
            _times_ratios(tables, k, True, left, before, one, chances[0, k], scratch, on, ratio)
            if following >= 0:
                _times_ratios(tables, following, False, right, words[n, t + 1], one, chances[1, following], scratch, on, ratio)
            _insert_flips(i, words[n, t], log_weight[n, t], gain[row, i], ratio, score[row], member[row], latent[row], kept, state)


@njit
def _times(vector, likelihood, out):
    """Writes the normalised product of a vector and likelihoods, or these alone."""
    total = 0.0
    for c in range(vector.shape[0]):
        out[c] = vector[c] * likelihood[c]
        total += out[c]
    if total == 0.0:
        copy(likelihood, out)
        for value in out:
            total += value
    if total == 0.0:
        out[:] = 1.0
        total = np.float64(out.shape[0])
    scale = 1.0 / total
    for c in range(vector.shape[0]):
        out[c] *= scale


@njit
def _filter_block(likelihood, kind, block, chances, vector, out):
    """Writes a block's filtered posterior at every step; returns the last."""
    vector[:] = 0.0
    vector[0] = 1.0
    last = -1
    for t in range(kind.shape[0]):
        if kind[t] < 0:
            out[t] = 0.0
            continue
        last = t
        _step(vector, chances[kind[t]], block)
        _times(vector, likelihood[t], out[t])
        copy(out[t], vector)
    return last


@parallel_kernel(cost=HEAVY, has_plain=True)
def _draw_blocks(likelihood, kind, block, chances, uniform, out):
    num_data, num_steps, size = likelihood.shape
    for n in prange(num_data):
        vector, filtered = np.empty(size), np.empty((num_steps, size))
        last = _filter_block(likelihood[n], kind[n], block[n], chances, vector, filtered)
        for t in range(last, -1, -1):
            if t < last:
                # The chance of the configuration after this one, by doubling.
                vector[0] = 1.0
                for i in range(block.shape[1]):
                    chance, bit = chances[kind[n, t + 1], block[n, i]], 1 << i
                    value = (out[n, t + 1] >> i) & 1
                    for c in range(bit):
                        vector[c | bit] = vector[c] * chance[1, value]
                        vector[c] *= chance[0, value]
                for c in range(size):
                    filtered[t, c] *= vector[c]
            out[n, t] = _place(filtered[t], uniform[n, t])


@parallel_kernel(cost=HEAVY, has_plain=True)
def _block_posteriors(likelihood, kind, block, chances, returns, out):
    num_data, _, size = likelihood.shape
    for n in prange(num_data):
        vector = np.empty(size)
        last = _filter_block(likelihood[n], kind[n], block[n], chances, vector, out[n])
        vector[:] = 1.0 / size
        for t in range(last, -1, -1):
            if t < last:
                _times(vector, likelihood[n, t + 1], vector)
                _step(vector, returns[kind[n, t + 1]], block[n])
            for c in range(size):
                out[n, t, c] *= vector[c]
