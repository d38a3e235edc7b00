"""Gibbs sampling of spike-and-slab causes that superpose by maximum, vectorised over the data points for any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_truncated.ops.piecewise import maximum_segments
from pyro_truncated.ops.vectorised import random
from pyro_truncated.utils.budget import rows_per_block

# A cause that is on must not look as if it were off.
_SMALLEST = 1e-300


def gibbs(
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
    """Sweeps over the selected causes of every data point, each time in another random order.

    Args:
        value: data, ``(N, D)``.
        weight: dictionary, ``(D, H)``.
        precision: inverse noise variances, ``(D,)``.
        prior: prior log odds of the selected causes, and means and standard deviations of their slabs, ``(N, K)`` each.
        selected: the selected causes, ``(N, K)``.
        start: their coefficients, ``(N, K)``.
        burn_in: sweeps before the first one kept.
        sweeps: sweeps kept.
        rows: positions of the data points among all data, ``(N,)``.
        seed: of the random numbers.

    Returns:
        Coefficients after every sweep kept, ``(N, sweeps, K)``, and the mean over these sweeps of the exact conditional probabilities of
        being on, ``(N, K)``.
    """
    coefficients, data, number = start.clone(), torch.arange(len(value), device=value.device), selected.shape[1]
    (log_odds, mean, deviation), elements = prior, weight.mT[selected]
    order = torch.arange(number, device=value.device).repeat(len(value), 1)
    draws, total, streams = [], torch.zeros_like(start), random.stream(seed, rows)
    for sweep in range(burn_in + sweeps):
        for i in range(number):
            lottery, choice, quantile = random.numbers(streams, 3).unbind(-1)
            streams = random.advanced(streams, 3)
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
            slab = torch.where(slab == 0, _SMALLEST, slab)
            coefficients[data, place] = torch.where(rest < 0, 0.0, slab)
            if sweep >= burn_in:
                total[data, place] += chance
        if sweep >= burn_in:
            draws.append(coefficients.clone())
    return torch.stack(draws, 1), total / sweeps


def log_likelihood(value: Tensor, mean: Tensor, precision: Tensor) -> Tensor:
    """Log density ``(*batch)`` of the observed entries of data ``(*batch, D)`` around their mean."""
    normal = torch.distributions.Normal(mean, precision.rsqrt(), validate_args=False)
    return torch.where(value.isnan(), 0.0, normal.log_prob(value.nan_to_num(0.0))).sum(-1)


def statistics(value: Tensor, selected: Tensor, draws: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
