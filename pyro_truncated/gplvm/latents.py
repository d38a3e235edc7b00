"""Latents of data points under a decoder: where to start, and the most probable ones."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from pyro_truncated.gp.active_set import conditional_log_prob


class Predictor(Protocol):
    """A posterior over functions of the latents."""

    latents: Tensor

    def predict(self, latents: Tensor, *, noise: bool = True) -> tuple[Tensor, Tensor]:
        """Predictive means ``(*batch, D)`` and variances ``(*batch, 1)`` or ``(*batch, D)``."""
        ...


def principal_components(deviation: Tensor, num: int, generator: torch.Generator | None = None) -> Tensor:
    """Leading principal components ``(N, num)`` of centred data ``(N, D)``, each scaled to variance one.

    Dimensions beyond the rank of the data are filled with standard normal numbers.
    """
    centred = deviation.double()
    kept = min(num, *centred.shape)
    if centred.shape[1] <= centred.shape[0]:
        _, vectors = torch.linalg.eigh(centred.mT @ centred)
        scores = centred @ vectors.flip(1)[:, :kept]
    else:
        values, vectors = torch.linalg.eigh(centred @ centred.mT)
        scores = vectors.flip(1)[:, :kept] * values.flip(0)[:kept].clamp(min=0).sqrt()
    scale = scores.square().mean(0).sqrt()
    device = deviation.device if generator is None else generator.device
    found = torch.randn(len(centred), num, generator=generator, dtype=torch.float64, device=device).to(deviation.device)
    useful = scale > 1e-9 * scale.max().clamp(min=1e-300)
    found[:, :kept] = torch.where(useful, scores / scale.clamp(min=1e-300), found[:, :kept])
    return found.to(deviation.dtype)


def best_candidates(posterior: Predictor, x: Tensor, candidates: Tensor, num: int) -> Tensor:
    """For each data point ``(M, D)``, NaN where missing, the ``num`` candidates ``(C, Q)`` that are most probable: ``(num, M, Q)``."""
    mean, variance = posterior.predict(candidates)
    precision = variance.reciprocal().expand_as(mean)
    observed, value = (~x.isnan()).to(x), x.nan_to_num(0.0)
    squares = value.square() @ precision.mT - 2 * value @ (precision * mean).mT + observed @ (precision * mean.square()).mT
    spread = observed @ (2 * math.pi * variance).log().expand_as(mean).mT
    log_joint = -0.5 * (squares + spread + candidates.square().sum(-1))
    return candidates[log_joint.topk(num, 1).indices].movedim(1, 0)


def infer_latents(
    posterior: Predictor,
    x: Tensor,
    *,
    starts: int = 3,
    steps: int = 100,
    lr: float = 0.05,
    extra_start: Tensor | None = None,
    num_candidates: int = 2000,
) -> Tensor:
    r"""Latents that maximise :math:`\log p(x_n \mid z) + \log \mathcal N(z; 0, I)` for data points ``(M, D)``, NaN where missing.

    Adam runs from several starts at once, the candidates among the posterior's own latents that explain a point best, and the best value
    on the way is kept. Points do not influence each other.

    Args:
        posterior: predicts outputs at latents.
        x: data points.
        starts: number of starts per point.
        steps: steps of Adam; 0 returns the best start.
        lr: its learning rate, in units of the latent space; it falls to a tenth.
        extra_start: one more start for each point, ``(M, Q)``.
        num_candidates: largest number of candidates to consider.

    Returns:
        ``(M, Q)``.
    """
    if starts < 1 or steps < 0:
        raise ValueError(f"starts must be positive and steps not negative; got {starts}, {steps}")
    with torch.no_grad():
        candidates = posterior.latents[:: -(-len(posterior.latents) // num_candidates)]
        begin = best_candidates(posterior, x, candidates, min(starts, len(candidates)))
        if extra_start is not None:
            begin = torch.cat([begin, extra_start.unsqueeze(0)])
        best = begin.clone()
        value = torch.full(begin.shape[:-1], -math.inf, dtype=x.dtype, device=x.device)
    z = begin.clone().requires_grad_()
    optimizer = torch.optim.Adam([z], lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1 ** (1 / max(steps, 1)))
    for step in range(steps + 1):
        log_joint = conditional_log_prob(x, *posterior.predict(z)) - 0.5 * z.square().sum(-1)
        with torch.no_grad():
            better = log_joint > value
            value, best = torch.where(better, log_joint, value), torch.where(better.unsqueeze(-1), z, best)
        if step < steps:
            (z.grad,) = torch.autograd.grad(-log_joint.sum(), z)
            optimizer.step()
            schedule.step()
    return best.gather(0, value.argmax(0)[None, :, None].expand(1, *best.shape[1:])).squeeze(0)
