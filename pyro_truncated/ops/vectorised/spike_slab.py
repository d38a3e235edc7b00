"""Spike-and-slab likelihoods in plain torch, for any device: batched Cholesky factors over the active latents of every state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_truncated.ops.unpacked import collapse
from pyro_truncated.ops.vectorised.values import unpack_bits
from pyro_truncated.utils.budget import rows_per_block


class _Active(NamedTuple):
    """The active latents of a block of states, as many places for each as the state with most of them has.

    Attributes:
        where: the states of the block among all of their data points.
        latents: which ones, ``(N, c, K)``; zero in places that are not taken.
        is_taken: which places are, ``(N, c, K)`` in float64.
    """

    where: slice
    latents: Tensor
    is_taken: Tensor


def log_prob(words: Tensor, linear: Tensor, scaled: Tensor, observed: Tensor | None, mean: Tensor, deviation: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.compiled.spike_slab.log_prob`."""
    gram, parameters = gram_of(scaled, observed).squeeze(1), (linear.double(), mean.double(), deviation.double())
    return torch.cat([_collapsed(block, gram, *parameters)[0] for block in _blocks(words, scaled.shape[1])], 1)


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
    gram, linear, mean, deviation = gram_of(scaled, observed).squeeze(1), linear.double(), mean.double(), deviation.double()
    active, first = linear.new_zeros(num_data, num_latents), linear.new_zeros(num_data, num_latents)
    second = linear.new_zeros(num_data if per_datum else 1, num_latents**2)
    for block in _blocks(words, num_latents):
        _, factor, solution = _collapsed(block, gram, linear, mean, deviation)
        weight, index = weights[:, block.where].double().unsqueeze(-1), block.latents
        spread = block.is_taken * deviation[index]
        value = block.is_taken * (mean[index] + deviation[index] * solution)
        covariance = spread.unsqueeze(-1) * torch.cholesky_inverse(factor) * spread.unsqueeze(-2)
        pairs = weight.unsqueeze(-1) * (covariance + value.unsqueeze(-1) * value.unsqueeze(-2))
        active.scatter_add_(1, index.flatten(1), (weight * block.is_taken).flatten(1))
        first.scatter_add_(1, index.flatten(1), (weight * value).flatten(1))
        place = index.unsqueeze(-1) * num_latents + index.unsqueeze(-2)
        second.scatter_add_(1, place.reshape(len(second), -1), pairs.reshape(len(second), -1))
    second = second.unflatten(1, (num_latents, num_latents))
    return active, first, second if per_datum else second[0]


def _blocks(words: Tensor, num_latents: int) -> Iterator[_Active]:
    """Blocks of states with their active latents; at least one, empty if need be."""
    num_data, num_states, _ = words.shape
    size = rows_per_block(16 * num_data * num_latents)
    counts = [unpack_bits(part, num_latents, torch.uint8).sum(-1) for part in words.split(size, 1)]
    most = max([1, *(int(count.max()) for count in counts if count.numel())])
    size = rows_per_block(num_data * (32 * num_latents + 48 * most**2))
    for start in range(0, max(1, num_states), size):
        where = slice(start, start + size)
        bits = unpack_bits(words[:, where], num_latents, torch.bool)
        # Idle latents all go to one place more, which is left out.
        place = torch.where(bits, bits.cumsum(-1) - 1, most)
        latents = torch.arange(num_latents, device=words.device).expand_as(place)
        index = torch.zeros(*bits.shape[:2], most + 1, dtype=torch.int64, device=words.device).scatter_(-1, place, latents)[..., :most]
        is_taken = torch.arange(most, device=words.device) < bits.sum(-1, keepdim=True)
        yield _Active(where, index.masked_fill(~is_taken, 0), is_taken.double())


def _collapsed(block: _Active, gram: Tensor, linear: Tensor, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.unpacked.collapse`, of the active latents alone."""
    index = block.latents
    rows = torch.arange(len(index), device=index.device).view(-1, 1, 1)
    shared = rows if len(gram) > 1 else torch.zeros_like(rows)
    pairs = gram[shared.unsqueeze(-1), index.unsqueeze(-1), index.unsqueeze(-2)]
    return collapse(block.is_taken, linear[rows, index], pairs, mean[index], deviation[index])


def gram_of(scaled: Tensor, observed: Tensor | None) -> Tensor:
    """Gram matrices ``(1, 1, H, H)``, or ``(N, 1, H, H)`` over each data point's observed entries."""
    scaled = scaled.double()
    if observed is None:
        return (scaled.mT @ scaled)[None, None]
    num_latents = scaled.shape[1]
    squares = (scaled.unsqueeze(-1) * scaled.unsqueeze(-2)).flatten(1)
    gram: Tensor = observed.double() @ squares
    return gram.reshape(-1, 1, num_latents, num_latents)
