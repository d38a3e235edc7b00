"""Scores of single latents for models that score no other states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.states.space import StateSpace


class SingletonScore:
    """Log joints of states with at most one active latent.

    Args:
        model: has ``singletons``, log joints ``(n, H + 1)`` of the state without active latents and of those with one.
        y: data ``(n, D)``.
        space: of the states.
    """

    def __init__(self, model: Any, y: Tensor, space: StateSpace) -> None:
        self.model, self.y, self.space = model, y, space

    def __call__(self, words: Tensor) -> Tensor:
        """Log joints ``(n, C)`` of packed states ``(n, C, W)``.

        Raises:
            NotImplementedError: if more latents of a state are active.
        """
        if not len(words):
            return torch.zeros(words.shape[:2], dtype=torch.float64, device=words.device)
        states = self.space.unpack(words)
        ops.refuse((states.sum(-1, dtype=torch.int64) > 1).any(), self._complain)
        # Position 0 is the state without any.
        numbers = torch.arange(1, states.shape[-1] + 1, device=states.device)
        return self.model.singletons(self.y).gather(1, (states.long() * numbers).sum(-1))  # type: ignore[no-any-return]

    def _complain(self) -> None:
        raise NotImplementedError(f"{type(self.model).__name__} scores only states with at most one active latent")
