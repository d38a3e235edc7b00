"""Superpositions by maximum in plain torch, for any device.

Where the terms of all latents do not fit the memory budget, those of the active latents alone are looked at.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from pyro_truncated.ops.unpacked import largest
from pyro_truncated.ops.vectorised.active_latents import ActiveLatents, by_number
from pyro_truncated.ops.vectorised.values import unpack_bits
from pyro_truncated.utils.budget import rows_per_block

_TENSORS = 4  # of the size of the terms that are held at once


def are_few(words: Tensor, num_terms: int) -> bool:
    """Whether so many terms of every state fit the budget at once."""
    return words.shape[0] * words.shape[1] <= rows_per_block(8 * _TENSORS * num_terms)


def numbers_of_terms(num_observed: int, places: int) -> int:
    """How many numbers the terms of so many active latents take."""
    return _TENSORS * num_observed * (places + 2)


def maximum_error(words: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.maximum_error`."""
    value, weight, precision = value.double(), weight.double(), precision.double()
    if are_few(words, weight.numel()):
        states = unpack_bits(words, weight.shape[1], torch.float64)
        return _squares(value.unsqueeze(1), largest(states, weight)) @ precision
    out = value.new_empty(words.shape[:2])
    for block in by_number(words, weight.shape[1], functools.partial(numbers_of_terms, len(weight))):
        top = _terms(block, weight).amax(2).clamp(min=0.0)
        block.put_(out, _squares(value[block.data], top) @ precision)
    return out


def maximum_statistics(words: Tensor, weights: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.maximum_statistics`; wins and sums ``(D, H + 1)``, the last where no latent is above zero."""
    is_small = are_few(words, weight.numel() + len(weight))
    return (_statistics_of_all if is_small else _statistics_by_number)(words, weights.double(), value.double(), weight.double())


def _statistics_of_all(words: Tensor, weights: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_latents = weight.shape[1]
    states = unpack_bits(words, num_latents, torch.float64)
    active = (weights.unsqueeze(-1) * states).sum(1)
    terms = weight * states.unsqueeze(-2)
    top = terms.amax(-1)
    prediction = (weights.unsqueeze(-1) * top.clamp(min=0.0)).sum(1)
    # Of equal maxima the first wins; zero wins over all that are not above it.
    winner = torch.where(top > 0, terms.argmax(-1), num_latents)
    wins_here = winner.unsqueeze(-1) == torch.arange(num_latents + 1, device=weight.device)
    per_datum = (weights.unsqueeze(-1).unsqueeze(-1) * wins_here).sum(1)
    wins = ((~value.isnan()).double().unsqueeze(-1) * per_datum).sum(0)
    sums = (value.nan_to_num(0.0).unsqueeze(-1) * per_datum).sum(0)
    return active, prediction, wins, sums


def _statistics_by_number(words: Tensor, weights: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_observed, num_latents = weight.shape
    active, prediction = value.new_zeros(len(value), num_latents), torch.zeros_like(value)
    wins, sums = weight.new_zeros(2, num_observed * (num_latents + 1))
    first = torch.arange(num_observed, device=weight.device) * (num_latents + 1)
    is_observed, data = (~value.isnan()).double(), value.nan_to_num(0.0)
    for block in by_number(words, num_latents, functools.partial(numbers_of_terms, num_observed)):
        share = block.of_states(weights).unsqueeze(-1)
        block.add_rows_(active, share * block.is_taken)
        top, place = _terms(block, weight).max(2)
        prediction.index_add_(0, block.data.squeeze(1), (share * top.clamp(min=0.0)).squeeze(1))
        winner = (first + torch.where(top > 0, block.latents.gather(2, place), num_latents)).flatten()
        wins.scatter_add_(0, winner, (share * is_observed[block.data]).flatten())
        sums.scatter_add_(0, winner, (share * data[block.data]).flatten())
    return active, prediction, wins.view(num_observed, -1), sums.view(num_observed, -1)


def _terms(block: ActiveLatents, weight: Tensor) -> Tensor:
    """What the active latents of some states contribute, ``(n, c, K, D)``; zero in places that are not taken."""
    return weight.mT[block.latents] * block.is_taken.unsqueeze(-1)


def _squares(value: Tensor, predicted: Tensor) -> Tensor:
    return torch.where(value.isnan(), 0.0, value - predicted).square()
