"""A model with its guide and SVI, as learn trains them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList, AutoNormal, init_to_feasible
from pyro.optim import ClippedAdam
from torch import Tensor

from pyro_truncated.distributed.shards import sums_of, total_rows
from pyro_truncated.em.closed_form import ClosedForm, ClosedFormModel
from pyro_truncated.em.gibbs import GibbsEM, GibbsGuide, GibbsModel
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.program.call import Call
from pyro_truncated.program.chain_scorer import ChainLayout
from pyro_truncated.program.layout import Layout
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.search.automatic import AutomaticSearch, is_of_many
from pyro_truncated.search.base import Search
from pyro_truncated.search.conditional import ConditionalSearch
from pyro_truncated.search.evolutionary import EvolutionarySearch
from pyro_truncated.search.exhaustive import ExhaustiveSearch
from pyro_truncated.search.preselection import CombinedFlips
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.training.decoders import fit_decoder
from pyro_truncated.training.elbo import Truncated_ELBO
from pyro_truncated.training.model_kinds import ConditionalModel, ResizableModel, SearchedModel, has_companion_guides
from pyro_truncated.training.model_parameters import least_size, prior_draw, rate_of
from pyro_truncated.training.passes import parts_of
from pyro_truncated.training.relocation import Relocations
from pyro_truncated.utils.annealing import Temperature
from pyro_truncated.utils.parameter_store import spare_random_numbers

# Most search rounds; the gain per data point in nats that ends them.
_LOOKING, _HARDLY_MORE = 10, 0.01
LAST_RATE = 0.1
# Parents of evolution under user-defined models, whose scores dominate the cost. Their 30 children
# reached as much as the 56 of eight parents; four parents once ended in a worse optimum.
_PARENTS = 6


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all runs of a call have in common.

    Attributes:
        search: fills the populations.
        num_states: states per data point.
        lr: learning rate of gradient steps, see :func:`rate_of`.
        lrd: what it is multiplied by from step to step.
        max_count: largest value of count sites without an upper end.
        watch: is told the free energy per data point after every step.
    """

    search: Search | None
    num_states: int
    lr: float = 0.1
    lrd: float = 1.0
    max_count: int | Mapping[str, int] | None = None
    watch: Callable[[float], None] = lambda free_energy: None

    def guide_of(self, model: Any) -> AutoTruncated:
        """A truncated guide that has not seen its data yet."""
        conditional = model.default_conditional() if isinstance(model, ConditionalModel) else None
        return AutoTruncated(model, num_states=self.num_states, conditional=conditional, max_count=self.max_count)

    def guide_for(self, model: Any, y: Tensor) -> AutoTruncated:
        """A truncated guide that knows the latents of its data."""
        guide = self.guide_of(model)
        with spare_random_numbers():
            guide.setup(y)
        return guide

    def slowing(self, steps: int, last: float = LAST_RATE) -> Settings:
        """Returns settings with a decaying learning rate.

        It falls to a tenth or another part in so many steps.
        """
        return dataclasses.replace(self, lrd=last ** (1 / steps))

    def halved(self, space: StateSpace) -> Settings:
        """Returns settings with half the states, enough to compare restarts.

        Populations that hold all states stay whole.
        """
        return self if space.size <= self.num_states else dataclasses.replace(self, num_states=max(1, self.num_states // 2))


class Run:
    """A model with guide and SVI, trained as the model allows.

    A restart has a temperature. Chains of a Gibbs sampler need no burn-in there, as there are no learned parameters yet.
    """

    def __init__(self, model: Any, y: Tensor, settings: Settings, temperature: Temperature | None = None) -> None:
        self.truncated: AutoTruncated | None = None
        self._driver = ClosedForm(model) if isinstance(model, (ClosedFormModel, GibbsModel)) else None
        self._watch = settings.watch
        self._is_search_ours = settings.search is None
        if settings.search is not None:
            settings.search.forget()
        if isinstance(model, GibbsModel):
            search: Any = settings.search or _selection()
            self.guide: Any = GibbsGuide(model)
            elbo: Any = GibbsEM(search) if temperature is None else GibbsEM(search, settling=0, temperature=temperature)
        else:
            self.guide, self.truncated, space = _guides(model, y, settings, temperature is not None)
            is_product = self.truncated.product is not None
            search = settings.search or (AutomaticSearch() if is_product else default_search(model, space, settings.num_states))
            elbo = Truncated_ELBO(search, temperature=1.0 if temperature is None or self.guide is not self.truncated else temperature)
        self._elbo, self.relocations = elbo, Relocations(model, self.truncated, y)
        # A user's search may remember data points by their position among all.
        is_divisible = self._is_search_ours or isinstance(settings.search, (EvolutionarySearch, ExhaustiveSearch))
        self._parts = parts_of(model, y, self.guide, elbo, partial(settings.guide_of, model)) if is_divisible else None
        self._steps_each = 1 if self._parts is None else self._parts.number
        lrd = settings.lrd ** (1 / self._steps_each)
        self._rate = 1.0

        def options(name: str) -> dict[str, float]:
            return rate_of(settings.lr * self._rate, lrd, least_size(y), self.is_in_parts, name)

        optim = self._driver or ClippedAdam(cast("Any", options))
        self._svi = SVI(model, self.guide, optim, elbo)

    @property
    def is_by_gradients(self) -> bool:
        """Whether the model has no M-steps of its own."""
        return self._driver is None

    @property
    def has_companion(self) -> bool:
        """Whether a guide of continuous latents is trained beside the truncated one."""
        return self.truncated is not None and self.guide is not self.truncated

    @property
    def search(self) -> Any:
        """What fills the populations, or selects latents."""
        return self._elbo.search

    @property
    def is_in_parts(self) -> bool:
        """Whether a step is a pass over parts of the data.

        See :class:`~pyro_truncated.training.passes.Parts`.
        """
        return self._parts is not None

    @property
    def beside(self) -> dict[str, Tensor]:
        """Returns learned states of continuous latents by name."""
        return cast("dict[str, Tensor]", self.guide[0].state_dict()) if self.has_companion else {}

    @torch.no_grad()
    def see(self, y: Tensor) -> None:
        """Sets the guide up on its data, as its first step would."""
        with spare_random_numbers(), poutine.block():
            self.guide(y)

    @torch.no_grad()
    def take_over(self, beside: dict[str, Tensor], y: Tensor) -> None:
        """Takes another run's continuous latents, except those of data points."""
        if beside:
            self.see(y)
            for name, value in self.beside.items():
                if value.shape == beside[name].shape:
                    value.copy_(beside[name])

    @torch.no_grad()
    def scorer(self, y: Tensor) -> LogJoint:
        """The scorer of states, given the medians of continuous latents beside."""
        assert self.truncated is not None
        self.see(y)
        with spare_random_numbers(), poutine.block():
            values = self.truncated.other_values(Call(self.truncated.model, (y,)), median=True)
            return self.truncated.log_joint_of(y, values=values)

    def step(self, y: Tensor) -> float:
        """Takes a training step; returns the free energy before it."""
        self.relocations.before_step()
        loss = float(self._svi.step(y)) if self._parts is None else self._parts.step(self._svi)
        value = -loss / (total_rows(y) if self.truncated is None else num_posteriors(self.truncated, y))
        self._watch(value)
        return value

    def fit_decoder(self, y: Tensor) -> None:
        """Refits a network trained in parts to the states of the populations."""
        if self._parts is not None:
            assert self.truncated is not None
            self._parts.give()
            fit_decoder(self._svi.model, y, self.truncated)

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
        is_evolving = self._is_search_ours and isinstance(self._elbo.search, EvolutionarySearch)
        if is_evolving:
            assert self.truncated is not None
            space = self.truncated.space
            self._elbo.search = CombinedFlips() if space.is_binary and space.num_latents > AutomaticSearch.SEVERAL else ConditionalSearch()
        return is_evolving

    def find_states(self, y: Tensor) -> None:
        """Searches without training, so that bad first states teach nothing.

        There are ten rounds. If data points have a posterior each, rounds end when the free energy rises no more. Binary latents are
        searched by combined flips unless you named a search: under a trained model they reach as far as full conditionals at a tenth of
        the cost.
        """
        if self.truncated is not None and self.guide is self.truncated and self.truncated.product is None:
            before, reached = self._elbo.search, -math.inf
            # In a single posterior a round may find nothing by chance.
            are_apart = num_posteriors(self.truncated, y) == total_rows(y)
            least = _HARDLY_MORE if are_apart else -math.inf
            if self.intensify_search() and are_apart and self.truncated.space.is_binary:
                self._elbo.search = CombinedFlips()
            with torch.no_grad(), poutine.block():
                for _ in range(_LOOKING):
                    each = self.truncated.batch_of(y).search_(self._elbo.search).free_energy().double()
                    last, reached = reached, float(sums_of(y)([each.sum()])[0]) / total_rows(y)
                    if reached - last < least:
                        break
            self._elbo.search = before

    def end(self) -> None:
        """Releases the model for other training, and keeps the guide's results."""
        if self._parts is not None:
            self._parts.give()
        if self._driver is not None:
            self._driver.release()


def _guides(model: Any, y: Tensor, settings: Settings, is_start: bool = False) -> tuple[Any, AutoTruncated, StateSpace]:
    """Returns a model's guide, its truncated part, and the state space."""
    truncated = settings.guide_for(model, y)
    layout = truncated.layout
    if not has_companion_guides(model, layout):
        return truncated, truncated, layout.space
    guide = AutoGuideList(model)
    # Earlier guides keep their parameters; this one begins anew.
    guide._pyro_name = _free_name(type(guide).__name__)
    # A draw from the prior: restarts from one point, such as zero, agreed without need.
    guide.append(AutoNormal(poutine.block(model, hide=list(layout.sites)), init_loc_fn=prior_draw if is_start else init_to_feasible))
    truncated = settings.guide_of(model)
    guide.append(truncated)
    return guide, truncated, layout.space


def _free_name(kind: str) -> str:
    """A name for a module under which Pyro's store holds nothing yet."""
    taken = {name.partition(".")[0] for name in pyro.get_param_store()}
    return next(name for number in itertools.count(1) if (name := kind if number == 1 else f"{kind}_{number}") not in taken)


def layout_of(model: Any, y: Tensor, settings: Settings) -> Layout:
    """The discrete latents and the data plates of a model."""
    return dataclasses.replace(settings, num_states=1).guide_for(model, y).layout


def num_posteriors(guide: AutoTruncated, y: Tensor) -> float:
    """Returns how many posteriors the rows of data have.

    Rows may share latents; without a plate all data have one posterior. Of sequences of chains every step has one.
    """
    steps = guide.product.num_steps if isinstance(guide.product, ChainLayout) else 1
    return steps * total_rows(y) * min(1.0, guide.layout.num_data / len(y))


def _selection() -> Search:
    from pyro_truncated.search.gp_select import GPSelect  # Gaussian processes are loaded where they are needed

    return GPSelect(5)


def default_search(model: Any, space: StateSpace, num_states: int) -> Search:
    """What fills populations of models that have no opinion of their own."""
    if isinstance(model, SearchedModel):
        return model.default_search(num_states)
    is_combined = 2 * space.cardinalities.count(2) > space.num_latents or isinstance(model, ResizableModel)
    if not is_combined or space.size <= num_states or is_of_many(space):
        return AutomaticSearch()
    return EvolutionarySearch(None if isinstance(model, ClosedFormModel) else _PARENTS, crossover=True)


@torch.no_grad()
def insert_states(run: Run, y: Tensor, states: Tensor) -> None:
    """Merges states, repetitions allowed, into a new guide's populations."""
    guide = run.truncated
    if guide is None:
        return
    log_joint = run.scorer(y)
    words = guide.space.pack(states)
    population = guide.rescored(log_joint)
    merged = population.merge(Population(guide.space, words, log_joint.score(words).to(population.log_joint)))
    guide.populations.store_(merged.log_joint, None, merged.words)
