"""Runs: how they are trained, when they end, what they learn."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, cast

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList, AutoNormal, init_to_feasible
from pyro.optim import ClippedAdam
from torch import Tensor

from pyro_truncated.distributed.launch import AllReduced
from pyro_truncated.distributed.shards import shard_sum
from pyro_truncated.em.closed_form import ClosedForm
from pyro_truncated.em.gibbs import GibbsEM, GibbsGuide
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.multistart.decoders import fit_decoder
from pyro_truncated.multistart.model_parameters import Medians, ModelParameters, optimiser_options, prior_draw
from pyro_truncated.multistart.profile import Profile
from pyro_truncated.multistart.solution import STANDARD_ERRORS, FreeEnergyEstimate, Solution, estimate_mean, estimate_on_trend, vary
from pyro_truncated.program.call import Call
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.search.automatic import AutomaticSearch
from pyro_truncated.search.base import Search, SearchBatch
from pyro_truncated.search.conditional import ConditionalSearch
from pyro_truncated.search.evolutionary import EvolutionarySearch
from pyro_truncated.search.preselection import CombinedFlips
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.training.elbo import Truncated_ELBO
from pyro_truncated.utils.annealing import Temperature, temperature_at
from pyro_truncated.utils.parameter_store import program_modules, spare_random_numbers

# Most search rounds before training; steps between two moves of mixture components.
_MAX_SEARCH_ROUNDS, _RELOCATION_STEPS = 10, 10
# Beside continuous latents: share of the steps that is a window, so that slow gains are seen; least steps of one.
_WINDOW_SHARE, _COMPANION_WINDOW_STEPS = 0.25, 20
# First standard deviations there. At Pyro's 0.1 latents of 36 weights each were lost to their noise
# before they could explain anything: an Indian buffet ended 138 nats lower, and restarts agreed.
_INIT_SCALE = 0.01
# There the learning rate is multiplied by this at each plateau, so many times at most.
_RATE_FACTOR, _REDUCTIONS = 0.3, 4


class Trainer:
    """A model with guide and SVI, trained as the model allows.

    A restart has a temperature. Chains of a Gibbs sampler need no burn-in there, as there are no learned parameters yet. Training begins
    with the parameters and continuous latents of a solution, or else where the model is. As a context manager it removes its guide's
    parameters from Pyro's store in the end: others take their names.
    """

    def __init__(self, profile: Profile, temperature: Temperature | None = None, solution: Solution | None = None) -> None:
        self.profile, self._names_before = profile, set(pyro.get_param_store())
        if solution is not None:
            profile.parameters.load(solution.parameters)
        # Samplers have none.
        self.truncated_guide: Any = None
        self._driver = None if profile.optimizer == "gradients" else ClosedForm(profile.model)
        if profile.search is not None:
            profile.search.forget()
        if profile.optimizer == "Gibbs sampling":
            from pyro_truncated.search.gp_select import GPSelect  # Gaussian processes are loaded where they are needed

            search: Any = profile.search or GPSelect(min(5, profile.model.num_latents))
            self.guide: Any = GibbsGuide(profile.model)
            self.elbo: Any = GibbsEM(search) if temperature is None else GibbsEM(search, warm_up=0, temperature=temperature)
        else:
            self.guide, self.truncated_guide, space = _guides(profile, temperature is not None)
            search = profile.make_search(space)
            self.elbo = Truncated_ELBO(search, temperature=1.0 if temperature is None or profile.has_companion else temperature)
        self._moves_components = hasattr(profile.model, "split_and_merge") and not profile.spans_processes
        self._relocation_generator = torch.Generator().manual_seed(0)
        self._rate, self._decay, self._num_steps = 1.0, 1.0, 0

        self.parameters = ModelParameters(profile.model, profile.y, self.guide[0] if profile.has_companion else None)
        units: dict[str, float] = {}

        def options(name: str) -> dict[str, float]:
            if name not in units:
                units.update(self.parameters.units())
            return optimiser_options(profile.lr * self._rate, self._decay, units[name], self.parameters.in_layer(name))

        self._adam = ClippedAdam(cast("Any", options))
        # Of data that all processes hold whole, as restarts do, each has the whole gradient.
        optimizer = AllReduced(self._adam) if profile.spans_processes else self._adam
        self._svi = SVI(profile.model, self.guide, self._driver or optimizer, self.elbo)
        # Gradients that other training has left.
        self._left = {(id(value), version) for _, value, version in self._gradients()}
        if solution is not None and solution.companion:
            self.set_up()
            medians = Medians(self.truncated_guide, profile.y)
            self.take_over(medians.companion(solution.parameters, solution.companion))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        store = pyro.get_param_store()
        for name in set(store) - self._names_before - self.parameters.tensors().keys():
            del store[name]

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
        self.set_up()
        with spare_random_numbers(), poutine.block():
            values = self.truncated_guide.other_values(Call(self.truncated_guide.model, (self.profile.y,)), median=True)
            return cast("LogJoint", self.truncated_guide.make_scorer(self.profile.y, values=values))

    def step(self) -> float:
        """Takes a training step; returns the free energy before it."""
        y = self.profile.y
        if self._num_steps and self._num_steps % _RELOCATION_STEPS == 0:
            self.relocate()
        self._num_steps += 1
        value = -float(self._svi.step(y)) / self.profile.num_posteriors
        self.profile.watch(value)
        return value

    def _gradients(self) -> list[tuple[str, Tensor, int]]:
        """The model's parameters with gradients, and how often these have changed."""
        modules = program_modules(self.profile.model) if self._driver is None else []
        values = [(name, value) for module in modules for name, value in module.named_parameters() if value.requires_grad]
        return [(name, value, value.grad._version) for name, value in values if value.grad is not None]

    def warn_about_unknown_parameters(self) -> None:
        """Warns of parameters that have gradients, but are not in Pyro's store."""
        trained = {id(value) for value in self._adam.optim_objs}
        names = {name for name, value, version in self._gradients() if id(value) not in trained and (id(value), version) not in self._left}
        if names:
            warnings.warn(
                f"the parameters {sorted(names)} get gradients, but are not trained, as Pyro does not know them. Give learn a PyroModule "
                "in place of its method, call pyro.module(name, module) in the model, or freeze the module by requires_grad_(False).",
                UserWarning,
                stacklevel=4,
            )

    def relocate(self) -> bool:
        """Whether mixture components move; once none has, none is tried again."""
        if self._moves_components:
            profile, generator = self.profile, self._relocation_generator
            self._moves_components = profile.model.split_and_merge(self.truncated_guide, profile.y, generator) > 0
        return self._moves_components

    def fit_decoder(self) -> None:
        """Refits a network to the states of the populations."""
        if self.profile.has_decoder and self.profile.num_data == len(self.profile.y):
            fit_decoder(self.truncated_guide, self.profile.y)

    def slow_down(self, steps: int, share: float = 0.1) -> None:
        """Lets the learning rate fall to a share in so many steps."""
        self.set_rate(self._rate, share ** (1 / steps))

    def set_rate(self, rate: float, decay: float = 1.0) -> None:
        """Sets the learning rate relative to the first, and its decay."""
        for optimizer in self._adam.optim_objs.values():
            for group in optimizer.param_groups:
                group["lr"] *= rate / self._rate
                group["lrd"] = decay
        self._rate, self._decay = rate, decay

    def intensify_search(self) -> bool:
        """Searches more thoroughly from now on, unless you named the search.

        Says whether it does. By full conditionals, or by combined flips of more than 64 binary latents, of which few matter.
        """
        is_evolutionary = self.profile.search is None and isinstance(self.elbo.search, EvolutionarySearch)
        if is_evolutionary:
            space = self.truncated_guide.space
            self.elbo.search = CombinedFlips() if space.is_binary and space.num_latents > AutomaticSearch.SEVERAL else ConditionalSearch()
        return is_evolutionary

    def find_states(self) -> None:
        """Searches without training, so that bad first states teach nothing.

        Rounds end when the free energy rises no more if data points have a posterior each. Binary latents are searched by combined flips
        unless you named a search: under a trained model they reach as far as full conditionals at a tenth of the cost.
        """
        if self.truncated_guide is None or self.profile.has_companion or self.profile.is_product:
            return
        before, energy, y = self.elbo.search, -math.inf, self.profile.y
        # In a single posterior a round may find nothing by chance.
        least = -math.inf if self.profile.shares_latents else self.profile.config.gain
        if self.intensify_search() and not self.profile.shares_latents and self.truncated_guide.space.is_binary:
            self.elbo.search = CombinedFlips()
        with torch.no_grad(), poutine.block():
            for _ in range(_MAX_SEARCH_ROUNDS):
                each = self.truncated_guide.make_batch(y).search_(self.elbo.search).free_energy().double()
                last, energy = energy, float(shard_sum(y)([each.sum()])[0]) / self.profile.num_data
                if energy - last < least:
                    break
        self.elbo.search = before

    @torch.no_grad()
    def insert_states(self, words: Tensor) -> None:
        """Merges packed states, repetitions allowed, into a new guide's populations."""
        guide, log_joint = self.truncated_guide, self.scorer()
        population = guide.rescore(log_joint)
        union = population.merge(Population(guide.space, words, log_joint.score(words).to(population.log_joint)))
        guide.populations.store_(union.log_joint, None, union.words)

    def end(self) -> None:
        """Releases the model for other training, and keeps the guide's results."""
        if self._driver is not None:
            self._driver.release()

    def record(self, estimate: FreeEnergyEstimate) -> Solution:
        """What the run has learned."""
        profile, guide, probabilities = self.profile, self.truncated_guide, None
        population = None if guide is None or profile.is_product else copy_population(guide.population())
        if profile.has_companion:
            parameters = Medians(guide, profile.y).state(self.companion)
            estimate = self._with_data_points(estimate)
            return Solution(estimate, parameters, population, {name: value.clone() for name, value in self.companion.items()})
        if profile.is_chain:
            (chains,) = guide.marginals().values()
            probabilities = chains.flatten(0, -2).float().cpu()
        elif population is not None and profile.has_decoder and population.space.is_binary:
            marginals = population.marginals().double().cpu()
            probabilities = marginals if bool(vary(marginals).any()) else None
        return Solution(estimate, self.parameters.snapshot(), population, probabilities=probabilities)

    @torch.no_grad()
    def _with_data_points(self, estimate: FreeEnergyEstimate) -> FreeEnergyEstimate:
        r"""Adds the free energies of data points, at medians of continuous latents.

        Draws of ``P`` latents from their posterior change these by a deviation of about :math:`\sqrt{P / N}`. Medians in one optimum differ
        by less: 0.14 where that was 1.06. In two optima of an Indian buffet, of nearly equal means, it was 1.9, and they differed by 3.6.
        """
        if self.profile.is_product or self.profile.shares_latents:
            return estimate
        each = self.truncated_guide.rescore(self.scorer()).free_energy()
        num_latents = sum(value.numel() for value in self.companion.values()) / 2  # means and deviations
        return estimate._replace(each=each, scatter=math.sqrt(num_latents / len(each)))


def _guides(profile: Profile, is_start: bool) -> tuple[Any, AutoTruncated, StateSpace]:
    """Returns a model's guide, its truncated part, and the state space."""
    truncated_guide = profile.set_up_guide()
    layout = truncated_guide.layout
    if not profile.has_companion:
        return truncated_guide, truncated_guide, layout.space
    guide = AutoGuideList(profile.model)
    # Earlier guides keep their parameters; this one begins anew, under a name that Pyro's store does not hold yet.
    kind, used_names = type(guide).__name__, {name.partition(".")[0] for name in pyro.get_param_store()}
    names = itertools.chain([kind], (f"{kind}_{number}" for number in itertools.count(2)))
    guide._pyro_name = next(name for name in names if name not in used_names)
    # A draw from the prior: restarts from one point, such as zero, agreed without need.
    init = prior_draw if is_start else init_to_feasible
    guide.append(AutoNormal(poutine.block(profile.model, hide=list(layout.sites)), init_loc_fn=init, init_scale=_INIT_SCALE))
    truncated_guide = profile.make_guide()
    guide.append(truncated_guide)
    return guide, truncated_guide, layout.space


def copy_population(population: Population) -> Population:
    """Returns a population that later training does not change."""
    return Population(population.space, population.words.clone(), population.log_joint.clone())


# --- when runs end ---


def last_gain(values: Sequence[float], window: int) -> float:
    """Returns how far the last value is from the earlier best one."""
    return abs(values[-1] - max(values[:-window])) if len(values) > window else math.inf


def mean_gain(values: Sequence[float], window: int) -> float:
    """Returns the gain of a window's mean over the previous one's."""
    number = min(window, len(values) // 2)
    return (sum(values[-number:]) - sum(values[-2 * number : -number])) / number if number else 0.0


def remaining_gain(values: Sequence[float], window: int, errors: float = -1.0) -> float:
    r"""Returns what noisy free energies will gain, plus some standard errors.

    A window is the last quarter of the steps, or larger. A free energy that approaches its limit as :math:`1 / t` will still gain twice
    what this window has gained beside the one before; one that approaches it exponentially will gain less.
    """
    number = max(window, int(_WINDOW_SHARE * len(values)))
    if len(values) < 2 * number:
        return math.inf
    before, after = estimate_on_trend(values[-2 * number : -number]), estimate_on_trend(values[-number:])
    return 2 * _noisy_gain(before, after, errors)


def _noisy_gain(before: FreeEnergyEstimate, after: FreeEnergyEstimate, errors: float) -> float:
    """Returns a gain of noisy free energies plus some standard errors."""
    return max(0.0, after.free_energy - before.free_energy + errors * math.hypot(before.noise, after.noise) / STANDARD_ERRORS)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When a run has converged, and what its last steps are."""

    steps: int  # at least
    max_steps: int  # at most, without those at a falling rate
    tol: float = 0.0  # gain in nats per data point at convergence
    gain: Callable[[Sequence[float], int], float] = last_gain  # of free energies, given the window
    window: int = 5  # steps of which the gain is measured
    stride: int = 1  # steps between two measurements
    is_relative: bool = False  # the gain is divided by that of all steps
    decay: int = 0  # steps at a falling learning rate, after the others
    # Multiplies the learning rate before the first plateau; None: it does not fall from plateau to plateau.
    first_rate: float | None = None
    # Standard errors added to gains of plateaus. One more hides no slow gain, one less ends no later than noise allows.
    errors: float = -1.0
    is_thorough: bool = False  # the search is intensified, from the beginning or the second plateau on

    def has_converged(self, values: Sequence[float]) -> bool:
        """Whether the gain is below the tolerance."""
        unit = values[-1] - values[0] if self.is_relative and values else 1.0
        return self.gain(values, self.window) <= self.tol * unit


def convergence_schedule(profile: Profile, max_steps: int) -> Schedule:
    """Closed-form EM at temperature one, with a thorough search."""
    config = profile.config
    if profile.has_companion:
        return gradient_schedule(profile, max_steps)
    return Schedule(0, max_steps, config.gain, window=config.window, stride=config.window, is_thorough=True)


def gradient_schedule(profile: Profile, steps: int) -> Schedule:
    """Gradient steps while the free energy rises, then at a falling rate.

    There are at least so many, and at most four times as many. Beside continuous latents, where it is noisy and rises for long, there are
    up to sixteen times as many; nats up to the tolerance may remain there.
    """
    config = profile.config
    if profile.has_companion:
        # There 240 steps ended up to 250 nats below the optimum.
        window = min(_COMPANION_WINDOW_STEPS, max(2, 2 * steps))
        return Schedule(steps, 16 * steps, profile.tolerance, window=window, stride=window, first_rate=1.0)
    # Weights of networks change long after their latents are found.
    least, window = config.network_gain if profile.has_decoder else config.gradient_gain, config.gradient_window
    return Schedule(steps, 4 * steps, least, mean_gain, window, window, decay=config.decay_steps)


def restart_schedule(profile: Profile, temperature: Temperature, steps: int) -> Schedule:
    """The schedule of a restart: so many steps, by gradients at least."""
    config = profile.config
    if profile.is_informed:
        return Schedule(1, steps, config.informed_gain, window=config.window, is_relative=True)
    if profile.optimizer == "gradients":
        return gradient_schedule(profile, steps)
    if profile.is_mixture and temperature_at(temperature, 0) == 1.0:
        return Schedule(0, steps, config.mixture_gain, window=config.window)
    return Schedule(steps, steps)


def train(trainer: Trainer, schedule: Schedule) -> FreeEnergyEstimate:
    """Trains until convergence; returns the free energy that is reached.

    A neural decoder is refitted to its states before the learning rate falls, where training otherwise ends in bad optima.
    """
    if schedule.first_rate is not None:
        return _train_by_plateaus(trainer, schedule, schedule.first_rate)
    if schedule.is_thorough:
        trainer.intensify_search()
    values = _until_convergence(trainer, schedule)
    if schedule.decay:
        if values:
            trainer.fit_decoder()
        trainer.slow_down(schedule.decay)
        values += [trainer.step() for _ in range(schedule.decay)]
    trainer.end()
    return _estimate(trainer, schedule, values)


def _train_by_plateaus(trainer: Trainer, schedule: Schedule, first_rate: float) -> FreeEnergyEstimate:
    r"""Trains until neither more steps nor a smaller learning rate gain more.

    The noise of gradients lowers the free energy by an amount proportional to the rate. If a reduction of the rate by a factor :math:`f`
    has gained :math:`g`, all further ones will gain :math:`g f / (1 - f)`.
    """
    estimate, steps = FreeEnergyEstimate(-math.inf, remaining_gain=math.inf), 0
    for reduction in range(1 + _REDUCTIONS):
        trainer.set_rate(first_rate * _RATE_FACTOR**reduction)
        if reduction and schedule.is_thorough:
            trainer.intensify_search()
        # Half of the steps that are left, so that some are taken at smaller rates; two windows fit into them.
        steps_left = schedule.max_steps - steps
        most = steps_left if reduction == _REDUCTIONS else (steps_left + 1) // 2
        window = min(schedule.window, max(_COMPANION_WINDOW_STEPS, most // 2))
        least, gain = 0 if reduction else min(schedule.steps, most), partial(remaining_gain, errors=schedule.errors)
        values = _until_convergence(trainer, Schedule(least, most, schedule.tol, gain, window, window))
        steps, before = steps + len(values), estimate
        if values:
            estimate = estimate_on_trend(values[-max(window, int(_WINDOW_SHARE * len(values))) :])
        sure, possible = (
            remaining_gain(values, window, errors) + _noisy_gain(before, estimate, errors) * _RATE_FACTOR / (1 - _RATE_FACTOR)
            for errors in (-1.0, schedule.errors)
        )
        estimate = estimate._replace(remaining_gain=sure, steps=steps)
        if possible <= schedule.tol:
            break
    trainer.end()
    return estimate


def finish(trainer: Trainer, max_steps: int, tol: float) -> FreeEnergyEstimate:
    """Trains on all data to convergence; returns what is reached.

    The last steps search thoroughly. One such step of full conditionals tells as much as five of evolution, at several times the cost.
    The tolerance is a window's gain in nats per data point; minus infinity where convergence is not looked for.
    """
    profile, window = trainer.profile, trainer.profile.config.window
    if profile.has_companion:
        # Gains that take hundreds of steps do not show in the first tens, and a few steps do not show their noise.
        window = max(min(_COMPANION_WINDOW_STEPS, max(2, max_steps // 8)), max_steps // 40)
        options: dict[str, Any] = {"first_rate": _RATE_FACTOR, "errors": 1.0, "is_thorough": True}
        return train(trainer, Schedule(0, max_steps, profile.tolerance, window=window, stride=window, **options))
    # A tenth of the steps is kept back for the thorough search; of less than ten none, as searched states need a step to be trained.
    values = _until_convergence(trainer, Schedule(0, max_steps - max_steps // 10, tol, window=window))
    last = Schedule(0, max_steps - len(values), tol, window=window)
    if last.max_steps and trainer.intensify_search():
        values += _until_convergence(trainer, dataclasses.replace(last, tol=tol / window, window=1), values[-1:])
    elif last.max_steps and not last.has_converged(values):
        values += _until_convergence(trainer, last)
    trainer.end()
    return FreeEnergyEstimate(values[-1], steps=len(values))


def _until_convergence(trainer: Trainer, schedule: Schedule, before: Sequence[float] = ()) -> list[float]:
    """Takes steps until gains are small and no mixture component moves."""
    values = [trainer.step() for _ in range(schedule.steps)]
    while len(values) < schedule.max_steps:
        if schedule.has_converged([*before, *values]) and not trainer.relocate():
            break
        values += [trainer.step() for _ in range(min(schedule.stride, schedule.max_steps - len(values)))]
    return values


def _estimate(trainer: Trainer, schedule: Schedule, values: list[float]) -> FreeEnergyEstimate:
    steps, profile = len(values), trainer.profile
    if trainer.truncated_guide is None:
        # The log joint of a sampler's draws: a mean over the last sixth.
        return estimate_mean(values[-max(1, steps // 6) :])._replace(steps=steps)
    if profile.has_companion or profile.is_conditional:
        # Continuous latents make the free energy noisy; its trend is no noise.
        return estimate_on_trend(values[-profile.config.gradient_window :])._replace(steps=steps)
    estimate = FreeEnergyEstimate(values[-1], each=trainer.truncated_guide.population().free_energy(), steps=steps)
    if schedule.max_steps == schedule.steps or schedule.gain is not last_gain or steps <= schedule.window:
        return estimate
    gain = values[-1] - values[-1 - schedule.window]
    if not schedule.has_converged(values):
        return estimate._replace(rise=gain)
    return estimate._replace(noise=max(0.0, gain)) if schedule.is_relative else estimate


# --- short runs ---


class FixedStates(Search):
    """Proposes nothing new."""

    def propose(self, batch: SearchBatch) -> Population:
        """The states that there are."""
        return batch.population


def run_restart(profile: Profile, temperature: Temperature, words: Tensor | None = None) -> Solution:
    """Trains briefly from a drawn start, or from parameters and packed states."""
    profile.initialize()
    with Trainer(profile, temperature) as trainer:
        if profile.optimizer == "gradients":
            trainer.set_up()
            trainer.parameters.approach(profile.generator)
        if words is not None:
            trainer.insert_states(words)
        return trainer.record(train(trainer, restart_schedule(profile, temperature, profile.config.restart_steps)))


def retrain(profile: Profile, solution: Solution, schedule: Schedule, *, searches: bool = False) -> Solution:
    """Trains from a solution and its states, searched before if wanted."""
    with Trainer(profile, solution=solution) as trainer:
        if solution.population is not None:
            trainer.insert_states(solution.population.words)
        if searches:
            trainer.find_states()
        return trainer.record(train(trainer, schedule))


def search_and_train(profile: Profile, solution: Solution) -> Solution:
    """Searches for states of a solution and trains it by gradients."""
    return retrain(profile, solution, gradient_schedule(profile, profile.config.restart_steps), searches=True)


def converge(profile: Profile, solution: Solution) -> Solution:
    """Trains to convergence from a solution and its states."""
    return retrain(profile, solution, convergence_schedule(profile, profile.config.restart_steps))


def settle(profile: Profile, solution: Solution) -> Solution:
    """Trains briefly in ever smaller steps from a nearly final solution."""
    return retrain(profile, solution, Schedule(0, 0, decay=max(1, profile.config.restart_steps // 2)))


def fit_states(profile: Profile, words: Tensor, temperature: Temperature | None = None, solution: Solution | None = None) -> Solution:
    """Fits parameters briefly to packed states ``(N, S, W)`` that stay as they are."""
    with Trainer(profile.replace(search=FixedStates(), num_states=words.shape[1]), temperature, solution) as trainer:
        scorer, steps = trainer.scorer(), profile.config.restart_steps
        trainer.truncated_guide.populations.store_(scorer.score(words), None, words)
        return trainer.record(train(trainer, Schedule(steps, steps)))
