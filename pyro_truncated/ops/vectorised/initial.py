"""States to start from in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.fields import Fields
from pyro_truncated.ops.vectorised.evolution import flip_random
from pyro_truncated.ops.vectorised.selection import repeated


def initial_states(singletons: Tensor, others: Tensor, fields: Fields, shape: tuple[int, int], seed: int) -> Tensor:
    """See :func:`pyro_truncated.ops.initial_states`; ``others`` are the states of several active latents, if these are few, else empty."""
    generator = torch.Generator("cpu").manual_seed(seed)
    num_data, num_states = shape
    num_singletons = min(len(singletons), num_states - 1)
    num_others = num_states - 1 - num_singletons
    first = [singletons.new_zeros(num_data, 1, fields.num_words), _subsets(singletons, num_data, num_singletons, generator)]
    if len(others):
        return torch.cat([*first, _subsets(others, num_data, num_others, generator)], 1)
    return _add_sparse(torch.cat(first, 1), num_others, fields, generator)


def _subsets(choices: Tensor, num_data: int, size: int, generator: torch.Generator) -> Tensor:
    """Random distinct rows of ``choices`` for every data point, ``(N, size, W)``, in order if all of them fit."""
    if size == len(choices):
        return choices.expand(num_data, -1, -1)
    chosen = torch.rand(num_data, len(choices), generator=generator, device="cpu").argsort(1)[:, :size]
    return choices[chosen]


def _add_sparse(words: Tensor, number: int, fields: Fields, generator: torch.Generator) -> Tensor:
    """Adds new states with two changes and a Poisson number more, of a mean between 0 and 2 that belongs to the data point."""
    num_data, num_first, num_words = words.shape
    mean = 2 * torch.rand(num_data, 1, generator=generator, device="cpu")
    changes = 2 + torch.poisson(mean.expand(-1, number), generator).unsqueeze(-1)
    words = torch.cat([words, words.new_zeros(num_data, number, num_words)], 1)
    new = words[:, num_first:]
    for step in range(int(changes.max()) if changes.numel() else 0):
        new.copy_(torch.where(step < changes, _flipped(new, fields, generator), new))
    # A random walk leaves the region of states that are taken, however crowded it is.
    while bool((surplus := repeated(words)[:, num_first:].unsqueeze(-1)).any()):
        new.copy_(torch.where(surplus, _flipped(new, fields, generator), new))
    return words


def _flipped(words: Tensor, fields: Fields, generator: torch.Generator) -> Tensor:
    return flip_random(words, fields, int(torch.randint(2**63 - 1, (), generator=generator, device="cpu")))
