"""Weighted normal components: coefficients of log densities, and M-steps."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from pyro_truncated import ClosedFormModel, Population, StateSpace
from pyro_truncated.extend import generator_device
from pyro_truncated.models.covariances import Covariances, Parameters, Prior, at_most, floor_covariance, rounding_floor, variances
from pyro_truncated.models.data_model import random_rows
from pyro_truncated.models.linear_mixture import MIN_COMPONENT_COUNT, Shares, best_weights
from pyro_truncated.models.seeding import group_places, partners, scattered_rows
from pyro_truncated.search import MaxInnerProductIndex

Statistics = dict[str, Tensor]


def collect_statistics(kind: Covariances, shares: Shares, rows: Tensor) -> Statistics:
    """See :meth:`GaussianMixture.sufficient_statistics`."""
    return {"counts": shares.counts(), "sums": shares.sums(rows), "squares": rows.square().sum(0), "products": kind.products(shares, rows)}


def add_statistics(parts: Iterable[Statistics]) -> Statistics:
    """The sums of statistics."""
    total: Statistics = {}
    for part in parts:
        total = {name: total[name] + value for name, value in part.items()} if total else part
    return total


def own_statistics(kind: Covariances) -> tuple[str, ...]:
    """The statistics that every component has of its own."""
    return ("counts", "sums", "products") if kind.is_own else ("counts", "sums")


def merge_statistics(kind: Covariances, statistics: Statistics, groups: Tensor) -> Statistics:
    """The statistics of components that merge several, ``(M, P)``."""
    return {**statistics, **{name: statistics[name][groups].sum(1) for name in own_statistics(kind)}}


def least_variance(kind: Covariances, statistics: Statistics, center: Tensor, bulk: Tensor, dtype: torch.dtype) -> Tensor:
    """The least variance of components, of each dimension or all."""
    total = statistics["counts"].sum()
    shift, power = statistics["sums"].sum(0) / total, statistics["squares"] / total
    variance, power = at_most(torch.stack([power - shift.square(), power]), bulk.square())
    return kind.floor(variance, power + center.square(), dtype)


@dataclasses.dataclass(frozen=True)
class Gaussians:
    r"""Components :math:`\pi_k \mathcal N(\mu_k, \Sigma_k)` of one kind, whose weights need not sum to one."""

    kind: Covariances
    weights: Tensor  # (K,)
    loc: Tensor  # means above a center, (K, D). Data and statistics are relative to it, too.
    spreads: Parameters  # the parameters of the covariances by name, in any type. The others are in float64.

    def __len__(self) -> int:
        return len(self.weights)

    def rescale(self, units: Tensor) -> Gaussians:
        """Returns the components of data that are multiplied by units ``(D,)``."""
        return dataclasses.replace(self, loc=self.loc * units, spreads=self.kind.rescale(self.spreads, units))

    def coefficients(self) -> Tensor:
        """Coefficients ``(K, F)`` of one, the data, and products in the log joints."""
        linear, squares, size = self.kind.precisions(self.loc, {name: value.double() for name, value in self.spreads.items()})
        offset = self.weights.log() - size - 0.5 * (linear * self.loc).sum(-1)
        return torch.cat([offset.unsqueeze(-1), linear, -0.5 * squares], 1)

    def offset(self, features: Tensor) -> Tensor | None:
        """Terms of the log joints ``(N,)`` that features ``(N, F)`` lack."""
        return self.kind.offset(features[:, 1 : self.loc.shape[1] + 1], self.spreads)

    def expected_log_joint(self, statistics: Statistics) -> Tensor:
        r""":math:`\sum_n r_{nk} \log \pi_k \mathcal N(y_n; \mu_k, \Sigma_k)`, ``(K,)``, but for what is the same for all components."""
        features = [statistics["counts"].unsqueeze(-1), statistics["sums"], self.kind.summed_features(statistics)]
        return (self.coefficients() * torch.cat(features, 1)).sum(-1)

    def expected_statistics(self) -> Statistics:
        """The statistics of one data point in expectation."""
        loc, weights = self.loc, self.weights.unsqueeze(-1)
        spreads = {name: value.double() for name, value in self.spreads.items()}
        squares = (weights * (loc.square() + self.kind.variances(loc, spreads))).sum(0)
        products = self.kind.expected_products(self.weights, loc, spreads)
        return {"counts": self.weights, "sums": weights * loc, "squares": squares, "products": products}

    def log_prior(self, prior: Prior) -> Tensor:
        """Log densities ``(K,)`` of the covariances."""
        return prior.log_prob(self.kind, self.spreads).expand(len(self))

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        """Log joints ``(N, S)`` of data ``(N, D)`` and components ``(N, S)``."""
        spreads = {name: value.to(x) for name, value in self.spreads.items()}
        return self.kind.likelihood(z.mT, self.loc.to(x), spreads).log_prob(x).mT + self.weights.log().to(x)[z]

    def best(self, statistics: Statistics, prior: Prior) -> Gaussians:
        """The components that maximise the expected log joint; those without data stay."""
        is_used, loc = self._best_means(statistics)
        return self._where(is_used, statistics, loc, prior.best(self.kind, self.spreads, statistics, loc))

    def best_on_their_own(self, statistics: Statistics, prior: Prior) -> Gaussians:
        """The same, but what all components share stays."""
        is_used, loc = self._best_means(statistics)
        spreads = {**self.spreads}
        if self.kind.is_own:
            best = prior.best(self.kind, self.spreads, statistics, loc)
            spreads.update((name, best[name]) for name in self._own)
        return self._where(is_used, statistics, loc, spreads)

    def _best_means(self, statistics: Statistics) -> tuple[Tensor, Tensor]:
        """Which components have data, ``(K,)``, and the likeliest means, ``(K, D)``."""
        counts = statistics["counts"]
        is_used = counts > MIN_COMPONENT_COUNT
        return is_used, torch.where(is_used.unsqueeze(-1), statistics["sums"] / counts.unsqueeze(-1), self.loc)

    def _where(self, is_used: Tensor, statistics: Statistics, loc: Tensor, spreads: Parameters) -> Gaussians:
        """Such components where there are data, these ones elsewhere."""
        new = {}
        for name, value in spreads.items():
            keeps = ~is_used.reshape(-1, *(1,) * (value.dim() - 1)) if name in self._own else is_used.new_zeros(())
            new[name] = torch.where(keeps, self.spreads[name], value.to(self.spreads[name]))
        return Gaussians(self.kind, best_weights(statistics["counts"]), loc, new)

    def select(self, index: Tensor) -> Gaussians:
        """Copies of some of these components."""
        spreads = {name: value[index] if name in self._own else value for name, value in self.spreads.items()}
        return Gaussians(self.kind, self.weights[index], self.loc[index], spreads)

    def with_others(self, index: Tensor, others: Gaussians) -> Gaussians:
        """A copy with some components replaced, but for what all share."""
        pairs = {name: (value, others.spreads[name]) for name, value in self.spreads.items()}
        spreads = {name: old.index_copy(0, index, new) if name in self._own else old for name, (old, new) in pairs.items()}
        weights, loc = self.weights.index_copy(0, index, others.weights), self.loc.index_copy(0, index, others.loc)
        return Gaussians(self.kind, weights, loc, spreads)

    @property
    def _own(self) -> list[str]:
        """Names of the parameters that every component has for itself."""
        return [name for name, value in self.spreads.items() if value.dim() > 0] if self.kind.is_own else []


# Every cluster is seen as if it had so many data points more, spread as those of all clusters are. The numbers of this file were chosen on
# data of other seeds than those of the tables.
_PSEUDO_COUNT = 10
_ROWS_PER_BLOCK, _MAX_ROWS_PER_BLOCK, _PAIRS = 2**14, 2**16, 2**12


class Agglomeration:
    r"""Model-based hierarchical clustering for initial components.

    Twice as many clusters as components belong to rows that lie spread over the data (k-means++). Those two become one, again and again,
    for which

    .. math:: \sum_{n \in a} \log p_a(y_n) + \sum_{n \in b} \log p_b(y_n) - \sum_{n \in a \cup b} \log p_{ab}(y_n)

    is least, every component at its likeliest; sums over the clusters are all that this needs. Where components are wide, or of different
    widths, k-means leaves some of them without a cluster and gives others two.

    References:
        Banfield and Raftery, "Model-based Gaussian and non-Gaussian clustering", Biometrics 49, 1993. Fraley, "Algorithms for model-based
        Gaussian hierarchical clustering", SIAM Journal on Scientific Computing 20, 1998.
    """

    def __init__(self, kind: Covariances, x: Tensor, floor: Tensor) -> None:
        self.kind, self.x, self.floor = kind, x, floor

    def components(self, number: int, generator: torch.Generator | None = None) -> Gaussians:
        """So many components ``K``, no two of them the same."""
        owner = self._project().owners(number, generator)
        statistics = self.statistics(owner, int(owner.max()) + 1)
        counts, within = statistics["counts"], self._within(statistics, owner)
        # Of data of few different rows some components are copies.
        index = torch.arange(number, device=counts.device)
        components = self.likeliest(statistics, within).select(index % len(counts))
        size = torch.where(index < len(counts), counts[index % len(counts)], 0.0) + 1
        noise = torch.randn(components.loc.shape, generator=generator, device=generator_device(generator)).to(components.loc)
        loc = components.loc + 0.01 * variances(within).sqrt() * noise
        return dataclasses.replace(components, weights=size / size.sum(), loc=loc)

    def owners(self, number: int, generator: torch.Generator | None = None) -> Tensor:
        """The data points' clusters ``(N,)``, numbered from 0, at most so many."""
        # Seeds are drawn from at least five rows for each, two of them for each cluster; a cluster has six partners.
        most = max(20_000, 5 * number)
        seeded = self.x if len(self.x) <= most else random_rows(self.x, most, generator)
        # Rows are compared within so many parts of the data, where clusters are not long.
        cells = 1 if self.kind.is_dense else 32
        centres = seeded[scattered_rows(seeded, min(2 * number, len(seeded)), generator, cells)].unique(dim=0)
        near = _nearest(self.x, centres)
        statistics = self.statistics(near[:, 0], len(centres))
        likeliest = functools.partial(self.likeliest, covariance=self._within(statistics, near[:, 0]))
        becomes = ClusterMerger(self.kind, likeliest, statistics, partners(near, len(centres), 6)).merge_to(number)
        return becomes[near[:, 0]].unique(return_inverse=True)[1]

    def statistics(self, owner: Tensor, number: int) -> Statistics:
        """Of so many clusters, which the data points are in."""
        space = StateSpace([number])

        def parts() -> Iterator[Statistics]:
            for rows, own in zip(self.x.split(_ROWS_PER_BLOCK), owner.split(_ROWS_PER_BLOCK), strict=True):
                population = Population(space, space.pack(own[:, None, None]), rows.new_zeros(len(rows), 1))
                yield collect_statistics(self.kind, Shares(population, number), rows)

        return add_statistics(parts())

    def likeliest(self, statistics: Statistics, covariance: Tensor) -> Gaussians:
        """The components of clusters, all of weight one, given their common covariance."""
        counts = statistics["counts"].clamp(min=1.0)
        loc, weights = statistics["sums"] / counts.unsqueeze(-1), torch.ones_like(counts)
        if not self.kind.is_own:
            return Gaussians(self.kind, weights, loc, self.kind.start(covariance, len(loc)))
        products = statistics["products"] + _PSEUDO_COUNT * self.kind.product(covariance, loc)
        regularised = {"counts": counts + _PSEUDO_COUNT, "sums": statistics["sums"] + _PSEUDO_COUNT * loc, "products": products}
        return Gaussians(self.kind, weights, loc, self.kind.best(regularised, loc, self.floor))

    def _within(self, statistics: Statistics, owner: Tensor) -> Tensor:
        """The covariance within clusters, or of all data, ``(D, D)``."""
        counts = statistics["counts"]
        loc = statistics["sums"] / counts.clamp(min=1.0).unsqueeze(-1)
        # Around means: differences of sums have no digits of clusters beside an outlier.
        blocks = zip(self.x.split(_ROWS_PER_BLOCK), owner.split(_ROWS_PER_BLOCK), strict=True)
        needs_matrix = self.kind.is_dense or not self.kind.is_own
        total_of = _products if needs_matrix else _squares
        within = total_of(rows - loc[own] for rows, own in blocks)
        freedom = max(1, len(self.x) - int((counts > 0).sum()))
        varies = bool((variances(within) > self.floor).any())
        total = within / freedom if varies else total_of(self.x.split(_ROWS_PER_BLOCK)) / len(self.x)
        # What all components share starts where M-steps can leave it.
        floor = self.floor if self.kind.is_own else self.floor.maximum(rounding_floor(self.x.square().mean(0), is_shared=True))
        return floor_covariance(total, floor) if needs_matrix else total.maximum(floor)

    def _project(self) -> Agglomeration:
        """Simpler components, in leading directions, if covariances are large matrices.

        Numbers above a million deviations grow as their logarithms, or sums of squares would lack the digits of the others.
        """
        # Of the root of the least variance, which is a millionth of the variance.
        limit = 1e9 * self.floor.sqrt()
        x = torch.where(self.x.abs() > limit, limit * self.x.sign() * (1 + (self.x.abs() / limit).log()), self.x)
        # Larger covariances are compared in the directions in which the data vary most.
        kind, number = self.kind.by_itself(), max(32, self.kind.least_directions)
        if not kind.is_dense or x.shape[1] <= number:
            return Agglomeration(kind, x, self.floor)
        directions = torch.linalg.eigh(_products(x.split(_ROWS_PER_BLOCK))).eigenvectors
        return Agglomeration(kind, x @ directions[:, -number:], self.floor.mean())


def _products(blocks: Iterable[Tensor]) -> Tensor:
    return sum((rows.mT @ rows for rows in blocks), torch.zeros(()))


def _squares(blocks: Iterable[Tensor]) -> Tensor:
    return sum((rows.square().sum(0) for rows in blocks), torch.zeros(()))


class ClusterMerger:
    """Clusters that become fewer."""

    def __init__(self, kind: Covariances, likeliest: Callable[[Statistics], Gaussians], statistics: Statistics, pairs: Tensor) -> None:
        self._kind, self._likeliest, self._statistics, self._pairs = kind, likeliest, statistics, pairs
        self._alone = self._log_joints(statistics)
        self._cost = self.costs(pairs)

    def merge_to(self, number: int) -> Tensor:
        """Each cluster's part when so many are left, ``(M,)``."""
        owner = torch.arange(len(self._alone), device=self._alone.device)
        surplus = len(owner) - number
        while surplus > 0 and len(self._pairs):
            # A third of the surplus is merged at once.
            merged = self._pairs[_cheapest(self._pairs, self._cost, -(-surplus // 3))]
            becomes = torch.arange(len(owner), device=owner.device)
            becomes[merged[:, 1]] = merged[:, 0]
            self._merge(merged)
            self._relink(merged, becomes)
            owner, surplus = becomes[owner], surplus - len(merged)
        return owner

    def _merge(self, pairs: Tensor) -> None:
        union, first = merge_statistics(self._kind, self._statistics, pairs), pairs[:, 0]
        for name in own_statistics(self._kind):
            self._statistics[name][first] = union[name]
        self._alone[first] = self._log_joints(union)

    def _relink(self, pairs: Tensor, new_owner: Tensor) -> None:
        """Returns the pairs of current clusters, and costs of new ones."""
        number = len(new_owner)
        linked = new_owner[self._pairs].sort(1).values
        is_pair = linked[:, 0] != linked[:, 1]
        code, position = (linked[is_pair, 0] * number + linked[is_pair, 1]).unique(return_inverse=True)
        self._pairs = torch.stack([code // number, code % number], 1)
        # Of pairs that are one now all cost the same, or are new.
        cost = self._cost.new_zeros(len(code)).index_copy_(0, position, self._cost[is_pair])
        new = torch.isin(self._pairs, pairs[:, 0]).any(1)
        cost[new] = self.costs(self._pairs[new])
        self._cost = cost

    def costs(self, pairs: Tensor) -> Tensor:
        """What is lost where the two of a pair are one, ``(P,)``."""
        costs = [
            self._alone[some].sum(1) - self._log_joints(merge_statistics(self._kind, self._statistics, some))
            for some in pairs.split(_PAIRS)
            if len(some)
        ]
        return torch.cat(costs) if costs else self._alone.new_zeros(0)

    def _log_joints(self, statistics: Statistics) -> Tensor:
        """Sums of the log joints over clusters, ``(M,)``."""
        return self._likeliest(statistics).expected_log_joint(statistics)


def _cheapest(pairs: Tensor, cost: Tensor, number: int) -> Tensor:
    """Positions of the cheapest disjoint pairs, at most so many."""
    used: set[int] = set()
    order: list[int] = []
    for some in cost.argsort(stable=True).split(2 * number):
        for pair, both in zip(some.tolist(), pairs[some].tolist(), strict=True):
            if used.isdisjoint(both):
                used.update(both)
                order.append(pair)
                if len(order) == number:
                    return torch.tensor(order, device=pairs.device)
    return torch.tensor(order, device=pairs.device)


def _nearest(x: Tensor, centres: Tensor) -> Tensor:
    """The centres that are nearest to each data point, nearest first, ``(N, S)``."""
    # For more clusters the nearest are looked for in single precision.
    if len(centres) > 1000:
        # In units in which single precision, twice as fast, holds the squares: no cluster depends on the last digits.
        unit = x.abs().max().clamp(min=torch.finfo(x.dtype).tiny)
        x, centres = (x / unit).float(), (centres / unit).float()
    # The smallest distance is the largest of these linear functions.
    linear = torch.cat([-0.5 * centres.square().sum(1, keepdim=True), centres], 1)
    functions = MaxInnerProductIndex(
        linear, _with_one(centres), lambda: group_places(centres), len(x), lambda own: -0.5 * own[:, 1:].square().sum(1)
    )
    blocks = x.split(_ROWS_PER_BLOCK if functions.are_few else _MAX_ROWS_PER_BLOCK)
    # The four nearest: clusters of the others are not its partners.
    return torch.cat([functions.query(_with_one(rows), min(4, len(centres))) for rows in blocks])


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(x[:, :1]), x], 1)


def all_statistics(model: ClosedFormModel, population: Population, y: Tensor) -> Statistics:
    """Returns the statistics of a population, block by block."""
    return add_statistics(model.sufficient_statistics(block, y) for block in population.split(_MAX_ROWS_PER_BLOCK))


@dataclasses.dataclass(frozen=True)
class Moves:
    """Disjoint moves: two components become one, the free one splits another."""

    components: Gaussians  # all as they are before
    survivors: Tensor  # which components take over the data of another one, (M,)
    movers: Tensor  # which ones move, (M,). Where it is the survivor, its data are left to all others.
    targets: Tensor  # where they move to, (M,)
    unions: Gaussians  # what the survivors become
    halves: Gaussians  # what those that are split become, and those that move, two and two, 2 M components

    def __len__(self) -> int:
        return len(self.survivors)

    def first(self, number: int) -> Moves:
        """The first ones."""
        some = torch.arange(number, device=self.survivors.device)
        halves = self.halves.select(torch.arange(2 * number, device=self.survivors.device))
        return Moves(self.components, self.survivors[some], self.movers[some], self.targets[some], self.unions.select(some), halves)

    def after(self) -> Gaussians:
        """All components after these moves."""
        even = 2 * torch.arange(len(self), device=self.survivors.device)
        after = self.components.with_others(self.survivors, self.unions)
        after = after.with_others(self.targets, self.halves.select(even)).with_others(self.movers, self.halves.select(even + 1))
        return dataclasses.replace(after, weights=after.weights / after.weights.sum())

    def candidates(self, population: Population) -> Tensor:
        """States ``(N, S, 1)`` that populations should also score."""
        other = torch.arange(population.space.size, device=self.survivors.device)
        other[self.movers], other[self.targets] = self.survivors, self.movers
        return population.space.pack(other[population.states(torch.int64)])


class MoveSearch:
    r"""Looks for moves that raise the free energy :math:`\mathcal F = \langle \log p(z, y) \rangle_q + H(q)`.

    Two components that become one take the sums of their responsibilities and statistics, so the loss needs no look at the data. EM finds
    the gain of two components in the place of one, on the data that the one explains best. The cheapest merges are made together with the
    best splits.

    Reference:
        Ueda, Nakano, Ghahramani and Hinton, "SMEM algorithm for mixture models", Neural Computation 12, 2000. There one move is tried
        after the other, each by EM to the end.
    """

    def __init__(self, components: Gaussians, population: Population, x: Tensor, statistics: Statistics, prior: Prior) -> None:
        self.components, self.statistics, self.prior, self.x = components.best(statistics, prior), statistics, prior, x
        self._log_prior = self.components.log_prior(prior)
        # Responsibilities of so many of a data point's components overlap; the others are small.
        best = population.log_joint.topk(min(4, population.num_states)).indices
        self.component, weight = population.states(torch.int64)[..., 0], population.weights().double()
        self.deletion_losses = self._deletion_losses(population.log_joint.double(), weight)
        self.near, self.weight = self.component.gather(1, best), weight.gather(1, best)

    def moves(self, generator: torch.Generator | None = None) -> Moves:
        """The best disjoint moves that gain something, the best first."""
        pairs = self.pairs()
        losses = torch.cat([self.losses(some) for some in pairs.split(_PAIRS) if len(some)] + [self.deletion_losses])
        pairs = torch.cat([pairs, torch.arange(len(self.components), device=pairs.device).unsqueeze(1).expand(-1, 2)])
        gains, halves = self.halves(generator)
        index, targets = match_merges_with_splits(pairs, losses, gains)
        survivors, movers = pairs[index].unbind(1)
        two = torch.stack([2 * targets, 2 * targets + 1], 1).flatten()
        return Moves(self.components, survivors, movers, targets, self.merge_pairs(pairs[index]), halves.select(two))

    # --- two that become one ---

    def _deletion_losses(self, log_joint: Tensor, weight: Tensor) -> Tensor:
        """What the free energy loses without each component, ``(K,)``."""
        best = log_joint.argmax(1, keepdim=True)
        rest = log_joint.scatter(1, best, -math.inf).logsumexp(1, keepdim=True)
        loss = (-torch.log1p(-weight)).scatter(1, best, log_joint.logsumexp(1, keepdim=True) - rest)
        return self._log_prior.index_add(0, self.component.flatten(), loss.flatten())

    def pairs(self) -> Tensor:
        """Pairs ``(M, 2)`` of components that explain the same data."""
        return partners(self.near[:, :2], len(self.components), 3)

    def losses(self, pairs: Tensor) -> Tensor:
        """Returns the free energy's loss by merging pairs, ``(M,)``."""
        merged, each = self.merge_pairs(pairs), self.components.expected_log_joint(self.statistics) + self._log_prior
        together = merged.expected_log_joint(self._statistics(pairs)) + merged.log_prior(self.prior)
        return each[pairs].sum(1) - together - self._entropies(pairs)

    def merge_pairs(self, pairs: Tensor) -> Gaussians:
        """The components that pairs become."""
        unions = self.components.select(pairs[:, 0])
        if len(pairs):
            unions = unions.best_on_their_own(self._statistics(pairs), self.prior)
        return dataclasses.replace(unions, weights=self.components.weights[pairs].sum(1))

    def _statistics(self, pairs: Tensor) -> Statistics:
        return merge_statistics(self.components.kind, self.statistics, pairs)

    def _entropies(self, pairs: Tensor) -> Tensor:
        """The decrease of entropy by merging pairs, ``(M,)``."""
        number = len(self.components)
        pair_code, change = pairs[:, 0] * number + pairs[:, 1], self.weight.new_zeros(len(pairs))
        for i, j in itertools.combinations(range(self.near.shape[1]), 2):
            one, other, weight = self.near[:, i], self.near[:, j], self.weight[:, [i, j]]
            code = one.minimum(other) * number + one.maximum(other)
            place = torch.searchsorted(pair_code, code).clamp(max=len(pair_code) - 1)
            entropy = torch.special.entr(weight.sum(1)) - torch.special.entr(weight).sum(1)
            change.index_add_(0, place, torch.where(pair_code[place] == code, entropy, 0.0))
        return change

    # --- two in the place of one ---

    def halves(self, generator: torch.Generator | None) -> tuple[Tensor, Gaussians]:
        """The gain of splitting components, ``(K,)``, and halves ``2k`` and ``2k + 1``."""
        number, order = len(self.components), self.near[:, 0].argsort(stable=True)
        owner, x = self.near[order, 0], self.x[order]
        space = StateSpace([2 * number])
        blocks = list(zip(x.split(_MAX_ROWS_PER_BLOCK), torch.stack([2 * owner, 2 * owner + 1], 1).split(_MAX_ROWS_PER_BLOCK), strict=True))
        halves = self.components.select(torch.arange(2 * number, device=owner.device) // 2)
        log_joints = _sides(x, owner, number, generator).split(_MAX_ROWS_PER_BLOCK)
        for _ in range(8):
            populations = (
                Population(space, space.pack(z.unsqueeze(-1)), log_joint) for (_, z), log_joint in zip(blocks, log_joints, strict=True)
            )
            shares = (Shares(population, 2 * number) for population in populations)
            statistics = add_statistics(
                collect_statistics(halves.kind, share, rows.double()) for share, (rows, _) in zip(shares, blocks, strict=True)
            )
            halves = halves.best_on_their_own(statistics, self.prior)
            # Together they have the weight of the component that they are of.
            weights = halves.weights.reshape(-1, 2)
            share = weights / weights.sum(1, keepdim=True) * self.components.weights.unsqueeze(1)
            halves = dataclasses.replace(halves, weights=share.flatten())
            log_joints = [halves.log_joint(rows, z) for rows, z in blocks]
        whole = torch.cat([self.components.log_joint(rows, z[:, :1] // 2) for rows, z in blocks]).double()
        ratio = torch.cat(log_joints).double().logsumexp(1) - whole.squeeze(1)
        weight = self.weight[order, 0]
        each = torch.logaddexp(torch.log1p(-weight), weight.log() + ratio)
        gains = (halves.log_prior(self.prior).reshape(-1, 2).sum(1) - self._log_prior).index_add(0, owner, each)
        # Halves of less than three data points have no covariance.
        too_few = statistics["counts"].reshape(-1, 2).amin(1) < 3
        return gains.masked_fill(too_few, -math.inf), halves


def _sides(x: Tensor, owner: Tensor, number: int, generator: torch.Generator | None) -> Tensor:
    """Log weights ``(N, 2)`` of halves, by the side of the component's mean."""
    size = torch.bincount(owner, minlength=number)
    at = torch.rand(2, number, dtype=torch.float64, generator=generator, device=generator_device(generator)).to(x.device)
    draws = (size.cumsum(0) - size + (at * size).long()).clamp(max=len(x) - 1)
    mean = x.new_zeros(number, x.shape[1]).index_add_(0, owner, x) / size.clamp(min=1).unsqueeze(1)
    side = ((x - mean[owner]) * (x[draws[0]] - x[draws[1]])[owner]).sum(1) > 0
    return x.new_zeros(len(x), 2).masked_fill(torch.stack([side, ~side], 1), -math.inf)


def match_merges_with_splits(pairs: Tensor, losses: Tensor, gains: Tensor) -> tuple[Tensor, Tensor]:
    """The cheapest disjoint pairs with the most gainful components, ``(M,)`` each."""
    order, best = losses.argsort(stable=True).tolist(), iter(gains.argsort(descending=True, stable=True).tolist())
    both, cost, gain = pairs.tolist(), losses.tolist(), gains.tolist()
    used: set[int] = set()
    matches: list[tuple[int, int]] = []
    for pair in order:
        if not used.isdisjoint(both[pair]):
            continue
        # What is passed over here is taken, or will be with this pair.
        split = next((k for k in best if k not in used and k not in both[pair]), None)
        if split is None or not gain[split] > cost[pair]:
            break
        used.update((*both[pair], split))
        matches.append((pair, split))
    table = torch.tensor(matches, dtype=torch.int64, device=pairs.device).reshape(-1, 2)
    return table[:, 0], table[:, 1]


@torch.no_grad()
def accept_moves(
    moves: Moves, evaluate: Callable[[Moves], tuple[Population, Tensor]], model: torch.nn.Module
) -> tuple[Moves, Population | None]:
    """Makes all moves, or halves their number until the free energy rises.

    ``evaluate`` does moves and returns populations and their free energy. The model's parameters are put back if none is done, or something
    fails.
    """
    before, accepted = [value.clone() for value in model.parameters()], None
    try:
        least = evaluate(moves.first(0))[1] if len(moves) else torch.zeros(())
        while len(moves) and accepted is None:
            population, free_energy = evaluate(moves)
            if bool(free_energy >= least):
                accepted = population
            else:
                moves = moves.first(len(moves) // 2)
    finally:
        if accepted is None:
            for value, old in zip(model.parameters(), before, strict=True):
                value.copy_(old)
    return moves, accepted
