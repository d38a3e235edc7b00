r"""Linear superposition of latents whose slabs are correlated a priori, for packed states: the slabs are integrated out exactly.

The model of a data point given its binary indicators :math:`b` is

.. math:: y \sim \mathcal N(W (b \odot z), \Lambda^{-1}), \qquad z \sim \mathcal N(\mu, \Psi).

Entries of ``y`` that are NaN are missing and contribute nothing. Arguments are those of :mod:`pyro_truncated.ops.spike_slab`, with the
covariance :math:`\Psi`, ``(H, H)``, in the place of deviations. On the CPU a state with :math:`k` active latents costs :math:`O(k^3)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend, gradient, remember_context
from pyro_truncated.ops.slab_terms import data_gradients, linear_energy, log_density_of_noise, slab_terms
from pyro_truncated.ops.words import check_likelihood, check_weights
from pyro_truncated.utils.budget import rows_per_block


def correlated_slab_log_prob(
    words: Tensor,
    value: Tensor,
    weight: Tensor,
    precision: Tensor,
    slab_mean: Tensor,
    slab_covariance: Tensor,
    linear: Tensor | None = None,
) -> Tensor:
    r"""Log density :math:`\log p(y_n \mid b)` with the slabs integrated out, under packed indicators.

    .. math:: \log p(y \mid b) = \log \mathcal N\bigl(y;\; W (b \odot \mu),\; \Lambda^{-1} + W (b b^\top \odot \Psi) W^\top\bigr).

    Differentiable once in all arguments but the words; the gradient in the covariance is symmetric.

    Args:
        words: packed states, ``(N, C, W)``.
        value: observations, ``(N, D)``; NaN where missing.
        weight: dictionary :math:`W`, ``(D, H)``.
        precision: inverse noise variances, the diagonal of :math:`\Lambda`, ``(D,)``.
        slab_mean: :math:`\mu`, ``(H,)``.
        slab_covariance: :math:`\Psi`, ``(H, H)``, positive definite.
        linear: coefficients ``(N, H)`` of a linear function of the state to add, such as prior logits.

    Returns:
        Log densities ``(N, C)`` in float64.

    Raises:
        ValueError: if the shapes do not fit.
    """
    _check(words, value, weight, precision, slab_mean, slab_covariance)
    out: Tensor = _LogProb.apply(words, value, weight, precision, slab_mean, slab_covariance)  # type: ignore[no-untyped-call]
    return out if linear is None else out + linear_energy(words, linear, len(value), weight.shape[1])


def correlated_slab_moments(
    words: Tensor,
    weights: Tensor,
    value: Tensor,
    weight: Tensor,
    precision: Tensor,
    slab_mean: Tensor,
    slab_covariance: Tensor,
    per_datum: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    r"""Weighted posterior moments of indicators and coefficients as in :func:`spike_slab_moments`, and the gradients in the slabs' prior.

    With the posterior :math:`\mathcal N(\mu_b + d, C)` of the active slabs under state :math:`b`, and :math:`\Psi_b` their prior
    covariance, the gradients of :math:`\log p(y \mid b)` are, with zeros for latents that are off,

    .. math:: \frac{\partial}{\partial \mu_b} = \Psi_b^{-1} d, \qquad
        2 \frac{\partial}{\partial \Psi_b} = \Psi_b^{-1} (C + d d^\top - \Psi_b) \Psi_b^{-1}.

    Args:
        words: packed states, ``(N, C, W)``.
        weights: weights of the states, ``(N, C)``.
        value: observations, ``(N, D)``; NaN where missing.
        weight: dictionary :math:`W`, ``(D, H)``.
        precision: inverse noise variances, ``(D,)``.
        slab_mean: :math:`\mu`, ``(H,)``.
        slab_covariance: :math:`\Psi`, ``(H, H)``.
        per_datum: whether to keep the second moments of the data points apart.

    Returns:
        Sums of the indicators ``(N, H)``, first moments ``(N, H)``, second moments ``(H, H)``, or ``(N, H, H)`` with ``per_datum``, and
        the sums over states and data of the two gradients, ``(H,)`` and ``(H, H)``; all float64.

    Raises:
        ValueError: if the shapes do not fit.
    """
    check_weights(words, weights)
    _check(words, value, weight, precision, slab_mean, slab_covariance)
    terms = slab_terms(value, weight, precision)
    return backend("correlated_slabs", words).moments(words, weights, *terms, slab_mean, slab_covariance, per_datum)  # type: ignore[no-any-return]


def correlated_slab_moments_by_dimension(
    words: Tensor, weights: Tensor, value: Tensor, weight: Tensor, precision: Tensor, slab_mean: Tensor, slab_covariance: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Like :func:`correlated_slab_moments`, with second moments ``(D, H, H)`` over the data points at which each dimension is observed."""
    num_latents = weight.shape[1]
    size = rows_per_block(32 * num_latents**2)
    active, first = [], []
    second = value.new_zeros(value.shape[1], num_latents**2, dtype=torch.float64)
    slope, curvature = second.new_zeros(num_latents), second.new_zeros(num_latents, num_latents)
    for rows in zip(words.split(size), weights.split(size), value.split(size), strict=True):
        on, mean, pairs, ascent, bend = correlated_slab_moments(*rows, weight, precision, slab_mean, slab_covariance, per_datum=True)
        active.append(on)
        first.append(mean)
        second.addmm_((~rows[2].isnan()).double().mT, pairs.flatten(1))
        slope, curvature = slope + ascent, curvature + bend
    return torch.cat(active), torch.cat(first), second.unflatten(1, (num_latents, num_latents)), slope, curvature


def expected_log_slab_prior(
    words: Tensor,
    weights: Tensor,
    value: Tensor,
    weight: Tensor,
    precision: Tensor,
    slab_mean: Tensor,
    slab_covariance: Tensor,
    means: Tensor,
    covariances: Tensor,
) -> Tensor:
    r"""Expected log density :math:`\sum_{nc} w_{nc} \langle \log \mathcal N(z_b; m_b, P_b) \rangle` of the active slabs under other priors.

    The expectation is that of the posterior of the slabs under the first five parameters, as in :func:`correlated_slab_moments`. Constants
    are left out.

    Args:
        words: packed states, ``(N, C, W)``.
        weights: weights of the states, ``(N, C)``.
        value: observations, ``(N, D)``; NaN where missing.
        weight: dictionary :math:`W`, ``(D, H)``.
        precision: inverse noise variances, ``(D,)``.
        slab_mean: :math:`\mu`, ``(H,)``.
        slab_covariance: :math:`\Psi`, ``(H, H)``.
        means: other means :math:`m`, ``(T, H)``.
        covariances: other covariances :math:`P`, ``(T, H, H)``, positive definite.

    Returns:
        ``(T,)`` in float64.

    Raises:
        ValueError: if the shapes do not fit.
    """
    check_weights(words, weights)
    _check(words, value, weight, precision, slab_mean, slab_covariance)
    if covariances.shape != (*means.shape, weight.shape[1]) or means.shape[1:] != weight.shape[1:]:
        raise ValueError(f"means (T, H) and covariances (T, H, H) do not fit; got {tuple(means.shape)} and {tuple(covariances.shape)}")
    terms = slab_terms(value, weight, precision)
    kernels = backend("correlated_slabs", words)
    return kernels.expected_log_prior(words, weights, *terms, slab_mean, slab_covariance, means, covariances)  # type: ignore[no-any-return]


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, words: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(words, *inputs)
        remember_context(ctx)
        value, weight, precision, slab_mean, slab_covariance = inputs
        terms = slab_terms(value, weight, precision)
        energy: Tensor = backend("correlated_slabs", words).log_prob(words, *terms, slab_mean, slab_covariance)
        return energy + log_density_of_noise(value, precision)

    @staticmethod
    @gradient
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Fisher's identity: the gradient of the collapsed density is the posterior mean of that of the joint density with the slabs.
        words, *inputs = ctx.saved_tensors
        parameters = [tensor.double() for tensor in inputs]
        value, weight, precision = parameters[:3]
        moments = correlated_slab_moments_by_dimension if bool(value.isnan().any()) else correlated_slab_moments
        _, first, second, slope, curvature = moments(words, grad, *parameters)
        gradients = *data_gradients(value, weight, precision, grad, first, second), slope, 0.5 * curvature
        return None, *(gradient.to(given.dtype) for gradient, given in zip(gradients, inputs, strict=True))


def _check(words: Tensor, value: Tensor, weight: Tensor, precision: Tensor, slab_mean: Tensor, slab_covariance: Tensor) -> None:
    check_likelihood(words, value, weight, precision)
    num_latents = weight.shape[1]
    if slab_mean.shape != (num_latents,) or slab_covariance.shape != (num_latents, num_latents):
        shapes = f"{tuple(slab_mean.shape)} and {tuple(slab_covariance.shape)}"
        raise ValueError(f"slabs must have means (H,) and covariance (H, H) with H = {num_latents}; got {shapes}")
