"""The proposal for states outside of a population.

It is a mixture around its states that is positive everywhere.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.budget import rows_per_block

# Share and expected number of changed latents of the kernels around the states; the rest goes to independent latents.
_KERNELS = ((0.4, 1.0), (0.3, 3.0))


class Proposal:
    """The defensive mixture around the populations: draws states, and computes their densities.

    Args:
        population: the populations.
        generator: source of randomness.
    """

    def __init__(self, population: Population, generator: torch.Generator | None) -> None:
        self.population, self.space, self.generator = population, population.space, generator
        self.device = population.words.device
        weights = population.weights().double()
        self.base = 0.5 * weights + 0.5 / population.num_states
        self.cardinality = population.space.cardinality.to(self.device)
        self.values = _smoothed(population)
        latents = max(1, len(population.space.mutable))
        shares = [share for share, _ in _KERNELS]
        self.shares = torch.tensor([*shares, 1 - sum(shares)], dtype=torch.float64, device=self.device)
        self.rates = [min(0.5, changes / latents) for _, changes in _KERNELS]

    def block_sizes(self, num_samples: int, rows: slice, memory_budget: int) -> list[int]:
        """Numbers of draws that are made at once."""
        num_data = len(self.population.words[rows])
        size = rows_per_block(32 * num_data * (self.values.shape[1] * self.values.shape[2] + self.population.num_states), memory_budget)
        return [min(size, num_samples - start) for start in range(0, num_samples, size)]

    def sample(self, count: int, rows: slice) -> Tensor:
        """Independent draws ``(n, count, W)`` for a slice of the data points."""
        base, words = self.base[rows], self.population.words[rows]
        component = torch.multinomial(self.shares.expand(len(base), -1), count, replacement=True, generator=self.generator)
        chosen = torch.multinomial(base, count, replacement=True, generator=self.generator)
        values = self.space.unpack(ops.take(words, chosen), torch.int64)
        rates = torch.tensor([*self.rates, 0.0], dtype=torch.float64, device=self.device)[component]
        changes = self._uniform(values.shape) < rates.unsqueeze(-1)
        step = 1 + (self._uniform(values.shape) * (self.cardinality - 1)).long().minimum((self.cardinality - 2).clamp(min=0))
        around = self.space.pack(torch.where(changes, (values + step) % self.cardinality, values))
        independent = ops.draw_values(self.values[rows], count, self.space.fields, generator=self.generator)
        return torch.where((component == len(self.rates)).unsqueeze(-1), independent, around)

    def _uniform(self, shape: tuple[int, ...]) -> Tensor:
        source = self.device if self.generator is None else self.generator.device
        return torch.rand(shape, generator=self.generator, dtype=torch.float64, device=source).to(self.device)

    def log_density(self, words: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Returns log densities ``(n, M)`` of states, and which are in the population."""
        drawn, held = self._one_hot(words), self._one_hot(self.population.words[rows])
        log_base = self.base[rows].log().unsqueeze(1)
        parts = [self.shares[-1].log() + torch.einsum("nmk,nk->nm", drawn, self.values[rows].flatten(1).clamp(min=1e-300).log())]
        for share, rate in zip(self.shares, self.rates, strict=False):
            # Latents of one value never change.
            change = torch.where(self.cardinality > 1, math.log(rate) - (self.cardinality - 1).clamp(min=1).double().log(), 0.0)
            stay = torch.where(self.cardinality > 1, math.log1p(-rate), 0.0)
            agreement = drawn * (stay - change).repeat_interleave(self.values.shape[2])
            parts.append(share.log() + change.sum() + torch.logsumexp(log_base + agreement @ held.mT, -1))
        is_inside = (drawn @ held.mT).amax(-1) > self.space.num_latents - 0.5
        return torch.stack(parts).logsumexp(0), is_inside

    def _one_hot(self, words: Tensor) -> Tensor:
        values = self.space.unpack(words, torch.int64)
        return torch.nn.functional.one_hot(values, self.values.shape[2]).double().flatten(-2)


def _smoothed(population: Population) -> Tensor:
    """Returns probabilities ``(N, L, V)`` of the independent component.

    They are positive at all values that a latent has.
    """
    space: StateSpace = population.space
    own = dataclasses.replace(population, log_joint=population.log_joint.double()).value_probabilities()
    cardinality = space.cardinality.to(own.device)
    exists = torch.arange(own.shape[-1], device=own.device) < cardinality.unsqueeze(-1)
    uniform = exists.double() / cardinality.unsqueeze(-1)
    share = 1.0 / (space.num_latents + 1)
    mixed = (1 - share) * (0.8 * own + 0.2 * own.mean(0)) + share * uniform
    return mixed / mixed.sum(-1, keepdim=True)
