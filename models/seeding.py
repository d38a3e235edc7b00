"""Initial rows for clusters: k-means++ with local search."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from pyro_truncated.extend import generator_device
from pyro_truncated.search import MaxInnerProductIndex

_TRIALS_PER_DRAW = 4
# For more rows points are held in single precision.
_MAX_DOUBLE_ROWS = 1000
# More scattered rows are drawn in rounds.
_MAX_SCATTERED_AT_ONCE = 4000
# Of their draws so many are held against each other at a time; whole trials.
_DRAWS_PER_BLOCK = 512


def spread_rows(points: Tensor, number: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Chooses rows with a small sum of squared distances to the nearest.

    Of some rows, drawn in proportion to their squared distance from the chosen ones, the one that lowers the sum most is taken (greedy
    k-means++). Then further draws are exchanged for the chosen row with which the sum falls most, as long as it does (local search).

    Returns positions ``(K,)`` of the chosen rows, some repeatedly where there are fewer different ones. Also returns which of them is
    nearest to every row, ``(N,)``.

    References:
        Arthur and Vassilvitskii, "k-means++: the advantages of careful seeding", SODA 2007. Lattanzi and Sohler, "A better k-means++
        algorithm via local search", ICML 2019.
    """
    points = points - points.mean(0)
    if number > _MAX_DOUBLE_ROWS:
        points = points.float()  # twice as fast, and no cluster depends on the last digits
    trials = 2 + int(math.log(number))
    index = _greedy(points, number, trials, generator)
    if number == 1:
        return index, torch.zeros(len(points), dtype=torch.int64, device=points.device)
    nearest = _TwoNearest(points, index)
    # The search ends after ten swaps in a row that lower the cost by less than a share of what one centre accounts for.
    failures, least = 0, 0.02 * nearest.cost / number
    for _ in range(max(25, number)):
        failures = 0 if nearest.swap(_draw_positions(nearest.distance[0], trials, generator), least) else failures + 1
        if failures == 10:
            break
    return nearest.centers, nearest.index[0]


def _greedy(points: Tensor, number: int, trials: int, generator: torch.Generator | None) -> Tensor:
    index = torch.zeros(number, dtype=torch.int64, device=points.device)
    index[:1] = _draw_positions(torch.ones_like(points[:, 0]), 1, generator)
    distance = _square(points, index[:1])[0]
    for k in range(1, number):
        draws = _draw_positions(distance, trials, generator)
        lower = _square(points, draws).minimum(distance)
        best = lower.sum(1).argmin()
        index[k], distance = draws[best], lower[best]
    return index


def scattered_rows(points: Tensor, number: int, generator: torch.Generator | None = None, cells: int = 1) -> Tensor:
    """Positions ``(K,)`` of spread rows: the first part of :func:`spread_rows`.

    More than four thousand are drawn many at a time, nearly as good in a fraction of the time. With cells, a draw is judged by its own cell
    alone, which holds everything nearest to one of the first rows.
    """
    points = points - points.mean(0)
    if number > _MAX_DOUBLE_ROWS:
        # In units in which single precision, twice as fast, holds the squares.
        points = (points / points.abs().max().clamp(min=torch.finfo(points.dtype).tiny)).float()
    if number <= _MAX_SCATTERED_AT_ONCE:
        return _greedy(points, number, _TRIALS_PER_DRAW, generator)
    return _in_rounds(points, number, generator, cells)


def _in_rounds(points: Tensor, number: int, generator: torch.Generator | None, cells: int) -> Tensor:
    """Rows by greedy k-means++, first one per cell, then some together.

    Of some draws for every row that is sought the one comes first that lowers the sum of its cell most. It is taken with a probability:
    that share of its square distance which those taken before in the round have left.
    """
    power = points.square().sum(1)
    index = _greedy(points, min(cells, number), _TRIALS_PER_DRAW, generator)
    cell = _find_nearest(points, power, index)
    distance = (points - points[index[cell]]).square().sum(1)
    while len(index) < number:
        if not bool(distance.any()):  # all different rows are there
            return torch.cat([index, _draw_positions(distance, number - len(index), generator)])
        # Rounds grow as long as all can be held against each other.
        size = _TRIALS_PER_DRAW * min(len(index) // 8 + 16, 1024, number - len(index))
        draws = _best_first(points, distance, power, _draw_positions(distance, size, generator), cell)
        limits = distance[draws] * torch.rand(size, generator=generator, device=generator_device(generator)).to(distance)
        new = draws[_find_distant(points[draws], limits)]
        nearest = new[_find_nearest(points, power, new)]
        index, distance = torch.cat([index, new]), distance.minimum((points - points[nearest]).square().sum(1))
    return index


def _best_first(points: Tensor, distance: Tensor, power: Tensor, draws: Tensor, cell: Tensor, *, max_distances: int = 2**20) -> Tensor:
    """These rows with the best draws of cells first."""
    gain = torch.zeros_like(distance[draws])
    number = int(cell.max()) + 1
    for own, rows in zip(_parts(cell[draws], number), _parts(cell, number), strict=True):
        rest, across = (distance - power)[rows].unsqueeze(0), points[rows].mT
        for part in own.split(max(1, max_distances // max(1, len(rows)))):
            lower = torch.addmm(rest, points[draws[part]], across, alpha=2.0).sub_(power[draws[part]].unsqueeze(1))
            gain[part] = lower.clamp_(min=0.0).sum(1)
    order = gain.view(-1, _TRIALS_PER_DRAW).argsort(1, descending=True)
    return draws.view(-1, _TRIALS_PER_DRAW).gather(1, order).flatten()


def _parts(cell: Tensor, number: int) -> tuple[Tensor, ...]:
    return cell.argsort(stable=True).split(torch.bincount(cell, minlength=number).tolist())


def _find_distant(points: Tensor, limits: Tensor) -> Tensor:
    """Positions of draws ``(T, D)`` further than ``limits`` from those before."""
    has_near, distant = torch.zeros_like(limits, dtype=torch.bool), []
    for start in range(0, len(points), _DRAWS_PER_BLOCK):
        some = points[start : start + _DRAWS_PER_BLOCK]
        is_near = _square(some, torch.arange(len(some), device=some.device)) <= limits[start : start + len(some)]
        free = _first_free(is_near.cpu().numpy(), has_near[start : start + len(some)].cpu().numpy())
        own = torch.tensor(free, dtype=torch.int64, device=points.device)
        has_near[start:] |= (_square(points[start:], own) <= limits[start:]).any(0)
        distant.append(start + own)
    return torch.cat(distant)


def _first_free(is_near: np.ndarray, has_near: np.ndarray) -> list[int]:
    """The first draws that are not near to earlier ones."""
    first = []
    for start in range(0, len(is_near), _TRIALS_PER_DRAW):
        free = np.flatnonzero(~has_near[start : start + _TRIALS_PER_DRAW])
        if len(free):
            own = start + int(free[0])
            has_near |= is_near[own]
            first.append(own)
    return first


def _find_nearest(points: Tensor, power: Tensor, rows: Tensor) -> Tensor:
    """Which of some rows ``(R,)`` is nearest to each point, ``(N,)``."""
    functions = torch.cat([points[rows], -0.5 * power[rows].unsqueeze(1)], 1)
    features = torch.cat([points, torch.ones_like(points[:, :1])], 1)
    return MaxInnerProductIndex(functions, features[rows], lambda: torch.zeros_like(rows), 0).query(features, 1)[:, 0]


class _TwoNearest:
    """Each row's two nearest chosen rows, and removal costs."""

    def __init__(self, points: Tensor, centers: Tensor) -> None:
        self.points, self.centers = points, centers
        blocks = points.split(max(1, 2**24 // len(centers)))
        self.distance, self.index = (torch.cat(parts, 1) for parts in zip(*map(self._find, blocks), strict=True))

    @property
    def cost(self) -> Tensor:
        """Sum of the square distances to the nearest chosen row."""
        return self.distance[0].sum()

    def swap(self, candidates: Tensor, min_gain: Tensor) -> bool:
        """Swaps the best candidate in if the cost falls enough."""
        distance = _square(self.points, candidates)
        added = distance.minimum(self.distance[0])
        dearer = distance.minimum(self.distance[1]) - added
        cost = added.sum(1, keepdim=True) + distance.new_zeros(len(candidates), len(self.centers)).index_add_(1, self.index[0], dearer)
        candidate, place = divmod(int(cost.argmin()), len(self.centers))
        if not bool(cost[candidate, place] < self.cost - min_gain):
            return False
        self.centers[place] = candidates[candidate]
        bereft = (self.index == place).any(0).nonzero().squeeze(-1)
        both = torch.cat([self.distance, distance[candidate].unsqueeze(0)])
        indices = torch.cat([self.index, torch.full_like(self.index[:1], place)])
        self.distance, order = both.topk(2, dim=0, largest=False)
        self.index = indices.gather(0, order)
        self.distance[:, bereft], self.index[:, bereft] = self._find(self.points[bereft])
        return True

    def _find(self, points: Tensor) -> tuple[Tensor, Tensor]:
        nearest = torch.cdist(points, self.points[self.centers]).topk(2, largest=False)
        return nearest.values.square().mT, nearest.indices.mT


def _draw_positions(weight: Tensor, number: int, generator: torch.Generator | None) -> Tensor:
    """Positions drawn in proportion to weights; evenly if all are zero."""
    total = weight.double().cumsum(0)
    total = total if bool(total[-1] > 0) else torch.ones_like(total).cumsum(0)
    at = torch.rand(number, dtype=torch.float64, generator=generator, device=generator_device(generator))
    return torch.searchsorted(total, at.to(total.device) * total[-1], right=True).clamp(max=len(weight) - 1)


def _square(points: Tensor, rows: Tensor) -> Tensor:
    """Square distances ``(T, N)`` of all points from some of them."""
    some, power = points[rows], points.square().sum(1)
    return torch.addmm(power.unsqueeze(0), some, points.mT, alpha=-2.0).add_(power[rows].unsqueeze(1)).clamp_(min=0.0)


def group_places(places: Tensor) -> Tensor:
    """Groups ``(K,)`` of places ``(K, D)``, the root of their number."""
    nearest = spread_rows(places, round(len(places) ** 0.5), torch.Generator(places.device).manual_seed(0))[1]
    # Of several rows at one place only one is the nearest: the others have no group.
    return nearest.unique(return_inverse=True)[1]


def partners(near: Tensor, number: int, most: int) -> Tensor:
    """Pairs ``(P, 2)`` of centres, each with its ``most`` closest.

    The closest are most often near rows that it is nearest to; ``near`` is ``(N, S)``.
    """
    code, times = (near[:, :1] * number + near[:, 1:]).flatten().unique(return_counts=True)
    order = times.argsort(descending=True, stable=True)
    code = code[order[(code[order] // number).argsort(stable=True)]]
    own = code // number
    rank = torch.arange(len(code), device=code.device) - torch.searchsorted(own, own)
    pairs = torch.stack([own, code % number], 1)[rank < most].sort(1).values
    code = (pairs[:, 0] * number + pairs[:, 1]).unique()
    return torch.stack([code // number, code % number], 1)
