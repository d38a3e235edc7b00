"""Spike-and-slab likelihoods in plain torch, for any device: batched Cholesky factors over the active latents of every state."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.unpacked import collapse
from pyro_truncated.ops.vectorised.active_latents import ActiveLatents, blocks_of_active, gram_of

_NUM_MATRICES = 12


def log_prob(words: Tensor, linear: Tensor, scaled: Tensor, observed: Tensor | None, mean: Tensor, deviation: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.compiled.spike_slab.log_prob`."""
    parameters = gram_of(scaled, observed), linear.double(), mean.double(), deviation.double()
    out = linear.new_empty(words.shape[:2], dtype=torch.float64)
    for block in blocks_of_active(words, scaled.shape[1], _NUM_MATRICES):
        block.put_(out, _collapsed(block, *parameters)[0])
    return out


def moments(
    words: Tensor,
    weights: Tensor,
    linear: Tensor,
    scaled: Tensor,
    observed: Tensor | None,
    mean: Tensor,
    deviation: Tensor,
    per_datum: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.spike_slab_moments`; the other arguments are those of :func:`log_prob`."""
    num_data, num_latents = linear.shape
    gram, linear, mean, deviation = gram_of(scaled, observed), linear.double(), mean.double(), deviation.double()
    active, first = linear.new_zeros(num_data, num_latents), linear.new_zeros(num_data, num_latents)
    second = linear.new_zeros(num_data if per_datum else 1, num_latents**2)
    for block in blocks_of_active(words, num_latents, _NUM_MATRICES, is_final=True):
        _, factor, solution = _collapsed(block, gram, linear, mean, deviation)
        weight, index = block.of_states(weights).double().unsqueeze(-1), block.latents
        spread = block.is_taken * deviation[index]
        value = block.is_taken * (mean[index] + deviation[index] * solution)
        covariance = spread.unsqueeze(-1) * torch.cholesky_inverse(factor) * spread.unsqueeze(-2)
        block.add_rows_(active, weight * block.is_taken)
        block.add_rows_(first, weight * value)
        block.add_pairs_(second, weight.unsqueeze(-1) * (covariance + value.unsqueeze(-1) * value.unsqueeze(-2)), num_latents)
    second = second.unflatten(1, (num_latents, num_latents))
    return active, first, second if per_datum else second[0]


def _collapsed(block: ActiveLatents, gram: Tensor, linear: Tensor, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.unpacked.collapse`, of the active latents alone."""
    index = block.latents
    return collapse(block.is_taken, block.rows(linear), block.pairs(gram), mean[index], deviation[index])
