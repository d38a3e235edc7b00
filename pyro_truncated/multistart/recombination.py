"""Recombination: of two trained models, what each has found.

The program itself shows which parameters belong to which latent, and so which latents are exchangeable.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.multistart.agreement import ROUNDING, FreeEnergyEstimate, are_shared, match_latents, share_most
from pyro_truncated.multistart.model_parameters import Medians
from pyro_truncated.multistart.profile import Profile
from pyro_truncated.multistart.redundancy import deletion_losses, is_redundant, value_deletion_losses
from pyro_truncated.multistart.solution import Solution, copy_population
from pyro_truncated.search.base import Search
from pyro_truncated.states.population import Population
from pyro_truncated.utils.devices import generator_device
from pyro_truncated.utils.parameter_store import spare_random_numbers

# Search steps that fill populations, and that adapt them to slightly changed parameters.
_FILLING, _ADAPTING = 8, 2
# Correlations of latents that explain the same: small within one code, large for substitutes.
_CORRELATIONS = 0.15, 0.3, 0.5, 0.7
# Most such latents that are tried; relative difference of inactive data points of equal ones.
_MOST_TURNED, _DIFFERENT = 10, 0.2


class Recombination:
    """Exchanges latents between models that were trained from different starts.

    In a local optimum most latents are as in the best one, and a few share what they should divide. The latents of two models are
    matched by the correlation of their posterior probabilities. Pairs that explain the same data points form blocks, from single pairs
    to nearly all, as the least correlation falls. Unmatched latents of least deletion loss in one model are paired with those of
    largest loss in the other, see :func:`~pyro_truncated.multistart.redundancy.deletion_losses`.

    Every block of the better model is replaced by that of the other one, and populations are adapted. Blocks are accepted in the order
    of their gains in free energy, as long as it rises. This is the partition crossover of Whitley, Hains and Howe (2009).

    Args:
        medians: scores states; the populations of its guide are changed.
        search: fills the populations.
        latents: which latents may change places, see :func:`exchangeable_latents`.
        tolerance: least gain in free energy per data point.
    """

    def __init__(self, medians: Medians, search: Search, latents: Exchangeable, tolerance: float) -> None:
        self._medians, self._guide, self._search = medians, medians.guide, search
        self.latents, self.tolerance = latents, tolerance
        self._first_words, self.space = medians.guide.words.clone(), medians.guide.space

    def populate(self, found: Solution, near: Solution | None = None) -> Solution:
        """Returns a solution with populations, begun from a near one if given.

        Beside continuous latents their spread gives the free energy that was reached.
        """
        if near is None:
            solution = self._adapt(found.parameters, self._first_words, _FILLING)
        else:
            solution = _near(self._adapt(found.parameters, _words(near), _ADAPTING), near)
        if not found.companion:
            return solution
        return solution.replace(companion=found.companion, spread=found.free_energy - solution.estimate.free_energy)

    @torch.no_grad()
    def rescore(self, found: Solution) -> Solution:
        """A solution with populations that were found before."""
        parameters, words = found.parameters, self.space.pack(found.states)
        return _solution(parameters, Population(self.space, words, self._medians.scorer(parameters).score(words)))

    def cross(self, one: Solution, other: Solution) -> Solution:
        """Returns the better model with gainful latents of the other, or itself."""
        better, other = sorted((one, other), key=lambda member: member.free_energy, reverse=True)
        correlation, partner = self._match(better, other)
        partner = self._pair_unmatched(better, other, correlation, partner)
        # Relative difference of parameters below which latents are equal.
        differs = self.latents.distances(better.parameters, other.parameters, partner) > 0.2
        gains = {}
        for block in _blocks(correlation[:, partner]):
            if bool(differs[list(block)].any()):
                gains[block] = self._exchange(better, other, block, partner).free_energy - better.free_energy
        best = better
        for block in sorted(gains, key=lambda one: gains[one], reverse=True):
            if gains[block] > self.tolerance:
                changed = self._exchange(best, other, block, partner)
                best = changed if changed.free_energy > best.free_energy + self.tolerance else best
        return best

    def reinitialize(self, member: Solution, spare: int, other: int, generator: torch.Generator | None) -> Solution:
        """Re-initialises one latent near another one, with noise."""
        here, there = torch.tensor([spare]), torch.tensor([other])
        moved = self.latents.replace_latents(member.parameters, here, member.parameters, there)
        # Noise on parameters of a latent initialised near another one, in units of their root mean
        # square.
        return _near(self._adapt(self.latents.perturb(moved, here, 0.3, generator), _words(member), _ADAPTING), member)

    def find_mostly_active(self, member: Solution, known: Sequence[Tensor] = ()) -> dict[int, Tensor]:
        """Returns up to ten binary latents active in most data points.

        The most frequent come first.

        Args:
            member: the model.
            known: probabilities ``(N,)`` of latents that are known; what is on for the same data points is left out.

        Returns:
            The probabilities ``(N,)`` that each of them is on.
        """
        if self.latents.num_values or self.space.cardinalities[self.latents.latents.start] != 2:
            return {}
        each = self._marginals(member)
        # Activity above which a latent may be the complement of its cause.
        mostly = [latent for latent in each.mean(0).argsort(descending=True).tolist() if float(each[:, latent].mean()) > 0.5]
        new = [latent for latent in mostly if not any(_are_equally_inactive(each[:, latent], other) for other in known)]
        return {latent: each[:, latent] for latent in new[:_MOST_TURNED]}

    def complement(self, member: Solution, latent: int) -> Solution:
        """Returns a model with a binary latent complemented in all states.

        States keep their ranks; parameters do not fit them yet.
        """
        states, place = member.states, self.latents.latents.start + latent
        states[..., place] = 1 - states[..., place]
        return member.replace(population=dataclasses.replace(member.population, words=self.space.pack(states)))  # type: ignore[type-var]

    def deficits(self, member: Solution) -> Tensor:
        """Returns the deficit ``(H,)`` of data points with each latent.

        It is a difference of mean free energies.
        """
        share, each = self._marginals(member), _population(member).free_energy().cpu()
        return each.mean() - share.mT @ each / share.sum(0).clamp(min=ROUNDING)

    def are_shared(self, one: Solution, other: Solution) -> Tensor:
        """Whether each latent has a partner in the other model, ``(H,)``."""
        return are_shared(self._marginals(one), self._marginals(other))

    def share_most(self, one: Solution, other: Solution, most_apart: float) -> bool:
        """Whether most latents of both models have a partner in the other."""
        return share_most(self._marginals(one), self._marginals(other), most_apart)

    def find_redundant(self, member: Solution) -> Tensor:
        """Whether latents are redundant by the Bayesian information criterion, ``(H,)``."""
        return is_redundant(self._losses(member).cpu(), self.latents.num_parameters(member.parameters), self._guide.layout.num_data)

    def _losses(self, member: Solution) -> Tensor:
        """What the data would lose without each latent, ``(H,)``."""
        if self.latents.num_values:
            return value_deletion_losses(_population(member), self.latents.latents.start, self.latents.num_values)
        return deletion_losses(_population(member), self._medians.scorer(member.parameters))[self.latents.latents]

    def _match(self, one: Solution, other: Solution) -> tuple[Tensor, Tensor]:
        """Returns correlations ``(H, H)`` of two models' latents, and partners."""
        return match_latents(self._marginals(one), self._marginals(other))

    def _pair_unmatched(self, one: Solution, other: Solution, correlation: Tensor, partner: Tensor) -> Tensor:
        """Re-pairs unmatched latents: the least needed with the most needed."""
        # Correlation below which a latent is unmatched.
        is_left = correlation.gather(1, partner.unsqueeze(1)).squeeze(1) < 0.5
        here, there = is_left.nonzero().squeeze(1), partner[is_left]
        if len(here) < 2:
            return partner
        needed, needed_there = self._losses(one).cpu()[here], self._losses(other).cpu()[there]
        return partner.index_copy(0, here[needed.argsort()], there[needed_there.argsort(descending=True)])

    def _marginals(self, member: Solution) -> Tensor:
        return self.latents.probabilities(_population(member)).double().cpu()

    def _exchange(self, member: Solution, other: Solution, block: tuple[int, ...], partner: Tensor) -> Solution:
        here = torch.tensor(block)
        parameters = self.latents.replace_latents(member.parameters, here, other.parameters, partner[here])
        states = self._copy_states(other, member, here, partner[here])
        return _near(self._adapt(parameters, _words(member), _ADAPTING, states), member)

    def _copy_states(self, other: Solution, member: Solution, here: Tensor, there: Tensor) -> Tensor | None:
        """Returns states with latents ``here`` set as ``there`` in the other model.

        The other model's likeliest states are used.
        """
        if self.latents.num_values:
            return None
        start, space = self.latents.latents.start, self.space
        states, likeliest = member.states, space.unpack(_population(other).mode())
        states[..., start + here] = likeliest[:, start + there].unsqueeze(1)
        return space.pack(states)

    @torch.no_grad()
    def _adapt(self, parameters: dict[str, Tensor], words: Tensor, steps: int, others: Tensor | None = None) -> Solution:
        scorer = self._medians.scorer(parameters)
        beyond, population = self._medians.beyond(scorer), Population(self.space, words, scorer.score(words))
        if others is not None:
            population = population.merge(Population(self.space, others, scorer.score(others)))
        if bool((population.log_joint.amax(-1) == -torch.inf).any()):
            # Two latents may explain together what neither does.
            return _solution(parameters, population, beyond)
        self._guide.populations.store_(population.log_joint, None, population.words)
        population = self._guide.search_(self._search, scorer, steps)
        return _solution(parameters, copy_population(population), beyond)


def _solution(parameters: dict[str, Tensor], population: Population, beyond: float = 0.0) -> Solution:
    each = population.free_energy()
    return Solution(FreeEnergyEstimate(float(each.mean()) + beyond, each=each), parameters, population)


def _near(solution: Solution, other: Solution) -> Solution:
    """The same with the guide of continuous latents that another one has."""
    return solution.replace(companion=other.companion, spread=other.spread)


def _population(solution: Solution) -> Population:
    assert solution.population is not None
    return solution.population


def _words(solution: Solution) -> Tensor:
    return _population(solution).words


def build_recombinations(profile: Profile, tolerance: float, state: dict[str, Tensor]) -> list[Recombination]:
    """Returns recombinations for each group of exchangeable latents.

    Args:
        profile: of the model.
        tolerance: least gain in free energy per data point.
        state: parameters, and medians of continuous latents, in which latents differ.
    """
    if profile.is_conditional:
        return []  # its draws given the states hold for these states only
    guide = profile.set_up_guide()
    medians = Medians(profile.model, profile.y, guide)
    groups = exchangeable_latents(medians, state)
    if _are_behind_a_network(profile, state, groups):
        return []
    search = profile.search or profile.default_search(guide.space)
    search.forget()
    return [Recombination(medians, search, latents, tolerance) for latents in groups]


def _are_behind_a_network(profile: Profile, state: dict[str, Tensor], groups: Sequence[Exchangeable]) -> bool:
    """Whether most parameters are shared by all latents, as in a network.

    They mean nothing in another network.
    """
    own = {name for group in groups for name in group.axes}
    shared = sum(state[name].numel() for name in profile.layers - own)
    return shared > sum(state[name].numel() for name in own)


def _are_equally_inactive(one: Tensor, other: Tensor) -> bool:
    """Whether two latents are inactive for nearly the same data points."""
    return bool((one - other).abs().mean() <= _DIFFERENT * (1 - one).mean() + ROUNDING)


def _blocks(correlation: Tensor) -> list[tuple[int, ...]]:
    """Returns connected components of correlated pairs at several thresholds.

    Single pairs are included. Correlations are ``(H, H)``.
    """
    linked = torch.maximum(correlation, correlation.mT)
    found: dict[tuple[int, ...], None] = {(position,): None for position in range(len(linked))}
    for least in _CORRELATIONS:
        number, labels = connected_components((linked > least).numpy(), directed=False)
        for label in range(number):
            found[tuple((labels == label).nonzero()[0].tolist())] = None
    return [block for block in found if len(block) < len(linked)]


_NUM_STATES = 4
_MOST_TRIED = 64
_RELATIVE, _ABSOLUTE = 1e-4, 1e-3


class Exchangeable(NamedTuple):
    """Exchangeable latents of a site, or values of a single latent.

    Their parameters change places with them. Components of a mixture are an example.

    Attributes:
        latents: positions of theirs among the latents of a data point.
        axes: the axis along which the latents lie, by name of the parameters that have one.
        num_values: how many values the latent has, if these are what is exchanged, else zero.
    """

    latents: slice
    axes: dict[str, int]
    num_values: int = 0

    def replace_latents(self, state: dict[str, Tensor], here: Tensor, other: dict[str, Tensor], there: Tensor) -> dict[str, Tensor]:
        """Returns parameters with latents ``here`` replaced by ``there`` of ``other``."""
        moved = {}
        for name, axis in self.axes.items():
            to, origin = (index.to(state[name].device) for index in (here, there))
            moved[name] = state[name].index_copy(axis, to, other[name].index_select(axis, origin))
        return {**state, **moved}

    def perturb(self, state: dict[str, Tensor], here: Tensor, size: float, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Adds noise to parameters of the latents ``here``.

        Its unit is the root mean square of the whole parameter.
        """
        moved = {}
        for name, axis in self.axes.items():
            value, to = state[name], here.to(state[name].device)
            chosen = value.index_select(axis, to)
            noise = torch.randn(chosen.shape, generator=generator, dtype=value.dtype, device=generator_device(generator)).to(value.device)
            moved[name] = value.index_copy(axis, to, chosen + size * value.square().mean().sqrt() * noise)
        return {**state, **moved}

    def permute(self, levels: Tensor, order: Tensor) -> Tensor:
        """Permutes latents or values of unpacked states ``(..., L)`` by ``order``."""
        moved = levels.clone()
        chosen = levels[..., self.latents]
        moved[..., self.latents] = order.argsort()[chosen] if self.num_values else chosen[..., order]
        return moved

    def probabilities(self, population: Population) -> Tensor:
        """Returns posterior probabilities of latents or values, ``(N, H)``."""
        if self.num_values:
            return population.value_probabilities()[:, self.latents.start, : self.num_values]
        return population.marginals()[:, self.latents]

    def num_parameters(self, state: dict[str, Tensor]) -> int:
        """How many parameters each of the latents has."""
        return sum(state[name].numel() // state[name].shape[axis] for name, axis in self.axes.items())

    def distances(self, one: dict[str, Tensor], other: dict[str, Tensor], there: Tensor) -> Tensor:
        """Returns distances ``(H,)`` of parameters to those of ``there`` in ``other``.

        A root mean square in units of that of the whole parameter, of the parameter that differs most.
        """
        differences = []
        for name, axis in self.axes.items():
            value = one[name].movedim(axis, 0).reshape(len(there), -1)
            unit = value.square().mean().clamp(min=torch.finfo(value.dtype).tiny).sqrt()
            difference = value - other[name].movedim(axis, 0).reshape(value.shape)[there]
            differences.append(difference.square().mean(1).sqrt() / unit)
        return torch.stack([value.double() for value in differences]).amax(0)


def exchangeable_latents(medians: Medians, state: dict[str, Tensor]) -> list[Exchangeable]:
    r"""Finds the groups of latents that a program treats alike.

    They are exchangeable if :math:`p(P s, y \mid P \theta) = p(s, y \mid \theta)` for all permutations :math:`P`. These move the
    latents of the states, and the entries of the parameters along one axis each. It is tested with random states for two permutations
    that generate all others, and for axes as long as there are latents. Values of latents that are alone in their site are tested
    likewise.

    Args:
        medians: scores states; the populations of its guide stay as they are.
        state: parameters and medians, which must differ between latents, or anything seems exchangeable.

    Returns:
        Such groups of latents or values that have parameters of their own, the largest first.
    """
    with torch.no_grad(), spare_random_numbers():
        groups = [_exchangeable(medians, state, *alike) for alike in _alike(medians.guide)]
        medians.load_snapshot(state)
        return [group for group in groups if group is not None]


def _alike(guide: AutoTruncated) -> list[tuple[slice, int]]:
    """Returns candidate groups: vectors of one cardinality, values of single latents.

    The longest come first.
    """
    start, found = 0, []
    for site in guide.layout.sites.values():
        latents = slice(start, start + site.num_latents)
        start = latents.stop
        if len(site.shape) == 1 and site.num_latents > 1 and len(set(site.cardinalities)) == 1:
            found.append((latents, 0))
        if site.num_latents == 1 and site.cardinalities[0] > 2:
            found.append((latents, site.cardinalities[0]))
    return sorted(found, key=lambda one: -max(one[0].stop - one[0].start, one[1]))


def _exchangeable(medians: Medians, state: dict[str, Tensor], latents: slice, num_values: int) -> Exchangeable | None:
    levels = _random_levels(medians.guide)
    words = medians.guide.space.pack
    expected = medians.scorer(state).score(words(levels))
    if not bool(expected.isfinite().all()):
        return None

    def is_same(group: Exchangeable, order: Tensor) -> bool:
        """Whether permuted latents and parameters have the same log joints."""
        permuted = medians.scorer(group.replace_latents(state, torch.arange(len(order)), state, order))
        return torch.allclose(permuted.score(words(group.permute(levels, order))), expected, rtol=_RELATIVE, atol=_ABSOLUTE)

    number = num_values or latents.stop - latents.start
    groups = (Exchangeable(latents, axes, num_values) for axes in _possible_axes(medians.exchangeable_part(state), number))
    return next((group for group in groups if all(is_same(group, order) for order in _orders(number))), None)


def _possible_axes(parameters: dict[str, Tensor], number: int) -> Iterator[dict[str, int]]:
    """Yields axes by name, as many as possible first.

    There are at most some dozens of combinations.
    """
    choices = [[axis for axis, size in enumerate(value.shape) if size == number] + [None] for value in parameters.values()]
    for chosen in itertools.islice(itertools.product(*choices), _MOST_TRIED):
        axes = {name: axis for name, axis in zip(parameters, chosen, strict=True) if axis is not None}
        if axes:
            yield axes


def _orders(num_latents: int) -> list[Tensor]:
    """Returns a cycle and a transposition, which generate all permutations."""
    positions = torch.arange(num_latents)
    return [positions.roll(1), torch.cat([positions[:2].flip(0), positions[2:]])]


def _random_levels(guide: AutoTruncated) -> Tensor:
    """Unpacked states ``(N, C, L)`` of all data points."""
    generator = torch.Generator().manual_seed(0)
    cardinality = guide.space.cardinality
    uniform = torch.rand(guide.layout.num_data, _NUM_STATES, len(cardinality), generator=generator)
    return (uniform * cardinality).long().to(guide.words.device)
