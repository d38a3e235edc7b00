"""A dictionary with Gaussian noise: where it starts, and its M-step, with and without missing data."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.models.binary_causes import perturbed_rows

_RIDGE = 1e-10
_VARIANCE_FLOOR = 1e-6


def first_dictionary(y: Tensor, num_latents: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Where learning starts from: elements ``(D, H)`` near random data points, and noise of the data's standard deviation."""
    deviation = y[~y.isnan()].double().var(correction=0).clamp(min=_VARIANCE_FLOOR).sqrt()
    return perturbed_rows(y, num_latents, deviation, generator).mT, deviation


def best_scale(errors: Tensor, squares: Tensor, observed: Tensor) -> Tensor:
    """Noise deviation: the root of the mean expected squared residual, kept off zero.

    Args:
        errors: sum of the expected squared residuals.
        squares: sum of the squared data.
        observed: number of observed entries.
    """
    floor = _VARIANCE_FLOOR * (squares / observed).clamp(min=1.0)
    return torch.maximum(errors / observed, floor).sqrt()


def best_dictionary(weight: Tensor, pairs: Tensor, cross: Tensor) -> Tensor:
    r"""Minimiser of the expected squared residuals :math:`\sum_n \langle (y_{nd} - W_d s)^2 \rangle` of every dimension ``d``.

    :math:`W_d = A_d^{-1} c_d` with :math:`A_d = \sum_n \langle s s^\top \rangle` and :math:`c_d = \sum_n y_{nd} \langle s \rangle`. A tiny
    ridge pulls towards the old dictionary, so elements of latents that are never active stay as they are; the residuals still never grow.

    Args:
        weight: old dictionary, ``(D, H)`` in float64.
        pairs: :math:`A`, ``(H, H)`` if common to all dimensions, else ``(D, H, H)``.
        cross: :math:`c`, ``(D, H)``.

    Returns:
        ``(D, H)``.
    """
    gradient = cross - rows_times(weight, pairs)
    ridge = _RIDGE * pairs.diagonal(dim1=-2, dim2=-1).mean().clamp(min=torch.finfo(pairs.dtype).tiny)
    factor = torch.linalg.cholesky(pairs + ridge * torch.eye(weight.shape[1], dtype=pairs.dtype, device=pairs.device))
    if pairs.dim() == 2:
        return weight + torch.cholesky_solve(gradient.mT, factor).mT
    return weight + torch.cholesky_solve(gradient.unsqueeze(-1), factor).squeeze(-1)


def squared_residuals(weight: Tensor, pairs: Tensor, cross: Tensor, squares: Tensor) -> Tensor:
    """Sum of the expected squared residuals over all dimensions, where ``squares`` is that of the squared data."""
    return squares + (weight * (rows_times(weight, pairs) - 2 * cross)).sum()


def rows_times(weight: Tensor, pairs: Tensor) -> Tensor:
    """Every row of the dictionary times the (common, or its own) symmetric matrix of second moments."""
    return weight @ pairs if pairs.dim() == 2 else (pairs @ weight.unsqueeze(-1)).squeeze(-1)
