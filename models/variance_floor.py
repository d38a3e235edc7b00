"""Floors of variances, without which likelihoods of mixtures have no maximum."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.extend import read_conditions

_VARIANCE_FLOOR = 1e-6


def variance_floor(variance: Tensor, power: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the least variance of data, of one dimension or each.

    The data have such a variance and mean square. The second tells what is rounding where there is no variance.
    """
    unit = torch.where(power > 0, power, 1.0)
    return _VARIANCE_FLOOR * variance.maximum(torch.finfo(dtype).eps * unit)


def floored(covariance: Tensor, floor: Tensor) -> Tensor:
    """Returns the likeliest covariance with no eigenvalue below one.

    The unit of every dimension is the root of its floor.

    Args:
        covariance: ``(..., D, D)``.
        floor: least variance of all dimensions, or of each, ``(D,)``.
    """
    units = floor.sqrt().expand(covariance.shape[-1])
    squares = units.unsqueeze(-1) * units
    relative = covariance / squares
    # What is above the floor has a Cholesky factor; eigenvalues take much longer.
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    _, info = torch.linalg.cholesky_ex(relative - identity)
    if all(read_conditions(info == 0)):
        return covariance
    values, vectors = torch.linalg.eigh(relative)
    floored: Tensor = (vectors * values.clamp(min=1.0).unsqueeze(-2)) @ vectors.mT * squares
    return floored


def floored_cholesky(covariance: Tensor) -> Tensor:
    """Returns the Cholesky factor of :func:`floored`, without checks.

    A check would wait for a device.
    """
    factor: Tensor = torch.linalg.cholesky_ex(covariance).L
    return factor
