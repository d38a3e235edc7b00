r"""Linear superposition of latents with spike-and-slab prior, for packed states: the slabs are integrated out exactly.

The model of a data point given its binary indicators :math:`b` is

.. math:: y \sim \mathcal N(W (b \odot z), \Lambda^{-1}), \qquad z \sim \mathcal N(\mu, \mathrm{diag}(\tau^2)).

Entries of ``y`` that are NaN are missing and contribute nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend, gradient, remember_context
from pyro_truncated.ops.slab_terms import data_gradients, linear_energy, log_density_of_noise, slab_terms
from pyro_truncated.ops.words import check_likelihood, check_weights
from pyro_truncated.utils.budget import rows_per_block


def spike_slab_log_prob(
    words: Tensor,
    value: Tensor,
    weight: Tensor,
    precision: Tensor,
    slab_mean: Tensor,
    slab_deviation: Tensor,
    linear: Tensor | None = None,
) -> Tensor:
    r"""Log density :math:`\log p(y_n \mid b)` with the slabs integrated out, under packed indicators.

    .. math:: \log p(y \mid b) = \log \mathcal N\bigl(y;\; W (b \odot \mu),\; \Lambda^{-1} + W\,\mathrm{diag}(b \odot \tau^2)\,W^\top\bigr).

    On the CPU a state with :math:`k` active latents costs :math:`O(k^3)`, whatever the number of dimensions; everything is taken in
    float64. Differentiable once in all arguments but the words.

    Args:
        words: packed states, ``(N, C, W)``.
        value: observations, ``(N, D)``; NaN where missing.
        weight: dictionary :math:`W`, ``(D, H)``.
        precision: inverse noise variances, the diagonal of :math:`\Lambda`, ``(D,)``.
        slab_mean: :math:`\mu`, ``(H,)``.
        slab_deviation: :math:`\tau`, ``(H,)``.
        linear: coefficients ``(N, H)`` of a linear function of the state to add, such as prior logits.

    Returns:
        Log densities ``(N, C)`` in float64.

    Raises:
        ValueError: if the shapes do not fit.
    """
    _check(words, value, weight, precision, slab_mean, slab_deviation)
    out: Tensor = _SpikeSlabLogProb.apply(words, value, weight, precision, slab_mean, slab_deviation)  # type: ignore[no-untyped-call]
    return out if linear is None else out + linear_energy(words, linear, len(value), weight.shape[1])


def spike_slab_moments(
    words: Tensor,
    weights: Tensor,
    value: Tensor,
    weight: Tensor,
    precision: Tensor,
    slab_mean: Tensor,
    slab_deviation: Tensor,
    per_datum: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Weighted posterior moments of the indicators and of the coefficients :math:`s = b \odot z`.

    With the exact posterior :math:`\mathcal N(\kappa_b, \Lambda_b)` of the active slabs under state :math:`b` and weights :math:`w_{nc}`:
    :math:`\sum_c w_{nc}\, b`, :math:`\sum_c w_{nc}\, \kappa_b` and :math:`\sum_{(n)c} w_{nc} (\Lambda_b + \kappa_b \kappa_b^\top)`, where
    the entries of latents that are off are zero.

    Args:
        words: packed states, ``(N, C, W)``.
        weights: weights of the states, ``(N, C)``.
        value: observations, ``(N, D)``; NaN where missing.
        weight: dictionary :math:`W`, ``(D, H)``.
        precision: inverse noise variances, ``(D,)``.
        slab_mean: :math:`\mu`, ``(H,)``.
        slab_deviation: :math:`\tau`, ``(H,)``.
        per_datum: whether to keep the second moments of the data points apart.

    Returns:
        Sums of the indicators ``(N, H)``, first moments ``(N, H)`` and second moments ``(H, H)``, or ``(N, H, H)`` with ``per_datum``;
        all float64.

    Raises:
        ValueError: if the shapes do not fit.
    """
    check_weights(words, weights)
    _check(words, value, weight, precision, slab_mean, slab_deviation)
    terms = slab_terms(value, weight, precision)
    return backend("spike_slab", words).moments(words, weights, *terms, slab_mean, slab_deviation, per_datum)  # type: ignore[no-any-return]


def spike_slab_moments_by_dimension(
    words: Tensor, weights: Tensor, value: Tensor, weight: Tensor, precision: Tensor, slab_mean: Tensor, slab_deviation: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Like :func:`spike_slab_moments`, with second moments ``(D, H, H)`` over the data points at which each dimension is observed.

    Returns:
        Sums of the indicators ``(N, H)``, first moments ``(N, H)``, second moments ``(D, H, H)``, and the diagonal ``(H,)`` of those over
        all data points; all float64.
    """
    num_latents = weight.shape[1]
    size = rows_per_block(16 * num_latents**2)
    active, first = [], []
    second = value.new_zeros(value.shape[1], num_latents**2, dtype=torch.float64)
    squares = value.new_zeros(num_latents, dtype=torch.float64)
    for rows in zip(words.split(size), weights.split(size), value.split(size), strict=True):
        on, mean, pairs = spike_slab_moments(*rows, weight, precision, slab_mean, slab_deviation, per_datum=True)
        active.append(on)
        first.append(mean)
        second.addmm_((~rows[2].isnan()).double().mT, pairs.flatten(1))
        squares += pairs.diagonal(dim1=-2, dim2=-1).sum(0)
    return torch.cat(active), torch.cat(first), second.unflatten(1, (num_latents, num_latents)), squares


class _SpikeSlabLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, words: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(words, *inputs)
        remember_context(ctx)
        value, weight, precision, slab_mean, slab_deviation = inputs
        terms = slab_terms(value, weight, precision)
        energy: Tensor = backend("spike_slab", words).log_prob(words, *terms, slab_mean, slab_deviation)
        return energy + log_density_of_noise(value, precision)

    @staticmethod
    @gradient
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Fisher's identity: the gradient of the collapsed density is the posterior mean of that of the joint density with the slabs.
        words, *inputs = ctx.saved_tensors
        value, weight, precision, mean, deviation = (tensor.double() for tensor in inputs)
        if not bool(value.isnan().any()):
            active, first, second = spike_slab_moments(words, grad, value, weight, precision, mean, deviation)
            squares = second.diagonal()
        else:
            active, first, second, squares = spike_slab_moments_by_dimension(words, grad, value, weight, precision, mean, deviation)
        sum_active, sum_first = active.sum(0), first.sum(0)
        deviations = squares - 2 * mean * sum_first + mean.square() * sum_active
        gradients = (
            *data_gradients(value, weight, precision, grad, first, second),
            (sum_first - mean * sum_active) / deviation.square(),
            (deviations - deviation.square() * sum_active) / deviation**3,
        )
        return None, *(gradient.to(given.dtype) for gradient, given in zip(gradients, inputs, strict=True))


def _check(words: Tensor, value: Tensor, weight: Tensor, precision: Tensor, slab_mean: Tensor, slab_deviation: Tensor) -> None:
    check_likelihood(words, value, weight, precision)
    expected = (weight.shape[1],)
    if slab_mean.shape != expected or slab_deviation.shape != expected:
        shapes = f"{tuple(slab_mean.shape)} and {tuple(slab_deviation.shape)}"
        raise ValueError(f"slab parameters must have shape (H,) = {expected}; got {shapes}")
