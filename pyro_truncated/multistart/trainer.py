"""A model with its guide and SVI, as learn trains them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, cast

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList, AutoNormal, init_to_feasible
from pyro.optim import ClippedAdam
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.distributed.shards import shard_sum, total_rows
from pyro_truncated.em.closed_form import ClosedForm
from pyro_truncated.em.gibbs import GibbsEM, GibbsGuide
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.multistart.decoders import fit_decoder
from pyro_truncated.multistart.model_parameters import least_size, optimiser_options, prior_draw
from pyro_truncated.multistart.profile import Profile, num_posteriors
from pyro_truncated.multistart.relocation import Relocations
from pyro_truncated.program.call import Call
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.search.automatic import AutomaticSearch
from pyro_truncated.search.base import Search
from pyro_truncated.search.conditional import ConditionalSearch
from pyro_truncated.search.evolutionary import EvolutionarySearch
from pyro_truncated.search.exhaustive import ExhaustiveSearch
from pyro_truncated.search.preselection import CombinedFlips
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.training.elbo import Truncated_ELBO
from pyro_truncated.utils.annealing import Temperature
from pyro_truncated.utils.parameter_store import spare_random_numbers

# Most search rounds; the gain per data point in nats that ends them.
_MAX_SEARCH_ROUNDS, _MIN_GAIN_NATS = 10, 0.01
# What is left of the learning rate after its decay.
LAST_RATE = 0.1


class Trainer:
    """A model with guide and SVI, trained as the model allows.

    A restart has a temperature. Chains of a Gibbs sampler need no burn-in there, as there are no learned parameters yet.
    """

    def __init__(self, profile: Profile, temperature: Temperature | None = None) -> None:
        self.profile = profile
        self.truncated: AutoTruncated | None = None
        self._driver = None if profile.is_by_gradients else ClosedForm(profile.model)
        if profile.search is not None:
            profile.search.forget()
        if profile.optimizer == "Gibbs sampling":
            search: Any = profile.search or _selection()
            self.guide: Any = GibbsGuide(profile.model)
            elbo: Any = GibbsEM(search) if temperature is None else GibbsEM(search, settling=0, temperature=temperature)
        else:
            self.guide, self.truncated, space = _guides(profile, temperature is not None)
            search = profile.search or profile.default_search(space)
            elbo = Truncated_ELBO(search, temperature=1.0 if temperature is None or profile.has_companion else temperature)
        self._elbo, self.relocations = elbo, Relocations(profile.model, self.truncated, profile.y)
        # A user's search may remember data points by their position among all.
        is_divisible = profile.search is None or isinstance(profile.search, (EvolutionarySearch, ExhaustiveSearch))
        self._parts = split_data(profile, self.guide, elbo) if is_divisible else None
        self._steps_each = 1 if self._parts is None else self._parts.number
        lrd = profile.lrd ** (1 / self._steps_each)
        self._rate = 1.0

        def options(name: str) -> dict[str, float]:
            return optimiser_options(profile.lr * self._rate, lrd, least_size(profile.y), self.is_in_parts, name)

        optim = self._driver or ClippedAdam(cast("Any", options))
        self._svi = SVI(profile.model, self.guide, optim, elbo)

    @property
    def search(self) -> Any:
        """What fills the populations, or selects latents."""
        return self._elbo.search

    @property
    def is_in_parts(self) -> bool:
        """Whether a step is a pass over parts of the data.

        See :class:`~pyro_truncated.multistart.trainer.Parts`.
        """
        return self._parts is not None

    @property
    def companion(self) -> dict[str, Tensor]:
        """Returns learned states of continuous latents by name."""
        return cast("dict[str, Tensor]", self.guide[0].state_dict()) if self.profile.has_companion else {}

    @torch.no_grad()
    def set_up(self) -> None:
        """Sets the guide up on its data, as its first step would."""
        with spare_random_numbers(), poutine.block():
            self.guide(self.profile.y)

    @torch.no_grad()
    def take_over(self, companion: dict[str, Tensor]) -> None:
        """Takes another run's continuous latents, except those of data points."""
        if companion:
            self.set_up()
            for name, value in self.companion.items():
                if value.shape == companion[name].shape:
                    value.copy_(companion[name])

    @torch.no_grad()
    def scorer(self) -> LogJoint:
        """The scorer of states, given the medians of continuous latents beside."""
        assert self.truncated is not None
        self.set_up()
        with spare_random_numbers(), poutine.block():
            values = self.truncated.other_values(Call(self.truncated.model, (self.profile.y,)), median=True)
            return self.truncated.make_scorer(self.profile.y, values=values)

    def step(self) -> float:
        """Takes a training step; returns the free energy before it."""
        y = self.profile.y
        self.relocations.before_step()
        loss = float(self._svi.step(y)) if self._parts is None else self._parts.step(self._svi)
        value = -loss / (total_rows(y) if self.truncated is None else num_posteriors(self.truncated, y))
        self.profile.watch(value)
        return value

    def fit_decoder(self) -> None:
        """Refits a network trained in parts to the states of the populations."""
        if self._parts is not None:
            assert self.truncated is not None
            self._parts.collect()
            fit_decoder(self.profile.model, self.profile.y, self.truncated)

    def slow_down(self, steps: int) -> None:
        """Lets the learning rate fall to a tenth in so many steps."""
        for optimizer in self._svi.optim.optim_objs.values():
            for group in optimizer.param_groups:
                group["lrd"] = LAST_RATE ** (1 / (steps * self._steps_each))

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate, relative to the first one."""
        for optimizer in self._svi.optim.optim_objs.values():
            for group in optimizer.param_groups:
                group["lr"] *= rate / self._rate
        self._rate = rate

    def intensify_search(self) -> bool:
        """Searches more thoroughly from now on, and says whether it does.

        It does not where you have named the search.

        By full conditionals, or, of more than 64 binary latents, of which these hit few that matter, by combined flips.
        """
        is_evolving = self.profile.search is None and isinstance(self._elbo.search, EvolutionarySearch)
        if is_evolving:
            assert self.truncated is not None
            space = self.truncated.space
            self._elbo.search = CombinedFlips() if space.is_binary and space.num_latents > AutomaticSearch.SEVERAL else ConditionalSearch()
        return is_evolving

    def find_states(self) -> None:
        """Searches without training, so that bad first states teach nothing.

        There are ten rounds. If data points have a posterior each, rounds end when the free energy rises no more. Binary latents are
        searched by combined flips unless you named a search: under a trained model they reach as far as full conditionals at a tenth of
        the cost.
        """
        if self.truncated is not None and not self.profile.has_companion and not self.profile.is_product:
            before, reached, y = self._elbo.search, -math.inf, self.profile.y
            # In a single posterior a round may find nothing by chance.
            are_apart = not self.profile.is_shared
            least = _MIN_GAIN_NATS if are_apart else -math.inf
            if self.intensify_search() and are_apart and self.truncated.space.is_binary:
                self._elbo.search = CombinedFlips()
            with torch.no_grad(), poutine.block():
                for _ in range(_MAX_SEARCH_ROUNDS):
                    each = self.truncated.make_batch(y).search_(self._elbo.search).free_energy().double()
                    last, reached = reached, float(shard_sum(y)([each.sum()])[0]) / total_rows(y)
                    if reached - last < least:
                        break
            self._elbo.search = before

    @torch.no_grad()
    def insert_states(self, states: Tensor) -> None:
        """Merges states, repetitions allowed, into a new guide's populations."""
        guide = self.truncated
        if guide is None:
            return
        log_joint = self.scorer()
        words = guide.space.pack(states)
        population = guide.rescore(log_joint)
        merged = population.merge(Population(guide.space, words, log_joint.score(words).to(population.log_joint)))
        guide.populations.store_(merged.log_joint, None, merged.words)

    def end(self) -> None:
        """Releases the model for other training, and keeps the guide's results."""
        if self._parts is not None:
            self._parts.collect()
        if self._driver is not None:
            self._driver.release()


def _guides(profile: Profile, is_start: bool = False) -> tuple[Any, AutoTruncated, StateSpace]:
    """Returns a model's guide, its truncated part, and the state space."""
    truncated = profile.set_up_guide()
    layout = truncated.layout
    if not profile.has_companion:
        return truncated, truncated, layout.space
    guide = AutoGuideList(profile.model)
    # Earlier guides keep their parameters; this one begins anew.
    guide._pyro_name = _free_name(type(guide).__name__)
    # A draw from the prior: restarts from one point, such as zero, agreed without need.
    init = prior_draw if is_start else init_to_feasible
    guide.append(AutoNormal(poutine.block(profile.model, hide=list(layout.sites)), init_loc_fn=init))
    truncated = profile.make_guide()
    guide.append(truncated)
    return guide, truncated, layout.space


def _free_name(kind: str) -> str:
    """A name for a module under which Pyro's store holds nothing yet."""
    taken = {name.partition(".")[0] for name in pyro.get_param_store()}
    return next(name for number in itertools.count(1) if (name := kind if number == 1 else f"{kind}_{number}") not in taken)


def _selection() -> Search:
    from pyro_truncated.search.gp_select import GPSelect  # Gaussian processes are loaded where they are needed

    return GPSelect(5)


# Rows of a part; most parts, each of which has a guide.
_ROWS_PER_PART, _MAX_PARTS = 150, 32
# Rounding error of equal log joints.
_SCORE_RTOL = 1e-3


class Parts:
    """A model's data in parts, each with a guide, trained in turn.

    Rows of a part lie as far apart as there are parts: data are often in some order.

    Args:
        y: all data.
        guide: that of all data, which says what the parts begin with, and gets what they have found.
        rows: the parts.
        guides: one for each of them.
        elbo: the loss, whose search and temperature are theirs.
    """

    def __init__(
        self, y: Tensor, guide: AutoTruncated, rows: Sequence[Tensor], guides: Sequence[AutoTruncated], elbo: Truncated_ELBO
    ) -> None:
        self._y, self._guide, self._rows, self._guides, self._elbo = y, guide, rows, guides, elbo
        self._elbos = [Truncated_ELBO(elbo.search, temperature=elbo.temperature) for _ in guides]
        self._have_begun = False

    @property
    def number(self) -> int:
        """How many they are."""
        return len(self._guides)

    def step(self, svi: SVI) -> float:
        """Passes over all parts; returns the summed loss before each step."""
        if not self._have_begun:
            self._begin()
        loss = 0.0
        for rows, guide, elbo in zip(self._rows, self._guides, self._elbos, strict=True):
            elbo.search = self._elbo.search
            loss += float(SVI(svi.model, guide, svi.optim, elbo).step(rows))
        return loss

    @torch.no_grad()
    def _begin(self) -> None:
        self._have_begun, population = True, self._guide.population()
        for first, guide in enumerate(self._guides):
            words, log_joint = (select_part(value, first, self.number).clone() for value in (population.words, population.log_joint))
            guide.populations.store_(log_joint, None, words)

    @torch.no_grad()
    def collect(self) -> None:
        """Collects all states, with log joints under the present model."""
        if not self._have_begun:
            return
        population = self._guide.population()
        words, log_joint = population.words.clone(), population.log_joint.clone()
        for first, guide in enumerate(self._guides):
            found = guide.population()
            select_part(words, first, self.number).copy_(found.words)
            select_part(log_joint, first, self.number).copy_(found.log_joint)
        self._guide.populations.store_(log_joint, None, words)
        self._guide.refresh_(self._y)


def select_part(rows: Tensor, first: int, number: int) -> Tensor:
    """Returns every so many rows from one on, as a view."""
    return rows.as_subclass(Tensor)[first::number]


def split_data(profile: Profile, guide: Any, elbo: Any) -> Parts | None:
    """Returns the parts of a network's data, ``None`` for other models.

    Data points must share no latents, and lie in one process.

    Programs whose parts differ from all data are trained on all at once. They hold other data beside these rows, look at neighbours, or
    observe something of no data point, which would count once for each part.
    """
    y = profile.y
    if not profile.is_network or not profile.is_by_gradients or profile.has_companion or profile.is_conditional or profile.is_product:
        return None
    number = min(_MAX_PARTS, len(y) // _ROWS_PER_PART)
    is_whole = guide.layout.num_data == len(y) == total_rows(y) and getattr(y, "file", None) is None
    if number < 2 or not is_whole:
        return None
    with spare_random_numbers(), poutine.block(), torch.no_grad():
        guide.populations.seed_()
        whole = guide.make_batch(y)
        words = whole.population().words[:, :1]
        scores = whole.scorer.score(words)
        if float(whole.outside().detach()) != 0.0:
            return None
        rows = [select_part(y, first, number).contiguous() for first in range(number)]
        guides = [_make_part_guide(guide, part, first, profile) for first, part in enumerate(rows)]
        for first, (part, own) in enumerate(zip(rows, guides, strict=True)):
            if own is None or not _are_as_among_all(own, part, select_part(words, first, number), select_part(scores, first, number)):
                return None
    return Parts(y, guide, rows, [own for own in guides if own is not None], elbo)


def _make_part_guide(guide: AutoTruncated, rows: Tensor, first: int, profile: Profile) -> AutoTruncated | None:
    """Returns a guide of a part with its own random numbers.

    Its state space is that of all data.
    """
    assert guide.populations.seed is not None
    made = profile.make_guide()
    made.populations.seed = ops.mix_bits(guide.populations.seed, first)
    try:
        made.setup(rows)
    except Exception:  # any error of a program that takes all rows only
        return None
    is_alike = made.layout.num_data == len(rows) and made.space.cardinalities == guide.space.cardinalities
    return made if is_alike and made.num_states == guide.num_states else None


def _are_as_among_all(guide: AutoTruncated, rows: Tensor, words: Tensor, scores: Tensor) -> bool:
    """Whether a part's states keep their log joints ``scores``."""
    own = guide.make_scorer(rows).score(words)
    return own.shape == scores.shape and torch.allclose(own, scores, rtol=_SCORE_RTOL, atol=_SCORE_RTOL)
