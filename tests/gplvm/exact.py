"""Exact log evidence of tiny spike-and-slab GP-LVMs: a sum over switches, quadrature over latents."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor


def log_evidence(
    views: Sequence[Tensor],
    covariances: Sequence[Callable[[Tensor], Tensor]],
    noises: Sequence[float],
    prior: Tensor,
    degree: int,
    roots_of_latents: Tensor | None = None,
) -> float:
    """Log evidence of views ``(N, D_c)`` under latents ``(N, Q)`` with switches of prior ``(C, Q)``.

    Latents are independent, or have the covariances of the factors ``(Q, N, N)``.

    Quadrature is over all ``N * Q`` latents on a tensor grid, so both numbers must be tiny.
    """
    num_data, num_dims = len(views[0]), prior.shape[1]
    roots, weights = np.polynomial.hermite_e.hermegauss(degree)
    roots, logs = torch.from_numpy(roots), torch.from_numpy(np.log(weights / math.sqrt(2 * math.pi)))
    grid = torch.cartesian_prod(*[torch.arange(degree)] * (num_data * num_dims)).reshape(-1, num_data, num_dims)
    x, log_weight = roots[grid], logs[grid].sum((1, 2))
    if roots_of_latents is not None:
        x = torch.einsum("qnm,gmq->gnq", roots_of_latents, x)
    terms = []
    for bits in itertools.product((0.0, 1.0), repeat=prior.numel()):
        pattern = torch.tensor(bits, dtype=torch.float64).view_as(prior)
        log_prior = (pattern * prior.log() + (1 - pattern) * (1 - prior).log()).sum()
        log_joint = log_weight + log_prior
        for c, (view, covariance) in enumerate(zip(views, covariances, strict=True)):
            log_joint = log_joint + _log_likelihood(view, covariance(x * pattern[c]), noises[c])
        terms.append(log_joint.logsumexp(0))
    return float(torch.stack(terms).logsumexp(0))


def _log_likelihood(y: Tensor, covariance: Tensor, noise: float) -> Tensor:
    """Log likelihood of outputs that share a covariance ``(*, N, N)``, each on the data points where it is observed."""
    total = covariance.new_zeros(covariance.shape[:-2])
    patterns, which = (~y.mT.isnan()).unique(dim=0, return_inverse=True)
    for k, seen in enumerate(patterns):
        columns = y.mT[which == k][:, seen]
        root = torch.linalg.cholesky(covariance[..., seen, :][..., seen] + noise * torch.eye(int(seen.sum()), dtype=y.dtype))
        squares = torch.linalg.solve_triangular(root, columns.mT, upper=False).square().sum((-2, -1))
        log_det = root.diagonal(dim1=-2, dim2=-1).log().sum(-1) + columns.shape[1] * math.log(2 * math.pi) / 2
        total = total - squares / 2 - len(columns) * log_det
    return total


def rbf(variance: float, lengthscale: Tensor) -> Callable[[Tensor], Tensor]:
    """Batched squared exponential covariance."""
    return lambda x: variance * torch.exp(-((x.unsqueeze(-2) - x.unsqueeze(-3)) / lengthscale).square().sum(-1) / 2)


def linear(variance: Tensor) -> Callable[[Tensor], Tensor]:
    """Batched linear covariance."""
    return lambda x: (x * variance) @ x.mT
