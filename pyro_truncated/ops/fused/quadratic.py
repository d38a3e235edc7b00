"""Quadratic functions of packed binary states, over their active latents."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyro_truncated.ops.fused.bits import any_bits, lowest_bit, on_device

# One warp a program: its lanes go on until the state with the most active latents is done.
_STATES = 32


@on_device
def pair_energy(words: Tensor, linear: Tensor, pairwise: Tensor | None) -> Tensor:
    """See :func:`pyro_truncated.ops.pair_energy`."""
    num_data, num_candidates, num_words = words.shape
    out = linear.new_empty(num_data, num_candidates, dtype=torch.float64)
    linear, has_pairs = linear.contiguous(), pairwise is not None
    pairwise = linear if pairwise is None else pairwise.contiguous()
    per_datum = pairwise.stride(0) if pairwise.dim() == 3 else 0
    if out.numel():
        grid = (triton.cdiv(out.numel(), _STATES),)
        sizes = out.numel(), num_candidates, num_words, linear.shape[-1]
        _pair_energy[grid](
            words, *words.stride(), linear, pairwise, per_datum, out, *sizes, HAS_PAIRS=has_pairs, STATES=_STATES, num_warps=1
        )
    return out


@triton.jit
def _pair_energy(
    words,
    by_datum,
    by_candidate,
    by_word,
    linear,
    pairwise,
    per_datum,
    out,
    number,
    num_candidates,
    num_words,
    num_latents,
    HAS_PAIRS: tl.constexpr,
    STATES: tl.constexpr,
):
    state = tl.program_id(0).to(tl.int64) * STATES + tl.arange(0, STATES)
    inside = state < number
    datum = state // num_candidates
    words += datum * by_datum + (state - datum * num_candidates) * by_candidate
    linear += datum * num_latents
    pairwise += datum * per_datum
    energy = tl.zeros([STATES], tl.float64)
    for i in range(num_words):
        rest = tl.load(words + i * by_word, inside, 0)
        while any_bits(rest):
            is_on = rest != 0
            latent = 64 * i + lowest_bit(rest)
            rest = rest & (rest - 1)
            energy += tl.load(linear + latent, is_on, 0.0).to(tl.float64)
            if HAS_PAIRS:
                energy += tl.load(pairwise + latent * (num_latents + 1), is_on, 0.0).to(tl.float64)
                for j in range(i, num_words):
                    others = tl.load(words + j * by_word, inside, 0)
                    others = tl.where(is_on, tl.where(j == i, rest, others), 0)
                    while any_bits(others):
                        is_pair = others != 0
                        other = 64 * j + lowest_bit(others)
                        others = others & (others - 1)
                        energy += tl.load(pairwise + latent * num_latents + other, is_pair, 0.0).to(tl.float64)
                        energy += tl.load(pairwise + other * num_latents + latent, is_pair, 0.0).to(tl.float64)
    tl.store(out + state, energy, inside)


@on_device
def flip_energy(words: Tensor, alone: Tensor, others: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.flip_energy`."""
    num_data, num_latents = alone.shape
    words, alone, others = words.contiguous(), alone.contiguous(), others.contiguous()
    out = torch.empty_like(alone)
    block = min(256, triton.next_power_of_2(num_latents))
    if out.numel():
        grid = (num_data, triton.cdiv(num_latents, block))
        _flip_energy[grid](words, alone, others, out, words.shape[1], num_latents, BLOCK=block, num_warps=max(1, block // 64))
    return out


@triton.jit
def _flip_energy(words, alone, others, out, num_words, num_latents, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    latent = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = latent < num_latents
    words += row * num_words
    change = tl.load(alone + row * num_latents + latent, inside, 0.0)
    for i in range(num_words):
        rest = tl.load(words + i)
        while rest != 0:
            change += tl.load(others + (64 * i + lowest_bit(rest)) * num_latents + latent, inside, 0.0)
            rest = rest & (rest - 1)
    is_on = (tl.load(words + latent // 64, inside, 0) >> (latent % 64)) & 1
    tl.store(out + row * num_latents + latent, tl.where(is_on != 0, -change, change), inside)
