"""Selection of packed states in plain torch, for any device: lexicographic sorts instead of hash sets."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_truncated.ops.words import take


def repeated(words: Tensor) -> Tensor:
    """Marks the states ``(N, C)`` that equal an earlier state of their row."""
    order = torch.arange(words.shape[1], device=words.device).expand(words.shape[:2])
    # Stable sorts by one word after the other leave equal states side by side, the earliest first.
    for number, word in enumerate(words.unbind(-1)):
        order = word.argsort(dim=1, stable=True) if number == 0 else order.gather(1, word.gather(1, order).argsort(dim=1, stable=True))
    ordered = take(words, order)
    equal = torch.zeros_like(order, dtype=torch.bool)
    equal[:, 1:] = (ordered[:, 1:] == ordered[:, :-1]).all(-1)
    return torch.empty_like(equal).scatter_(1, order, equal)


def select_top(words: Tensor, log_joint: Tensor, extra_words: Tensor, extra_log_joint: Tensor, size: int) -> tuple[Tensor, Tensor, int]:
    """Best ``size`` distinct states, and the smallest number of distinct states that a row with too few of them has (else -1)."""
    are_enough = size <= words.shape[1]
    words = torch.cat([words, extra_words], 1)
    log_joint = torch.cat([log_joint, extra_log_joint], 1)
    surplus = repeated(words)
    # The states of the first set are distinct.
    fewest = size if are_enough or not len(words) else int((~surplus).sum(1).min())
    if fewest < size:
        return words[:, :0], log_joint[:, :0], fewest
    # Only repetitions stay at minus infinity, behind distinct states of probability zero.
    lowest = torch.finfo(log_joint.dtype).min
    key = log_joint.clamp(min=lowest).masked_fill(surplus, -math.inf)
    chosen = key.argsort(dim=1, descending=True, stable=True)[:, :size].sort(dim=1).values
    return take(words, chosen), log_joint.gather(1, chosen), -1
