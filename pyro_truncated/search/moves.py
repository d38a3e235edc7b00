"""Changes of single latents of packed states."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from pyro_truncated.states.space import StateSpace


@functools.lru_cache(maxsize=16)
def moves_of(space: StateSpace, device: torch.device) -> Moves:
    """Returns all single changes of a state, cached on a device."""
    return Moves(space, device)


class Moves:
    """All changes of one latent: to any value, or nearby ones.

    A limit restricts them to the next values.

    Args:
        space: the state space.
        device: where the states live.
        limit: largest number of moves of one latent. Default: all.

    Attributes:
        count: number of moves, ``M``; the number of latents where all are binary.
        latent: the latent that each move changes, ``(M,)``.
    """

    def __init__(self, space: StateSpace, device: torch.device, limit: int | None = None) -> None:
        counts = (space.cardinality - 1).clamp(max=limit or max(space.cardinalities))
        latent = torch.arange(space.num_latents, device="cpu").repeat_interleave(counts)
        self.step = (torch.arange(len(latent), device="cpu") - (counts.cumsum(0) - counts)[latent] + 1).to(device)
        self.count = len(latent)
        self.latent = latent.to(device)
        self.word, self.shift = space.word[latent].to(device), space.shift[latent].to(device)
        self.mask, self.cardinality = (1 << space.bits[latent].to(device)) - 1, space.cardinality[latent].to(device)

    def neighbours(self, words: Tensor) -> Tensor:
        """The states one move away from packed states ``(N, P, W)``, ``(N, P * M, W)``."""
        return self.apply(words, torch.arange(self.count, device=words.device).expand(*words.shape[:2], -1))[0].flatten(1, 2)

    def apply(self, words: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Applies moves ``(N, P, m)`` to packed states ``(N, P, W)``.

        Returns new states ``(N, P, m, W)`` and new values ``(N, P, m)``.
        """
        word, shift = self.word[chosen], self.shift[chosen]
        old = (words.gather(-1, word) >> shift) & self.mask[chosen]
        new = torch.remainder(old + self.step[chosen], self.cardinality[chosen])
        moved = words.unsqueeze(2).repeat(1, 1, chosen.shape[-1], 1)
        moved.scatter_add_(3, word.unsqueeze(-1), ((new - old) << shift).unsqueeze(-1))
        return moved, new
