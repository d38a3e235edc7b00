"""Correlated slabs of many states in the order of the kernels.

Until these are compiled, this serves in their place on the CPU, to the last digit. See :mod:`pyro_truncated.ops.compiled.slabs` for what is
computed. States come by their numbers of active latents; what they add to sums is added in their own order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend
from pyro_truncated.ops.vectorised.in_order import add, blocks_of_rows, log, total
from pyro_truncated.ops.vectorised.latent_values import active_places, count_active, sort_by_number
from pyro_truncated.utils.budget import current_budget, row_slices, rows_per_block

# As in the kernels.
_TINY, _LARGE, _LOST, _FIELD, _SLABS = 1e-14, 1e150, 1e-24, 0, 1
# Bytes of states at a time: less overhead and less memory that is new take the least time.
_CACHED = 2**26


def _add_rows(factors: Tensor, source: Tensor, rows: Any, target: Tensor, others: Any, first: Any, size: Any, start: int = 0) -> None:
    """Adds multiples ``(B, M)`` of rows to others, one after the other."""
    moves = np.stack(np.broadcast_arrays(rows, others, first, size), -1).reshape(-1, 4)
    backend("slabs", factors).add_rows(factors, source, target, start, moves)


def _round_up(count: Any) -> Any:
    return (count + 7) // 8 * 8


class _States:
    """States with as many active latents each, their slabs collapsed."""

    def __init__(self, linear: Tensor, table: Tensor, mean: Tensor, covariance: Tensor) -> None:
        number, count = linear.shape
        self.count, self.size, self.mean = count, _round_up(count + 1), mean
        self.prior, self.joint = linear.new_zeros(number, count, self.size), linear.new_zeros(number, count, 2 * self.size)
        self.vectors, lower = linear.new_zeros(number, 2, self.size), torch.zeros_like(self.prior)
        self.joint[:, :, :count], self.prior[:, :, :count] = table, covariance.triu()
        self.variances = torch.empty_like(linear)
        latents = np.arange(count)
        for p in range(count):
            self.variances[:, p] = self.prior[:, p, p].maximum(_TINY * covariance[:, p, p])
            factors = self.prior[:, p, p + 1 : count] * (1 / self.variances[:, p : p + 1])
            _add_rows(-factors, self.prior, p, self.prior, latents[p + 1 :], p, self.size)
            self.prior[:, p, p + 1 : count] = lower[:, p + 1 :, p] = factors
        self.precisions = 1 / self.variances
        self.vectors[:, _FIELD, :count] = linear
        _add_rows(-mean, self.joint, latents, self.vectors, _FIELD, 0, self.size)
        field = self.vectors[:, _FIELD, :count]
        self.energy = total(torch.cat([linear.new_zeros(number, 1), 0.5 * mean * (linear + field)], 1))
        self.joint[:, :, count] = field
        a, b = np.tril_indices(count, -1)
        _add_rows(self.prior[:, b, a], self.joint, a, self.joint, b, 0, self.size)
        a, b = np.triu_indices(count, 1)
        _add_rows(self.joint[:, a, b], lower, b, self.joint, a, a, _round_up(b))
        self.joint.diagonal(dim1=1, dim2=2).add_(self.precisions)

    def eliminate(self, size: int) -> Tensor:
        """Eliminates what is below the pivots; returns the log density's rest."""
        energy, product = torch.zeros_like(self.energy), torch.ones_like(self.energy)
        for p in range(self.count):
            pivot, x = self.joint[:, p, p].maximum(self.precisions[:, p]), self.joint[:, p, self.count]
            self.joint[:, p, p], inverse = pivot, 1 / pivot
            factors = -self.joint[:, p, p + 1 : self.count] * inverse.unsqueeze(1)
            energy = energy + 0.5 * x * x * inverse
            _add_rows(factors, self.joint, p, self.joint, np.arange(p + 1, self.count), p, size)
            product = product * (pivot * self.variances[:, p])
            energy, product = _take_out(energy, product, product > _LARGE)
        return energy - 0.5 * log(product)

    def find_posterior(self) -> Tensor:
        """Factorises the posterior covariance and keeps the means; returns the pivots."""
        self.vectors[:, _SLABS, : self.count] = self.mean
        self.joint[:, :, self.size :] = self.prior.triu(1)
        self.joint[:, :, self.size : self.size + self.count].diagonal(dim1=1, dim2=2).fill_(1.0)
        self.eliminate(2 * self.size)
        pivots = self.joint.diagonal(dim1=1, dim2=2).clone()
        factors = self.joint[:, :, self.count] / pivots
        _add_rows(factors, self.joint, np.arange(self.count), self.vectors, _SLABS, 0, self.size, self.size)
        return pivots

    def covariance(self, pivots: Tensor) -> Tensor:
        """The lower triangle of the posterior covariance."""
        out, (p, a) = torch.zeros_like(self.prior), np.ones((self.count, self.count)).nonzero()
        factors = (1 / pivots)[:, p] * self.joint[:, p, self.size + a]
        _add_rows(factors, self.joint, p, out, a, 0, _round_up(a + 1), self.size)
        return out[..., : self.count]

    def gradients(self, pivots: Tensor) -> tuple[Tensor, Tensor]:
        """In the means and, twice that, in the covariances, a lower triangle."""
        spare, products = torch.zeros_like(self.prior), torch.zeros_like(self.prior)
        spare.diagonal(dim1=1, dim2=2).fill_(1.0)
        self.vectors[:, _FIELD] = 0.0
        latents = np.arange(self.count)
        for p in range(self.count):
            own, later, width = latents[: p + 1], latents[p + 1 :], _round_up(p + 1)
            inverse = self.precisions[:, p : p + 1]
            _add_rows(-self.prior[:, p, p + 1 : self.count], spare, p, spare, later, 0, width)
            _add_rows(-inverse * spare[:, p, : p + 1], spare, p, products, own, 0, _round_up(own + 1))
            spare[:, p, : p + 1] *= inverse
        for p in range(self.count):
            own, later, width = latents[: p + 1], latents[p + 1 :], _round_up(p + 1)
            inverse = 1 / pivots[:, p : p + 1]
            _add_rows(-self.joint[:, p, p + 1 : self.count] * inverse, spare, p, spare, later, 0, width)
            _add_rows(inverse * spare[:, p, : p + 1], spare, p, products, own, 0, _round_up(own + 1))
            _add_rows(self.joint[:, p, self.count, None] * inverse, spare, p, self.vectors, _FIELD, 0, width)
        field = self.vectors[:, _FIELD, : self.count]
        _add_rows(field, self.vectors, _FIELD, products, latents, 0, _round_up(latents + 1))
        return field, products[..., : self.count]

    def log_prior(self, pivots: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        """Expected log densities of slabs under another prior, without constants."""
        rows, count, size = torch.zeros_like(self.joint), self.count, self.size
        rows[:, :, :count] = covariance.triu()
        rows[:, :, size : size + count] = (1 / pivots.sqrt()).unsqueeze(1) * self.joint[:, :, size : size + count].mT
        rows[:, :, size + count] = self.vectors[:, _SLABS, :count] - mean
        energy, product = torch.zeros_like(self.energy), torch.ones_like(self.energy)
        for p in range(count):
            pivot = rows[:, p, p].maximum(_TINY * covariance[:, p, p])
            inverse = 1 / pivot
            energy = energy - 0.5 * inverse * backend("slabs", rows).row_squares(rows, p, size, size + count + 1)
            product = product * pivot
            energy, product = _take_out(energy, product, ~((product > 1 / _LARGE) & (product < _LARGE)))
            _add_rows(-rows[:, p, p + 1 : count] * inverse.unsqueeze(1), rows, p, rows, np.arange(p + 1, count), p, 2 * size)
        return energy - 0.5 * log(product)


def _take_out(energy: Tensor, product: Tensor, is_extreme: Tensor) -> tuple[Tensor, Tensor]:
    """Takes the logarithms of products that would leave the range of numbers."""
    return torch.where(is_extreme, energy - 0.5 * log(product), energy), torch.where(is_extreme, 1.0, product)


class Problem:
    """Data and slabs, and the states that count."""

    def __init__(
        self, words: Tensor, linear: Tensor, elements: Tensor, is_observed: Tensor | None, mean: Tensor, covariance: Tensor
    ) -> None:
        self.words, self.linear, self.mean, self.covariance = words, linear.double(), mean.double(), covariance.double()
        elements = elements.double()
        self.gram = backend("slabs", linear).row_grams(elements, is_observed) if is_observed is not None else (elements.mT @ elements)[None]

    def states(self, rows: slice, is_kept: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor, _States]]:
        """Yields states of data points: their positions, latents and slabs."""
        words, num_latents = self.words[rows], self.linear.shape[1]
        flat, gram = words.reshape(-1, 1, words.shape[2]), self.gram if len(self.gram) == 1 else self.gram[rows]
        for count, some in sort_by_number(words, list(range(num_latents + 1))):
            some = some if is_kept is None else some[is_kept.flatten()[some]]
            for where in some.split(rows_per_block(32 * num_latents + 160 * (count + 4) ** 2, min(current_budget(), _CACHED))):
                latents = active_places(flat[where], num_latents, count)[0].squeeze(1)
                data, pairs = where // words.shape[1], (latents.unsqueeze(2), latents.unsqueeze(1))
                table = gram[0][pairs] if len(gram) == 1 else gram[data[:, None, None], *pairs]
                linear = self.linear[rows][data.unsqueeze(1), latents]
                yield where, latents, _States(linear, table, self.mean[latents], self.covariance[pairs])


def log_prob(problem: Problem) -> Tensor:
    """See :func:`pyro_truncated.ops.compiled.slabs.correlated_log_prob`."""
    out = problem.linear.new_empty(problem.words.shape[:2])
    for where, _, states in problem.states(slice(None)):
        out.view(-1)[where] = states.energy + states.eliminate(states.size)
    return out


def _is_kept(weights: Tensor) -> Tensor:
    """States whose weights rounding does not lose beside the largest."""
    size = weights.abs()
    return size > _LOST * torch.where(size < torch.inf, size, 0.0).amax(1, keepdim=True)


def moments(problem: Problem, weights: Tensor, per_datum: bool) -> tuple[Tensor, ...]:
    """See :func:`pyro_truncated.ops.compiled.slabs.correlated_moments`."""
    (num_data, num_latents), candidates, weights = problem.linear.shape, weights.shape[1], weights.double()
    num_blocks, most = backend("slabs", weights).count_correlated_blocks(problem.words, num_data, 2 * num_latents**2)
    block = blocks_of_rows(num_data, num_blocks)
    active, first = problem.linear.new_zeros(2, num_data, num_latents)
    slope, curvature = active.new_zeros(num_blocks, num_latents), active.new_zeros(num_blocks, num_latents, num_latents)
    second = active.new_zeros(num_data if per_datum else num_blocks, num_latents, num_latents)
    for rows in row_slices(num_data, 64 * candidates * most**2):
        is_kept, weight = _is_kept(weights[rows]), weights[rows].flatten()
        number = (count_active(problem.words[rows]) * is_kept).flatten()
        num_pairs, data = number * (number + 1) // 2, torch.arange(num_data)[rows].repeat_interleave(candidates)
        single, pair = number.cumsum(0) - number, num_pairs.cumsum(0) - num_pairs
        index, (value, ascent) = torch.empty(int(number.sum()), dtype=torch.int64), active.new_empty(2, int(number.sum()))
        pairs, (spread, bend) = torch.empty(int(num_pairs.sum()), dtype=torch.int64), active.new_empty(2, int(num_pairs.sum()))
        for where, latents, states in problem.states(rows, is_kept):
            pivots, (a, b) = states.find_posterior(), torch.tril_indices(states.count, states.count)
            at = single[where].unsqueeze(1) + torch.arange(states.count)
            slabs = states.vectors[:, _SLABS, : states.count]
            index[at], value[at] = latents, slabs
            at_pair = pair[where].unsqueeze(1) + torch.arange(len(a))
            pairs[at_pair] = latents[:, a] * num_latents + latents[:, b]
            spread[at_pair] = states.covariance(pivots)[:, a, b] + slabs[:, a] * slabs[:, b]
            ascent[at], products = states.gradients(pivots)
            bend[at_pair] = products[:, a, b]
        place, mass = data.repeat_interleave(number), weight.repeat_interleave(number)
        add(active, place * num_latents + index, mass)
        add(first, place * num_latents + index, mass * value)
        add(slope, block[place] * num_latents + index, mass * ascent)
        place, mass = data.repeat_interleave(num_pairs), weight.repeat_interleave(num_pairs)
        add(second, (place if per_datum else block[place]) * num_latents**2 + pairs, mass * spread)
        add(curvature, block[place] * num_latents**2 + pairs, mass * bend)
    second, bend = second if per_datum else second.sum(0), curvature.sum(0)
    return active, first, second + second.tril(-1).mT, slope.sum(0), bend + bend.tril(-1).mT


def expected_log_prior(problem: Problem, weights: Tensor, means: Tensor, covariances: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.compiled.slabs.expected_log_prior`."""
    weights = weights.double()
    is_kept, num_data = _is_kept(weights), len(weights)
    num_blocks, _ = backend("slabs", weights).count_correlated_blocks(problem.words, num_data, len(means))
    found = problem.linear.new_zeros(weights.numel(), len(means))
    for where, latents, states in problem.states(slice(None), is_kept):
        pivots, pairs = states.find_posterior(), (latents.unsqueeze(2), latents.unsqueeze(1))
        for t, (mean, covariance) in enumerate(zip(means.double(), covariances.double(), strict=True)):
            found[where, t] = states.log_prior(pivots, mean[latents], covariance[pairs])
    out, kept = found.new_zeros(num_blocks, len(means)), is_kept.flatten().nonzero().squeeze(1)
    place = blocks_of_rows(num_data, num_blocks)[kept // weights.shape[1]].unsqueeze(1) * len(means) + torch.arange(len(means))
    add(out, place, weights.flatten()[kept].unsqueeze(1) * found[kept])
    return out.sum(0)
