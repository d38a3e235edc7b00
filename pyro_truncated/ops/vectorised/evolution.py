"""The operators of :mod:`pyro_truncated.ops.evolution` in plain torch, for any device."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_truncated.ops.fields import Fields, pack
from pyro_truncated.ops.vectorised.values import unpack
from pyro_truncated.utils.budget import blocks_of_rows


def select_parents(log_joint: Tensor, num_parents: int, by_fitness: bool, seed: int) -> Tensor:
    """Successive draws without replacement as the smallest of exponential arrival times (Efraimidis & Spirakis, 2006)."""
    generator = torch.Generator(log_joint.device).manual_seed(seed)
    log_joint = log_joint.double()
    possible = log_joint > -math.inf
    lowest = log_joint.masked_fill(~possible, math.inf).amin(1, keepdim=True)
    fitness = (log_joint - lowest) + lowest.abs() if by_fitness else torch.ones_like(log_joint)
    fitness = torch.where(possible, fitness, 0.0)
    arrival = torch.empty_like(fitness).exponential_(generator=generator)
    # States without fitness come after all others in random order, those of probability zero at the very end.
    rank = torch.where(fitness > 0, 0, torch.where(possible, 1, 2))
    order = torch.where(fitness > 0, arrival / fitness, arrival).argsort(dim=1)
    return order.gather(1, rank.gather(1, order).argsort(dim=1, stable=True))[:, :num_parents]


def cross(parents: Tensor, fields: Fields, seed: int) -> Tensor:
    """Both offspring of every pair of parents, pair after pair."""
    device = parents.device
    generator = torch.Generator(device).manual_seed(seed)
    num_data, num_parents, num_words = parents.shape
    first, second = torch.triu_indices(num_parents, num_parents, 1, device=device)
    cut = torch.randint(1, fields.num_latents, (num_data, len(first), 1), generator=generator, device=device)
    position = torch.arange(num_words, device=device)
    word, shift = fields.word.to(device)[cut], fields.shift.to(device)[cut]
    tail = torch.where(position > word, -1, torch.where(position < word, 0, ~((1 << shift) - 1)))
    a, b = parents[:, first], parents[:, second]
    swapped = (a ^ b) & tail
    return torch.stack([a ^ swapped, b ^ swapped], 2).flatten(1, 2)


def flip_random(words: Tensor, fields: Fields, seed: int) -> Tensor:
    """Changes one latent of every state."""
    generator = torch.Generator(words.device).manual_seed(seed)

    def change(values: Tensor) -> Tensor:
        return _one_of(fields, values, generator)

    return _mutate(words, fields, change, generator)


def flip_sparse(words: Tensor, fields: Fields, switch_on: Tensor, switch_off: Tensor, rate: float, seed: int) -> Tensor:
    """Sparsity-driven flips, given the probabilities for every number of active binary latents."""
    device = words.device
    generator = torch.Generator(device).manual_seed(seed)
    cardinality = fields.cardinality.to(device)
    binary = cardinality == 2
    switch_on, switch_off = switch_on.to(device), switch_off.to(device)

    def change(values: Tensor) -> Tensor:
        on = (values != 0) & binary
        active = on.sum(-1, keepdim=True)
        probability = torch.where(on, switch_off[active], switch_on[active])
        probability = torch.where(binary, probability, torch.where(cardinality > 2, rate, 0.0))
        flips = torch.rand(values.shape, generator=generator, device=device, dtype=torch.double) < probability
        return torch.where(flips.any(-1, keepdim=True), flips, _one_of(fields, values, generator))

    return _mutate(words, fields, change, generator)


def _one_of(fields: Fields, values: Tensor, generator: torch.Generator) -> Tensor:
    """Marks one latent of more than one value per state, ``(n, C, L)`` booleans."""
    mutable = fields.mutable.to(values.device)
    index = torch.randint(len(mutable), (*values.shape[:-1], 1), generator=generator, device=values.device)
    return torch.zeros_like(values, dtype=torch.bool).scatter_(-1, mutable[index], True)


def _mutate(words: Tensor, fields: Fields, change: Callable[[Tensor], Tensor], generator: torch.Generator) -> Tensor:
    """Moves the latents that ``change`` marks to another of their values, all of them equally probable, in blocks of data points."""
    out = torch.empty_like(words, memory_format=torch.contiguous_format)
    cardinality = fields.cardinality.to(words.device)
    for rows in blocks_of_rows(len(words), 32 * words.shape[1] * fields.num_latents):
        values = unpack(words[rows], fields, torch.int64)
        step = torch.rand(values.shape, generator=generator, device=words.device) * (cardinality - 1)
        step = 1 + torch.minimum(step.long(), (cardinality - 2).clamp(min=0))
        out[rows] = pack(torch.where(change(values), (values + step) % cardinality, values), fields)
    return out
