"""What a model expects to observe of data points in states: means and variances, beside the states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Means and variances of the observations of ``N`` data points in ``C`` states of each, those of all sites side by side.

    Attributes:
        words: the states, ``(N, C, num_words)``.
        mean: of each observed value in each state, ``(N, C, D)``.
        variance: likewise.
    """

    words: Tensor
    mean: Tensor
    variance: Tensor

    @classmethod
    def joined(cls, blocks: Sequence[Moments]) -> Moments:
        """Those of blocks of states of the same data points."""
        return cls(*(torch.cat(parts, 1) for parts in zip(*blocks, strict=True)))
