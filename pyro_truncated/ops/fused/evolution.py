"""Choice of the best distinct states, by comparisons of all pairs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyro_truncated.ops.backend import NoKernelError
from pyro_truncated.ops.fused.bits import mix, on_device

# Of more states sorts take less time.
_MOST_STATES = 1024


@on_device
def find_duplicates(words: Tensor) -> Tensor:
    """Marks the states ``(N, C)`` that equal an earlier state of their row."""
    num_data, number, num_words = words.shape
    if number > _MOST_STATES:
        raise NoKernelError
    out = torch.zeros(num_data, number, dtype=torch.bool, device=words.device)
    if out.numel():
        words, hashes = words.contiguous(), out.new_empty(out.shape, dtype=torch.int64)
        _hash_states[triton.cdiv(out.numel(), 256),](words, hashes, out.numel(), num_words, BLOCK=256)
        _find_duplicates[num_data,](words, hashes, out, number, num_words, BLOCK=triton.next_power_of_2(number), num_warps=1)
    return out


@triton.jit
def _hash_states(words, hashes, number, num_words, BLOCK: tl.constexpr):
    state = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = state < number
    result = tl.load(words + state * num_words, inside, 0)
    for i in range(1, num_words):
        result = mix(result) ^ tl.load(words + state * num_words + i, inside, 0)
    tl.store(hashes + state, result, inside)


@triton.jit
def _find_duplicates(words, hashes, out, number, num_words, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    words += row * number * num_words
    hashes += row * number
    state = tl.arange(0, BLOCK)
    inside = state < number
    own = tl.load(hashes + state, inside, 0)
    is_duplicate = state < 0
    for earlier in range(number):
        is_equal = inside & (own == tl.load(hashes + earlier)) & (state > earlier)
        # Words are compared only where hashes are equal.
        if tl.max(is_equal.to(tl.int32), 0) > 0:
            for i in range(num_words):
                is_equal &= tl.load(words + state * num_words + i, is_equal, 0) == tl.load(words + earlier * num_words + i)
            is_duplicate |= is_equal
    tl.store(out + row * number + state, is_duplicate, inside)


@on_device
def select_top(words: Tensor, log_joint: Tensor, extra_words: Tensor, extra_log_joint: Tensor, size: int) -> tuple[Tensor, Tensor, int]:
    """The best ``size`` distinct states, and a row's too small number or -1."""
    number = words.shape[1] + extra_words.shape[1]
    if size > words.shape[1] or number > _MOST_STATES:
        raise NoKernelError
    words, log_joint = torch.cat([words, extra_words], 1), torch.cat([log_joint, extra_log_joint], 1)
    num_data, _, num_words = words.shape
    out = words.new_empty(num_data, size, num_words), log_joint.new_empty(num_data, size)
    if num_data:
        block = triton.next_power_of_2(number)
        sizes = number, num_words, size
        _select_top[num_data,](words, log_joint, find_duplicates(words), *out, *sizes, BLOCK=block, num_warps=max(1, block // 128))
    return *out, -1


@triton.jit
def _select_top(words, log_joint, is_duplicate, top_words, top_log_joint, number, num_words, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    words += row * number * num_words
    log_joint += row * number
    is_duplicate += row * number
    state = tl.arange(0, BLOCK)
    inside = state < number
    own, is_repeated = tl.load(log_joint + state, inside, 0.0), tl.load(is_duplicate + state, inside, 0).to(tl.int32)
    rank = tl.where(own == own, own, float("inf"))
    num_better = tl.zeros([BLOCK], tl.int32)
    for other in range(number):
        value, other_repeated = tl.load(log_joint + other), tl.load(is_duplicate + other).to(tl.int32)
        value = tl.where(value == value, value, float("inf"))
        is_better = (value > rank) | ((value == rank) & (other < state))
        num_better += ((other_repeated < is_repeated) | ((other_repeated == is_repeated) & is_better)).to(tl.int32)
    # A total order, also where NaN waits for its error: exactly so many are chosen. They stay in their order.
    is_chosen = inside & (num_better < size)
    place = row * size + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(top_log_joint + place, own, is_chosen)
    for i in range(num_words):
        tl.store(top_words + place * num_words + i, tl.load(words + state * num_words + i, is_chosen, 0), is_chosen)
