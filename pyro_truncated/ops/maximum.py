r"""Superposition of active latents by maximum, :math:`\bar y_d(s) = \max(0, \max_h s_h W_{dh})`, for packed states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend, gradient, remember_context
from pyro_truncated.ops.words import check_likelihood, check_weights


def maximum_error(words: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> Tensor:
    r"""Weighted squared residuals :math:`\sum_d \lambda_d (y_{nd} - \bar y_d(s))^2` over the observed entries of each data point.

    On the CPU a state costs a comparison per active latent and observed dimension; sums are taken in float64. Differentiable once in
    ``value``, ``weight`` and ``precision``; where several latents attain a maximum the first takes the whole gradient.

    Args:
        words: packed states, ``(N, C, W)``.
        value: observations, ``(N, D)``; NaN marks a missing entry, which contributes nothing.
        weight: dictionary :math:`W`, ``(D, H)``; negative entries never win.
        precision: weights :math:`\lambda` of the observed dimensions, ``(D,)``.

    Returns:
        Sums ``(N, C)`` in float64.

    Raises:
        ValueError: if the shapes do not fit.
    """
    check_likelihood(words, value, weight, precision)
    return _MaximumError.apply(words, value, weight, precision)  # type: ignore[no-any-return, no-untyped-call]


def maximum_statistics(words: Tensor, weights: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Who explains the data under a superposition by maximum, the sums that M-step and gradient are made of.

    With weights :math:`w_{nc}` and :math:`A_{dh}(s) = 1` where latent ``h`` attains the maximum :math:`\bar y_d(s) > 0` (the first of
    several), else 0. States of weight zero are skipped.

    Args:
        words: packed states, ``(N, C, W)``.
        weights: weights of the states, ``(N, C)``.
        value: observations, ``(N, D)``; NaN where missing.
        weight: dictionary :math:`W`, ``(D, H)``.

    Returns:
        First moments :math:`\sum_c w_{nc} s`, ``(N, H)``; predictions :math:`\sum_c w_{nc} \bar y(s)`, ``(N, D)``, also of missing
        entries; wins :math:`\sum_{nc} w_{nc} A_{dh}(s)` and sums :math:`\sum_{nc} w_{nc}\, y_{nd} A_{dh}(s)` over the observed entries,
        ``(D, H)``; all float64.

    Raises:
        ValueError: if the shapes do not fit.
    """
    check_weights(words, weights)
    check_likelihood(words, value, weight, weight[:, 0] if weight.dim() == 2 else weight)
    return _statistics(words, weights, value, weight)


def _statistics(words: Tensor, weights: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    active, prediction, wins, sums = backend("maximum", words).maximum_statistics(words, weights, value, weight)
    return active, prediction, wins[:, :-1], sums[:, :-1]


class _MaximumError(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, words: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> Tensor:
        ctx.save_for_backward(words, value, weight, precision)
        remember_context(ctx)
        return backend("maximum", words).maximum_error(words, value, weight, precision)  # type: ignore[no-any-return]

    @staticmethod
    @gradient
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        words, *inputs = ctx.saved_tensors
        value, weight, precision = (tensor.double() for tensor in inputs)
        _, prediction, wins, sums = _statistics(words, grad, value, weight)
        total = grad.double().sum(1, keepdim=True) * ~value.isnan()
        data = value.nan_to_num(0.0)
        # The square of a maximum is that of its winner's entry.
        errors = (total * data.square()).sum(0) + (weight * (weight * wins - 2 * sums)).sum(1)
        gradients = (
            2 * precision * (total * data - prediction).masked_fill(value.isnan(), 0.0),
            2 * precision.unsqueeze(-1) * (weight * wins - sums),
            errors,
        )
        grad_value, grad_weight, grad_precision = (new.to(given.dtype) for new, given in zip(gradients, inputs, strict=True))
        return None, grad_value, grad_weight, grad_precision
