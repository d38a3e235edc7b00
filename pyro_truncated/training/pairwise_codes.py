"""Codes with pairwise interactions, refined from a linear model's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_truncated.utils.devices import device_of

# Alternations of states and effects; the relative gain in squared error that ends them.
_PASSES, _AT_REST = 30, 1e-4
# Relative gain that a redrawn latent needs; vain redraws of each latent before the search ends.
_LITTLE, _DRAWS = 2e-3, 5
# Principal components of the residual, in whose span a redrawn latent gets its direction.
_COMPONENTS = 4
# Prior of effects in data points; least data points per effect.
_RIDGE, _FEWEST_FOR_EFFECT = 0.3, 4
# Largest product of effects, values, latents and data points in a pass.
_MOST_WORK = 1e9


@torch.no_grad()
def explaining_pairs(code: Tensor, values: Tensor, generator: torch.Generator | None) -> Tensor:
    r"""Refines a code by effects of latents and of pairs.

    .. math:: \min_{s, a, b, c} \sum_n \|v_n - a - \sum_h b_h s_{nh} - \sum_{h < j} c_{hj} s_{nh} s_{nj}\|^2

    by alternating optimisation of states (one latent of every data point after the other) and effects. Then latents are redrawn one
    after the other. A redrawn latent is active where the residual points into a random one of its main directions. It is kept if the
    error ends lower.

    Args:
        code: binary, ``(N, H)``, on any device.
        values: ``(N, D)``.
        generator: source of randomness.

    Returns:
        The code ``(N, H)``, where the values are. It is the given one if the effects of pairs are more than the data determine, or too
        many.
    """
    code = code.to(values.device)
    size = code.shape[1]
    effects = 1 + size + size * (size - 1) // 2
    if len(code) < _FEWEST_FOR_EFFECT * effects or len(code) * effects * values.shape[1] * size > _MOST_WORK:
        return code
    values = values.double()
    best, lowest = _settled(code.double(), values)
    failed = 0
    while failed < _DRAWS * size:
        found, error = _settled(_redrawn(best, failed % size, values, generator), values)
        if error < (1 - _LITTLE) * lowest:
            best, lowest, failed = found, error, 0
        else:
            failed += 1
    return best.to(code)


def _settled(code: Tensor, values: Tensor) -> tuple[Tensor, float]:
    """Alternates states and effects to convergence; returns code and error."""
    weights, before = _effects(code, values), math.inf
    for _ in range(_PASSES):
        error = _errors(code, values, weights)
        for latent in range(code.shape[1]):
            flipped = code.clone()
            flipped[:, latent] = 1 - flipped[:, latent]
            other = _errors(flipped, values, weights)
            code = torch.where((other < error).unsqueeze(1), flipped, code)
            error = torch.minimum(error, other)
        weights = _effects(code, values)
        now = float(_errors(code, values, weights).sum())
        if now > (1 - _AT_REST) * before:
            break
        before = now
    return code, now


def _redrawn(code: Tensor, latent: int, values: Tensor, generator: torch.Generator | None) -> Tensor:
    """Redraws a latent where the residual is largest in a random direction.

    It is active as often as before.
    """
    without = code.clone()
    without[:, latent] = 0
    left = values - _pairs(without) @ _effects(without, values)
    directions = torch.linalg.svd(left, full_matrices=False).Vh
    components = left @ directions[:_COMPONENTS].mT
    drawn = torch.randn(components.shape[1], generator=generator, dtype=torch.float64, device=device_of(generator)).to(values)
    along = components @ drawn
    number = int(code[:, latent].sum().clamp(1, len(code) - 1))
    without[along.topk(number).indices, latent] = 1
    return without


def _effects(code: Tensor, values: Tensor) -> Tensor:
    """The best effects of latents and pairs, ``(1 + H + H (H - 1) / 2, D)``."""
    pairs = _pairs(code)
    effects: Tensor = torch.linalg.solve(pairs.mT @ pairs + _RIDGE * torch.eye(pairs.shape[1]).to(pairs), pairs.mT @ values)
    return effects


def _errors(code: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """The square error of each data point, ``(N,)``."""
    return (values - _pairs(code) @ weights).square().sum(1)


def _pairs(code: Tensor) -> Tensor:
    """Ones, latents and their products, ``(N, 1 + H + H (H - 1) / 2)``."""
    first, second = torch.triu_indices(code.shape[1], code.shape[1], 1, device=code.device)
    return torch.cat([torch.ones_like(code[:, :1]), code, code[:, first] * code[:, second]], 1)
