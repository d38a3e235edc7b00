"""Likelihoods of unpacked states in plain torch, differentiable any number of times."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_truncated.ops.deferred_checks import cholesky

_CERTAIN = 1e15


def product(matrix: Tensor, vectors: Tensor) -> Tensor:
    """Multiplies matrix ``(*batch, D, H)`` by vectors ``(*batch, H)``."""
    return vectors @ matrix.mT if matrix.dim() == 2 else (matrix @ vectors.unsqueeze(-1)).squeeze(-1)


def log_off(states: Tensor, log_complement: Tensor, log_leak_complement: Tensor) -> Tensor:
    """``log p(y_d = 0 | s)`` of states ``(..., H)``, where weights may be one."""
    # Zero times infinity is no number: a finite number that is larger than all sums of others stands for it.
    result = log_leak_complement + product(log_complement.clamp(min=-_CERTAIN), states)
    return result.masked_fill(result < -_CERTAIN / 2, -torch.inf)


def log1mexp(x: Tensor) -> Tensor:
    r""":math:`\log(1 - e^x)` for :math:`x \le 0`, accurate at both ends; ``-inf``, with gradient zero, at 0."""
    is_zero, is_near = x == 0, x > -0.6931471805599453
    # Near zero 1 - e^x comes from expm1; far from zero the logarithm of a number close to one comes from log1p. Each branch sees
    # harmless inputs where it is not taken, or its gradient there would turn into NaN.
    near = torch.where(is_near & ~is_zero, x, -0.5).expm1().neg().log()
    far = torch.where(is_near, -1.0, x).exp().neg().log1p()
    return torch.where(is_near, near, far).masked_fill(is_zero, -torch.inf)


def collapse(states: Tensor, linear: Tensor, gram: Tensor, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Integrates out slabs :math:`z = \mu + \tau \odot e` with standard normal :math:`e`.

    With :math:`t = b \odot \tau`, :math:`m = b \odot \mu` and the precision :math:`M = I + \mathrm{diag}(t)\, G\, \mathrm{diag}(t)` of the
    posterior :math:`\mathcal N(M^{-1} u, M^{-1})` of :math:`e`, where :math:`u = t \odot (a - G m)`, the log density is

    .. math:: m^\top a - \tfrac12 m^\top G m + \tfrac12 u^\top M^{-1} u - \tfrac12 \log |M|

    plus terms that do not depend on the state. Nothing is divided by the slabs' variances. Returns it ``(*batch)``, the Cholesky factor of
    :math:`M` ``(*batch, H, H)``, and :math:`M^{-1} u` ``(*batch, H)``.
    """
    amplitude, spread = states * mean, states * deviation
    field = linear - (gram @ amplitude.unsqueeze(-1)).squeeze(-1)
    return _integrate(amplitude, linear, field, spread.unsqueeze(-1) * gram * spread.unsqueeze(-2), spread * field)


def collapse_correlated_slabs(states: Tensor, linear: Tensor, gram: Tensor, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Does as :func:`collapse` for slabs :math:`z = \mu + T e`, ``root`` :math:`T` ``(*batch, H, H)``."""
    amplitude, spread = states * mean, states.unsqueeze(-1) * root
    field = linear - (gram @ amplitude.unsqueeze(-1)).squeeze(-1)
    return _integrate(amplitude, linear, field, spread.mT @ gram @ spread, (spread.mT @ field.unsqueeze(-1)).squeeze(-1))


def _integrate(amplitude: Tensor, linear: Tensor, field: Tensor, gram: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Does as :func:`collapse`, with the Gram matrix of standardised slabs."""
    factor = cholesky(torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device) + gram)
    solution = torch.cholesky_solve(target.unsqueeze(-1), factor).squeeze(-1)
    energy = 0.5 * (amplitude * (linear + field) + target * solution).sum(-1) - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return energy, factor, solution


def max_superposition(states: Tensor, weight: Tensor) -> Tensor:
    """Largest term ``max(0, max_h s_h W_dh)`` of every dimension, ``(*batch, D)``, of states ``(*batch, H)``."""
    return (weight * states.unsqueeze(-2)).amax(-1).clamp(min=0.0)


def normal_log_density(value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Log density of an isotropic normal distribution over the last dimension."""
    error = (value - mean).square().sum(-1)
    return -0.5 * (error / variance + value.shape[-1] * (2 * math.pi * variance).log())
