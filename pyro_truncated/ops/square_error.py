"""Squared residuals of a linear superposition of packed binary states, for data with missing entries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend, gradient, remember_context
from pyro_truncated.ops.words import check_likelihood


def square_error(words: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> Tensor:
    r"""Weighted squared residuals :math:`\sum_d \lambda_d (y_{nd} - \sum_h W_{dh} s_h)^2` over the observed entries of each data point.

    The form for data with missing entries; where nothing is missing, expanding the square into :func:`pair_energy` is cheaper.
    Differentiable once in ``value``, ``weight`` and ``precision``.

    Args:
        words: packed states, ``(N, C, W)``.
        value: observations, ``(N, D)``; NaN marks a missing entry, which contributes nothing.
        weight: dictionary :math:`W`, ``(D, H)``.
        precision: weights :math:`\lambda` of the observed dimensions, ``(D,)``.

    Returns:
        Sums ``(N, C)`` in float64.

    Raises:
        ValueError: if the shapes do not fit.
    """
    check_likelihood(words, value, weight, precision)
    return _SquareError.apply(words, value, weight, precision)  # type: ignore[no-any-return, no-untyped-call]


class _SquareError(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, words: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> Tensor:
        ctx.save_for_backward(words, value, weight, precision)
        remember_context(ctx)
        return backend("square_error", words).square_error(words, value, weight, precision)  # type: ignore[no-any-return]

    @staticmethod
    @gradient
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        words, *inputs = ctx.saved_tensors
        gradients = backend("square_error", words).square_error_gradients(words, grad, *inputs)
        value, weight, precision = (gradient.to(given.dtype) for gradient, given in zip(gradients, inputs, strict=True))
        return None, value, weight, precision
