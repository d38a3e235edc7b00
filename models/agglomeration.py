"""Agglomeration of clusters for initial components of a mixture.

Pairs merge that one component explains nearly as well as two.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pyro_truncated import Population, StateSpace
from pyro_truncated.models.binary_causes import random_rows
from pyro_truncated.models.covariances import Covariances
from pyro_truncated.models.gaussians import Gaussians, Statistics, added, collected, combined, own_statistics
from pyro_truncated.models.mixture import Shares
from pyro_truncated.models.seeding import grouped, parted, partners, scattered_rows
from pyro_truncated.models.variance_floor import floored
from pyro_truncated.search import MaxInnerProductIndex

# Chosen on data of other seeds than those of the tables.
_SURPLUS = 2
_NEAREST, _PARTNERS = 4, 6
# Every cluster is seen as if it had so many data points more, spread as those of all clusters are.
_PRIOR = 10
_SHARE = 3
# Larger covariances are compared in the directions in which the data vary most.
_DIRECTIONS = 32
_SEEDED, _SEEDED_PER_COMPONENT = 20_000, 5
# Rows are compared within so many parts of the data, where clusters are not long.
_CELLS = 32
_ROWS_PER_BLOCK, _MAX_ROWS_PER_BLOCK, _PAIRS = 2**14, 2**16, 2**12
# For more clusters the nearest are looked for in single precision.
_MAX_DOUBLE_CLUSTERS = 1000


class Agglomeration:
    r"""Model-based hierarchical clustering for initial components.

    It starts from twice as many clusters as there shall be components.

    The clusters belong to rows that lie spread over the data (k-means++). Of these those two become one, again and again, whose union one
    component explains nearly as well as they do: for which

    .. math:: \sum_{n \in a} \log p_a(y_n) + \sum_{n \in b} \log p_b(y_n) - \sum_{n \in a \cup b} \log p_{ab}(y_n)

    is least, every component at its likeliest; sums over the clusters are all that this needs. (With the mixing proportions large clusters
    would swallow each other before small ones do.) Where components are wide, or of different widths, k-means leaves some of them without
    a cluster and gives others two.

    Args:
        kind: the kind of covariances.
        x: data above their mean, ``(N, D)``.
        floor: least variance, of all dimensions or of each.

    References:
        Banfield and Raftery, "Model-based Gaussian and non-Gaussian clustering", Biometrics 49, 1993. Fraley, "Algorithms for model-based
        Gaussian hierarchical clustering", SIAM Journal on Scientific Computing 20, 1998.
    """

    def __init__(self, kind: Covariances, x: Tensor, floor: Tensor) -> None:
        self.kind, self.x, self.floor = kind, x, floor
        self._products = sum((rows.mT @ rows for rows in x.split(_ROWS_PER_BLOCK)), x.new_zeros(()))

    def components(self, number: int, generator: torch.Generator | None = None) -> Gaussians:
        """So many components ``K``, no two of them the same."""
        owner = self._seen().owners(number, generator)
        statistics = self.statistics(owner, int(owner.max()) + 1)
        counts, within = statistics["counts"], self._within(statistics)
        # Of data of few different rows some components are copies.
        index = torch.arange(number, device=counts.device)
        components = self.likeliest(statistics, within).of(index % len(counts))
        size = torch.where(index < len(counts), counts[index % len(counts)], 0.0) + 1
        return dataclasses.replace(components, weights=size / size.sum(), loc=parted(components.loc, within, generator))

    def owners(self, number: int, generator: torch.Generator | None = None) -> Tensor:
        """Returns the data points' clusters ``(N,)``, numbered from 0.

        At most so many clusters are left.
        """
        most = max(_SEEDED, _SEEDED_PER_COMPONENT * number)
        seeded = self.x if len(self.x) <= most else random_rows(self.x, most, generator)
        cells = 1 if self.kind.is_dense else _CELLS
        centres = seeded[scattered_rows(seeded, min(_SURPLUS * number, len(seeded)), generator, cells)].unique(dim=0)
        near = _nearest(self.x, centres)
        statistics = self.statistics(near[:, 0], len(centres))
        likeliest = functools.partial(self.likeliest, within=self._within(statistics))
        becomes = Merging(self.kind, likeliest, statistics, partners(near, len(centres), _PARTNERS)).down_to(number)
        owner: Tensor = becomes[near[:, 0]].unique(return_inverse=True)[1]
        return owner

    def statistics(self, owner: Tensor, number: int) -> Statistics:
        """Of so many clusters, which the data points are in."""
        space = StateSpace([number])

        def parts() -> Iterator[Statistics]:
            for rows, own in zip(self.x.split(_ROWS_PER_BLOCK), owner.split(_ROWS_PER_BLOCK), strict=True):
                population = Population(space, space.pack(own[:, None, None]), rows.new_zeros(len(rows), 1))
                yield collected(self.kind, Shares(population, number), rows)

        return added(parts())

    def likeliest(self, statistics: Statistics, within: Tensor) -> Gaussians:
        """Returns the components of clusters, all of weight one.

        ``within`` is what is known of their covariances beforehand.
        """
        counts = statistics["counts"].clamp(min=1.0)
        loc, weights = statistics["sums"] / counts.unsqueeze(-1), torch.ones_like(counts)
        if not self.kind.is_own:
            return Gaussians(self.kind, weights, loc, self.kind.start(within, len(loc)))
        products = statistics["products"] + _PRIOR * self.kind.product(within, loc)
        more = {"counts": counts + _PRIOR, "sums": statistics["sums"] + _PRIOR * loc, "products": products}
        return Gaussians(self.kind, weights, loc, self.kind.best(more, loc, self.floor))

    def _within(self, statistics: Statistics) -> Tensor:
        """Returns the covariance within clusters, ``(D, D)``.

        If nothing varies within these, it is that of all data.
        """
        counts, sums = statistics["counts"], statistics["sums"]
        within = self._products - (sums / counts.clamp(min=1.0).unsqueeze(-1)).mT @ sums
        freedom = max(1, len(self.x) - int((counts > 0).sum()))
        varies = bool((within.diagonal() > self.floor).any())
        covariance: Tensor = floored(within / freedom if varies else self._products / len(self.x), self.floor)
        return covariance

    def _seen(self) -> Agglomeration:
        """Returns simpler components if covariances are large matrices.

        Each component counts by itself, in the directions in which the data vary most.
        """
        kind, number = self.kind.by_itself(), max(_DIRECTIONS, self.kind.least_directions)
        if not kind.is_dense or self.x.shape[1] <= number:
            return Agglomeration(kind, self.x, self.floor)
        return Agglomeration(kind, self.x @ torch.linalg.eigh(self._products).eigenvectors[:, -number:], self.floor.mean())


class Merging:
    """Clusters that become fewer.

    Args:
        kind: the kind of covariances of their components.
        likeliest: these components, as a function of statistics.
        statistics: of the clusters. They change.
        pairs: which ones lie next to each other, ``(P, 2)``.
    """

    def __init__(self, kind: Covariances, likeliest: Callable[[Statistics], Gaussians], statistics: Statistics, pairs: Tensor) -> None:
        self._kind, self._likeliest, self._statistics, self._pairs = kind, likeliest, statistics, pairs
        self._alone = self._log_joints(statistics)
        self._cost = self.costs(pairs)

    def down_to(self, number: int) -> Tensor:
        """Returns each cluster's part when so many are left, ``(M,)``.

        At most a third of the surplus merges at once, to choose again.
        """
        owner = torch.arange(len(self._alone), device=self._alone.device)
        surplus = len(owner) - number
        while surplus > 0 and len(self._pairs):
            merged = self._pairs[_cheapest(self._pairs, self._cost, -(-surplus // _SHARE))]
            becomes = torch.arange(len(owner), device=owner.device)
            becomes[merged[:, 1]] = merged[:, 0]
            self._merge(merged)
            self._relink(merged, becomes)
            owner, surplus = becomes[owner], surplus - len(merged)
        return owner

    def _merge(self, merged: Tensor) -> None:
        union, kept = combined(self._kind, self._statistics, merged), merged[:, 0]
        for name in own_statistics(self._kind):
            self._statistics[name][kept] = union[name]
        self._alone[kept] = self._log_joints(union)

    def _relink(self, merged: Tensor, becomes: Tensor) -> None:
        """Returns the pairs of current clusters, and costs of new ones."""
        number = len(becomes)
        linked = becomes[self._pairs].sort(1).values
        apart = linked[:, 0] != linked[:, 1]
        code, where = (linked[apart, 0] * number + linked[apart, 1]).unique(return_inverse=True)
        self._pairs = torch.stack([code // number, code % number], 1)
        # Of pairs that are one now all cost the same, or are new.
        cost = self._cost.new_zeros(len(code)).index_copy_(0, where, self._cost[apart])
        new = torch.isin(self._pairs, merged[:, 0]).any(1)
        cost[new] = self.costs(self._pairs[new])
        self._cost = cost

    def costs(self, pairs: Tensor) -> Tensor:
        """What is lost where the two of a pair are one, ``(P,)``."""
        costs = [
            self._alone[some].sum(1) - self._log_joints(combined(self._kind, self._statistics, some))
            for some in pairs.split(_PAIRS)
            if len(some)
        ]
        return torch.cat(costs) if costs else self._alone.new_zeros(0)

    def _log_joints(self, statistics: Statistics) -> Tensor:
        """Sums of the log joints over clusters, ``(M,)``."""
        log_joints: Tensor = self._likeliest(statistics).expected(statistics)
        return log_joints


def _cheapest(pairs: Tensor, cost: Tensor, number: int) -> Tensor:
    """Returns positions of the cheapest disjoint pairs, at most so many.

    No two pairs have a cluster in common.
    """
    taken: set[int] = set()
    chosen: list[int] = []
    for some in cost.argsort(stable=True).split(2 * number):
        for pair, both in zip(some.tolist(), pairs[some].tolist(), strict=True):
            if taken.isdisjoint(both):
                taken.update(both)
                chosen.append(pair)
                if len(chosen) == number:
                    return torch.tensor(chosen, device=pairs.device)
    return torch.tensor(chosen, device=pairs.device)


def _nearest(x: Tensor, centres: Tensor) -> Tensor:
    """The centres that are nearest to each data point, nearest first, ``(N, S)``."""
    if len(centres) > _MAX_DOUBLE_CLUSTERS:
        # In units in which single precision, twice as fast, holds the squares: no cluster depends on the last digits.
        unit = x.abs().max().clamp(min=torch.finfo(x.dtype).tiny)
        x, centres = (x / unit).float(), (centres / unit).float()
    # The smallest distance is the largest of these linear functions.
    linear = torch.cat([-0.5 * centres.square().sum(1, keepdim=True), centres], 1)
    functions = MaxInnerProductIndex(
        linear, _with_one(centres), lambda: grouped(centres), len(x), lambda own: -0.5 * own[:, 1:].square().sum(1)
    )
    blocks = x.split(_ROWS_PER_BLOCK if functions.are_few else _MAX_ROWS_PER_BLOCK)
    return torch.cat([functions.largest(_with_one(rows), min(_NEAREST, len(centres))) for rows in blocks])


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(x[:, :1]), x], 1)
