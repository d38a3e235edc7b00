"""Mixtures of Gaussians with full, diagonal, spherical, tied or low-rank covariances."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import AutoTruncated, ClosedForm, Population, StateSpace
from pyro_truncated.distributions import Component
from pyro_truncated.extend import check_observable, generator_device, names_arguments, selected_rows, some_rows, takes_arrays
from pyro_truncated.models.covariances import (
    Covariances,
    Parameters,
    Prior,
    at_most,
    bulk_deviation,
    empty_prior_buffers,
    floor_covariance,
    make_covariances,
    prior_buffers,
    rounding_floor,
)
from pyro_truncated.models.data_model import (
    MAX_ROWS_PER_BLOCK,
    MIN_COMPONENT_COUNT,
    MOST_ROWS,
    ROWS_PER_BLOCK,
    check_data,
    count_data,
    random_rows,
)
from pyro_truncated.models.linear_mixture import LinearMixture, Shares, best_weights
from pyro_truncated.models.seeding import group_places, partners, perturb, scattered_rows
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
        each: Tensor = prior.log_prob(self.kind, self.spreads)
        return each.expand(len(self))

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        """Log joints ``(N, S)`` of data ``(N, D)`` and components ``(N, S)``."""
        spreads = {name: value.to(x) for name, value in self.spreads.items()}
        log_density: Tensor = self.kind.likelihood(z.mT, self.loc.to(x), spreads).log_prob(x)
        return log_density.mT + self.weights.log().to(x)[z]

    def best(self, statistics: Statistics, prior: Prior, *, keeps_shared: bool = False) -> Gaussians:
        """The components that maximise the expected log joint.

        Those without data stay, and what all components share, if asked for.
        """
        counts = statistics["counts"]
        is_used = counts > MIN_COMPONENT_COUNT
        loc = torch.where(is_used.unsqueeze(-1), statistics["sums"] / counts.unsqueeze(-1), self.loc)
        spreads = {**self.spreads}
        if self.kind.is_own or not keeps_shared:
            for name, value in prior.best(self.kind, self.spreads, statistics, loc).items():
                keeps = ~is_used.reshape(-1, *(1,) * (value.dim() - 1)) if name in self._own else is_used.new_full((), keeps_shared)
                spreads[name] = torch.where(keeps, spreads[name], value.to(spreads[name]))
        return Gaussians(self.kind, best_weights(counts), loc, spreads)

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


# Pairs that are looked at at a time. The numbers of this file were chosen on data of other seeds than those of the tables.
_PAIRS = 2**12


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
        return dataclasses.replace(components, weights=size / size.sum(), loc=perturb(components.loc, within, generator))

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
            for rows, own in zip(self.x.split(ROWS_PER_BLOCK), owner.split(ROWS_PER_BLOCK), strict=True):
                population = Population(space, space.pack(own[:, None, None]), rows.new_zeros(len(rows), 1))
                yield collect_statistics(self.kind, Shares(population, number), rows)

        return add_statistics(parts())

    def likeliest(self, statistics: Statistics, covariance: Tensor) -> Gaussians:
        """The components of clusters, all of weight one, given their common covariance."""
        counts = statistics["counts"].clamp(min=1.0)
        loc, weights = statistics["sums"] / counts.unsqueeze(-1), torch.ones_like(counts)
        if not self.kind.is_own:
            return Gaussians(self.kind, weights, loc, self.kind.start(covariance, len(loc)))
        # Every cluster is seen as if it had so many data points more, spread as those of all clusters are.
        pseudo = 10
        products = statistics["products"] + pseudo * self.kind.product(covariance, loc)
        regularised = {"counts": counts + pseudo, "sums": statistics["sums"] + pseudo * loc, "products": products}
        return Gaussians(self.kind, weights, loc, self.kind.best(regularised, loc, self.floor))

    def _within(self, statistics: Statistics, owner: Tensor) -> Tensor:
        """The covariance within clusters, or of all data, ``(D, D)``."""
        counts = statistics["counts"]
        loc = statistics["sums"] / counts.clamp(min=1.0).unsqueeze(-1)
        # Around means: differences of sums have no digits of clusters beside an outlier.
        blocks = zip(self.x.split(ROWS_PER_BLOCK), owner.split(ROWS_PER_BLOCK), strict=True)
        within = _products(rows - loc[own] for rows, own in blocks)
        freedom = max(1, len(self.x) - int((counts > 0).sum()))
        varies = bool((within.diagonal() > self.floor).any())
        total = within / freedom if varies else _products(self.x.split(ROWS_PER_BLOCK)) / len(self.x)
        # What all components share starts where M-steps can leave it.
        floor = self.floor if self.kind.is_own else self.floor.maximum(rounding_floor(self.x.square().mean(0), is_shared=True))
        return floor_covariance(total, floor)

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
        directions = torch.linalg.eigh(_products(x.split(ROWS_PER_BLOCK))).eigenvectors
        return Agglomeration(kind, x @ directions[:, -number:], self.floor.mean())


def _products(blocks: Iterable[Tensor]) -> Tensor:
    """The sum of products of rows, ``(D, D)``."""
    return sum((rows.mT @ rows for rows in blocks), torch.zeros(()))


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
    blocks = x.split(ROWS_PER_BLOCK if functions.are_few else MAX_ROWS_PER_BLOCK)
    # The four nearest: clusters of the others are not its partners.
    return torch.cat([functions.query(_with_one(rows), min(4, len(centres))) for rows in blocks])


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(x[:, :1]), x], 1)


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
        self.near, self.weight = self.component.gather(1, best), weight.gather(1, best)
        # What the free energy loses without each component, (K,).
        log_joint = population.log_joint.double()
        best = log_joint.argmax(1, keepdim=True)
        rest = log_joint.scatter(1, best, -math.inf).logsumexp(1, keepdim=True)
        loss = (-torch.log1p(-weight)).scatter(1, best, log_joint.logsumexp(1, keepdim=True) - rest)
        self.deletion_losses = self._log_prior.index_add(0, self.component.flatten(), loss.flatten())

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
            unions = unions.best(self._statistics(pairs), self.prior, keeps_shared=True)
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
        blocks = list(zip(x.split(MAX_ROWS_PER_BLOCK), torch.stack([2 * owner, 2 * owner + 1], 1).split(MAX_ROWS_PER_BLOCK), strict=True))
        halves = self.components.select(torch.arange(2 * number, device=owner.device) // 2)
        log_joints = _sides(x, owner, number, generator).split(MAX_ROWS_PER_BLOCK)
        # Eight EM steps of the halves.
        for _ in range(8):
            populations = (
                Population(space, space.pack(z.unsqueeze(-1)), log_joint) for (_, z), log_joint in zip(blocks, log_joints, strict=True)
            )
            shares = (Shares(population, 2 * number) for population in populations)
            statistics = add_statistics(
                collect_statistics(halves.kind, share, rows.double()) for share, (rows, _) in zip(shares, blocks, strict=True)
            )
            halves = halves.best(statistics, self.prior, keeps_shared=True)
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
    """The cheapest disjoint pairs with the most gainful components, ``(M,)`` each.

    Of ``pairs (P, 2)`` that cost ``losses (P,)``, and components that gain ``gains (K,)`` as two.
    """
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
    before = [value.clone() for value in model.parameters()]
    population: Population | None = None
    try:
        least: Any = evaluate(moves.first(0))[1] if len(moves) else None
        while len(moves) and population is None:
            proposed, free_energy = evaluate(moves)
            if bool(free_energy >= least):
                population = proposed
            else:
                moves = moves.first(len(moves) // 2)
    finally:
        if population is None:
            for value, old in zip(model.parameters(), before, strict=True):
                value.copy_(old)
    return moves, population


class GaussianMixture(LinearMixture):
    r"""Mixture of Gaussians, :math:`z \sim \mathrm{Categorical}(\pi)`, :math:`y \sim \mathcal N(\mu_z, \Sigma_z)`.

    Variances are kept above :math:`10^{-6}` of the data's variance in each dimension, without outliers. Else the likelihood has no
    maximum. Covariances of components have a weak prior from :meth:`initialize` on: a few more data points with the covariance of all
    data, scaled to the component. Losses in training include :meth:`log_prior`.

    Example:
        >>> y = torch.cat([torch.randn(50, 2), torch.randn(50, 2) + 5])
        >>> model = GaussianMixture(2, 2).initialize(y)
        >>> guide = AutoTruncated(model, num_states=2)  # both components: exact EM
        >>> svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO())
        >>> losses = [svi.step(y) for _ in range(10)]

    Args:
        num_observed: observed dimensions ``D``.
        num_components: number of components ``K``.
        covariance: ``"full"``, ``"diag"`` or ``"spherical"`` for a covariance of each component, ``"tied"`` for a full one that all
            share, ``"low-rank"`` for :math:`W_k W_k^\top + \sigma_k^2 I`, a mixture of probabilistic principal component analysers.
        rank: number of columns ``R`` of :math:`W_k`, below ``D``; of low-rank covariances.
        shared_noise: whether all components of low rank have the same :math:`\sigma`.
        pseudo_data: how many data points the prior of a covariance counts for, 0 for none. Default: six, one if diagonal or spherical.
        dtype: type of the parameters. Default: torch's.

    Attributes:
        weights: mixing proportions :math:`\pi`, ``(K,)``.
        loc: means :math:`\mu`, ``(K, D)``.
        scale: Cholesky factors ``(K, D, D)`` if full, ``(D, D)`` if tied; standard deviations ``(K, D)`` if diagonal, ``(K,)`` if
            spherical; those of the noise, ``(K,)`` or ``()``, if of low rank.
        factor: :math:`W`, ``(K, D, R)``; of low-rank covariances only.
        center: where moments are taken, ``(D,)``: the data's mean after :meth:`initialize`.
        bulk: deviations of the data without outliers, ``(D,)``, where there are some; else zero.
        spread: the data's covariance ``(D, D)`` in :meth:`initialize`, if diagonal or spherical variances ``(D,)``. Empty without prior.
        pseudo: how many data points it counts for, half its log determinant, ``(2,)``. Zero if unknown.

    Raises:
        ValueError: for an unknown kind of covariance, a rank that is missing, out of range, or given for another kind, or such pseudo-data.

    Reference:
        Tipping and Bishop, "Mixtures of probabilistic principal component analyzers", Neural Computation 11, 1999.
    """

    weights: Tensor
    loc: Tensor
    scale: Tensor
    factor: Tensor
    center: Tensor
    bulk: Tensor
    spread: Tensor
    pseudo: Tensor
    pseudo_data: float = 0.0

    @names_arguments
    def __init__(
        self,
        num_observed: int,
        num_components: int,
        *,
        covariance: str = "full",
        rank: int | None = None,
        shared_noise: bool = False,
        pseudo_data: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_observed, num_components, dtype)
        if pseudo_data is not None and not 0 <= pseudo_data < math.inf:
            raise ValueError(f"pseudo_data must be finite and not negative; got {pseudo_data}")
        self.covariance, self.rank = covariance, rank
        self._kind = make_covariances(covariance, num_observed, rank, shared_noise)
        self.pseudo_data = self._kind.pseudo_data if pseudo_data is None or not self._kind.is_own else pseudo_data
        self.loc = PyroParam(torch.randn(num_components, num_observed, dtype=dtype), constraints.real)  # type: ignore[assignment]
        for name, value in self._kind.start(torch.eye(num_observed, dtype=dtype), num_components).items():
            # Directions of length zero would have no gradient.
            value = 0.1 * torch.randn_like(value) if name == "factor" else value
            setattr(self, name, PyroParam(value, self._kind.supports[name]))
        self.register_buffer("center", torch.zeros(num_observed, dtype=torch.float64))
        for name, value in self.new_buffers().items():
            self.register_buffer(name, value)

    def new_buffers(self) -> dict[str, Tensor]:
        """Mixtures of earlier versions have no prior, and know of no outliers."""
        own = {"bulk": torch.zeros_like(self.center), **empty_prior_buffers(self._kind, self.pseudo_data, self.center)}
        return {**super().new_buffers(), **own}

    @takes_arrays
    def forward(self, y: Tensor | None = None, batch_size: int | None = None, num_data: int | None = None) -> Tensor:
        """The model of data ``y (N, D)``; without data it generates ``num_data`` observations."""
        weights, loc, spreads = self.weights, self.loc, self._spreads()
        size = count_data(y, num_data)
        if y is not None and self.pseudo_data:  # a factor, but no device is waited for
            unit = dist.Unit(self.log_prior(spreads), validate_args=False)
            pyro.sample("covariances", unit, obs=unit.sample(), infer={"is_auxiliary": True, "of_parameters": True})  # type: ignore[arg-type]
        with pyro.plate("data", size, subsample_size=batch_size) as index:
            z = pyro.sample("z", Component(weights))
            return pyro.sample("y", self._kind.likelihood(z, loc, spreads), obs=selected_rows(y, index))

    @names_arguments
    @torch.no_grad()
    @takes_arrays
    def initialize(self, y: Tensor, generator: torch.Generator | None = None) -> GaussianMixture:
        """Initialises from clusters of the data.

        They give means, shares and covariances.

        Twice as many clusters belong to rows that are spread over the data (k-means++). Clusters
        are then merged that one component explains nearly as well as two. This is model-based
        hierarchical clustering, see :class:`~pyro_truncated.models.gaussian_mixture.Agglomeration`.
        All of it looks at 20 000 random rows, or fifty per component if more.

        Args:
            y: data ``(N, D)``.
            generator: source of randomness.

        Returns:
            The model itself.

        Raises:
            ValueError: for data that training refuses, in its words.
        """
        check_observable(self, check_data(y, self.num_observed), constraints.real)
        # At least fifty rows for each component.
        rows = some_rows(y, max(MOST_ROWS, 50 * self.num_components), generator).double()
        self.center = rows.mean(0)
        above = rows - self.center
        self.bulk = bulk_deviation(above)
        # The mean of few outliers is far from all other rows, whose moments around it would lose their digits.
        self.center = torch.where(self.bulk > 0, rows.median(0).values, self.center)
        above = rows - self.center
        variance = at_most(above.square().mean(0), self.bulk.square())
        floor = self._kind.floor(variance, variance + self.center.square(), self.loc.dtype)
        self.spread, self.pseudo = prior_buffers(self._kind, self.pseudo_data, above, floor).values()
        self._take(self._first_components(above, floor, generator))
        self.knows_data.fill_(True)
        return self

    def _first_components(self, centred: Tensor, floor: Tensor, generator: torch.Generator | None) -> Gaussians:
        """Components to start from, of data above their center.

        Where dimensions have units, distances are in their deviations. Of many dimensions, distances as they are are tried, too, and of
        data with outliers, distances in deviations without these. They are taken if clearly likelier.
        """

        def start(units: Tensor) -> Gaussians:
            return Agglomeration(self._kind, centred / units, floor / units.square()).components(self.num_components, generator)

        if not self._kind.has_units:
            return start(floor.new_ones(()))
        deviation = centred.square().mean(0).sqrt()
        units = torch.where(deviation > 0, deviation, 1.0)
        # In few dimensions deviations are the better unit.
        others = [torch.ones_like(units)] if centred.shape[1] > 16 else []
        if bool((self.bulk > 0).any()):
            others.append(at_most(units, self.bulk))
        best, rows = start(units).rescale(units), centred[:1000]
        every = torch.arange(self.num_components, device=rows.device).expand(len(rows), -1)
        for other_units in others:
            other = start(other_units).rescale(other_units)
            # Likelier by a tenth of a nat on some rows.
            if bool((other.log_joint(rows, every).logsumexp(1) - best.log_joint(rows, every).logsumexp(1)).mean() > 0.1):
                best = other
        return best

    @names_arguments
    @torch.no_grad()
    @takes_arrays
    def split_and_merge(self, guide: AutoTruncated, y: Tensor, generator: torch.Generator | None = None) -> int:
        """Moves one of two components that explain the same data elsewhere.

        The free energy tells the loss of merging two components, or of removing one. EM on its data tells the gain of two in its place. All
        disjoint moves that gain are done at once; fewer or none, where the free energy would fall. After them
        :class:`~pyro_truncated.ClosedForm` takes a step on all data. Call it after passes, at the cost of two, until nothing moves.

        Example:
            >>> y = torch.cat([torch.randn(200, 2), torch.randn(200, 2) + 9])
            >>> model = GaussianMixture(2, 2, covariance="spherical").initialize(y)
            >>> model.loc = torch.zeros(2, 2) + torch.tensor([[0.0], [0.1]])  # both in the first cluster
            >>> guide = AutoTruncated(model, num_states=2)
            >>> losses = [SVI(model, guide, ClosedForm(model), Truncated_ELBO()).step(y) for _ in range(5)]
            >>> moved = model.split_and_merge(guide, y)

        Args:
            guide: the truncated guide of this very model.
            y: all data ``(N, D)``, those that the guide has the populations of.
            generator: source of randomness.

        Returns:
            How many components have moved.

        Raises:
            ValueError: if the guide is of another model, or the data have another number of dimensions.
            NotImplementedError: where several processes share the data.
        """
        if guide.model is not self:
            raise ValueError(f"guide must be the AutoTruncated of this very mixture; got one of {type(guide.model).__name__}")
        population = guide.refresh_(check_data(y, self.num_observed))
        if guide.populations.is_part:
            raise NotImplementedError("split_and_merge needs all data; got a shard: train the mixture in one process")
        statistics = self._all_statistics(population, y)
        search = MoveSearch(self._components(self.weights), population, self._above_center(y), statistics, self._prior(statistics))
        moves, new_population = accept_moves(search.moves(generator), lambda some: self._move(some, guide, y), self)
        if new_population is None:
            return 0
        guide.populations.store_(new_population.log_joint, None, new_population.words)
        if (driver := ClosedForm.find(self)) is not None:
            driver.collect(self._all_statistics(new_population, y), None, None, len(y))
            driver(())
        return len(moves)

    def _all_statistics(self, population: Population, y: Tensor) -> Statistics:
        """Returns the statistics of a population, block by block."""
        return add_statistics(self.sufficient_statistics(block, y) for block in population.split(MAX_ROWS_PER_BLOCK))

    def _move(self, moves: Moves, guide: AutoTruncated, y: Tensor) -> tuple[Population, Tensor]:
        """Moves components; returns populations with their candidates, and the free energy."""
        self._take(moves.after())
        scorer = guide.make_scorer(y)
        population = guide.rescore(scorer)
        words = moves.candidates(population)
        population = population.merge(Population(population.space, words, scorer.score(words)))
        return population, population.free_energy().sum() + self.log_prior()

    def log_prior(self, spreads: dict[str, Tensor] | None = None) -> Tensor:
        """The log density of the covariances, a scalar, zero without a prior."""
        each: Tensor = Prior.from_pseudo_data(self.center[0], self.spread, self.pseudo).log_prob(
            self._kind, spreads := spreads or self._spreads()
        )
        return each.sum().to(spreads["scale"].dtype)

    def _prior(self, statistics: dict[str, Tensor]) -> Prior:
        total = statistics["counts"].sum()
        shift, power = statistics["sums"].sum(0) / total, statistics["squares"] / total
        variance, power = at_most(torch.stack([power - shift.square(), power]), self.bulk.square())
        floor = self._kind.floor(variance, power + self.center.square(), self.loc.dtype)
        return Prior.from_pseudo_data(floor, self.spread, self.pseudo)

    def _spreads(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self._kind.supports}

    def linear_features(self, y: Tensor) -> Tensor:
        """Returns features ``(N, F)``: one, the data, and their products."""
        x = self._above_center(y)
        return torch.cat([torch.ones_like(x[:, :1]), x, self._kind.features(x)], 1)

    def linear_functions(self, y: Tensor) -> MaxInnerProductIndex:
        """Returns the log joints, in the data's type."""
        loc, components = self.loc.detach().to(self._dtype_for(y)), self._components(self.weights)
        return MaxInnerProductIndex(
            components.coefficients().to(loc), self.linear_features(loc), lambda: group_places(loc), len(y), components.offset
        )

    def _dtype_for(self, y: Tensor) -> torch.dtype:
        return y.dtype if y.is_floating_point() else self.loc.dtype

    def _above_center(self, y: Tensor) -> Tensor:
        return (y.double() - self.center).to(self._dtype_for(y))

    def _components(self, weights: Tensor) -> Gaussians:
        return Gaussians(self._kind, weights.double(), self.loc.double() - self.center, self._spreads())

    def _take(self, components: Gaussians) -> None:
        for name, value in components.spreads.items():
            setattr(self, name, value.to(self.loc))
        self.loc = (components.loc + self.center).to(self.loc)
        self.weights = components.weights.to(self.weights)

    def _statistics(self, population: Population, y: Tensor, temperature: float) -> dict[str, Tensor]:
        r"""Sums with responsibilities :math:`r_{nk}` over :math:`x = y - c`, :math:`c` the center.

        ``counts (K,)``; ``sums (K, D)`` of :math:`x_n`; ``squares (D,)``, without responsibilities. ``products (K, D, D)`` of :math:`x_n
        x_n^\top`, over all components ``(D, D)`` if tied, only diagonals ``(K, D)`` if diagonal or spherical.
        """
        rows = population.select_rows(y).double() - self.center
        return dict(collect_statistics(self._kind, Shares(population, self.num_components, temperature), rows))

    @torch.no_grad()
    def datum_statistics(self) -> dict[str, Tensor]:
        """What :meth:`sufficient_statistics` are for one data point of the mixture, in expectation."""
        return dict(self._components(self.weights).expected_statistics())

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        r"""Sets the parameters to the maximiser of the expected log joint.

        With :math:`n_k = \sum_n r_{nk}`: :math:`\pi_k = n_k / N` and :math:`\mu_k = \frac{1}{n_k} \sum_n r_{nk} y_n`. The covariance
        :math:`\Sigma_k` is the weighted one around it, with the prior's data, averaged over dimensions if spherical and over components if
        tied. A component without data stays.
        """
        self._take(self._components(statistics["counts"]).best(statistics, self._prior(statistics)))

    @torch.no_grad()
    @takes_arrays
    def reconstruct(self, population: Population, y: Tensor) -> Tensor:
        r"""Posterior mean of the noise-free data, ``(N, D)`` for the population's data points.

        It is :math:`\sum_k r_{nk}\, \mu_k`, of low rank :math:`\sum_k r_{nk} \langle \mu_k + W_k h \rangle`: all else is noise.

        Args:
            population: truncated posteriors, of data points that have been scored; its ``indices`` select these among ``y``.
            y: all data, ``(N, D)``.
        """
        parameters = {name: value.double() for name, value in self._spreads().items()}
        mean: Tensor = self._kind.without_noise(population, check_data(y, self.num_observed), self.loc.double(), parameters)
        return mean.to(self._dtype_for(y))
