"""Vectorised spike-and-slab likelihoods for any device: all latents, masked by the states, in batched Cholesky factors."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.vectorised.quadratic import _blocks


def collapse(states: Tensor, linear: Tensor, gram: Tensor, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Integrates out slabs :math:`z = \mu + \tau \odot e` with standard normal :math:`e`.

    With :math:`t = b \odot \tau`, :math:`m = b \odot \mu` and the precision :math:`M = I + \mathrm{diag}(t)\, G\, \mathrm{diag}(t)` of the
    posterior :math:`\mathcal N(M^{-1} u, M^{-1})` of :math:`e`, where :math:`u = t \odot (a - G m)`, the log density is

    .. math:: m^\top a - \tfrac12 m^\top G m + \tfrac12 u^\top M^{-1} u - \tfrac12 \log |M|

    plus terms that do not depend on the state. Nothing is divided by the slabs' variances, and latents that are off keep their prior.

    Args:
        states: indicators :math:`b`, ``(*batch, H)``.
        linear: :math:`a = W^\top \Lambda y`, ``(*batch, H)``.
        gram: :math:`G = W^\top \Lambda W`, ``(*batch, H, H)``.
        mean: means of the slabs :math:`\mu`, ``(*batch, H)``.
        deviation: standard deviations of the slabs :math:`\tau`, ``(*batch, H)``.

    Returns:
        The log density ``(*batch)``, the Cholesky factor of :math:`M` ``(*batch, H, H)``, and :math:`M^{-1} u` ``(*batch, H)``.
    """
    amplitude, spread = states * mean, states * deviation
    field = linear - (gram @ amplitude.unsqueeze(-1)).squeeze(-1)
    identity = torch.eye(states.shape[-1], dtype=gram.dtype, device=gram.device)
    factor = torch.linalg.cholesky(identity + spread.unsqueeze(-1) * gram * spread.unsqueeze(-2))
    target = spread * field
    solution = torch.cholesky_solve(target.unsqueeze(-1), factor).squeeze(-1)
    energy = 0.5 * (amplitude * (linear + field) + target * solution).sum(-1) - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return energy, factor, solution


def log_prob(words: Tensor, linear: Tensor, scaled: Tensor, observed: Tensor | None, mean: Tensor, deviation: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.compiled.spike_slab.log_prob`."""
    num_latents = scaled.shape[1]
    gram = _gram(scaled, observed)
    parameters = linear.double().unsqueeze(1), gram, mean.double(), deviation.double()
    blocks = _blocks(words, num_latents, num_latents**2, torch.float64)
    return torch.cat([collapse(states, *parameters)[0] for _, states in blocks], 1)


def moments(
    words: Tensor,
    weights: Tensor,
    linear: Tensor,
    scaled: Tensor,
    observed: Tensor | None,
    mean: Tensor,
    deviation: Tensor,
    per_datum: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.spike_slab_moments`; the other arguments are those of :func:`log_prob`."""
    num_data, num_latents = linear.shape
    gram, mean, deviation = _gram(scaled, observed), mean.double(), deviation.double()
    active = linear.new_zeros(num_data, num_latents, dtype=torch.float64)
    first = torch.zeros_like(active)
    second = linear.new_zeros(num_data, num_latents, num_latents, dtype=torch.float64)
    for where, states in _blocks(words, num_latents, num_latents**2, torch.float64):
        _, factor, solution = collapse(states, linear.double().unsqueeze(1), gram, mean, deviation)
        weight = weights[:, where].double()
        spread, value = states * deviation, states * (mean + deviation * solution)
        covariance = spread.unsqueeze(-1) * torch.cholesky_inverse(factor) * spread.unsqueeze(-2)
        active += (weight.unsqueeze(-1) * states).sum(1)
        first += (weight.unsqueeze(-1) * value).sum(1)
        second += torch.einsum("nc,nchi->nhi", weight, covariance + value.unsqueeze(-1) * value.unsqueeze(-2))
    return active, first, second if per_datum else second.sum(0)


def _gram(scaled: Tensor, observed: Tensor | None) -> Tensor:
    """Gram matrices ``(1, 1, H, H)``, or ``(N, 1, H, H)`` over each data point's observed entries."""
    scaled = scaled.double()
    if observed is None:
        return (scaled.mT @ scaled)[None, None]
    num_latents = scaled.shape[1]
    squares = (scaled.unsqueeze(-1) * scaled.unsqueeze(-2)).flatten(1)
    gram: Tensor = observed.double() @ squares
    return gram.reshape(-1, 1, num_latents, num_latents)
