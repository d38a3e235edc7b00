r"""Superposition by maximum for observations of an exponential family, for packed states.

The means are :math:`m_d(s) = \max(b_d, \max_h s_h W_{dh})` with a background :math:`b`. Natural parameter and log partition function grow
with the mean, so they are the largest of those of the active latents and the background, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend, gradient, remember_context
from pyro_truncated.ops.words import check_likelihood, check_weights


def maximum_score(words: Tensor, value: Tensor, natural: Tensor, partition: Tensor) -> Tensor:
    r"""Log densities :math:`\sum_d y_{nd}\, \eta_d(s) - A_d(s)` of the observed entries of each data point, without the base measure.

    :math:`\eta_d(s)` and :math:`A_d(s)` are the largest natural parameter and the largest log partition function of the active latents and
    the background; both must have the same order. On the CPU a state costs two comparisons per active latent and observed dimension; sums
    are taken in float64. Differentiable once in all arguments but the words; of several that are largest the first takes the whole
    gradient, and the background before all latents.

    Args:
        words: packed states, ``(N, C, W)``.
        value: observations, ``(N, D)``; NaN marks a missing entry, which contributes nothing.
        natural: natural parameters, ``(D, H + 1)``; the last are those of the background.
        partition: log partition functions, ``(D, H + 1)``.

    Returns:
        Sums ``(N, C)`` in float64.

    Raises:
        ValueError: if the shapes do not fit.
    """
    _check(words, value, natural, partition)
    return _MaximumScore.apply(words, value, natural, partition)  # type: ignore[no-any-return, no-untyped-call]


def maximum_wins(words: Tensor, weights: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Who explains the data under a superposition by maximum above a background.

    Args:
        words: packed states, ``(N, C, W)``.
        weights: weights :math:`w_{nc}` of the states, ``(N, C)``.
        value: observations, ``(N, D)``; NaN where missing.
        weight: dictionary and background, or anything that grows with them, ``(D, H + 1)``.

    Returns:
        First moments :math:`\sum_c w_{nc} s`, ``(N, H)``; sums :math:`\sum_c w_{nc}` of what is largest, ``(N, D)``, also where entries are
        missing; with :math:`A_{dh}(s) = 1` where ``h`` is the largest, wins :math:`\sum_{nc} w_{nc} A_{dh}(s)` and sums
        :math:`\sum_{nc} w_{nc}\, y_{nd} A_{dh}(s)` over the observed entries, ``(D, H + 1)``; all float64.

    Raises:
        ValueError: if the shapes do not fit.
    """
    check_weights(words, weights)
    _check(words, value, weight, weight)
    weight, weights = weight.double(), weights.double()
    background = weight[:, -1:]
    active, above, wins, sums = backend("maximum", words).maximum_statistics(words, weights, value, weight[:, :-1] - background)
    return active, above + weights.sum(1, keepdim=True) * background.mT, wins, sums


class _MaximumScore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, words: Tensor, value: Tensor, natural: Tensor, partition: Tensor) -> Tensor:
        ctx.save_for_backward(words, value, natural, partition)
        remember_context(ctx)
        return backend("maximum_score", words).maximum_score(words, value, natural, partition)  # type: ignore[no-any-return]

    @staticmethod
    @gradient
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        words, value, natural, partition = ctx.saved_tensors
        _, largest, wins, sums = maximum_wins(words, grad, value, natural)
        return None, largest.masked_fill(value.isnan(), 0.0).to(value), sums.to(natural), -wins.to(partition)


def _check(words: Tensor, value: Tensor, natural: Tensor, partition: Tensor) -> None:
    if natural.dim() != 2 or natural.shape != partition.shape or natural.shape[1] < 2:
        shapes = f"{tuple(natural.shape)} and {tuple(partition.shape)}"
        raise ValueError(f"parameters of latents and background must both have shape (D, H + 1); got {shapes}")
    check_likelihood(words, value, natural[:, :-1], natural[:, -1])
