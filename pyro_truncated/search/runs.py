"""Replacing runs of neighbouring latents in packed states."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_truncated import ops

if TYPE_CHECKING:
    from pyro_truncated.states.space import StateSpace

WORD_BITS = 64


def replace(words: Tensor, others: Tensor, space: StateSpace, draws: dict[str, Any]) -> Tensor:
    """Replaces a run of neighbouring latents in every state.

    The new values are a common one, those of another state, or those elsewhere in that state.

    The start of a run is uniform, its length is log-uniform, and it ends with the last latent. In two of five cases
    its latents take a common value, at most their largest. In two of five they take the values of the other state a
    log-uniform number of places away (at the same places if latents differ in kind). In the others they take its
    values at the same places.

    Args:
        words: packed states ``(N, C, W)``.
        others: as many more.
        space: the state space.
        draws: what is drawn with: ``rows`` and ``generator`` as for :func:`pyro_truncated.ops.uniform`.

    Returns:
        Packed states ``(N, C, W)``; some may equal the given ones.
    """
    first, constant = _tables(space, words.device)
    uniform = ops.uniform(shape=(5, words.shape[1]), **draws).unbind(1)
    start = (uniform[0] * space.num_latents).long().clamp(max=space.num_latents - 1)
    length = (uniform[1] * math.log(space.num_latents + 1)).exp().long()
    value = (uniform[2] * len(constant)).long().clamp(max=len(constant) - 1)
    inside = first[(start + length).clamp(max=space.num_latents)] & ~first[start]
    moved = others if len(set(space.cardinalities)) > 1 else _translated(others, _distance(uniform[3], space), space)
    kind = uniform[4].unsqueeze(-1)
    new = torch.where(kind < 0.4, constant[value], torch.where(kind < 0.8, moved, others))
    return (words & ~inside) | (new & inside)


def _distance(uniform: Tensor, space: StateSpace) -> Tensor:
    """Draws log-uniform distances up to half of the latents, in both directions."""
    sign = torch.where(uniform < 0.5, -1, 1)
    return sign * ((2 * uniform % 1) * math.log(max(2.0, space.num_latents / 2))).exp().long()


def _translated(words: Tensor, distance: Tensor, space: StateSpace) -> Tensor:
    """Shifts states ``(N, C, W)``: latent ``l`` takes latent ``l + distance``.

    Beyond the ends values are zero.

    The latents must have equally many values.
    """
    width = int(space.bits[0])
    per_word = WORD_BITS // width
    jump = distance.div(per_word, rounding_mode="floor").unsqueeze(-1)
    shift = (distance.unsqueeze(-1) - jump * per_word) * width
    # A word of zeros at either end stands for all words beyond it.
    padded = torch.nn.functional.pad(words, (1, 1))
    place = torch.arange(1, words.shape[-1] + 1, device=words.device) + jump
    low, high = (padded.gather(-1, (place + i).clamp(0, words.shape[-1] + 1)) for i in (0, 1))
    used = -1 if per_word * width == WORD_BITS else (1 << (per_word * width)) - 1
    # What comes in from above when a negative word is shifted down is cut off, by a mask without shifts of 64.
    kept = ~(-1 << (per_word * width - 1 - shift) << 1)
    return (((low >> shift) & kept) | (high << (per_word * width - shift - 1) << 1)) & used


@functools.lru_cache(maxsize=16)
def _tables(space: StateSpace, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns masks of the first ``0 .. L`` latents and states of equal values.

    Their shapes are ``(L + 1, W)`` and ``(V, W)``.
    """
    bits = torch.zeros(space.num_latents + 1, space.num_words, dtype=torch.int64, device="cpu")
    rows = torch.arange(1, space.num_latents + 1, device="cpu")
    field = torch.where(space.bits == WORD_BITS, -1, (1 << space.bits) - 1) << space.shift
    bits[rows, space.word] = field
    values = torch.arange(max(space.cardinalities), device="cpu").unsqueeze(-1)
    return bits.cumsum(0).to(device), space.pack(values.minimum(space.cardinality - 1)).to(device)
