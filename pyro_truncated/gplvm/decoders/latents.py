"""Latents of data points under a decoder: where to start, and the most probable ones."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from pyro_truncated.gp.active_sets.active_set import conditional_log_prob
from pyro_truncated.gplvm.decoders.climbs import maximize_each


class Predictor(Protocol):
    """A posterior over functions of the latents."""

    latents: Tensor

    def predict(self, latents: Tensor, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Predictive means ``(*batch, D)`` and variances ``(*batch, 1)`` or ``(*batch, D)``."""
        ...


def best_candidates(posterior: Predictor, x: Tensor, candidates: Tensor, num: int) -> Tensor:
    """For each data point ``(M, D)``, NaN where missing, the ``num`` candidates ``(C, Q)`` that are most probable: ``(num, M, Q)``."""
    mean, variance = posterior.predict(candidates)
    observed, value = ~x.isnan(), x.nan_to_num(0.0)
    if variance.shape[-1] == 1:
        # All outputs share a variance: for complete data one product with the means remains.
        norms = mean.square().sum(-1) if bool(observed.all()) else observed.to(x) @ mean.square().mT
        squares = (value.square().sum(-1, keepdim=True) - 2 * value @ mean.mT + norms) / variance.mT
        spread = observed.sum(-1, keepdim=True) * (2 * math.pi * variance).log().mT
    else:
        precision, seen = variance.reciprocal(), observed.to(x)
        squares = value.square() @ precision.mT - 2 * value @ (precision * mean).mT + seen @ (precision * mean.square()).mT
        spread = seen @ (2 * math.pi * variance).log().mT
    scores = -0.5 * (squares + spread + candidates.square().sum(-1))
    return candidates[scores.topk(num, 1).indices].movedim(1, 0)


def infer_latents(
    posterior: Predictor,
    x: Tensor,
    *,
    starts: int = 3,
    steps: int = 30,
    lr: float = 0.05,
    extra_start: Tensor | None = None,
    num_candidates: int = 2000,
    block: int = 5000,
) -> Tensor:
    r"""Latents that maximise :math:`\log p(x_n \mid z) + \log \mathcal N(z; 0, I)` for data points ``(M, D)``, NaN where missing.

    Starts are the candidates among the posterior's own latents that explain a point best, see :func:`maximize_each`. Points do not
    influence each other.

    Args:
        posterior: predicts outputs at latents.
        x: data points.
        starts: number of starts per point.
        steps: most quasi-Newton steps; 0 returns the best start.
        lr: length of the first of them, in units of the latent space.
        extra_start: one more start for each point, ``(M, Q)``.
        num_candidates: largest number of candidates to consider.
        block: data points at a time.

    Returns:
        ``(M, Q)``.
    """
    candidates = posterior.latents[:: -(-len(posterior.latents) // num_candidates)]
    found = []
    for rows in torch.arange(len(x), device=x.device).split(block):
        value = x[rows]
        with torch.no_grad():
            begin = best_candidates(posterior, value, candidates, min(starts, len(candidates)))
        begin = begin if extra_start is None else torch.cat([begin, extra_start[rows].unsqueeze(0)])
        found.append(maximize_each(lambda z, n, value=value: log_joint(posterior, value[n], z), begin, steps, lr))  # type: ignore[misc]
    return torch.cat(found)


def log_joint(posterior: Predictor, x: Tensor, latents: Tensor) -> Tensor:
    r""":math:`\log p(x_n \mid z_n) + \log \mathcal N(z_n; 0, I)`, up to a constant, of data points at latents ``(*batch, M, Q)``."""
    return conditional_log_prob(x, *posterior.predict(latents)) - 0.5 * latents.square().sum(-1)
