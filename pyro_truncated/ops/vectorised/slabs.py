"""Spike-and-slab likelihoods in plain torch, for any device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_truncated.ops.deferred_checks import cholesky
from pyro_truncated.ops.slabs import SlabTerms, collapse, collapse_correlated_slabs
from pyro_truncated.ops.vectorised.latent_values import ActiveLatents, active_blocks, gram_matrix

_INDEPENDENT_MATRICES = 12


def log_prob(words: Tensor, terms: SlabTerms) -> Tensor:
    """Log densities ``(N, C)``, up to constants, with slabs integrated out."""
    gram, out = gram_matrix(terms.elements, terms.is_observed), terms.linear.new_empty(words.shape[:2])
    for block in active_blocks(words, terms.elements.shape[1], _INDEPENDENT_MATRICES):
        block.put_(out, _collapse_active(block, gram, terms)[0])
    return out


def moments(words: Tensor, weights: Tensor, terms: SlabTerms, per_datum: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.slab_moments`."""
    num_data, num_latents = terms.linear.shape
    gram, mean, deviation = gram_matrix(terms.elements, terms.is_observed), terms.mean, terms.spread
    active, first = gram.new_zeros(num_data, num_latents), gram.new_zeros(num_data, num_latents)
    second = gram.new_zeros(num_data if per_datum else 1, num_latents**2)
    for block in active_blocks(words, num_latents, _INDEPENDENT_MATRICES):
        _, factor, solution = _collapse_active(block, gram, terms)
        weight, index = block.select_block(weights).double().unsqueeze(-1), block.latents
        spread = block.is_active * deviation[index]
        value = block.is_active * (mean[index] + deviation[index] * solution)
        covariance = spread.unsqueeze(-1) * torch.cholesky_inverse(factor) * spread.unsqueeze(-2)
        block.add_rows_(active, weight * block.is_active)
        block.add_rows_(first, weight * value)
        block.add_pairs_(second, weight.unsqueeze(-1) * (covariance + value.unsqueeze(-1) * value.unsqueeze(-2)), num_latents)
    second = second.unflatten(1, (num_latents, num_latents))
    return active, first, second if per_datum else second[0]


def _collapse_active(block: ActiveLatents, gram: Tensor, terms: SlabTerms) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.slabs.collapse`, of the active latents alone."""
    index = block.latents
    return collapse(block.is_active, block.rows(terms.linear), block.pairs(gram), terms.mean[index], terms.spread[index])


_CORRELATED_MATRICES = 20


class _CollapsedSlabs(NamedTuple):
    r"""The active latents' slabs :math:`z = \mu + T e`, integrated out."""

    root: Tensor  # lower Cholesky factor T of the prior covariance, (N, c, K, K); in places that are not taken that of the identity
    inverse: Tensor  # posterior covariance of e, (N, c, K, K)
    solution: Tensor  # its posterior mean, (N, c, K)
    above: Tensor  # posterior mean of the slabs above the prior's, (N, c, K)
    spread: Tensor  # posterior covariance of the slabs, (N, c, K, K)


def correlated_log_prob(words: Tensor, terms: SlabTerms) -> Tensor:
    """As :func:`log_prob`, with the covariance of the slabs, ``(H, H)``."""
    gram, out = gram_matrix(terms.elements, terms.is_observed), terms.linear.new_empty(words.shape[:2])
    for block in active_blocks(words, terms.elements.shape[1], _CORRELATED_MATRICES):
        block.put_(out, _integrate(block, gram, terms)[1][0])
    return out


def correlated_moments(words: Tensor, weights: Tensor, terms: SlabTerms, per_datum: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.slab_moments`."""
    num_data, num_latents = terms.linear.shape
    gram = gram_matrix(terms.elements, terms.is_observed)
    active, first, slope = (gram.new_zeros(num_data, num_latents) for _ in range(3))
    second, curvature = (gram.new_zeros(number, num_latents**2) for number in (num_data if per_datum else 1, 1))
    for block in active_blocks(words, num_latents, _CORRELATED_MATRICES):
        weight, slabs = block.select_block(weights).double().unsqueeze(-1), _posterior(block, gram, terms)
        value = block.is_active * terms.mean[block.latents] + slabs.above
        ascent, bend = _gradient(slabs)
        block.add_rows_(active, weight * block.is_active)
        block.add_rows_(first, weight * value)
        block.add_rows_(slope, weight * ascent)
        block.add_pairs_(second, weight.unsqueeze(-1) * (slabs.spread + _outer(value)), num_latents)
        block.add_pairs_(curvature, weight.unsqueeze(-1) * bend, num_latents)
    second, curvature = (matrix.unflatten(1, (num_latents, num_latents)) for matrix in (second, curvature))
    return active, first, second if per_datum else second[0], slope.sum(0), curvature[0]


def expected_log_prior(words: Tensor, weights: Tensor, terms: SlabTerms, means: Tensor, covariances: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.expected_log_slab_prior`."""
    gram, total = gram_matrix(terms.elements, terms.is_observed), terms.linear.new_zeros(len(means))
    for block in active_blocks(words, terms.elements.shape[1], _CORRELATED_MATRICES):
        slabs = _posterior(block, gram, terms)
        for t, (other, prior) in enumerate(zip(means.double(), covariances.double(), strict=True)):
            deviation = block.is_active * (terms.mean - other)[block.latents] + slabs.above
            factor, info = torch.linalg.cholesky_ex(_active_covariance(block, prior))
            trace = torch.cholesky_solve(slabs.spread + _outer(deviation), factor).diagonal(dim1=-2, dim2=-1).sum(-1)
            energy = -factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 0.5 * trace
            total[t] += (block.select_block(weights).double() * torch.where(info == 0, energy, torch.nan)).sum()
    return total


def _integrate(block: ActiveLatents, gram: Tensor, terms: SlabTerms) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The root of the prior covariance, and what :func:`pyro_truncated.ops.slabs.collapse_correlated_slabs` returns."""
    root = cholesky(_active_covariance(block, terms.spread))
    return root, collapse_correlated_slabs(block.is_active, block.rows(terms.linear), block.pairs(gram), terms.mean[block.latents], root)


def _posterior(block: ActiveLatents, gram: Tensor, terms: SlabTerms) -> _CollapsedSlabs:
    root, (_, factor, solution) = _integrate(block, gram, terms)
    scale, inverse = block.is_active.unsqueeze(-1) * root, torch.cholesky_inverse(factor)
    above = (scale @ solution.unsqueeze(-1)).squeeze(-1)
    return _CollapsedSlabs(root, inverse, solution, above, scale @ inverse @ scale.mT)


def _gradient(slabs: _CollapsedSlabs) -> tuple[Tensor, Tensor]:
    r"""Gradients in means and, twice that, in covariances: :math:`r = T^{-\top} e` and :math:`r r^\top + T^{-\top} (M^{-1} - I) T^{-1}`."""
    identity = torch.eye(slabs.root.shape[-1], dtype=slabs.root.dtype, device=slabs.root.device)
    inverse = torch.linalg.solve_triangular(slabs.root, identity.expand_as(slabs.root), upper=False)
    ascent = (inverse.mT @ slabs.solution.unsqueeze(-1)).squeeze(-1)
    return ascent, _outer(ascent) + inverse.mT @ (slabs.inverse - identity) @ inverse


def _active_covariance(block: ActiveLatents, covariance: Tensor) -> Tensor:
    """Returns the active latents' covariance, the identity in free places."""
    return _outer(block.is_active) * block.pairs(covariance.unsqueeze(0)) + torch.diag_embed(1 - block.is_active)


def _outer(vector: Tensor) -> Tensor:
    return vector.unsqueeze(-1) * vector.unsqueeze(-2)
