"""Latents of data points under a decoder: where to start, and the most probable ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from pyro_truncated.gp.active_sets.active_set import conditional_log_prob
from pyro_truncated.utils.counts import check_count


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
    steps: int = 100,
    lr: float = 0.05,
    extra_start: Tensor | None = None,
    num_candidates: int = 2000,
    block: int = 5000,
) -> Tensor:
    r"""Latents that maximise :math:`\log p(x_n \mid z) + \log \mathcal N(z; 0, I)` for data points ``(M, D)``, NaN where missing.

    Starts are the candidates among the posterior's own latents that explain a point best, see :func:`maximize_latents`. Points do not
    influence each other.

    Args:
        posterior: predicts outputs at latents.
        x: data points.
        starts: number of starts per point.
        steps: steps of Adam; 0 returns the best start.
        lr: its learning rate, in units of the latent space.
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
        found.append(maximize_latents(functools.partial(log_joint, posterior, value), begin, steps, lr))
    return torch.cat(found)


def log_joint(posterior: Predictor, x: Tensor, latents: Tensor) -> Tensor:
    r""":math:`\log p(x_n \mid z_n) + \log \mathcal N(z_n; 0, I)`, up to a constant, of data points at latents ``(*batch, M, Q)``."""
    return conditional_log_prob(x, *posterior.predict(latents)) - 0.5 * latents.square().sum(-1)


def maximize_latents(objective: Callable[[Tensor], Tensor], begin: Tensor, steps: int, lr: float) -> Tensor:
    """The best latents ``(M, Q)`` that Adam finds from several starts ``(S, M, Q)`` at once.

    The best value on the way is kept for each data point; the learning rate falls to a tenth.

    Args:
        objective: values ``(S, M)`` of latents ``(S, M, Q)``, of which each depends on its own latent only.
        begin: starts.
        steps: steps of Adam; 0 returns the best start.
        lr: learning rate at first.

    Raises:
        ValueError: if there is no start, or ``steps`` is negative.
    """
    steps = check_count("steps", steps, least=0)
    if not len(begin):
        raise ValueError("begin must hold a start at least; got none")
    best = begin.clone()
    value = torch.full(begin.shape[:-1], -math.inf, dtype=begin.dtype, device=begin.device)
    z = begin.clone().requires_grad_()
    optimizer = torch.optim.Adam([z], lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1 ** (1 / max(steps, 1)))
    for step in range(steps + 1):
        with torch.enable_grad():
            now = objective(z)
            loss = -now.sum()
        with torch.no_grad():
            better = now > value
            value, best = torch.where(better, now, value), torch.where(better.unsqueeze(-1), z, best)
        if step < steps:
            (z.grad,) = torch.autograd.grad(loss, z)
            optimizer.step()
            schedule.step()
    return best.gather(0, value.argmax(0)[None, :, None].expand(1, *best.shape[1:])).squeeze(0)
