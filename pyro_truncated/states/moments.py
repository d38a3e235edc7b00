"""Means and variances of observations in given states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Returns means and variances of the observations in ``M`` states.

    The states may belong to any data points. All sites stand side by side.

    Attributes:
        words: the states, ``(M, num_words)``.
        mean: of each observed value in each state, ``(M, D)``.
        variance: likewise.
    """

    words: Tensor
    mean: Tensor
    variance: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Moments]) -> Moments:
        """Those of all parts."""
        return parts[0] if len(parts) == 1 else cls(*map(torch.cat, zip(*parts, strict=True)))
