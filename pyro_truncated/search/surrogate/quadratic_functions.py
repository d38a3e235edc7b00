"""Quadratic functions of binary states, and their greatest values."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_truncated.states.space import StateSpace


class QuadraticFunctions(NamedTuple):
    r"""Functions :math:`\sum_h s_h f_h + \sum_{h < k} s_h s_k J_{hk}`, ``C`` of each of ``n`` data points."""

    effects: Tensor  # f, (n, C, H)
    pairs: Tensor  # J, symmetric with zeros on the diagonal: (H, H) of all functions, or (n, C, H, H)

    def gains(self, states: Tensor) -> Tensor:
        """What flips of each latent alone add in states ``(n, C, H)``."""
        field = states @ self.pairs if self.pairs.dim() == 2 else (states.unsqueeze(-2) @ self.pairs).squeeze(-2)
        return (1 - 2 * states) * (self.effects + field)

    def ascend(self, states: Tensor) -> Tensor:
        """States after twelve flips that each raise the functions most."""
        for _ in range(12):
            gain, latent = self.gains(states).max(-1, keepdim=True)
            flip = torch.zeros_like(states).scatter_(-1, latent, (gain > 0).to(states))
            states = (states - flip).abs()
        return states

    def ascend_by_pairs(self, states: Tensor, steps: int = 2) -> Tensor:
        """Returns states after greedy flips of one or two latents."""
        size = states.shape[-1]
        latent = torch.arange(size, device=states.device)
        for _ in range(steps):
            gain, sign = self.gains(states), 1 - 2 * states
            both = self.pairs * sign.unsqueeze(-1) * sign.unsqueeze(-2) + gain.unsqueeze(-1) + gain.unsqueeze(-2)
            both.diagonal(dim1=-2, dim2=-1).copy_(gain)
            most, at = both.flatten(-2).max(-1, keepdim=True)
            is_flipped = ((latent == at // size) | (latent == at % size)) & (most > 0)
            states = (states - is_flipped.to(states)).abs()
        return states

    def best_new_states(self, optimum: Tensor, space: StateSpace, words: Tensor) -> Tensor:
        """Returns the best states within two flips of ``(n, C, H)``, none of ``words``."""
        # States are known by their words, or by one number made of these; each latent adds its own.
        latent_keys = _keys(space.pack(torch.eye(optimum.shape[-1], dtype=torch.int64, device=optimum.device)))
        known_keys, children = _keys(words).sort(1).values, []
        for at, (state, gain) in enumerate(zip(optimum.unbind(1), self.gains(optimum).unbind(1), strict=True)):
            near, sign = Neighbours.from_gains(gain), 1 - 2 * state
            values = near.sums(gain)
            values[:, 1 + gain.shape[1] :] += near.between(self.pairs if self.pairs.dim() == 2 else self.pairs[:, at]) * near.products(sign)
            keys = near.sums(sign.long() * latent_keys) + (state.long() * latent_keys).sum(-1, keepdim=True)
            place = torch.searchsorted(known_keys, keys).clamp(max=known_keys.shape[1] - 1)
            best = values.masked_fill(known_keys.gather(1, place) == keys, -math.inf).argmax(1, keepdim=True)
            children.append((state - near.flips(best).to(state)).abs())
            known_keys = torch.cat([known_keys, keys.gather(1, best)], 1).sort(1).values
        return torch.stack(children, 1)


class Neighbours(NamedTuple):
    """A state with its neighbours at one flip and some at two."""

    best: Tensor  # latents that alone would gain most, (n, B)
    one: Tensor  # which of these is flipped first in states two flips away
    other: Tensor  # which second
    num_latents: int  # number of all latents

    @classmethod
    def from_gains(cls, gain: Tensor) -> Neighbours:
        """Those of states whose flips gain this, ``(n, H)``."""
        best = gain.topk(min(40, gain.shape[1]), 1).indices
        one, other = torch.triu_indices(best.shape[1], best.shape[1], 1, device=gain.device)
        return cls(best, one, other, gain.shape[1])

    def sums(self, values: Tensor) -> Tensor:
        """Sums ``(n, 1 + H + len(one))`` over the flipped latents of values ``(n, H)``."""
        best = values.gather(1, self.best)
        return torch.cat([torch.zeros_like(values[:, :1]), values, best[:, self.one] + best[:, self.other]], 1)

    def products(self, values: Tensor) -> Tensor:
        """Returns products ``(n, len(one))`` of values of two flipped latents."""
        best = values.gather(1, self.best)
        return best[:, self.one] * best[:, self.other]

    def between(self, pairs: Tensor) -> Tensor:
        """Returns matrix entries ``(n, len(one))`` at two flipped latents."""
        row, column = self.best[:, self.one], self.best[:, self.other]
        return pairs[row, column] if pairs.dim() == 2 else pairs.flatten(1).gather(1, row * self.num_latents + column)

    def flips(self, index: Tensor) -> Tensor:
        """Which latents are flipped in the chosen ones ``(n, 1)``, booleans ``(n, H)``."""
        latent, pair = torch.arange(self.num_latents, device=index.device), index - 1 - self.num_latents
        one, other = (self.best.gather(1, which[pair.clamp(min=0)]) for which in (self.one, self.other))
        return torch.where(pair < 0, latent == index - 1, (latent == one) | (latent == other))


def _keys(words: Tensor) -> Tensor:
    """Hashes states by a sum over their words, and so over latents."""
    # Multiples of the golden ratio's bits (Knuth's multiplicative hashing).
    factors = torch.arange(words.shape[-1], device=words.device) * 0x9E3779B97F4A7C + 1
    return (words * factors).sum(-1)


def half_products(states: Tensor, weight: Tensor) -> Tensor:
    """Half of the weighted sum ``(H, H)`` of products of latents."""
    flat = states.flatten(0, 1)
    products: Tensor = 0.5 * flat.mT @ (flat * weight.flatten().unsqueeze(-1))
    return products
