"""The log probability of a transition, linear in products of bits.

Transitions are those of binary chains.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PairTerms(NamedTuple):
    r"""Coefficients of :math:`\log p(s \mid s') = k + \sum_m b_m s'_m + v_m s_m + c_m s'_m s_m` for ``K`` kinds of transitions.

    Attributes:
        constant: :math:`k`, ``(K,)``.
        previous: :math:`b`, ``(K, M)``.
        current: :math:`v`, ``(K, M)``.
        both: :math:`c`, ``(K, M)``.
        forbidden: transitions of probability zero, Boolean ``(K, M, 2, 2)``. They count as one in the coefficients.
    """

    constant: Tensor
    previous: Tensor
    current: Tensor
    both: Tensor
    forbidden: Tensor


def pair_terms(log_prob: Tensor) -> PairTerms:
    """The coefficients of log transition probabilities ``(K, M, 2, 2)``, in float64."""
    forbidden = log_prob == -torch.inf
    (off_off, off_on), (on_off, on_on) = (row.unbind(-1) for row in log_prob.double().masked_fill(forbidden, 0.0).unbind(-2))
    both = on_on - on_off - off_on + off_off
    return PairTerms(off_off.sum(-1), on_off - off_off, off_on - off_off, both, forbidden)
