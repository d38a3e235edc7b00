"""Observations of an exponential family under a superposition by maximum in plain torch, for any device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from pyro_truncated.ops.vectorised.active_latents import by_number
from pyro_truncated.ops.vectorised.maximum import are_few, numbers_of_terms
from pyro_truncated.ops.vectorised.values import unpack_bits


def maximum_score(words: Tensor, value: Tensor, natural: Tensor, partition: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.maximum_score`."""
    natural, partition = natural.double(), partition.double()
    (num_observed, num_latents), is_missing, value = natural[:, 1:].shape, value.isnan(), value.double().nan_to_num(0.0)
    if are_few(words, 2 * natural.numel()):
        states = unpack_bits(words, num_latents, torch.float64)
        is_on = torch.cat([states > 0, states.new_ones(*states.shape[:-1], 1, dtype=torch.bool)], -1).unsqueeze(-2)
        most = (torch.where(is_on, parameter, -torch.inf).amax(-1) for parameter in (natural, partition))
        return (value.unsqueeze(1) * next(most) - next(most)).masked_fill(is_missing.unsqueeze(1), 0.0).sum(-1)
    out = value.new_empty(words.shape[:2])
    for block in by_number(words, num_latents, functools.partial(numbers_of_terms, 2 * num_observed)):
        # Where no latent is, and beside all that are, is the background, the last column.
        latents = block.latents.masked_fill(block.is_taken == 0, num_latents)
        most = (parameter.mT[latents].amax(2).maximum(parameter[:, -1]) for parameter in (natural, partition))
        block.put_(out, (value[block.data] * next(most) - next(most)).masked_fill(is_missing[block.data], 0.0).sum(-1))
    return out
