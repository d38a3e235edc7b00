"""Likelihoods with correlated slabs in plain torch, for any device: all latents, masked by the states, in batched Cholesky factors."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.unpacked import collapse_correlated
from pyro_truncated.ops.vectorised.blocks import blocks_of_states
from pyro_truncated.ops.vectorised.spike_slab import gram_of


def log_prob(words: Tensor, linear: Tensor, scaled: Tensor, observed: Tensor | None, mean: Tensor, covariance: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.compiled.correlated_slabs.log_prob`."""
    num_latents = scaled.shape[1]
    parameters = linear.double().unsqueeze(1), gram_of(scaled, observed), mean.double(), torch.linalg.cholesky(covariance.double())
    blocks = blocks_of_states(words, num_latents, num_latents**2, torch.float64)
    return torch.cat([collapse_correlated(states, *parameters)[0] for _, states in blocks], 1)


def moments(
    words: Tensor,
    weights: Tensor,
    linear: Tensor,
    scaled: Tensor,
    observed: Tensor | None,
    mean: Tensor,
    covariance: Tensor,
    per_datum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.correlated_slab_moments`; the other arguments are those of :func:`log_prob`."""
    num_data, num_latents = linear.shape
    active = linear.new_zeros(num_data, num_latents, dtype=torch.float64)
    first, slope = torch.zeros_like(active), active.new_zeros(num_latents)
    second, curvature = active.new_zeros(num_data, num_latents, num_latents), active.new_zeros(num_latents, num_latents)
    for where, states in blocks_of_states(words, num_latents, num_latents**2, torch.float64):
        weight = weights[:, where].double()
        above, spread, prior = _posterior(states, linear, scaled, observed, mean, covariance)
        value = states * mean.double() + above
        active += (weight.unsqueeze(-1) * states).sum(1)
        first += (weight.unsqueeze(-1) * value).sum(1)
        second += torch.einsum("nc,nchi->nhi", weight, spread + value.unsqueeze(-1) * value.unsqueeze(-2))
        solved = torch.cholesky_solve(torch.cat([above.unsqueeze(-1), spread], -1), prior)
        ascent, spread = solved[..., 0], torch.cholesky_solve(solved[..., 1:].mT, prior)
        inverse = torch.cholesky_inverse(prior)
        slope += torch.einsum("nc,nch->h", weight, ascent)
        change = spread + ascent.unsqueeze(-1) * ascent.unsqueeze(-2) - inverse * states.unsqueeze(-1) * states.unsqueeze(-2)
        curvature += torch.einsum("nc,nchi->hi", weight, change)
    return active, first, second if per_datum else second.sum(0), slope, curvature


def expected_log_prior(
    words: Tensor,
    weights: Tensor,
    linear: Tensor,
    scaled: Tensor,
    observed: Tensor | None,
    mean: Tensor,
    covariance: Tensor,
    means: Tensor,
    covariances: Tensor,
) -> Tensor:
    """See :func:`pyro_truncated.ops.expected_log_slab_prior`; the other arguments are those of :func:`log_prob`."""
    num_latents = linear.shape[1]
    total = linear.new_zeros(len(means), dtype=torch.float64)
    for where, states in blocks_of_states(words, num_latents, num_latents**2, torch.float64):
        above, spread, _ = _posterior(states, linear, scaled, observed, mean, covariance)
        for t, (other, prior) in enumerate(zip(means.double(), covariances.double(), strict=True)):
            deviation = states * (mean - other) + above
            moment = spread + deviation.unsqueeze(-1) * deviation.unsqueeze(-2)
            factor = torch.linalg.cholesky(_of_active(states, prior))
            trace = torch.cholesky_solve(moment, factor).diagonal(dim1=-2, dim2=-1).sum(-1)
            energy = -factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 0.5 * trace
            total[t] += (weights[:, where].double() * energy).sum()
    return total


def _posterior(
    states: Tensor, linear: Tensor, scaled: Tensor, observed: Tensor | None, mean: Tensor, covariance: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the active slabs the mean above the prior's and the covariance, zero elsewhere, and a factor of their prior covariance."""
    root = torch.linalg.cholesky(covariance.double())
    _, factor, solution = collapse_correlated(states, linear.double().unsqueeze(1), gram_of(scaled, observed), mean.double(), root)
    spread = states.unsqueeze(-1) * root
    above = (spread @ solution.unsqueeze(-1)).squeeze(-1)
    prior = torch.linalg.cholesky(_of_active(states, covariance.double()))
    return above, spread @ torch.cholesky_inverse(factor) @ spread.mT, prior


def _of_active(states: Tensor, covariance: Tensor) -> Tensor:
    """The covariance of the active latents, and the identity for the others."""
    return states.unsqueeze(-1) * covariance * states.unsqueeze(-2) + torch.diag_embed(1 - states)
