"""Spike-and-slab likelihoods, a state's active latents in registers."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyro_truncated.ops.fused.bits import any_bits, lowest_bit, on_device
from pyro_truncated.ops.vectorised import slabs as vectorised
from pyro_truncated.ops.vectorised.latent_values import gram_matrix, max_active

# Of a matrix of active latents; larger ones do not fit registers.
_PLACES = (8, 16, 32, 64)


@on_device
def log_prob(words: Tensor, linear: Tensor, scaled: Tensor, observed: Tensor | None, mean: Tensor, deviation: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.compiled.slabs.log_prob`."""
    num_data, num_candidates, num_words = words.shape
    num_latents = linear.shape[1]
    most = num_latents if num_latents <= _PLACES[-1] else max_active(words, num_latents)
    if most > _PLACES[-1]:
        return vectorised.log_prob(words, linear, scaled, observed, mean, deviation)
    gram = gram_matrix(scaled, observed)
    # NaN stays where a state has more active latents than was recorded.
    out = torch.full((num_data, num_candidates), math.nan, dtype=torch.float64, device=words.device)
    parameters = *(tensor.double().contiguous() for tensor in (linear, mean, deviation, gram)), 0 if len(gram) == 1 else gram.stride(0)
    fewer = -1
    for places in _PLACES:
        # Each launch takes the states that fit its matrices, but not those of the launch before.
        if out.numel() and fewer < most:
            states = max(1, 1024 // places**2)
            grid, sizes = (triton.cdiv(out.numel(), states),), (out.numel(), num_candidates, num_words, num_latents, fewer)
            constants = {"STATES": states, "PLACES": places, "num_warps": max(1, places**2 // 1024)}
            _log_prob[grid](words, *words.stride(), *parameters, out, *sizes, **constants)
        fewer = places
    return out


@triton.jit
def _log_prob(
    words,
    by_datum,
    by_candidate,
    by_word,
    linear,
    mean,
    deviation,
    gram,
    per_datum,
    out,
    number,
    num_candidates,
    num_words,
    num_latents,
    fewer,
    STATES: tl.constexpr,
    PLACES: tl.constexpr,
):
    state = tl.program_id(0).to(tl.int64) * STATES + tl.arange(0, STATES)
    inside = state < number
    datum = state // num_candidates
    words += datum * by_datum + (state - datum * num_candidates) * by_candidate
    place = tl.arange(0, PLACES)
    latents = tl.zeros([STATES, PLACES], tl.int64)
    count = tl.zeros([STATES], tl.int32)
    for i in range(num_words):
        rest = tl.load(words + i * by_word, inside, 0)
        while any_bits(rest):
            is_on = rest != 0
            is_here = is_on[:, None] & (count[:, None] == place[None, :])
            latents = tl.where(is_here, (64 * i + lowest_bit(rest))[:, None], latents)
            count += is_on.to(tl.int32)
            rest = rest & (rest - 1)
    is_asked = inside & (count > fewer) & (count <= PLACES)
    most = tl.max(tl.where(is_asked, count, -1), 0)
    if most >= 0:
        is_taken = place[None, :] < count[:, None]
        amplitude = tl.load(mean + latents, is_taken, 0.0)
        spread = tl.load(deviation + latents, is_taken, 0.0)
        product = tl.load(linear + datum[:, None] * num_latents + latents, is_taken, 0.0)
        pairs = gram + (datum * per_datum)[:, None, None] + latents[:, :, None] * num_latents + latents[:, None, :]
        matrix = tl.load(pairs, is_taken[:, :, None] & is_taken[:, None, :], 0.0)
        field = product - tl.sum(matrix * amplitude[:, None, :], 2)
        energy = 0.5 * tl.sum(amplitude * (product + field), 1)
        matrix = spread[:, :, None] * matrix * spread[:, None, :] + (place[:, None] == place[None, :])[None, :, :].to(tl.float64)
        target = spread * field
        # The matrix is factorised in its place, one column after the other, and the target solved for on the way.
        for j in range(most):
            is_here = (place == j)[None, :]
            column = tl.sum(tl.where(is_here[:, None, :], matrix, 0.0), 2)
            pivot = tl.sum(tl.where(is_here, column, 0.0), 1)
            value = tl.sum(tl.where(is_here, target, 0.0), 1)
            energy += 0.5 * (value * value / pivot - tl.log(pivot))
            ratio = column / pivot[:, None]
            matrix -= ratio[:, :, None] * column[:, None, :]
            target -= ratio * value[:, None]
        tl.store(out + state, energy, is_asked)
