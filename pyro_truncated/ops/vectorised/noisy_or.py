"""Noisy-OR likelihoods of packed states in plain torch, for any device.

A file of its own, as in the other folders of kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.noisy_or import log1mexp, log_off
from pyro_truncated.ops.vectorised.latent_values import state_blocks


def noisy_or_log_prob(words: Tensor, value: Tensor, log_complement: Tensor, log_leak_complement: Tensor, linear: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.noisy_or_log_prob`."""
    value = value.unsqueeze(1)
    log_probs = []
    for _, states in state_blocks(words, log_complement.shape[1], log_complement.shape[0], log_complement.dtype):
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
    for where, states in state_blocks(words, num_latents, num_observed, torch.float64):
        weight = weights[:, where].unsqueeze(-1)
        share = weight / -torch.expm1(log_off(states, log_complement, log_leak_complement))
        # A state of weight zero contributes nothing even where it is impossible.
        share = torch.where(is_on & (weight != 0), share, 0.0)
        first += (weight * states).sum(1)
        ratio += share.flatten(0, 1).mT @ states.flatten(0, 1)
        leak_ratio += share.sum((0, 1))
    return first, ratio, leak_ratio
