"""The counter-based random numbers of :mod:`pyro_truncated.ops.compiled.random` in plain torch, bit by bit the same on any device.

They are 64-bit words in signed integers: sums and products wrap around as those of unsigned ones do, and a mask cuts off what a shift
brings in from the sign.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


STEP = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
_LOW_33, _LOW_34, _LOW_37, _LOW_53, _LOW_32 = (2**bits - 1 for bits in (33, 34, 37, 53, 32))


def mix(x: Tensor) -> Tensor:
    """Scrambles 64 bits."""
    x = (x ^ ((x >> 30) & _LOW_34)) * _FIRST
    x = x.bitwise_xor_((x >> 27).bitwise_and_(_LOW_37)).mul_(_SECOND)
    return x.bitwise_xor_((x >> 31).bitwise_and_(_LOW_33))


def stream(seed: int, rows: Tensor) -> Tensor:
    """First states ``(N,)`` of the streams of data points."""
    return mix(_scrambled(rows) + seed)


@functools.lru_cache(maxsize=1)
def _scrambled(rows: Tensor) -> Tensor:
    # The operators of a search draw for the same data points, one after the other: by the very tensor of their positions.
    return mix((rows + 1) * STEP)


def advanced(streams: Tensor, count: int) -> Tensor:
    """Streams after so many steps."""
    return streams + _signed((count * STEP) % 2**64)


def states_of(streams: Tensor, count: int) -> Tensor:
    """The states of streams after so many steps, ``(*batch, count)``."""
    return streams.unsqueeze(-1) + torch.arange(1, count + 1, device=streams.device) * STEP


def numbers(streams: Tensor, count: int) -> Tensor:
    """The first so many words of streams, ``(*batch, count)``."""
    return mix(states_of(streams, count))


def uniform(words: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) with 53 random bits."""
    numerators: Tensor = (words >> 11).bitwise_and_(_LOW_53)
    return numerators.double().mul_(2.0**-53)


def below(words: Tensor, bound: int | Tensor) -> Tensor:
    """Uniform integers in 0 .. bound - 1, for bounds below 2**31."""
    scaled: Tensor = (words >> 32).bitwise_and_(_LOW_32) * bound
    return scaled >> 32


def uniform_numbers(rows: Tensor, count: int, seed: int) -> Tensor:
    """See :func:`pyro_truncated.ops.uniform`."""
    return uniform(numbers(stream(seed, rows), count))


def shuffle_step(order: Tensor, i: int, words: Tensor) -> Tensor:
    """One step of a shuffle of rows ``(N, K)``, in place: brings to place ``i`` what random words ``(N, 1)`` choose; returns that."""
    place = i + below(words, order.shape[1] - i)
    here, there = order[:, i : i + 1].clone(), order.gather(1, place)
    order.scatter_(1, place, here)
    order[:, i : i + 1] = there
    return there
