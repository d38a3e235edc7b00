"""Draws of states with independent binary latents."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyro_truncated.ops.backend import NoKernelError
from pyro_truncated.ops.fused.bits import mix, on_device, uniform
from pyro_truncated.ops.packed_states import Fields
from pyro_truncated.ops.vectorised import random


@on_device
def draw_values(tails: Tensor, num_samples: int, fields: Fields, rows: Tensor, seed: int) -> Tensor:
    """See :func:`pyro_truncated.ops.draw_values`; given the probabilities ``P(value > v)``, ``(N, L, V - 1)``."""
    if not fields.is_binary:
        raise NoKernelError
    out = torch.empty(len(tails), num_samples, fields.num_words, dtype=torch.int64, device=tails.device)
    if out.numel():
        sizes = out.numel(), num_samples, fields.num_latents, fields.num_words
        _draw_bits[triton.cdiv(out.numel(), _WORDS),](
            tails, random.stream(seed, rows).contiguous(), out, *sizes, random.STEP, WORDS=_WORDS, num_warps=1
        )
    return out


_WORDS = 16


@triton.jit
def _draw_bits(tails, streams, out, number, num_samples, num_latents, num_words, step, WORDS: tl.constexpr):
    position = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    inside = position < number
    state = position // num_words
    datum = state // num_samples
    bit = tl.arange(0, 64)
    latent = (position - state * num_words)[:, None] * 64 + bit[None, :]
    inside_bits = inside[:, None] & (latent < num_latents)
    count = (state - datum * num_samples)[:, None] * num_latents + latent + 1
    draw = uniform(mix(tl.load(streams + datum, inside, 0)[:, None] + count * step))
    tail = tl.load(tails + datum[:, None] * num_latents + latent, inside_bits, 0.0)
    bits = (inside_bits & (draw < tail)).to(tl.int64) << bit[None, :].to(tl.int64)
    tl.store(out + position, tl.sum(bits, 1), inside)
