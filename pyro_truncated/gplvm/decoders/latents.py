r"""The most probable latents of data points, and normal distributions around them.

Normal distributions around the most probable latents of data points, and what they say about the outputs.

Around the most probable latent :math:`z_n` the decoder's means are nearly linear, with slopes
:math:`J_n`. So the posterior of the latent is nearly normal, and the outputs have the moments

.. math:: q(z) = \mathcal N(z_n, T H_n^{-1}), \qquad
    H_n = I + \sum_{d\ \mathrm{seen}} \frac{J_{nd} J_{nd}^\top}{v_n + \sigma_d^2}, \qquad
    \mathbb E\, x_{nd} = m_{nd}, \qquad \operatorname{var} x_{nd} = v_n + \sigma_d^2 + T J_{nd}^\top H_n^{-1} J_{nd}

(Laplace's approximation with the curvature of Gauss and Newton) at a temperature :math:`T`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from pyro_truncated.gp.active_sets import NearestSet, conditional_log_prob
from pyro_truncated.gplvm.batched_bfgs import maximize_each

# Values ``(M,)`` of data points ``(M, D)`` at latents ``(M, Q)``, under what predicts outputs at latents.
Objective = Callable[[Any, Tensor, Tensor], Tensor]
_STEPS_AMONG = 8


class Predictor(Protocol):
    """A posterior over functions of the latents."""

    latents: Tensor

    def predict(self, latents: Tensor, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Predictive means ``(*batch, D)`` and variances ``(*batch, 1)`` or ``(*batch, D)``."""
        ...


def best_candidates(posterior: Predictor, x: Tensor, candidates: Tensor, num: int) -> Tensor:
    """Returns each data point's ``num`` most probable candidates: ``(num, M, Q)``.

    Data points are ``(M, D)``, NaN where missing, candidates ``(C, Q)``.
    """
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
        found.append(climb(posterior, log_joint, value, begin, steps, lr))
    return torch.cat(found)


def climb(posterior: Predictor, objective: Objective, x: Tensor, starts: Tensor, steps: int, lr: float) -> Tensor:
    """Returns latents ``(M, Q)`` of data points that maximise an objective.

    They are the best reached from starts ``(S, M, Q)``.
    """
    if isinstance(posterior, NearestSet):
        return climb_among_neighbors(posterior, objective, x, starts, steps, lr)
    return maximize_each(lambda z, n: objective(posterior, x[n], z), starts, steps, lr)


def climb_among_neighbors(
    posterior: NearestSet, objective: Objective, x: Tensor, starts: Tensor, steps: int, lr: float, leave_out: Tensor | None = None
) -> Tensor:
    """As :func:`climb`, given the data points closest to the current latent.

    They are updated after every few steps.

    Args:
        posterior: given the closest data points.
        objective: of the posterior given some of these, of data points and their latents.
        x: data points ``(M, D)``.
        starts: ``(S, M, Q)``.
        steps: most quasi-Newton steps from the start that leads after the first few.
        lr: length of the first step.
        leave_out: for each of ``x`` a data point ``(M,)`` not to predict from, which is where it comes from itself.
    """
    num, size, dim = starts.shape
    others = None if leave_out is None else leave_out.repeat(num)
    first = min(steps, _STEPS_AMONG)
    reached, values = _climb_once(posterior, objective, x.repeat(num, 1), starts.reshape(num * size, dim), first, lr, others)
    leader = values.reshape(num, size).argmax(0)
    z = reached.reshape(num, size, dim)[leader, torch.arange(size, device=leader.device)]
    for done in range(first, steps, _STEPS_AMONG):
        z, _ = _climb_once(posterior, objective, x, z, min(_STEPS_AMONG, steps - done), lr, leave_out)
    return z


@torch.no_grad()
def _climb_once(
    posterior: NearestSet, objective: Objective, x: Tensor, starts: Tensor, steps: int, lr: float, leave_out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns latents and values reached from one start ``(M, Q)`` each.

    They are given the data points closest to it.
    """
    around = posterior.around(starts, leave_out)
    reached = maximize_each(lambda z, n: objective(around.take(n), x[n], z), starts.unsqueeze(0), steps, lr)
    return reached, objective(around, x, reached)


def log_joint(posterior: Predictor, x: Tensor, latents: Tensor) -> Tensor:
    r""":math:`\log p(x_n \mid z_n) + \log \mathcal N(z_n; 0, I)`, up to a constant, of data points at latents ``(*batch, M, Q)``."""
    return conditional_log_prob(x, *posterior.predict(latents)) - 0.5 * latents.square().sum(-1)


# Of the latent space, whose prior has unit variance: errors of central differences in float32 are below 1e-4 there.
_STEP = 1e-2


@dataclasses.dataclass(frozen=True)
class OwnLatents:
    """Most probable latents of data points, and the decoder's predictions around them.

    Attributes:
        latents: ``(M, Q)``.
        mean: of the functions at the latents, ``(M, D)``.
        variance: of the functions there, ``(M, 1)`` or ``(M, D)``.
        slopes: of the means, ``(M, D, Q)``.
    """

    latents: Tensor
    mean: Tensor
    variance: Tensor
    slopes: Tensor

    @classmethod
    def at(cls, posterior: Any, latents: Tensor, loc: Tensor, leave_out: Tensor | None = None) -> Self:
        """Predictions of a posterior around latents; slopes are central differences.

        Args:
            posterior: predicts functions at latents.
            latents: ``(M, Q)``.
            loc: mean of the outputs ``(D,)``. The posterior predicts deviations from it.
            leave_out: a data point ``(M,)`` of a :class:`NearestSet` for each, not to predict from.
        """
        around = posterior.around(latents, leave_out) if isinstance(posterior, NearestSet) else posterior
        mean, variance = around.predict(latents, noiseless=True)
        steps = _STEP * torch.eye(latents.shape[1]).to(latents)
        slopes = [(around.predict(latents + step)[0] - around.predict(latents - step)[0]) / (2 * _STEP) for step in steps]
        return cls(latents.double(), (mean + loc).double(), variance.double(), torch.stack(slopes, -1).double())

    def spread(self, seen: Tensor, noise: Tensor) -> Tensor:
        """Returns variances ``(M, D)`` of the means under the normals.

        They hold at temperature one, where entries ``(M, D)`` are observed.
        """
        precision = seen / (self.variance + noise)
        curvature = torch.einsum("mdq,md,mdr->mqr", self.slopes, precision, self.slopes)
        root = torch.linalg.cholesky(curvature + torch.eye(self.latents.shape[1]).to(curvature))
        whitened: Tensor = torch.linalg.solve_triangular(root, self.slopes.mT, upper=False)
        return whitened.square().sum(1)

    def log_joint(self, x: Tensor, noise: Tensor) -> Tensor:
        """Returns log joint densities ``(M,)`` of observed entries and latents.

        Data points are ``(M, D)``, and densities are correct up to constants.
        """
        spread = self.variance + noise
        terms = torch.where(x.isnan(), 0.0, (x - self.mean).square() / spread + spread.log())
        return -(terms.sum(1) + self.latents.square().sum(1)) / 2
