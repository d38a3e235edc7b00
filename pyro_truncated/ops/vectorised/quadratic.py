"""Vectorised versions of the CPU kernels for any device: states are unpacked a block at a time, under a memory budget."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK_BYTES = 2**28


def unpack_bits(words: Tensor, num_latents: int, dtype: torch.dtype) -> Tensor:
    """Unpacks words ``(..., W)`` of binary latents into ``(..., num_latents)``."""
    octets = words.contiguous().view(torch.uint8).unsqueeze(-1)
    bits = (octets >> torch.arange(8, dtype=torch.uint8, device=words.device)) & 1
    return bits.flatten(-2)[..., :num_latents].to(dtype)


def pair_energy(words: Tensor, linear: Tensor, pairwise: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.pair_energy`."""
    energies = []
    for _, states in _blocks(words, linear.shape[-1], linear.shape[-1], torch.promote_types(linear.dtype, pairwise.dtype)):
        field = linear.unsqueeze(-2) + states @ pairwise.to(states.dtype)
        energies.append((field * states).sum(-1))
    return torch.cat(energies, -1)


def moments(words: Tensor, weights: Tensor, num_latents: int, per_datum: bool) -> tuple[Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.moments`."""
    num_data = weights.shape[0]
    first = weights.new_zeros(num_data, num_latents, dtype=torch.float64)
    second = weights.new_zeros((*((num_data,) if per_datum else ()), num_latents, num_latents), dtype=torch.float64)
    for where, states in _blocks(words, num_latents, num_latents, torch.float64):
        weighted = weights[:, where].double().unsqueeze(-1) * states
        first += weighted.sum(1)
        second += weighted.mT @ states if per_datum else weighted.flatten(0, 1).mT @ states.flatten(0, 1)
    return first, second


def noisy_or_log_prob(words: Tensor, value: Tensor, log_complement: Tensor, log_leak_complement: Tensor, linear: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.noisy_or_log_prob`."""
    value = value.unsqueeze(1)
    log_probs = []
    for _, states in _blocks(words, log_complement.shape[1], log_complement.shape[0], log_complement.dtype):
        off = log_off(states, log_complement, log_leak_complement)
        terms = torch.where(value == 1, log1mexp(off), off)
        log_probs.append(torch.where(value.isnan(), 0.0, terms).sum(-1) + (states * linear.unsqueeze(1)).sum(-1))
    return torch.cat(log_probs, -1)


def noisy_or_statistics(
    words: Tensor, weights: Tensor, value: Tensor, log_complement: Tensor, log_leak_complement: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.noisy_or_statistics`."""
    log_complement, log_leak_complement, weights = log_complement.double(), log_leak_complement.double(), weights.double()
    num_observed, num_latents = log_complement.shape
    first = weights.new_zeros(len(value), num_latents)
    ratio = weights.new_zeros(num_observed, num_latents)
    leak_ratio = weights.new_zeros(num_observed)
    is_on = (value == 1).unsqueeze(1)
    for where, states in _blocks(words, num_latents, num_observed, torch.float64):
        weight = weights[:, where].unsqueeze(-1)
        share = weight / -torch.expm1(log_off(states, log_complement, log_leak_complement))
        # A state of weight zero contributes nothing even where it is impossible.
        share = torch.where(is_on & (weight != 0), share, 0.0)
        first += (weight * states).sum(1)
        ratio += share.flatten(0, 1).mT @ states.flatten(0, 1)
        leak_ratio += share.sum((0, 1))
    return first, ratio, leak_ratio


def square_error(words: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.square_error`."""
    errors = []
    for _, states in _blocks(words, weight.shape[1], weight.shape[0], torch.float64):
        errors.append(_residual(states, value, weight).square() @ precision.double())
    return torch.cat(errors, -1)


def square_error_gradients(words: Tensor, grad: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``(grad * square_error).sum()`` with respect to value, weight and precision."""
    grad_value = torch.zeros_like(value, dtype=torch.float64)
    grad_weight = torch.zeros_like(weight, dtype=torch.float64)
    grad_precision = torch.zeros_like(precision, dtype=torch.float64)
    for where, states in _blocks(words, weight.shape[1], weight.shape[0], torch.float64):
        residual = _residual(states, value, weight)
        slope = grad[:, where].double().unsqueeze(-1) * residual
        grad_precision += (slope * residual).sum((0, 1))
        slope *= 2 * precision.double()
        grad_value += slope.sum(1)
        grad_weight -= slope.flatten(0, 1).mT @ states.flatten(0, 1)
    return grad_value, grad_weight, grad_precision


def log1mexp(x: Tensor) -> Tensor:
    r""":math:`\log(1 - e^x)` for :math:`x \le 0`, accurate at both ends; ``-inf``, with gradient zero, at 0."""
    is_zero, is_near = x == 0, x > -0.6931471805599453
    # Near zero 1 - e^x comes from expm1; far from zero the logarithm of a number close to one comes from log1p. Each branch sees
    # harmless inputs where it is not taken, or its gradient there would turn into NaN.
    near = torch.where(is_near & ~is_zero, x, -0.5).expm1().neg().log()
    far = torch.where(is_near, -1.0, x).exp().neg().log1p()
    return torch.where(is_near, near, far).masked_fill(is_zero, -torch.inf)


def log_off(states: Tensor, log_complement: Tensor, log_leak_complement: Tensor) -> Tensor:
    """``log p(y_d = 0 | s)`` of states ``(..., H)``; a weight of one (log complement minus infinity) acts only where its latent is on."""
    is_certain = log_complement.isneginf()
    result = log_leak_complement + product(log_complement.masked_fill(is_certain, 0.0), states)
    if not bool(is_certain.any()):
        return result
    return result.masked_fill(product(is_certain.to(states.dtype), states) > 0, -torch.inf)


def product(matrix: Tensor, vectors: Tensor) -> Tensor:
    """Matrix ``(*batch, D, H)`` times vectors ``(*batch, H)``; one large product if all vectors share the matrix."""
    return vectors @ matrix.mT if matrix.dim() == 2 else (matrix @ vectors.unsqueeze(-1)).squeeze(-1)


def _residual(states: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    value = value.double().unsqueeze(1)
    return torch.where(value.isnan(), 0.0, value - states @ weight.double().mT)


def _blocks(words: Tensor, num_latents: int, width: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of candidates: where they are, and their states ``(N, c, H)``. A block holds a few tensors ``(N, c, max(H, width))``."""
    size = max(1, _BLOCK_BYTES // max(1, 8 * words.shape[0] * max(num_latents, width)))
    for start in range(0, max(1, words.shape[1]), size):
        where = slice(start, start + size)
        yield where, unpack_bits(words[:, where], num_latents, dtype)
