"""Noisy-OR likelihoods of packed states, over their active latents."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyro_truncated.ops.backend import NoKernelError
from pyro_truncated.ops.fused.bits import lowest_bit, on_device


@on_device
def noisy_or_log_prob(words: Tensor, value: Tensor, log_complement: Tensor, log_leak_complement: Tensor, linear: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.noisy_or_log_prob`."""
    num_data, num_candidates, num_words = words.shape
    num_observed = len(log_complement)
    # A program holds all dimensions of a state.
    if num_observed > 2**14:
        raise NoKernelError
    out = linear.new_empty(num_data, num_candidates, dtype=torch.float64)
    causes, linear, value = log_complement.mT.double().contiguous(), linear.double(), value.contiguous()
    block = triton.next_power_of_2(max(1, num_observed))
    if out.numel():
        arguments = words, *words.stride(), value, causes, log_leak_complement.double().contiguous(), linear, *linear.stride(), out
        sizes = num_candidates, num_words, num_observed
        _noisy_or[out.numel(),](*arguments, *sizes, BLOCK=block, num_warps=min(8, max(1, block // 128)))
    return out


@triton.jit
def _noisy_or(
    words,
    by_datum,
    by_candidate,
    by_word,
    value,
    causes,
    leak,
    linear,
    linear_by_datum,
    by_latent,
    out,
    num_candidates,
    num_words,
    num_observed,
    BLOCK: tl.constexpr,
):
    state = tl.program_id(0).to(tl.int64)
    datum = state // num_candidates
    words += datum * by_datum + (state - datum * num_candidates) * by_candidate
    linear += datum * linear_by_datum
    place = tl.arange(0, BLOCK)
    inside = place < num_observed
    log_off = tl.load(leak + place, inside, 0.0)
    total = tl.zeros([], tl.float64)
    for i in range(num_words):
        rest = tl.load(words + i * by_word)
        while rest != 0:
            latent = 64 * i + lowest_bit(rest)
            log_off += tl.load(causes + latent * num_observed + place, inside, 0.0)
            total += tl.load(linear + latent * by_latent)
            rest = rest & (rest - 1)
    y = tl.load(value + datum * num_observed + place, inside, 0.0)
    terms = tl.where(y == 1, _log1mexp(log_off), log_off)
    # Missing observations are NaN, which differ from themselves.
    terms = tl.where(inside & (y == y), terms, 0.0)
    tl.store(out + state, total + tl.sum(terms, 0))


@triton.jit
def _log1mexp(x):
    """See :func:`pyro_truncated.ops.noisy_or.log1mexp`."""
    # Without expm1 and log1p, which Triton's interpreter lacks. The logarithm of the rounded number has the same rounding error as e^x or
    # 1 - e^x, so their ratio is right (Kahan).
    power = tl.exp(x)
    is_near = x > -0.6931471805599453
    rounded = tl.where(is_near, power, 1 - power)
    is_exact = rounded == 1
    log_rounded = tl.log(tl.where(is_exact, 0.5, rounded))
    near = tl.where(is_exact, -x, (1 - power) * x / log_rounded)
    far = tl.where(is_exact, -power, power * log_rounded / tl.where(is_exact, 1.0, 1 - rounded))
    return tl.where(is_near, tl.log(tl.where(is_near, near, 1.0)), far)
