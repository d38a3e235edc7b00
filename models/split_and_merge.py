"""Split and merge: two components become one, and a third two."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedFormModel, Population, StateSpace
from pyro_truncated.extend import device_of
from pyro_truncated.models.covariance_prior import Prior
from pyro_truncated.models.gaussians import Gaussians, Statistics, added, collected, combined
from pyro_truncated.models.mixture import Shares
from pyro_truncated.models.seeding import partners

# Chosen on data of other seeds than those of the tables.
_EM_STEPS = 8
_PARTNERS = 3
_MIN_COUNT = 3
# Responsibilities of so many of a data point's components overlap; the others are small.
_OVERLAPPING = 4
_ROWS_PER_BLOCK, _PAIRS = 2**16, 2**12


def all_statistics(model: ClosedFormModel, population: Population, y: Tensor) -> Statistics:
    """Returns the statistics of a population, block by block."""
    return added(model.sufficient_statistics(block, y) for block in population.split(_ROWS_PER_BLOCK))


def all_populations(model: Any, guide: AutoTruncated, y: Tensor) -> Population:
    """The populations of all data, under the model as it is.

    Raises:
        ValueError: if the guide is of another model.
        NotImplementedError: where data are shared out over several processes.
    """
    if guide.model is not model:
        raise ValueError(f"guide must be the AutoTruncated of this very mixture; got one of {type(guide.model).__name__}")
    population = guide.refresh_(y)
    if guide.populations.is_part:
        raise NotImplementedError("split_and_merge needs all data; got a shard: train the mixture in one process")
    return population  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class Moves:
    r"""Disjoint moves of components.

    Two components become one, and the free one splits a third.

    Attributes:
        components: all as they are before.
        kept: which components take over the data of another one, ``(M,)``.
        moved: which ones move, ``(M,)``. Where it is the one that is kept, its data are left to all others.
        split: where they move to, ``(M,)``.
        merged: what the kept ones become.
        halves: what those that are split become, and those that move, two and two, ``2 M`` components.
    """

    components: Gaussians
    kept: Tensor
    moved: Tensor
    split: Tensor
    merged: Gaussians
    halves: Gaussians

    def __len__(self) -> int:
        return len(self.kept)

    def first(self, number: int) -> Moves:
        """The first ones."""
        some = torch.arange(number, device=self.kept.device)
        halves = self.halves.of(torch.arange(2 * number, device=self.kept.device))
        return Moves(self.components, self.kept[some], self.moved[some], self.split[some], self.merged.of(some), halves)

    def after(self) -> Gaussians:
        """All components after these moves."""
        even = 2 * torch.arange(len(self), device=self.kept.device)
        after = self.components.with_others(self.kept, self.merged)
        after = after.with_others(self.split, self.halves.of(even)).with_others(self.moved, self.halves.of(even + 1))
        return dataclasses.replace(after, weights=after.weights / after.weights.sum())

    def candidates(self, population: Population) -> Tensor:
        """Returns states that populations should also score.

        They are packed ``(N, S, 1)`` and include unmoved ones.
        """
        other = torch.arange(population.space.size, device=self.kept.device)
        other[self.moved], other[self.split] = self.kept, self.moved
        return population.space.pack(other[population.states(torch.int64)])


def offered(moves: Moves, guide: AutoTruncated, y: Tensor) -> Population:
    """The populations that accepted moves are proposed to.

    They are not kept yet.
    """
    scorer = guide.log_joint_of(y)
    population = guide.rescored(scorer)
    words = moves.candidates(population)
    return population.merge(Population(population.space, words, scorer.score(words)))


class MoveSearch:
    r"""Looks for moves that raise the free energy :math:`\mathcal F = \langle \log p(z, y) \rangle_q + H(q)`.

    Two components that become one take the sums of their responsibilities and of their statistics.
    What that costs, the change of the expected log joints and of the entropy, needs no look at the
    data. EM finds the gain of two components in the place of one, on the data that the one explains
    best. Both hardly depend on other components. So the cheapest merges are made together with the
    best splits.

    Args:
        components: as they are. The moves begin from the ones that an M-step makes of them.
        population: truncated posteriors of all data points.
        x: data above the center, ``(N, D)``.
        statistics: of these data and posteriors.
        prior: of the covariances.

    Reference:
        Ueda, Nakano, Ghahramani and Hinton, "SMEM algorithm for mixture models", Neural Computation 12, 2000. There one move is tried
        after the other, each by EM to the end.
    """

    def __init__(self, components: Gaussians, population: Population, x: Tensor, statistics: Statistics, prior: Prior) -> None:
        self.components, self.statistics, self.prior, self.x = components.best(statistics, prior), statistics, prior, x
        self._log_prior = self.components.log_prior(prior)
        best = population.log_joint.topk(min(_OVERLAPPING, population.num_states)).indices
        self.component, weight = population.states(torch.int64)[..., 0], population.weights().double()
        self.deletion_losses = self._losses_without(population.log_joint.double(), weight)
        self.near, self.weight = self.component.gather(1, best), weight.gather(1, best)

    def moves(self, generator: torch.Generator | None = None) -> Moves:
        """The best disjoint moves that gain something, the best first."""
        pairs = self.pairs()
        losses = torch.cat([self.losses(some) for some in pairs.split(_PAIRS) if len(some)] + [self.deletion_losses])
        pairs = torch.cat([pairs, torch.arange(len(self.components), device=pairs.device).unsqueeze(1).expand(-1, 2)])
        gains, halves = self.halves(generator)
        chosen, split = matched(pairs, losses, gains)
        kept, moved = pairs[chosen].unbind(1)
        two = torch.stack([2 * split, 2 * split + 1], 1).flatten()
        return Moves(self.components, kept, moved, split, self.merged(pairs[chosen]), halves.of(two))

    # --- two that become one ---

    def _losses_without(self, log_joint: Tensor, weight: Tensor) -> Tensor:
        """What the free energy loses without each component, ``(K,)``."""
        best = log_joint.argmax(1, keepdim=True)
        rest = log_joint.scatter(1, best, -math.inf).logsumexp(1, keepdim=True)
        loss = (-torch.log1p(-weight)).scatter(1, best, log_joint.logsumexp(1, keepdim=True) - rest)
        without: Tensor = self._log_prior.index_add(0, self.component.flatten(), loss.flatten())
        return without

    def pairs(self) -> Tensor:
        """Returns pairs ``(M, 2)`` of components that explain the same data.

        The second is most often second where the first is the best.
        """
        pairs: Tensor = partners(self.near[:, :2], len(self.components), _PARTNERS)
        return pairs

    def losses(self, pairs: Tensor) -> Tensor:
        """Returns the free energy's loss by merging pairs, ``(M,)``."""
        merged, each = self.merged(pairs), self.components.expected(self.statistics) + self._log_prior
        together = merged.expected(self._statistics(pairs)) + merged.log_prior(self.prior)
        losses: Tensor = each[pairs].sum(1) - together - self._entropies(pairs)
        return losses

    def merged(self, pairs: Tensor) -> Gaussians:
        """The components that pairs become."""
        found = self.components.of(pairs[:, 0])
        if len(pairs):
            found = found.best_on_their_own(self._statistics(pairs), self.prior)
        return dataclasses.replace(found, weights=self.components.weights[pairs].sum(1))

    def _statistics(self, pairs: Tensor) -> Statistics:
        return combined(self.components.kind, self.statistics, pairs)

    def _entropies(self, pairs: Tensor) -> Tensor:
        """Returns the decrease of entropy by merging pairs, ``(M,)``.

        It is negative where both explain a data point.
        """
        number = len(self.components)
        known, change = pairs[:, 0] * number + pairs[:, 1], self.weight.new_zeros(len(pairs))
        for i, j in itertools.combinations(range(self.near.shape[1]), 2):
            one, other, weight = self.near[:, i], self.near[:, j], self.weight[:, [i, j]]
            code = one.minimum(other) * number + one.maximum(other)
            place = torch.searchsorted(known, code).clamp(max=len(known) - 1)
            entropy = torch.special.entr(weight.sum(1)) - torch.special.entr(weight).sum(1)
            change.index_add_(0, place, torch.where(known[place] == code, entropy, 0.0))
        return change

    # --- two in the place of one ---

    def halves(self, generator: torch.Generator | None) -> tuple[Tensor, Gaussians]:
        """Returns the gain of splitting each component, ``(K,)``, and the halves.

        They are components ``2k`` and ``2k + 1``.
        """
        number, order = len(self.components), self.near[:, 0].argsort(stable=True)
        owner, x = self.near[order, 0], self.x[order]
        space = StateSpace([2 * number])
        blocks = list(zip(x.split(_ROWS_PER_BLOCK), torch.stack([2 * owner, 2 * owner + 1], 1).split(_ROWS_PER_BLOCK), strict=True))
        halves = self.components.of(torch.arange(2 * number, device=owner.device) // 2)
        log_joints = _sides(x, owner, number, generator).split(_ROWS_PER_BLOCK)
        for _ in range(_EM_STEPS):
            populations = (
                Population(space, space.pack(z.unsqueeze(-1)), log_joint) for (_, z), log_joint in zip(blocks, log_joints, strict=True)
            )
            shares = (Shares(population, 2 * number) for population in populations)
            statistics = added(collected(halves.kind, share, rows.double()) for share, (rows, _) in zip(shares, blocks, strict=True))
            halves = self._shared_out(halves.best_on_their_own(statistics, self.prior))
            log_joints = [halves.log_joint(rows, z) for rows, z in blocks]
        whole = torch.cat([self.components.log_joint(rows, z[:, :1] // 2) for rows, z in blocks]).double()
        ratio = torch.cat(log_joints).double().logsumexp(1) - whole.squeeze(1)
        weight = self.weight[order, 0]
        each = torch.logaddexp(torch.log1p(-weight), weight.log() + ratio)
        gains = (halves.log_prior(self.prior).reshape(-1, 2).sum(1) - self._log_prior).index_add(0, owner, each)
        too_few = statistics["counts"].reshape(-1, 2).amin(1) < _MIN_COUNT
        return gains.masked_fill(too_few, -math.inf), halves

    def _shared_out(self, halves: Gaussians) -> Gaussians:
        """Halves with the weight of the component that they are of."""
        weights = halves.weights.reshape(-1, 2)
        share = weights / weights.sum(1, keepdim=True) * self.components.weights.unsqueeze(1)
        return dataclasses.replace(halves, weights=share.flatten())


def _sides(x: Tensor, owner: Tensor, number: int, generator: torch.Generator | None) -> Tensor:
    """Returns on which side of its component's mean each data point is.

    The line goes through two of its data points. Log weights of the halves are ``(N, 2)``.
    """
    size = torch.bincount(owner, minlength=number)
    at = torch.rand(2, number, dtype=torch.float64, generator=generator, device=device_of(generator)).to(x.device)
    drawn = (size.cumsum(0) - size + (at * size).long()).clamp(max=len(x) - 1)
    mean = x.new_zeros(number, x.shape[1]).index_add_(0, owner, x) / size.clamp(min=1).unsqueeze(1)
    side = ((x - mean[owner]) * (x[drawn[0]] - x[drawn[1]])[owner]).sum(1) > 0
    return x.new_zeros(len(x), 2).masked_fill(torch.stack([side, ~side], 1), -math.inf)


def matched(pairs: Tensor, losses: Tensor, gains: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the cheapest pairs with the most gainful components.

    The gain must be positive, and no component occurs twice.

    Args:
        pairs: components that could become one, ``(P, 2)``.
        losses: what that costs, ``(P,)``.
        gains: what two in the place of each component would gain, ``(K,)``.

    Returns:
        Positions of the chosen pairs, and the component that each goes with, ``(M,)``, what gains most first.
    """
    order, best = losses.argsort(stable=True).tolist(), iter(gains.argsort(descending=True, stable=True).tolist())
    both, cost, gain = pairs.tolist(), losses.tolist(), gains.tolist()
    taken: set[int] = set()
    chosen: list[tuple[int, int]] = []
    for pair in order:
        if not taken.isdisjoint(both[pair]):
            continue
        # What is passed over here is taken, or will be with this pair.
        split = next((k for k in best if k not in taken and k not in both[pair]), None)
        if split is None or not gain[split] > cost[pair]:
            break
        taken.update((*both[pair], split))
        chosen.append((pair, split))
    found = torch.tensor(chosen, dtype=torch.int64, device=pairs.device).reshape(-1, 2)
    return found[:, 0], found[:, 1]


@torch.no_grad()
def accepted(moves: Moves, tried: Callable[[Moves], tuple[Population, Tensor]], model: torch.nn.Module) -> tuple[Moves, Population | None]:
    """Makes all moves, or halves their number until the free energy rises.

    It must not be below that without any move.

    Args:
        moves: the best first.
        tried: does moves; the populations after them, and their free energy.
        model: whose parameters are put back if none is done, or something fails.

    Returns:
        The moves, and the populations after them; none where none are done.
    """
    before, population = [value.clone() for value in model.parameters()], None
    try:
        moves, population = _accept(moves, tried)
    finally:
        if population is None:
            for value, old in zip(model.parameters(), before, strict=True):
                value.copy_(old)
    return moves, population


def _accept(moves: Moves, tried: Callable[[Moves], tuple[Population, Tensor]]) -> tuple[Moves, Population | None]:
    if not len(moves):
        return moves, None
    least = tried(moves.first(0))[1]
    while len(moves):
        population, free_energy = tried(moves)
        if bool(free_energy >= least):
            return moves, population
        moves = moves.first(len(moves) // 2)
    return moves, None
