"""Observations of an exponential family under a superposition by maximum in plain torch, for any device."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.vectorised.blocks import blocks_of_states


def maximum_score(words: Tensor, value: Tensor, natural: Tensor, partition: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.maximum_score`."""
    natural, partition = natural.double(), partition.double()
    num_latents = natural.shape[1] - 1
    is_missing, value = value.isnan().unsqueeze(1), value.double().nan_to_num(0.0).unsqueeze(1)
    scores = []
    for _, states in blocks_of_states(words, num_latents, 2 * natural.numel(), torch.float64):
        is_on = torch.cat([states > 0, states.new_ones(*states.shape[:-1], 1, dtype=torch.bool)], -1).unsqueeze(-2)
        most = (torch.where(is_on, parameter, -torch.inf).amax(-1) for parameter in (natural, partition))
        scores.append((value * next(most) - next(most)).masked_fill(is_missing, 0.0).sum(-1))
    return torch.cat(scores, 1)
