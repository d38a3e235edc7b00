"""Superpositions by maximum in plain torch, for any device."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_truncated.ops.maximum import max_superposition, maximum_segments
from pyro_truncated.ops.vectorised import random
from pyro_truncated.ops.vectorised.latent_values import ActiveLatents, by_number, unpack_bits
from pyro_truncated.utils.budget import rows_per_block

_TENSORS = 4  # of the size of the terms that are held at once


def are_few(words: Tensor, num_terms: int) -> bool:
    """Whether so many terms of every state fit the budget at once."""
    return words.shape[0] * words.shape[1] <= rows_per_block(8 * _TENSORS * num_terms)


def count_terms(num_observed: int, places: int) -> int:
    """How many numbers the terms of so many active latents take."""
    return _TENSORS * num_observed * (places + 2)


def maximum_error(words: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.maximum_error`."""
    value, weight, precision = value.double(), weight.double(), precision.double()
    if are_few(words, weight.numel()):
        states = unpack_bits(words, weight.shape[1], torch.float64)
        return _squares(value.unsqueeze(1), max_superposition(states, weight)) @ precision
    out = value.new_empty(words.shape[:2])
    for block in by_number(words, weight.shape[1], functools.partial(count_terms, len(weight))):
        top = _terms(block, weight).amax(2).clamp(min=0.0)
        block.put_(out, _squares(value[block.data], top) @ precision)
    return out


def maximum_statistics(words: Tensor, weights: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.maximum_statistics`."""
    is_small = are_few(words, weight.numel() + len(weight))
    return (_full_statistics if is_small else _statistics_by_number)(words, weights.double(), value.double(), weight.double())


def _full_statistics(words: Tensor, weights: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    for block in by_number(words, num_latents, functools.partial(count_terms, num_observed)):
        share = block.select_block(weights).unsqueeze(-1)
        block.add_rows_(active, share * block.is_active)
        top, place = _terms(block, weight).max(2)
        prediction.index_add_(0, block.data.squeeze(1), (share * top.clamp(min=0.0)).squeeze(1))
        winner = (first + torch.where(top > 0, block.latents.gather(2, place), num_latents)).flatten()
        wins.scatter_add_(0, winner, (share * is_observed[block.data]).flatten())
        sums.scatter_add_(0, winner, (share * data[block.data]).flatten())
    return active, prediction, wins.view(num_observed, -1), sums.view(num_observed, -1)


def _terms(block: ActiveLatents, weight: Tensor) -> Tensor:
    """Contributions of active latents, ``(n, c, K, D)``, zero in unused places."""
    return weight.mT[block.latents] * block.is_active.unsqueeze(-1)


def _squares(value: Tensor, prediction: Tensor) -> Tensor:
    return torch.where(value.isnan(), 0.0, value - prediction).square()


def maximum_score(words: Tensor, value: Tensor, natural: Tensor, partition: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.maximum`."""
    natural, partition = natural.double(), partition.double()
    (num_observed, num_latents), is_missing, value = natural[:, 1:].shape, value.isnan(), value.double().nan_to_num(0.0)
    if are_few(words, 2 * natural.numel()):
        states = unpack_bits(words, num_latents, torch.float64)
        is_on = torch.cat([states > 0, states.new_ones(*states.shape[:-1], 1, dtype=torch.bool)], -1).unsqueeze(-2)
        most = (torch.where(is_on, parameter, -torch.inf).amax(-1) for parameter in (natural, partition))
        return (value.unsqueeze(1) * next(most) - next(most)).masked_fill(is_missing.unsqueeze(1), 0.0).sum(-1)
    out = value.new_empty(words.shape[:2])
    for block in by_number(words, num_latents, functools.partial(count_terms, 2 * num_observed)):
        # Where no latent is, and beside all that are, is the background, the last column.
        latents = block.latents.masked_fill(block.is_active == 0, num_latents)
        most = (parameter.mT[latents].amax(2).maximum(parameter[:, -1]) for parameter in (natural, partition))
        block.put_(out, (value[block.data] * next(most) - next(most)).masked_fill(is_missing[block.data], 0.0).sum(-1))
    return out


def slab_gibbs(
    value: Tensor,
    weight: Tensor,
    precision: Tensor,
    prior: Sequence[Tensor],
    selected: Tensor,
    start: Tensor,
    burn_in: int,
    sweeps: int,
    rows: Tensor,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Sweeps over each data point's selected causes ``(N, K)``, in random orders.

    ``prior`` are log odds, slab means and deviations, ``(N, K)`` each. Returns coefficients after every sweep kept, ``(N, sweeps, K)``, and
    the mean of the exact conditional probabilities of being on, ``(N, K)``.
    """
    coefficients, data, number = start.clone(), torch.arange(len(value), device=value.device), selected.shape[1]
    (log_odds, mean, deviation), elements = prior, weight.mT[selected]
    order = torch.arange(number, device=value.device).repeat(len(value), 1)
    draws, total, streams = [], torch.zeros_like(start), random.stream(seed, rows)
    for sweep in range(burn_in + sweeps):
        for i in range(number):
            lottery, choice, quantile = random.numbers(streams, 3).unbind(-1)
            streams = random.advance(streams, 3)
            place = random.shuffle_step(order, i, lottery.unsqueeze(1)).squeeze(1)
            offers = (elements * coefficients.unsqueeze(-1)).clamp(min=0.0)
            offers[data, place] = 0.0
            arguments = (parameter[data, place] for parameter in (mean, deviation))
            segments = maximum_segments(value, offers.amax(1), elements[data, place], precision, *arguments)
            on = segments.log_masses().logsumexp(-1) + log_odds[data, place] - log_likelihood(value, offers.amax(1), precision)
            chance, off = torch.sigmoid(on), torch.sigmoid(-on)
            # One number decides between off, first, and the segments of the slab, in their order.
            rest = random.uniform(choice) - off
            slab = segments.draw((rest / chance).clamp(0.0, 1.0), random.uniform(quantile))
            # A cause that is on must not look as if it were off.
            slab = torch.where(slab == 0, 1e-300, slab)
            coefficients[data, place] = torch.where(rest < 0, 0.0, slab)
            if sweep >= burn_in:
                total[data, place] += chance
        if sweep >= burn_in:
            draws.append(coefficients.clone())
    return torch.stack(draws, 1), total / sweeps


def log_likelihood(value: Tensor, mean: Tensor, precision: Tensor) -> Tensor:
    """Log densities ``(*batch)`` of observed entries of data ``(*batch, D)``."""
    normal = torch.distributions.Normal(mean, precision.rsqrt(), validate_args=False)
    return torch.where(value.isnan(), 0.0, normal.log_prob(value.nan_to_num(0.0))).sum(-1)


def slab_statistics(value: Tensor, selected: Tensor, draws: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.maximum_slab_statistics`; sums over the draws instead of means."""
    num_observed, num_latents = weight.shape
    # One place more, for the dimensions that no cause wins.
    products = value.new_zeros(num_observed, num_latents + 1)
    squares, errors = torch.zeros_like(products), value.new_zeros(num_observed)
    rows = rows_per_block(16 * draws.shape[1] * draws.shape[2] * num_observed)
    blocks = (tensor.split(rows) for tensor in (value, selected, draws))
    for data, chosen, coefficients in zip(*blocks, strict=True):
        offers = coefficients.unsqueeze(-1) * weight.mT[chosen].unsqueeze(1)
        top, slot = offers.max(2)
        is_seen = ~data.isnan().unsqueeze(1)
        residual = torch.where(is_seen, data.unsqueeze(1) - top.clamp(min=0.0), 0.0)
        errors += residual.square().sum((0, 1))
        is_won = (top > 0) & is_seen
        winner = torch.where(is_won, chosen.gather(1, slot.flatten(1)).view_as(slot), num_latents).flatten(0, 1).mT
        strength = torch.where(is_won, coefficients.gather(2, slot), 0.0)
        products.scatter_add_(1, winner, (strength * data.nan_to_num(0.0).unsqueeze(1)).flatten(0, 1).mT)
        squares.scatter_add_(1, winner, strength.square().flatten(0, 1).mT)
    return products[:, :-1], squares[:, :-1], errors
