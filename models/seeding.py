"""Rows that lie spread over the data, for clusters to start from: k-means++ with local search."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

# The search ends after so many swaps in a row that no longer lower the cost by a share of what one centre accounts for.
_PATIENCE = 10
_LEAST_GAIN = 0.02
_FEWEST_TRIES = 25
_FEW_TRIALS = 4
# More are many: they are looked at in groups, of which so many.
_FEW = 1000
_LOOKED_AT = 8
_BLOCK = 2**22


def spread_rows(points: Tensor, number: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    r"""Chooses rows with a small sum of square distances from every row to the nearest chosen one.

    Rows are drawn in proportion to their square distance from those chosen so far; of some draws the one is taken that lowers the sum most
    (greedy k-means++). Then further draws are exchanged for the chosen row with which the sum falls most, as long as it does (local
    search): one such swap puts right a cluster that has two rows, and another that has none.

    Args:
        points: rows ``(N, D)``.
        number: how many to choose, ``K``; where there are fewer different rows some are chosen repeatedly.
        generator: source of randomness.

    Returns:
        Positions ``(K,)`` of the chosen rows, and that of the nearest chosen one of every row ``(N,)``, between 0 and ``K - 1``.

    References:
        Arthur and Vassilvitskii, "k-means++: the advantages of careful seeding", SODA 2007. Lattanzi and Sohler, "A better k-means++
        algorithm via local search", ICML 2019.
    """
    points = points - points.mean(0)
    if number > _FEW:
        points = points.float()  # twice as fast, and no cluster depends on the last digits
    trials = 2 + int(math.log(number))
    chosen = _greedy(points, number, trials, generator)
    if number == 1:
        return chosen, torch.zeros(len(points), dtype=torch.int64, device=points.device)
    nearest = _TwoNearest(points, chosen)
    failures, least = 0, _LEAST_GAIN * nearest.cost / number
    for _ in range(max(_FEWEST_TRIES, number)):
        failures = 0 if nearest.swap(_drawn(nearest.distance[0], trials, generator), least) else failures + 1
        if failures == _PATIENCE:
            break
    return nearest.chosen, nearest.index[0]


def _greedy(points: Tensor, number: int, trials: int, generator: torch.Generator | None) -> Tensor:
    chosen = torch.zeros(number, dtype=torch.int64, device=points.device)
    chosen[:1] = _drawn(torch.ones_like(points[:, 0]), 1, generator)
    distance = _squared(points, chosen[:1])[0]
    for k in range(1, number):
        drawn = _drawn(distance, trials, generator)
        lower = _squared(points, drawn).minimum(distance)
        best = lower.sum(1).argmin()
        chosen[k], distance = drawn[best], lower[best]
    return chosen


def scattered_rows(points: Tensor, number: int, generator: torch.Generator | None = None) -> Tensor:
    """Positions ``(K,)`` of rows of points ``(N, D)`` that lie spread over them: the first part of :func:`spread_rows`, with few draws."""
    points = points - points.mean(0)
    if number > _FEW:
        # In units in which single precision, twice as fast, holds the squares.
        points = (points / points.abs().max().clamp(min=torch.finfo(points.dtype).tiny)).float()
    return _greedy(points, number, _FEW_TRIALS, generator)


class _TwoNearest:
    """The two nearest of the chosen rows of every row, and what it costs to do without one of them."""

    def __init__(self, points: Tensor, chosen: Tensor) -> None:
        self.points, self.chosen = points, chosen
        blocks = points.split(max(1, 2**24 // len(chosen)))
        self.distance, self.index = (torch.cat(parts, 1) for parts in zip(*map(self._find, blocks), strict=True))

    @property
    def cost(self) -> Tensor:
        """Sum of the square distances to the nearest chosen row."""
        return self.distance[0].sum()

    def swap(self, candidates: Tensor, least: Tensor) -> bool:
        """Puts a candidate in the place of a chosen row, those two for which the cost falls most; not if it falls by less than is given."""
        distance = _squared(self.points, candidates)
        added = distance.minimum(self.distance[0])
        dearer = distance.minimum(self.distance[1]) - added
        cost = added.sum(1, keepdim=True) + distance.new_zeros(len(candidates), len(self.chosen)).index_add_(1, self.index[0], dearer)
        candidate, place = divmod(int(cost.argmin()), len(self.chosen))
        if not bool(cost[candidate, place] < self.cost - least):
            return False
        self.chosen[place] = candidates[candidate]
        self._enter(distance[candidate], place)
        return True

    def _enter(self, distance: Tensor, place: int) -> None:
        """Takes in the distances of the row that has come to a place."""
        bereft = (self.index == place).any(0).nonzero().squeeze(-1)
        both = torch.cat([self.distance, distance.unsqueeze(0)])
        indices = torch.cat([self.index, torch.full_like(self.index[:1], place)])
        self.distance, order = both.topk(2, dim=0, largest=False)
        self.index = indices.gather(0, order)
        self.distance[:, bereft], self.index[:, bereft] = self._find(self.points[bereft])

    def _find(self, points: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.cdist(points, self.points[self.chosen]).topk(2, largest=False)
        return found.values.square().mT, found.indices.mT


def _drawn(weight: Tensor, number: int, generator: torch.Generator | None) -> Tensor:
    """Positions drawn in proportion to weights; evenly if all are zero."""
    total = weight.double().cumsum(0)
    total = total if bool(total[-1] > 0) else torch.ones_like(total).cumsum(0)
    at = torch.rand(number, dtype=torch.float64, generator=generator, device=None if generator is None else generator.device)
    return torch.searchsorted(total, at.to(total.device) * total[-1], right=True).clamp(max=len(weight) - 1)


def _squared(points: Tensor, rows: Tensor) -> Tensor:
    """Square distances ``(T, N)`` of all points from some of them."""
    some, power = points[rows], points.square().sum(1)
    return torch.addmm(power.unsqueeze(0), some, points.mT, alpha=-2.0).add_(power[rows].unsqueeze(1)).clamp_(min=0.0)


def parted(points: Tensor, covariance: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Points ``(K, D)`` with noise of a hundredth of the deviations of a covariance ``(D, D)``, which tells equal ones apart."""
    noise = torch.randn(points.shape, generator=generator, device=None if generator is None else generator.device).to(points)
    return points + 0.01 * covariance.diagonal().sqrt() * noise


class Groups:
    """Finds the largest of very many linear functions of some features: first the groups of functions that are large on average.

    Args:
        coefficients: of the functions, ``(K, F)``.
        places: where the functions belong, ``(K, D)``: those that lie together make a group. Up to a thousand functions make
            none, and the device is not asked for anything.
    """

    def __init__(self, coefficients: Tensor, places: Tensor) -> None:
        self.coefficients, number = coefficients, len(places)
        self.sizes: list[int] = []
        if number > _FEW:
            group = spread_rows(places, round(number**0.5), torch.Generator(places.device).manual_seed(0))[1]
            # Of several rows at one place only one is the nearest: the others have no group.
            self.group, size = group.unique(return_inverse=True, return_counts=True)[1:]
            total = coefficients.new_zeros(len(size), coefficients.shape[1]).index_add_(0, self.group, coefficients)
            self.mean, self.sizes = total / size.unsqueeze(-1), size.tolist()

    def likeliest(self, features: Tensor, number: int) -> Tensor:
        """The ``number`` largest functions of each of some features ``(N, F)``, largest first; of groups, those in the likeliest ones."""
        looked_at, total = min(_LOOKED_AT, len(self.sizes)), len(self.coefficients)
        width = looked_at * max(self.sizes, default=0)
        if not width or width >= total or sum(sorted(self.sizes)[:looked_at]) < number:
            return torch.cat([(some @ self.coefficients.mT).topk(number).indices for some in _blocks(features, total)])
        return torch.cat([self._likeliest(some, number, looked_at) for some in _blocks(features, width)])

    def _likeliest(self, features: Tensor, number: int, looked_at: int) -> Tensor:
        """The same, by way of one table of all functions of the groups that are looked at; group by group it takes longer."""
        asked = (features @ self.mean.mT).topk(looked_at).indices
        order, members = asked.flatten().argsort(), self.group.argsort(stable=True)
        width, starts = max(self.sizes), torch.tensor([0, *itertools.accumulate(self.sizes)], device=asked.device)
        value = features.new_full((len(order), width), -math.inf)
        times = torch.bincount(asked.flatten(), minlength=len(self.sizes)).tolist()
        for those, rows, who in zip(order.split(times), (order // looked_at).split(times), members.split(self.sizes), strict=True):
            value[those, : len(who)] = features[rows] @ self.coefficients[who].mT
        place = value.view(len(features), -1).topk(number).indices
        group = asked.gather(1, place // width)
        found: Tensor = members[starts[group] + place % width]
        return found


def _blocks(features: Tensor, width: int) -> tuple[Tensor, ...]:
    """Rows of so many results each, at a time."""
    blocks: tuple[Tensor, ...] = features.split(max(1, _BLOCK // width))
    return blocks


def partners(near: Tensor, number: int, most: int) -> Tensor:
    """Pairs ``(P, 2)`` of centres, each with the ``most`` that are most often near rows that it is nearest to; ``near`` is ``(N, S)``."""
    code, times = (near[:, :1] * number + near[:, 1:]).flatten().unique(return_counts=True)
    order = times.argsort(descending=True, stable=True)
    code = code[order[(code[order] // number).argsort(stable=True)]]
    own = code // number
    rank = torch.arange(len(code), device=code.device) - torch.searchsorted(own, own)
    pairs: Tensor = torch.stack([own, code % number], 1)[rank < most].sort(1).values.unique(dim=0)
    return pairs
