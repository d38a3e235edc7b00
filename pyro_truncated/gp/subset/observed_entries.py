"""The observed entries of a table of targets, some of them, and what those of each input are without that input."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class ObservedEntries:
    """Entries of standardised targets ``(n, H)`` that were observed, ``E`` of them.

    Attributes:
        row: the input of each, ``(E,)``.
        output: the output of each, ``(E,)``.
        value: ``(E,)``.
    """

    row: Tensor
    output: Tensor
    value: Tensor

    def __len__(self) -> int:
        return len(self.value)

    def drawn(self, num: int, generator: torch.Generator | None = None) -> ObservedEntries:
        """At most ``num`` of them at random, of as many different inputs as there are."""
        order = torch.randperm(len(self), generator=generator).to(self.row.device)
        by_input, place = self.row[order].sort(stable=True)
        turn = torch.arange(len(self), device=place.device) - torch.searchsorted(by_input, by_input)
        chosen = order[place[turn.argsort(stable=True)[:num]]]
        return ObservedEntries(self.row[chosen], self.output[chosen], self.value[chosen])

    def left_out(self, inverse: Tensor) -> Tensor:
        r"""Predictions ``(E,)`` of the entries of each input from those of all other inputs.

        With the entries :math:`b` of one input, they are :math:`y_b - (P_{bb})^{-1} [P y]_b`.

        Args:
            inverse: :math:`P`, the inverse ``(E, E)`` of their covariances.
        """
        _, group = self.row.unique(return_inverse=True)
        place = torch.full((int(group.max()) + 1, int(self.output.max()) + 1), -1, device=group.device)
        place[group, self.output] = torch.arange(len(self), device=group.device)
        is_seen = place >= 0
        within = inverse[place[:, :, None], place[:, None, :]]
        identity = torch.eye(place.shape[1], dtype=inverse.dtype, device=inverse.device)
        blocks = torch.where(is_seen[:, :, None] & is_seen[:, None, :], within, identity)
        weights = torch.where(is_seen, (inverse @ self.value)[place], 0.0)
        lost: Tensor = torch.linalg.solve(blocks, weights)
        return self.value - lost[group, self.output]
