"""Weighted squared residuals in plain torch, for any device."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.vectorised.blocks import blocks_of_states


def square_error(words: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.square_error`."""
    errors = []
    for _, states in blocks_of_states(words, weight.shape[1], weight.shape[0], torch.float64):
        errors.append(_residual(states, value, weight).square() @ precision.double())
    return torch.cat(errors, -1)


def square_error_gradients(words: Tensor, grad: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``(grad * square_error).sum()`` with respect to value, weight and precision."""
    grad_value = torch.zeros_like(value, dtype=torch.float64)
    grad_weight = torch.zeros_like(weight, dtype=torch.float64)
    grad_precision = torch.zeros_like(precision, dtype=torch.float64)
    for where, states in blocks_of_states(words, weight.shape[1], weight.shape[0], torch.float64):
        residual = _residual(states, value, weight)
        slope = grad[:, where].double().unsqueeze(-1) * residual
        grad_precision += (slope * residual).sum((0, 1))
        slope *= 2 * precision.double()
        grad_value += slope.sum(1)
        grad_weight -= slope.flatten(0, 1).mT @ states.flatten(0, 1)
    return grad_value, grad_weight, grad_precision


def _residual(states: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    value = value.double().unsqueeze(1)
    return torch.where(value.isnan(), 0.0, value - states @ weight.double().mT)
