"""Spike-and-slab likelihoods in plain torch, for any device: all latents, masked by the states, in batched Cholesky factors."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.unpacked import collapse
from pyro_truncated.ops.vectorised.blocks import blocks_of_states


def log_prob(words: Tensor, linear: Tensor, scaled: Tensor, observed: Tensor | None, mean: Tensor, deviation: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.compiled.spike_slab.log_prob`."""
    num_latents = scaled.shape[1]
    gram = gram_of(scaled, observed)
    parameters = linear.double().unsqueeze(1), gram, mean.double(), deviation.double()
    blocks = blocks_of_states(words, num_latents, num_latents**2, torch.float64)
    return torch.cat([collapse(states, *parameters)[0] for _, states in blocks], 1)


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
    gram, mean, deviation = gram_of(scaled, observed), mean.double(), deviation.double()
    active = linear.new_zeros(num_data, num_latents, dtype=torch.float64)
    first = torch.zeros_like(active)
    second = linear.new_zeros(num_data, num_latents, num_latents, dtype=torch.float64)
    for where, states in blocks_of_states(words, num_latents, num_latents**2, torch.float64):
        _, factor, solution = collapse(states, linear.double().unsqueeze(1), gram, mean, deviation)
        weight = weights[:, where].double()
        spread, value = states * deviation, states * (mean + deviation * solution)
        covariance = spread.unsqueeze(-1) * torch.cholesky_inverse(factor) * spread.unsqueeze(-2)
        active += (weight.unsqueeze(-1) * states).sum(1)
        first += (weight.unsqueeze(-1) * value).sum(1)
        second += torch.einsum("nc,nchi->nhi", weight, covariance + value.unsqueeze(-1) * value.unsqueeze(-2))
    return active, first, second if per_datum else second.sum(0)


def gram_of(scaled: Tensor, observed: Tensor | None) -> Tensor:
    """Gram matrices ``(1, 1, H, H)``, or ``(N, 1, H, H)`` over each data point's observed entries."""
    scaled = scaled.double()
    if observed is None:
        return (scaled.mT @ scaled)[None, None]
    num_latents = scaled.shape[1]
    squares = (scaled.unsqueeze(-1) * scaled.unsqueeze(-2)).flatten(1)
    gram: Tensor = observed.double() @ squares
    return gram.reshape(-1, 1, num_latents, num_latents)
