"""Random numbers keyed by the position of a data point.

They are the same on every device, in any batch, block and process. Each draw (splitmix64) depends on the seed of a run, the run's progress,
the number of the operator's call, and the position of the data point among all data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend, is_vectorised
from pyro_truncated.utils.budget import rows_per_block

# Odd numbers with well spread bits, as signed 64-bit integers: the golden ratio, and those of a published 64-bit finaliser (splitmix64).
GOLDEN, FINALISER, SECOND_FINALISER = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_WORD = 2**64 - 1


class Stream:
    """The seeds of successive calls of operators; equal streams give equal seeds.

    It stands in for a generator wherever operators and searches take one.

    Args:
        seed: of all of them, a number from 0 to 2**63 - 1.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self._count = seed, 0
        self._branches: dict[int, Stream] = {}
        self._ahead: dict[int, CachedSeed] = {}
        # Of generators by their identity, which they keep as long as they are held; shared by all streams that begin again.
        self._seeds: dict[int, tuple[torch.Generator, int]] = {}

    def next(self) -> int:
        """The next seed."""
        self._count += 1
        seed = mix_bits(self.seed, self._count)
        return self._ahead.pop(seed, seed)

    def draw_ahead(self, rows: Tensor, counts: Sequence[int]) -> None:
        """Draws the first ``counts`` words of the next seeds together."""
        seeds = [mix_bits(self.seed, self._count + 1 + i) for i in range(len(counts))]
        draws = backend("random", rows).several(rows, seeds, counts)
        self._ahead = {seed: CachedSeed(seed, rows, *words) for seed, words in zip(seeds, draws, strict=True)}

    def again(self) -> Stream:
        """The stream, with its branches, from its beginning."""
        stream = Stream(self.seed)
        stream._seeds = self._seeds
        return stream

    def branch(self, generator: torch.Generator | None) -> Stream:
        """A stream for an object, seeded once by its own generator."""
        if generator is None:
            return self
        key = id(generator)
        if key not in self._seeds:
            self._seeds[key] = generator, draw_seed(generator)
        return self._branches.setdefault(key, Stream(self._seeds[key][1]))


class CachedSeed(int):
    """A seed with what has been drawn for it already."""

    rows: Tensor
    streams: Tensor
    words: Tensor

    def __new__(cls, seed: int, rows: Tensor, streams: Tensor, words: Tensor) -> CachedSeed:
        """A number that carries tensors."""
        instance = super().__new__(cls, seed)
        instance.rows, instance.streams, instance.words = rows, streams, words
        return instance


Source = torch.Generator | Stream | None


def draw_ahead(counts: Sequence[int], *, rows: Tensor, generator: Source = None) -> None:
    """Draws random words for the next calls of operators together.

    On a device a few large operations take the place of many small ones. Elsewhere, and where the words would take much of the memory
    budget, nothing is drawn ahead.

    Args:
        counts: number of words per data point that each call takes; 0 where that is not known.
        rows: positions ``(N,)`` of the data points.
        generator: source of the seeds.
    """
    if counts and isinstance(generator, Stream) and is_vectorised(rows) and len(rows) <= rows_per_block(64 * sum(counts)):
        generator.draw_ahead(rows, counts)


def draw_seed(source: Source = None) -> int:
    """A 63-bit integer that seeds one operator call."""
    if isinstance(source, Stream):
        return source.next()
    device = "cpu" if source is None else source.device
    return int(torch.randint(2**63 - 1, (), generator=source, device=device))


def mix_bits(*numbers: int) -> int:
    """Hashes integers to 63 bits; all bits and their order count."""
    state = 0
    for number in numbers:
        state = _mix((state + _mix(((number + 1) * GOLDEN) & _WORD)) & _WORD)
    return state >> 1


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * FINALISER) & _WORD
    x = ((x ^ (x >> 27)) * SECOND_FINALISER) & _WORD
    return x ^ (x >> 31)


def positions(rows: Tensor | None, num_data: int, device: torch.device) -> Tensor:
    """Positions ``(N,)`` of data points on a device, by default all.

    Raises:
        ValueError: if they are no integers, one for each data point.
    """
    if rows is None:
        return torch.arange(num_data, device=device)
    if rows.shape != (num_data,) or rows.dtype != torch.int64:
        raise ValueError(
            f"rows must be the positions of {num_data} data points, int64 of shape ({num_data},); "
            f"got {rows.dtype} of shape {tuple(rows.shape)}"
        )
    return rows.to(device)


def uniform(rows: Tensor, shape: Sequence[int] = (), *, generator: Source = None) -> Tensor:
    """Uniform random numbers in [0, 1) for data points, with 53 random bits.

    Args:
        rows: positions of the data points among all data, ``(N,)`` int64; the numbers come to their device.
        shape: how many for each data point.
        generator: source of the seed.

    Returns:
        ``(N, *shape)`` in float64.
    """
    seed = draw_seed(generator)
    number = math.prod(shape)
    numbers: Tensor = backend("random", rows).uniform_numbers(positions(rows, len(rows), rows.device), number, seed)
    return numbers.view(len(rows), *shape)


def uniform_integers(rows: Tensor, bound: int, shape: Sequence[int] = (), *, generator: Source = None) -> Tensor:
    """Uniform random integers in ``0 .. bound - 1`` for data points, ``(N, *shape)`` int64; see :func:`uniform`."""
    return (uniform(rows, shape, generator=generator) * bound).long()
