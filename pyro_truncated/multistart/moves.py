"""Moves of solutions, and the pool whose best one they improve."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pyro_truncated.multistart.config import Restart
from pyro_truncated.multistart.model_parameters import Medians, draw_noise
from pyro_truncated.multistart.profile import Profile
from pyro_truncated.multistart.pruning import deletion_losses, redundant_mask, value_deletion_losses
from pyro_truncated.multistart.solution import NOTHING, ROUNDING, FreeEnergyEstimate, Solution, match_latents, shared_mask, vary
from pyro_truncated.multistart.trainer import Trainer, copy_population, fit_states, search_and_train, settle
from pyro_truncated.program.layout import Layout
from pyro_truncated.program.sites import family
from pyro_truncated.search.base import Search
from pyro_truncated.states.population import Population
from pyro_truncated.utils.budget import rows_per_block
from pyro_truncated.utils.parameter_store import spare_random_numbers

# Search steps that adapt populations to slightly changed parameters.
_ADAPT_STEPS = 2
# Correlations of latents that explain the same: small within one code, large for substitutes.
_MIN_CORRELATIONS = 0.15, 0.3, 0.5, 0.7
# Noise on parameters of a latent initialised near another one, in units of their root mean square.
_PERTURBATION_SCALE = 0.3
# Most latents whose complements are tried.
_MAX_COMPLEMENTED = 10
# Random states, and assignments of axes, by which latents are found to be exchangeable; rounding errors of log joints.
_NUM_STATES, _MAX_PERMUTATIONS, _SCORE_RTOL, _SCORE_ATOL = 4, 64, 1e-4, 1e-3
# Most latents revived at once, each in a state of its own; most rounds, as likelihoods may be unbounded; probability of dead ones.
_MAX_REVIVED, _MAX_ROUNDS, _DEAD_PROBABILITY = 512, 4, 1e-8

# Yields solutions, and is sent the best one after each.
Proposals = Generator[Solution, Solution, None]
# Trains what a move proposes.
Refine = Callable[[Profile, Solution], Solution]


class Move(Protocol):
    """Proposes changed solutions; :meth:`SolutionPool.improve` refines and accepts them.

    Example:
        >>> class Negate:  # for LearnConfig(moves=(Negate(),))
        ...     name = "negated weights"
        ...     def propose(self, best):
        ...         yield best.replace(parameters={name: -value for name, value in best.parameters.items()})
    """

    name: str

    def propose(self, best: Solution) -> Proposals:
        """Yields changed solutions; is sent the best one after each."""


# --- exchangeable latents ---


class Exchangeable(NamedTuple):
    """Latents of sites, or values of theirs, that are exchangeable."""

    latents: tuple[slice, ...]  # of each site: its positions among the latents of a data point
    axes: list[tuple[str, int]]  # of parameters, along which they lie
    num_values: int = 0  # how many values each latent has, if these are exchanged

    @property
    def places(self) -> Tensor:
        """Positions of the latents, ``(sites, H)``; ``(latents,)`` for values."""
        places = [torch.arange(own.start, own.stop) for own in self.latents]
        return torch.cat(places) if self.num_values else torch.stack(places)

    @property
    def number(self) -> int:
        """How many latents or values change places."""
        return self.num_values or self.latents[0].stop - self.latents[0].start

    def replace_latents(self, state: dict[str, Tensor], index: Tensor, other: dict[str, Tensor], order: Tensor) -> dict[str, Tensor]:
        """Returns parameters with latents ``index`` of ``other`` in another order."""
        updates, origin = dict(state), dict(other)
        for name, axis in self.axes:
            origin[name] = origin[name].index_select(axis, order.to(origin[name].device))
        for name, axis in self.axes:
            to = index.to(origin[name].device)
            updates[name] = updates[name].index_copy(axis, to, origin[name].index_select(axis, to))
        return updates


def exchangeable_latents(medians: Medians, state: dict[str, Tensor]) -> list[Exchangeable]:
    r"""Finds the latents and values that a program treats alike.

    They are exchangeable if :math:`p(P s, y \mid P \theta) = p(s, y \mid \theta)` for all permutations :math:`P`. These move the
    latents of the states, or their values, and the entries of the parameters along some axes each. It is tested with random states for
    two permutations that generate all others, and for axes as long as there are latents or values. Sites that are not exchangeable
    alone, as they share parameters, are permuted together: pairs are tried first, then all of them, then other sets.

    Parameters and medians must differ between latents, or anything seems exchangeable. Groups have parameters of their own, the largest
    first; populations stay as they are.
    """
    layout, space, parameters = medians.guide.layout, medians.guide.space, medians.exchangeable_part(state)
    alike = _sites_by_size(layout)
    if not alike:
        return []
    uniform = torch.rand(layout.num_data, _NUM_STATES, space.num_latents, generator=torch.Generator().manual_seed(0))
    levels = (uniform * space.cardinality).long().to(medians.guide.words.device)

    def keeps_scores(group: Exchangeable) -> bool:
        # Of several latents each may have a table of its own: its values are then exchangeable without those of others.
        places, positions = (part.to(levels.device) for part in (group.places, torch.arange(group.number)))
        num_tables = len(places)
        if all(num_tables > 1 and num_tables in state[name].select(axis, 0).shape for name, axis in group.axes):
            return False
        # A cycle and a transposition generate all permutations.
        for order in (positions.roll(1), torch.cat([positions[:2].flip(0), positions[2:]])):
            permuted, scorer = levels.clone(), medians.scorer(group.replace_latents(state, positions, state, order))
            permuted[..., places] = order.argsort()[levels[..., places]] if group.num_values else levels[..., places[:, order]]
            if not torch.allclose(scorer.score(space.pack(permuted)), expected, rtol=_SCORE_RTOL, atol=_SCORE_ATOL):
                return False
        return True

    def find(latents: tuple[slice, ...], choices: list[list[list[tuple[str, int]]]], num_values: int) -> list[Exchangeable]:
        candidates = (Exchangeable(latents, list(itertools.chain(*axes)), num_values) for axes in itertools.product(*choices))
        return list(itertools.islice(filter(keeps_scores, itertools.islice(candidates, _MAX_PERMUTATIONS)), 1))

    groups: list[Exchangeable] = []
    with torch.no_grad(), spare_random_numbers():
        expected = medians.scorer(state).score(space.pack(levels))
        # Impossible states tell nothing.
        for (number, num_values), sites in alike if bool(expected.isfinite().all()) else []:
            axes = [[(name, axis) for axis, size in enumerate(part.shape) if size == number] for name, part in parameters.items()]
            one = [[*([axis] for axis in own), []] for own in axes]
            own_groups = [group for site in sites for group in find((site,), one, num_values)]
            # Sites of which not all assignments were tried may be exchangeable alone: they are not taken together.
            if math.prod(map(len, one)) <= _MAX_PERMUTATIONS:
                several = [[*choices, own] if len(own) > 1 else choices for choices, own in zip(one, axes, strict=True)]
                rest = [site for site in sites if all(site not in group.latents for group in own_groups)]
                sizes = dict.fromkeys((2, len(rest), *range(3, len(rest))))
                subsets = itertools.chain.from_iterable(itertools.combinations(rest, size) for size in sizes if 2 <= size <= len(rest))
                for latents in itertools.islice(subsets, 4 * _MAX_PERMUTATIONS // math.prod(map(len, several)) + 1):
                    if not any(site in group.latents for site in latents for group in own_groups):
                        own_groups += find(latents, several, num_values)
            groups += own_groups
        medians.load(state)
    return groups


def _sites_by_size(layout: Layout) -> list[tuple[tuple[int, int], list[slice]]]:
    """Returns sites by number of latents, and of values, the largest first."""
    alike = defaultdict(list)
    for name, site in layout.sites.items():
        if len(set(site.cardinalities)) == 1:
            if len(site.shape) == 1 and site.num_latents > 1:
                alike[site.num_latents, 0].append(layout.slices[name])
            if site.cardinalities[0] > 2:
                alike[site.cardinalities[0], site.cardinalities[0]].append(layout.slices[name])
    return sorted(alike.items(), key=lambda one: -one[0][0])


class Recombination:
    """Exchanges latents between models that were trained from different starts.

    In a local optimum most latents are as in the best one, and a few share what they should divide. The latents of two models are
    matched by the correlation of their posterior probabilities. Unmatched latents of least deletion loss in one model are paired with
    those of largest loss in the other, see :func:`~pyro_truncated.multistart.pruning.deletion_losses`. Pairs that explain the same data
    points form blocks, from single pairs to nearly all, as the least correlation falls.

    Every block of the better model is replaced by that of the other one, and populations are adapted. Blocks are accepted in the order
    of their gains in free energy, as long as it rises. This is the partition crossover of Whitley, Hains and Howe (2009).
    """

    def __init__(self, medians: Medians, search: Search, latents: Exchangeable, tolerance: float) -> None:
        self._medians, self._guide, self._search = medians, medians.guide, search
        self.latents, self.tolerance, self.space = latents, tolerance, medians.guide.space

    def populate(self, solution: Solution) -> Solution:
        """Returns a solution with populations that are adapted to its parameters.

        Beside continuous latents their spread gives the free energy that was reached.
        """
        result = self._change(solution, solution.parameters)
        return result.replace(spread=solution.free_energy - result.estimate.free_energy) if solution.companion else result

    def cross(self, better: Solution, other: Solution) -> Solution:
        """Returns the better model with gainful latents of the other, or itself."""
        best, (correlation, partner) = better, self._match(better, other)
        reached = {block: self._exchange(better, other, block, partner).free_energy for block in _blocks(correlation[:, partner])}
        for block in sorted(reached, key=reached.__getitem__, reverse=True):
            if reached[block] > better.free_energy + self.tolerance:
                proposal = self._exchange(best, other, block, partner)
                best = proposal if proposal.free_energy > best.free_energy + self.tolerance else best
        return best

    def reinitialize(self, member: Solution, spare: int, other: int, generator: torch.Generator | None) -> Solution:
        """Re-initialises one latent near another one, with noise."""
        here = torch.tensor([spare])
        order = torch.arange(self.latents.number).index_fill(0, here, other)
        parameters = self.latents.replace_latents(member.parameters, here, member.parameters, order)
        for name, axis in self.latents.axes:
            value, index = parameters[name], here.to(parameters[name].device)
            part, size = value.index_select(axis, index), _PERTURBATION_SCALE * value.square().mean().sqrt()
            parameters[name] = value.index_copy(axis, index, part + size * draw_noise(part, generator))
        return self._change(member, parameters)

    def deficits(self, member: Solution) -> Tensor:
        """Returns the mean deficit ``(H,)`` of data points with each latent."""
        share, each = self._marginals(member), member.kept_population.free_energy().cpu()
        each = each.repeat_interleave(len(share) // len(each))
        return each.mean() - share.mT @ each / share.sum(0).clamp(min=ROUNDING)

    def shared_mask(self, one: Solution, other: Solution) -> Tensor:
        """Whether each latent has a partner in the other model, ``(H,)``."""
        return shared_mask(self._marginals(one), self._marginals(other))

    def find_redundant(self, member: Solution) -> Tensor:
        """Whether latents are redundant by the Bayesian information criterion, ``(H,)``."""
        num_parameters = sum(member.parameters[name].numel() // self.latents.number for name, _ in self.latents.axes)
        return redundant_mask(self._losses(member), num_parameters, self._guide.layout.num_data)

    def _losses(self, member: Solution) -> Tensor:
        places, population = self.latents.places, member.kept_population
        if self.latents.num_values:
            return value_deletion_losses(population, places, self.latents.num_values).cpu()
        return deletion_losses(population, self._medians.scorer(member.parameters))[0].cpu()[places].sum(0)

    def _match(self, one: Solution, other: Solution) -> tuple[Tensor, Tensor]:
        """Returns correlations ``(H, H)``, and what replaces each latent, ``(H,)``."""
        correlation, partner = match_latents(self._marginals(one), self._marginals(other))
        # What correlates by less than a half stands for something else: the least needed is paired with the most needed.
        here = (correlation.gather(1, partner.unsqueeze(1)).squeeze(1) < 0.5).nonzero().squeeze(1)
        if len(here) > 1:
            losses, other_losses = self._losses(one)[here], self._losses(other)[partner[here]]
            partner[here[losses.argsort()]] = partner[here[other_losses.argsort(descending=True)]]
        return correlation, partner

    def _marginals(self, member: Solution) -> Tensor:
        """Returns probabilities, ``(N, H)`` for each site, or latent with values."""
        population, number = member.kept_population, self.latents.num_values
        each = population.value_probabilities()[..., :number] if number else population.marginals()
        return each[:, self.latents.places].flatten(0, 1).double().cpu()

    def _exchange(self, member: Solution, other: Solution, block: tuple[int, ...], partner: Tensor) -> Solution:
        """Returns a model with a block of latents of the other one."""
        here, places, words = torch.tensor(block), self.latents.places, None
        if not self.latents.num_values:
            states, likeliest = member.states, self.space.unpack(other.kept_population.mode())
            states[..., places[:, here]] = likeliest[:, places[:, partner[here]]].unsqueeze(1)
            words = self.space.pack(states)
        return self._change(member, self.latents.replace_latents(member.parameters, here, other.parameters, partner), words)

    @torch.no_grad()
    def _change(self, member: Solution, parameters: dict[str, Tensor], others: Tensor | None = None) -> Solution:
        """Returns a model with changed parameters, and populations adapted to them."""
        scorer, words = self._medians.scorer(parameters), member.kept_population.words
        population = Population(self.space, words, scorer.score(words))
        if others is not None:
            population = population.merge(Population(self.space, others, scorer.score(others)))
        # Of states that are all impossible none is searched: two latents may explain together what neither does.
        if not bool((population.log_joint.amax(-1) == -torch.inf).any()):
            self._guide.populations.store_(population.log_joint, None, population.words)
            population = copy_population(self._guide.search_(self._search, scorer, _ADAPT_STEPS))
        each = population.free_energy()
        estimate = FreeEnergyEstimate(float(each.mean()) + self._medians.beyond(scorer), each=each)
        return Solution(estimate, parameters, population, member.companion, member.spread)


def build_recombinations(profile: Profile, state: dict[str, Tensor]) -> list[Recombination]:
    """Returns recombinations for each group of exchangeable latents.

    There are none behind a network, where most parameters are shared by all latents: they mean nothing in another network.
    """
    if profile.is_conditional:
        return []  # its draws given the states hold for these states only
    guide = profile.set_up_guide()
    medians = Medians(guide, profile.y)
    groups = exchangeable_latents(medians, state)
    own = {name for group in groups for name, _ in group.axes}
    if sum(state[name].numel() for name in profile.layers - own) > sum(state[name].numel() for name in own):
        return []
    search = profile.make_search(guide.space)
    search.forget()
    return [Recombination(medians, search, latents, profile.tolerance) for latents in groups]


def _blocks(correlation: Tensor) -> list[tuple[int, ...]]:
    """Returns single pairs, and components correlated by several thresholds."""
    # SciPy takes longer to import than all of the library.
    from scipy.sparse.csgraph import connected_components

    similarity = torch.maximum(correlation, correlation.mT)
    blocks: dict[tuple[int, ...], None] = {(position,): None for position in range(len(similarity))}
    for least in _MIN_CORRELATIONS:
        number, labels = connected_components((similarity > least).numpy(), directed=False)
        for label in range(number):
            blocks[tuple((labels == label).nonzero()[0].tolist())] = None
    return [block for block in blocks if len(block) < len(similarity)]


# --- moves ---


@dataclasses.dataclass
class Crossover:
    """Latents of another solution, by group. Source: Whitley, Hains and Howe (2009)."""

    groups: Sequence[Recombination]
    other: Solution
    name: str = "crossover"

    def propose(self, best: Solution) -> Proposals:
        """Yields a child of each group that gains by itself."""
        for group in self.groups:
            if (child := group.cross(best, self.other)) is not best:
                best = yield child


@dataclasses.dataclass
class Complement:
    """Complements of latents that are on where the prior expects them off.

    A latent may have the negative of its dictionary element, with a constant added elsewhere. Then it is active for all data points
    without the cause. Gradients do not lead from there to the cause, but parameters fitted to complemented states do.

    The model is left somewhere else.
    """

    profile: Profile
    name: str = "complement"

    def propose(self, best: Solution) -> Proposals:
        """Yields solutions fitted to states with one latent complemented."""
        for latent in self.find_unlikely(best):
            space, states = best.kept_population.space, best.states
            states[..., latent] = 1 - states[..., latent]
            population = Population(space, space.pack(states), best.kept_population.log_joint)
            child = fit_states(self.profile, population.mode().unsqueeze(1), solution=best)
            best = yield child.replace(population=population)

    def find_unlikely(self, solution: Solution) -> list[int]:
        r"""Returns up to ten binary latents that their prior expects complemented.

        The complement of a latent with the frequency :math:`q` and the prior probability :math:`p` adds :math:`(1 - 2 q) \log(p / (1 - p))`
        nats per data point to the log prior. Those that gain are returned, the largest gain first.
        """
        if solution.population is None:
            return []
        with Trainer(self.profile, solution=solution) as trainer:
            scorer = trainer.scorer()
        prior = []
        for name, site in scorer.layout.sites.items():
            mean = torch.full((site.num_latents,), math.nan)
            if family(fn := scorer.nodes[name]["fn"]) == "Bernoulli":
                mean = scorer.layout.expand_to_rows(name, fn.mean.detach(), scorer.sizes).reshape(-1, site.num_latents).mean(0)
            prior.append(mean.double().cpu())
        frequency = solution.population.marginals().double().cpu().mean(0)
        gain = ((1 - 2 * frequency) * torch.cat(prior).logit()).nan_to_num(0.0)
        value, latents = gain.sort(descending=True)
        return latents[value > 0][:_MAX_COMPLEMENTED].tolist()


@dataclasses.dataclass
class RedundantLatents:
    """Redundant latents, initialised beside those that explain data worst."""

    groups: Sequence[Recombination]
    profile: Profile
    name: str = "use of redundant latents"

    def propose(self, best: Solution) -> Proposals:
        """Yields solutions as long as one of them gains."""
        before = None
        while best is not before:
            before = best
            for group in self.groups:
                redundant = group.find_redundant(best)
                if not bool(redundant.any()) or bool(redundant.all()):
                    continue
                need = group.deficits(best).masked_fill(redundant, -math.inf)
                for other in need.topk(min(self.profile.config.max_candidates, int((~redundant).sum()))).indices.tolist():
                    last, best = best, (yield group.reinitialize(best, int(redundant.nonzero()[0]), other, self.profile.generator))
                    if best is not last:
                        break


@dataclasses.dataclass
class DeadLatents:
    r"""Revives dead binary latents that all data share.

    With a posterior for each data point most latents are active somewhere, and their parameters are learned. In a single posterior a
    latent may be inactive in all states because of its initial parameters, which nothing then corrects. Here parameters are fitted to
    the likeliest state :math:`s`, and to all states with one dead latent :math:`l` added,

    .. math:: \max_\theta \; \log p(s, y \mid \theta) + \sum_l \log p(s + e_l, y \mid \theta),

    so that each explains a part of the residual. Then states are searched and the model is trained, while the free energy rises.

    The model is left somewhere else.
    """

    profile: Profile
    name: str = "revival of dead latents"

    def propose(self, best: Solution) -> Proposals:
        """Yields solutions fitted with dead latents, while these gain."""
        for _ in range(0 if best.companion else _MAX_ROUNDS):
            states = self.revive(best)
            if states.shape[1] == 1:
                return
            # At this temperature all states count alike.
            child = fit_states(self.profile, states, lambda _: 1e9, best)
            before, best = best, (yield child.replace(population=best.population))
            if best is before:
                return

    # With more posteriors than these bytes hold fewer latents are revived at once.
    def revive(self, solution: Solution, max_bytes: int = 2**28) -> Tensor:
        """Returns likeliest states, and these with a dead latent each, packed ``(N, 1 + K, W)``.

        These are binary latents, inactive in all states, whose parameters a step does not change. A first Adam step is equally long for all
        gradients that are not zero. Of too many latents a random part: as many as states of the given memory, one for each, hold.
        """
        space, words = solution.kept_population.space, solution.kept_population.words
        with Trainer(self.profile, solution=solution) as trainer:
            states = space.unpack(Population(space, words, trainer.scorer().score(words)).mode())
            trainer.insert_states(words)
            trainer.step()
            is_off = (trainer.truncated_guide.population().marginals().amax(0) < _DEAD_PROBABILITY).cpu()
            dead = (is_off & (space.cardinality.cpu() == 2)).nonzero().squeeze(1)
            parameters = self.profile.parameters.learned()
            steps = [(value.detach() - solution.parameters[name]).abs() for name, value in parameters.items()]
        if all(bool((step.max() > 0) & (step >= step.max() / 2).all()) for step in steps):
            dead = dead[:0]
        most = min(_MAX_REVIVED, rows_per_block(states.numel() * states.element_size(), max_bytes))
        if len(dead) > most:
            dead = dead[torch.randperm(len(dead), device="cpu")[:most].sort().values]
        states = states.unsqueeze(1).repeat(1, 1 + len(dead), 1)
        states[:, torch.arange(1, 1 + len(dead)), dead] = 1
        return space.pack(states)


# --- the pool ---


class SolutionPool:
    """The solutions of restarts, and the best one, improved by moves.

    Restarts are independent, so a latent that two of them have found is hardly an accident. Once each latent of the best has been found
    twice, few are missing. The number of kinds that a sample misses grows with the square of the number seen only once (Chao, 1987).
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.refine: Refine = settle  # trains what is exchanged, which is nearly final
        # Tried on the best one after each exchange; what they propose is trained to convergence.
        self.own_moves: Sequence[Move] = (Complement(profile),)
        self.best = NOTHING  # the highest free energy, with what others have added
        self.restarts: list[Restart] = []
        self.estimates: list[FreeEnergyEstimate] = []  # what each has reached
        # Probabilities (N, H) that latents of each are active, where restarts are compared by these.
        self.codes: list[Tensor | None] = []
        self.groups: list[Recombination] = []  # of latents that restarts exchange
        # Restarts exchange nothing, as weights of networks mean nothing in another network.
        self.is_network = profile.initialization == "draw_start"
        self.targets: Tensor | None = None  # what a network decodes states into, if a linear model can warm-start it
        self.moves: dict[str, tuple[int, int]] = {}  # how often each kind was tried beyond restarts, and how often accepted
        self._members: list[Solution] = []  # restarts that exchange latents, with populations
        self._failures: dict[str, Solution] = {}  # the best one that gained nothing by a move, by its name

    @property
    def energies(self) -> list[float]:
        """The free energy per data point of each restart, in order."""
        return [restart.free_energy for restart in self.restarts]

    def add(self, solution: Solution, restart: Restart) -> None:
        """Adds a restart."""
        self.restarts.append(restart)
        self.estimates.append(solution.estimate)
        code = solution.probabilities
        if self.profile.learns_causes and solution.population is not None:
            code = solution.population.marginals().double().cpu()
        self.codes.append(code)
        if self.groups:
            self._join(solution)
        else:
            self.best = solution if self.best is NOTHING else max(self.best, solution, key=attrgetter("finite_energy"))

    def exchange(self, groups: list[Recombination]) -> None:
        """Lets restarts exchange latents, from the best one on."""
        self.groups = groups
        if groups:
            first, self.best = self.best, NOTHING
            self._join(first)

    def is_complete(self) -> bool:
        """Whether two restarts have found each latent of the best, none redundant."""
        return not any(bool((self._find_singletons(group) | group.find_redundant(self.best)).any()) for group in self.groups)

    @property
    def num_singletons(self) -> int:
        """How many latents of the best only one restart has found.

        Redundant ones do not count, unless they are the majority.
        """
        number = 0
        for group in self.groups:
            singletons, redundant = self._find_singletons(group), group.find_redundant(self.best)
            is_minority = int(redundant.sum()) <= int((~singletons & ~redundant).sum())
            number += int((singletons & ~redundant if is_minority else singletons).sum())
        return number

    def ranked_codes(self) -> list[tuple[float, Tensor]]:
        """Free energies and codes of restarts, the best one first."""
        ranked = sorted(zip(self.energies, self.codes, strict=True), key=lambda one: -one[0])
        return [(energy, code) for energy, code in ranked if code is not None]

    def share_chains(self) -> bool:
        """Whether each chain of the best was found by another restart, too."""
        (_, best), *others = self.ranked_codes()
        if not others:
            return False
        is_shared = torch.stack([shared_mask(best, other) for _, other in others]).any(0)
        return not bool((vary(best) & ~is_shared).any())

    def use_redundant_latents(self) -> bool:
        """Whether the best gains by its own redundant latents.

        They are not tried while other restarts still add to it.
        """
        return bool(self.groups) and self._improve(RedundantLatents(self.groups, self.profile), self.refine)

    def improve(self, best: Solution, move: Move, refine: Refine) -> Solution:
        """Returns the best solution after a move: itself, or a refined proposal."""
        proposals = move.propose(best)
        proposal = next(proposals, None)
        while proposal is not None:
            solution = refine(self.profile, proposal)
            is_better = solution.free_energy > best.free_energy + self.profile.tolerance
            tried, accepted = self.moves.get(move.name, (0, 0))
            self.moves[move.name] = tried + 1, accepted + is_better
            best = solution if is_better else best
            try:
                proposal = proposals.send(best)
            except StopIteration:
                proposal = None
        return best

    def _join(self, solution: Solution) -> None:
        """Adds latents of a restart to the best, then of others."""
        before = self.best
        self._members.append(self.groups[0].populate(solution))
        queue = [self._members[-1]]
        while queue:
            other = queue.pop()
            gains = [self._cross(other), *(self._improve(move, search_and_train) for move in self.own_moves)]
            if any(gains):
                queue = [member for member in self._members if member is not other]
        if self.best is before:
            self.use_redundant_latents()

    def _cross(self, other: Solution) -> bool:
        """Whether the best has become better by what another one has found."""
        if self.best is NOTHING:
            self.best = other
            return False
        best, lesser = sorted((self.best, other), key=attrgetter("finite_energy"), reverse=True)
        return self._try(Crossover(self.groups, lesser), best, self.refine)

    def _improve(self, move: Move, refine: Refine) -> bool:
        """Whether a move improves the best; it is not repeated on it."""
        if self.best is self._failures.get(move.name):
            return False
        has_gained = self._try(move, self.best, refine)
        self._failures[move.name] = self.best
        return has_gained

    def _try(self, move: Move, solution: Solution, refine: Refine) -> bool:
        """Whether a move of the best, or of a better one, gains.

        Beside continuous latents the free energy of an untrained child is an estimate with the parent's spread. There only trained
        children count.
        """

        def train_child(profile: Profile, child: Solution) -> Solution:
            trained = self.groups[0].populate(refine(profile, child))
            return trained if child.companion else max(child, trained, key=attrgetter("free_energy"))

        before, self.best = self.best, self.improve(solution, move, train_child)
        return self.best is not before

    def _find_singletons(self, group: Recombination) -> Tensor:
        return torch.stack([group.shared_mask(self.best, member) for member in self._members]).sum(0) < 2
