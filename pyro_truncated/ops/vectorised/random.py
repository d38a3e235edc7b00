"""Counter-based random numbers in plain torch, on any device.

They equal those of :mod:`pyro_truncated.ops.compiled.random`, bit by bit: 64-bit words in signed integers, whose sums and products wrap
around.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pyro_truncated.ops.streams import FINALISER, GOLDEN, SECOND_FINALISER, CachedSeed
from pyro_truncated.utils.budget import current_budget, row_slices


def _to_signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


STEP = GOLDEN


def mix(x: Tensor) -> Tensor:
    """Scrambles 64 bits."""
    # Masks keep the lowest bits: of signed numbers the sign is shifted in.
    x = (x ^ ((x >> 30) & (2**34 - 1))) * FINALISER
    x = x.bitwise_xor_((x >> 27).bitwise_and_(2**37 - 1)).mul_(SECOND_FINALISER)
    return x.bitwise_xor_((x >> 31).bitwise_and_(2**33 - 1))


def stream(seed: int, rows: Tensor) -> Tensor:
    """First states ``(N,)`` of the streams of data points."""
    return seed.streams if isinstance(seed, CachedSeed) and seed.rows is rows else mix(_scramble(rows) + seed)


def draw_words(seed: int, rows: Tensor, count: int) -> Tensor:
    """The first so many words of the streams of data points, ``(N, count)``."""
    if isinstance(seed, CachedSeed) and seed.rows is rows and seed.words.shape[1] == count:
        return seed.words
    return numbers(stream(seed, rows), count)


def several(rows: Tensor, seeds: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Data points' streams by several seeds, and ``counts`` first words of each."""
    keys = torch.tensor(seeds, dtype=torch.int64, device="cpu").to(rows.device, non_blocking=True)
    streams = mix(_scramble(rows).unsqueeze(1) + keys)
    owner, steps = _places(tuple(counts), rows.device)
    words = mix(streams[:, owner] + steps)
    return zip(streams.unbind(1), words.split(list(counts), 1), strict=True)


@functools.lru_cache(maxsize=64)
def _places(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns each word's stream and its distance from the first state."""
    owner = [number for number, count in enumerate(counts) for _ in range(count)]
    steps = [step for count in counts for step in range(1, count + 1)]
    return torch.tensor(owner, dtype=torch.int64, device=device), torch.tensor(steps, dtype=torch.int64, device=device) * STEP


@functools.lru_cache(maxsize=1)
def _scramble(rows: Tensor) -> Tensor:
    # The operators of a search draw for the same data points, one after the other: by the very tensor of their positions.
    return mix((rows + 1) * STEP)


def advance(streams: Tensor, count: int) -> Tensor:
    """Streams after so many steps."""
    return streams + _to_signed((count * STEP) % 2**64)


def strides(streams: Tensor, number: int, size: int) -> Tensor:
    """Streams ``(N, number)``, each ``size`` steps after the previous."""
    return streams.unsqueeze(-1) + torch.arange(number, device=streams.device) * _to_signed((size * STEP) % 2**64)


def numbers(streams: Tensor, count: int) -> Tensor:
    """The first so many words of streams, ``(*batch, count)``."""
    return mix(streams.unsqueeze(-1) + torch.arange(1, count + 1, device=streams.device) * STEP)


def blocks(streams: Tensor, count: int) -> Iterator[slice]:
    """Yields slices of data points whose random words fit cache and budget."""
    # Where flips of 280 000 states of 20 latents took the least time on the CPU; a quarter or four
    # times of it is hardly worse.
    budget = min(current_budget(), 2**24) if streams.is_cpu else None
    return row_slices(len(streams), 64 * count, budget)


def uniform(words: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) with 53 random bits."""
    numerators: Tensor = (words >> 11).bitwise_and_(2**53 - 1)
    return numerators.double().mul_(2.0**-53)


def below(words: Tensor, bound: int | Tensor) -> Tensor:
    """Uniform integers in 0 .. bound - 1, for bounds below 2**31."""
    scaled: Tensor = (words >> 32).bitwise_and_(2**32 - 1) * bound
    return scaled >> 32


def uniform_numbers(rows: Tensor, count: int, seed: int) -> Tensor:
    """See :func:`pyro_truncated.ops.uniform`."""
    return uniform(draw_words(seed, rows, count))


def shuffle_step(order: Tensor, i: int, words: Tensor) -> Tensor:
    """Swaps entries ``i`` of rows ``(N, K)`` with random later ones; returns these."""
    place = i + below(words, order.shape[1] - i)
    here, there = order[:, i : i + 1].clone(), order.gather(1, place)
    order.scatter_(1, place, here)
    order[:, i : i + 1] = there
    return there
