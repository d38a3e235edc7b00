"""States to start from in plain torch; they are those of :mod:`pyro_truncated.ops.compiled.initial`."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.fields import Fields
from pyro_truncated.ops.vectorised import random
from pyro_truncated.ops.vectorised.evolution import changed_by
from pyro_truncated.ops.vectorised.selection import repeated

_MOST_CHANGES = 24


def initial_states(singletons: Tensor, others: Tensor, fields: Fields, num_states: int, rows: Tensor, seed: int) -> Tensor:
    """See :func:`pyro_truncated.ops.initial_states`; ``others`` are the states of several active latents, if these are few, else empty."""
    streams = random.stream(seed, rows)
    num_singletons = min(len(singletons), num_states - 1)
    num_others = num_states - 1 - num_singletons
    first = [singletons.new_zeros(len(rows), 1, fields.num_words), _subsets(singletons, num_singletons, streams)]
    if num_singletons < len(singletons):
        streams = random.advanced(streams, num_singletons)
    if len(others):
        return torch.cat([*first, _subsets(others, num_others, streams)], 1)
    return _add_sparse(torch.cat(first, 1), num_others, fields, streams)


def _subsets(choices: Tensor, size: int, streams: Tensor) -> Tensor:
    """Random distinct rows of ``choices`` for every data point, ``(N, size, W)``, in order if all of them fit: a partial shuffle."""
    if size == len(choices):
        return choices.expand(len(streams), -1, -1)
    draws, order = random.numbers(streams, size), torch.arange(len(choices), device="cpu").repeat(len(streams), 1)
    for i in range(size):
        random.shuffle_step(order, i, draws[:, i : i + 1])
    return choices[order[:, :size]]


def _add_sparse(words: Tensor, number: int, fields: Fields, streams: Tensor) -> Tensor:
    """Adds new states with two changes and a Poisson number more, of a mean between 0 and 2 that belongs to the data point."""
    num_data, num_first, num_words = words.shape
    streams = streams.unsqueeze(1) + random.STEP
    walks = random.mix(streams + torch.arange(num_first, num_first + number, device="cpu") * random.STEP)
    steps = 2 + _poisson(random.uniform(random.mix(walks + random.STEP)), 2 * random.uniform(random.mix(streams)))
    words = torch.cat([words, words.new_zeros(num_data, number, num_words)], 1)
    new = words[:, num_first:]
    for step in range(int(steps.max()) if steps.numel() else 0):
        _walk(new, fields, walks, torch.full_like(steps, step), step < steps)
    # A random walk leaves the region of states that are taken, however crowded it is.
    while bool((surplus := repeated(words)[:, num_first:]).any()):
        _walk(new, fields, walks, steps, surplus)
        steps += surplus
    return words


def _poisson(uniform: Tensor, mean: Tensor) -> Tensor:
    """Poisson numbers by inversion, for means up to 2."""
    probability = (-mean).exp()
    cumulative, count = probability, torch.zeros(uniform.shape, dtype=torch.int64, device="cpu")
    for number in range(1, _MOST_CHANGES + 1):
        count += uniform >= cumulative
        probability = probability * (mean / number)
        cumulative = cumulative + probability
    return count


def _walk(words: Tensor, fields: Fields, walks: Tensor, step: Tensor, moves: Tensor) -> None:
    """Lets some states ``(N, C, W)`` make a step of their walks."""
    state = walks + (2 * step + 2) * random.STEP
    draws = random.mix(torch.stack([state, state + random.STEP], -1))
    words ^= torch.where(moves.unsqueeze(-1), changed_by(words, fields, draws), 0)
