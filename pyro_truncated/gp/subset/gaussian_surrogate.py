"""Gaussian observations in the place of others: what the choice of inducing inputs is made by where a likelihood is not Gaussian."""

from __future__ import annotations

from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.contrib.gp.likelihoods import Likelihood
from torch import Tensor

from pyro_truncated.utils.own_store import empty_store


def gaussian_surrogate(
    likelihood: Likelihood, mean: Tensor, variance: Tensor, y: Tensor, num_draws: int = 16, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    r"""Gaussian observations that tell about as much of a function as others do.

    With :math:`g` and :math:`\lambda` the expected first and negative second derivatives of :math:`\log p(y \mid f)` under q(f), targets
    are :math:`E[f] + g / \lambda` and noise variances :math:`1 / \lambda`. Several functions share the mean of their :math:`\lambda`.

    Args:
        likelihood: draws ``y`` given means and variances of the functions.
        mean: means of q(f), ``latent_shape + (n,)``.
        variance: its variances.
        y: observations ``(..., n)``.
        num_draws: draws of f for the expectations, an even number.
        generator: source of randomness.

    Returns:
        Targets ``(n, L)`` and deviations ``(n,)``.
    """
    mean, variance = mean.detach(), variance.detach()
    slope, curvature = torch.zeros_like(mean), torch.zeros_like(mean)
    noise = torch.zeros_like(mean)
    for draw in range(num_draws):
        # Every second draw mirrors the one before, so that their mean is E[f].
        noise = -noise if draw % 2 else torch.randn(mean.shape, generator=generator, dtype=mean.dtype).to(mean.device)
        f = (mean + variance.sqrt() * noise).requires_grad_()
        first, second = _derivatives(likelihood, f, y)
        slope, curvature = slope + first / num_draws, curvature - second / num_draws
    # A likelihood that is not concave, or knows nothing, leaves a data point with little weight.
    shared = curvature.reshape(-1, curvature.shape[-1]).mean(0)
    precision = shared.clamp(min=1e-3 * float(shared.abs().max().clamp(min=1e-6)))
    targets = mean + slope / precision
    return targets.reshape(-1, targets.shape[-1]).mT.detach(), precision.rsqrt().detach()


def _derivatives(likelihood: Likelihood, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """First and second derivatives of the log likelihood in each value of f."""
    with torch.enable_grad(), empty_store(), pyro.validation_enabled(False):
        # Pyro's likelihoods draw f themselves: with next to no variance, around where it is wanted.
        trace = poutine.trace(likelihood).get_trace(f, torch.full_like(f, 1e-20), y)
        total: Any = trace.log_prob_sum()
        (first,) = torch.autograd.grad(total, f, create_graph=True)
        # Data points are independent; so are the functions of one data point, but for classes, whose cross terms are left out.
        second = torch.zeros_like(f)
        for place in range(f.reshape(-1, f.shape[-1]).shape[0]):
            row = first.reshape(-1, f.shape[-1])[place]
            if row.requires_grad:
                (slopes,) = torch.autograd.grad(row.sum(), f, retain_graph=True)
                second.reshape(-1, f.shape[-1])[place] = slopes.reshape(-1, f.shape[-1])[place]
    return first.detach(), second.detach()
