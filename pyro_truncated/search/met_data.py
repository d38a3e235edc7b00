"""The memory of a learned affinity."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_truncated.search.base import SearchBatch


class MetData:
    """Inputs and latest marginals of met data points, by global position."""

    def __init__(self, inputs: Tensor, marginals: Tensor, visits: Tensor) -> None:
        self.inputs, self.marginals, self.visits = inputs, marginals, visits

    @classmethod
    def like(cls, inputs: Tensor, marginals: Tensor) -> MetData:
        """An empty memory for data points of the kind."""
        return cls(inputs[:0], marginals[:0], torch.zeros(0, dtype=torch.int64, device=inputs.device))

    def holds(self, inputs: Tensor, num_options: int, indices: Tensor | None) -> bool:
        """Whether a batch is of the remembered data: known rows are unchanged."""
        is_larger = indices is None and len(self.visits) > len(inputs)
        sizes = (inputs.shape[1], num_options), (self.inputs.shape[1], self.marginals.shape[1])
        if is_larger or sizes[0] != sizes[1] or inputs.device != self.inputs.device:
            return False
        rows = rows_of(inputs, indices)
        met = (rows < len(self.visits)).nonzero().squeeze(-1)
        met = met[self.visits[rows[met]] > 0]
        known, given = self.inputs[rows[met]].nan_to_num(nan=math.inf), inputs[met].nan_to_num(nan=math.inf)
        return torch.equal(known, given)

    def store(self, inputs: Tensor, marginals: Tensor, indices: Tensor | None) -> Tensor:
        """Takes in a batch; returns where its rows are."""
        rows = rows_of(inputs, indices)
        self._grow(int(rows.max()) + 1 if len(rows) else 0)
        self.inputs[rows], self.marginals[rows] = inputs, marginals
        self.visits[rows] += 1
        return rows

    def _grow(self, size: int) -> None:
        more = size - len(self.visits)
        if more > 0:
            self.inputs = torch.cat([self.inputs, self.inputs.new_zeros(more, self.inputs.shape[1])])
            self.marginals = torch.cat([self.marginals, self.marginals.new_zeros(more, self.marginals.shape[1])])
            self.visits = torch.cat([self.visits, self.visits.new_zeros(more)])


def rows_of(inputs: Tensor, indices: Tensor | None) -> Tensor:
    """Returns positions of a batch's data points among this process's."""
    return torch.arange(len(inputs), device=inputs.device) if indices is None else indices.to(inputs.device)


def flat_observations(batch: SearchBatch) -> Tensor:
    """Returns a batch's observations side by side, ``(n, D)`` in float64.

    Raises:
        ValueError: if there are none.
    """
    size = len(batch.population)
    parts = [value.reshape(size, math.prod(value.shape[1:])).double() for value in batch.observations.values() if len(value) == size]
    if not parts:
        raise ValueError("there is no observed site with one value per data point to regress on; give inputs")
    return torch.cat(parts, 1)
