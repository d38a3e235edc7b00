"""Superpositions by maximum in plain torch, for any device."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.unpacked import largest
from pyro_truncated.ops.vectorised.blocks import blocks_of_states
from pyro_truncated.utils.budget import blocks_of_rows


def maximum_error(words: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.maximum_error`."""
    value, weight, precision = value.double().unsqueeze(1), weight.double(), precision.double()
    errors = []
    for _, states in blocks_of_states(words, weight.shape[1], weight.numel(), torch.float64):
        residual = torch.where(value.isnan(), 0.0, value - largest(states, weight))
        errors.append(residual.square() @ precision)
    return torch.cat(errors, 1)


def maximum_statistics(words: Tensor, weights: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.maximum_statistics`; wins and sums ``(D, H + 1)``, the last where no latent is above zero."""
    blocks = list(blocks_of_rows(len(words), 32 * weight.numel()))
    if len(blocks) <= 1:
        return _statistics(words, weights, value, weight)
    parts = [_statistics(words[rows], weights[rows], value[rows], weight) for rows in blocks]
    active, prediction, wins, sums = zip(*parts, strict=True)
    return torch.cat(active), torch.cat(prediction), sum(wins[1:], wins[0]), sum(sums[1:], sums[0])


def _statistics(words: Tensor, weights: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_data, num_latents = value.shape[0], weight.shape[1]
    value, weight = value.double(), weight.double()
    active = value.new_zeros(num_data, num_latents)
    prediction = torch.zeros_like(value)
    wins, sums = weight.new_zeros(2, weight.shape[0], num_latents + 1)
    is_observed, data = (~value.isnan()).double(), value.nan_to_num(0.0)
    latents = torch.arange(num_latents + 1, device=weight.device)
    for where, states in blocks_of_states(words, num_latents, weight.numel(), torch.float64):
        share = weights[:, where].double()
        active += (share.unsqueeze(-1) * states).sum(1)
        terms = weight * states.unsqueeze(-2)
        top = terms.amax(-1)
        prediction += (share.unsqueeze(-1) * top.clamp(min=0.0)).sum(1)
        # Of equal maxima the first wins; zero wins over all that are not above it.
        winner = torch.where(top > 0, terms.argmax(-1), num_latents)
        wins_here = winner.unsqueeze(-1) == latents
        per_datum = (share.unsqueeze(-1).unsqueeze(-1) * wins_here).sum(1)
        wins += (is_observed.unsqueeze(-1) * per_datum).sum(0)
        sums += (data.unsqueeze(-1) * per_datum).sum(0)
    return active, prediction, wins, sums
