"""Tables behind the genetic operators: how probable flips are, and how many random numbers they need at most."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Weights of parents that are drawn only when no fitter one is left, in units of the largest fitness: far below what rounding can see.
UNFIT, IMPOSSIBLE = 1e-100, 1e-200

# Of a number of flips that is exceeded less often than this, the rest is cut off.
_NEVER = 1e-18


class SparseFlips(NamedTuple):
    """What decides on flips.

    Attributes:
        log_stay_off: log probability that an idle binary latent stays so, for every number of active ones, ``(H + 1,)`` float64.
        switch_off: probability that an active binary latent is switched off, in units of 2**-32, ``(H + 1,)`` int64.
        log_stay_other: log probability that a latent of several values keeps its value.
        num_on: random numbers for switching on, one for each latent that is met.
        num_other: pairs of random numbers for moving latents of several values.
    """

    log_stay_off: Tensor
    switch_off: Tensor
    log_stay_other: float
    num_on: int
    num_other: int


def sparse_flips(switch_on: Tensor, switch_off: Tensor, rate: float, num_several: int) -> SparseFlips:
    """Tables for probabilities ``(H + 1,)`` to switch on and off, and a rate for latents of several values."""
    num_binary = len(switch_on) - 1
    stay_other = -math.inf if rate == 1 else math.log1p(-rate)
    numbers = most_flips(num_binary, float(switch_on.max())), most_flips(num_several, rate)
    return SparseFlips(torch.log1p(-switch_on), (switch_off * 2.0**32).round().long(), stay_other, *numbers)


def most_flips(number: int, probability: float) -> int:
    r"""A number of successes that so many independent trials exceed with probability below 1e-18, by the Chernoff bound.

    :math:`P(X \ge x) \le \exp(-x \log(x / \mu) + x - \mu)` for a sum of mean :math:`\mu < x`.
    """
    mean = number * probability
    if mean == 0:
        return 0
    exceeds = (x for x in range(math.ceil(mean), number) if x > mean and x * math.log(x / mean) - x + mean > -math.log(_NEVER))
    return next(exceeds, number)
