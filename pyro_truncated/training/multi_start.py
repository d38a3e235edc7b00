"""Restarts with annealing until two agree, and the best of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from pyro_truncated.em.closed_form import ClosedFormModel, undriven
from pyro_truncated.em.gibbs import GibbsModel
from pyro_truncated.training.agreement import FreeEnergyEstimate
from pyro_truncated.training.assembly import Assembly
from pyro_truncated.training.completion import can_complete, completed
from pyro_truncated.training.dead_latents import revive_dead_latents
from pyro_truncated.training.learn_report import LearnReport, Restart
from pyro_truncated.training.model_kinds import ResizableModel, StartingModel, has_informed_init
from pyro_truncated.training.model_parameters import disturb, draws_starts, layers_of, load_snapshot, snapshot
from pyro_truncated.training.model_runs import Settings, layout_of
from pyro_truncated.training.overcomplete import start_overcomplete
from pyro_truncated.training.recombination import recombinations_of
from pyro_truncated.training.starts import Start, fitted, settled, start
from pyro_truncated.training.stop_rule import Plan, Pool, StopRule
from pyro_truncated.training.warm_start import LinearCauses, decoded_values, likeliest_states, shuffle, teach
from pyro_truncated.utils.annealing import cooling
from pyro_truncated.utils.console import ProgressBar, progress_bar

# Restarts that are kept with their states.
_KEPT = 3
# States, temperature and tolerance of the linear model's restarts, as for such a model alone.
_STATES_OF_CODES, _TEMPERATURE_OF_CODES, _TOLERANCE_OF_CODES = 64, 20.0, 0.05


class MultiStart:
    """What the starts of a model have reached.

    Attributes:
        pool: their solutions.
        rule: says whether another one is made.
        reason: why no further one is.
    """

    def __init__(self, model: Any, y: Tensor, settings: Settings, plan: Plan) -> None:
        self.pool = Pool(Start(FreeEnergyEstimate(-math.inf), {}, None))
        self._model, self._y, self._plan = model, y, plan
        self._num_steps, settings = 0, dataclasses.replace(settings, watch=partial(self._count, settings.watch))
        self._first = None if draws_starts(model) else _first_place(model, y)
        is_full = plan.starts == 1 or plan.is_product or (self._first is None and not has_informed_init(model))
        self._settings = settings if is_full else settings.halved(layout_of(model, y, settings).space)
        self._is_resized = isinstance(model, ResizableModel) and not isinstance(model, GibbsModel)
        self.rule = StopRule(model, y, self._settings, plan)
        self.pool.is_network = isinstance(model, StartingModel)
        # Why no further restart is made.
        self.reason: str | None = None

    def _count(self, watch: Callable[[float], None], free_energy: float) -> None:
        self._num_steps += 1
        watch(free_energy)

    def make(self, bar: ProgressBar) -> None:
        """Makes independent restarts until two agree."""
        while self.reason is None:
            number = len(self.pool.energies)
            bar.set_description_str(f"start {number + 1}")
            before = self._num_steps
            self._begin(number)
            found = self._start()
            self._end(found, self._num_steps - before)
            self.reason = self.rule.reason(self.pool)

    def _start(self) -> Start:
        plan = self._plan
        if self._is_resized:
            return start_overcomplete(self._model, self._y, self._settings, plan.temperature, plan.steps, plan.generator, plan.tolerance)
        if self.pool.decoded is None:
            return start(self._model, self._y, self._settings, plan.temperature, plan.steps, plan.generator, None, plan.tolerance)
        states = self._linear_code(self.pool.decoded)
        teach(self._model, self._y, self._settings, states, plan.steps)
        return start(self._model, self._y, self._settings, 1.0, plan.steps, plan.generator, states)

    def _linear_code(self, decoded: Tensor) -> Tensor:
        """Returns states ``(N, H)`` of a linear model of the decoded values."""
        linear = LinearCauses(decoded.shape[1], layout_of(self._model, self._y, self._settings).space.num_latents).to(decoded.device)
        falling = cooling(_TEMPERATURE_OF_CODES, self._plan.steps)
        plan = Plan(None, self._plan.steps, falling, _TOLERANCE_OF_CODES, self._plan.generator, are_compared=True)
        found = MultiStart(linear, decoded, settings := Settings(None, _STATES_OF_CODES), plan)
        with undriven(linear), progress_bar(False) as bar:
            found.make(bar)
            found.complete()
        return likeliest_states(linear, decoded, settings, found.pool.best)

    def complete(self) -> None:
        """Adds latents of other restarts to the best, after the comparison.

        It is for causes with closed-form M-steps.
        """
        if len(self.pool.found) > 1 and can_complete(self._model):
            best, *_ = self.pool.found
            self.pool.best = completed(self._model, self._y, self._settings, self.pool.found, self._plan.tolerance, self._plan.steps)
            self.pool.moves.count("crossover", self.pool.best is not best)

    def report(self, disagreement: str | None, last: FreeEnergyEstimate, settings: dict[str, Any]) -> LearnReport:
        """Returns what was done, given how the training after it ended."""
        assert self.reason is not None
        kinds = {GibbsModel: "Gibbs sampling", ClosedFormModel: "closed-form M-steps"}
        optimizer = next((name for kind, name in kinds.items() if isinstance(self._model, kind)), "gradients")
        return LearnReport(
            tuple(self.pool.restarts), dict(self.pool.moves), self.reason, disagreement, last.steps, last.remaining, optimizer, settings
        )

    def _begin(self, number: int) -> None:
        """Initialises a restart near the model's parameters if the model does not."""
        if self._first is None or number == 0:
            return
        if number == 1 and not self._plan.is_product:
            self.pool.assembly = self._assembled(self._first)
            self.pool.is_network = self.pool.assembly is None and bool(layers_of(self._model, self._y))
            self.pool.decoded = decoded_values(self._model, self._y, self._settings) if self.pool.is_network else None
        if self.pool.decoded is not None:
            load_snapshot(self._model, self._y, self._first)
            shuffle(self._model, self._y, self._plan.generator)
            return
        self._disturb(self._first)

    def _initialisation(self) -> str:
        if self._first is None:
            return "draw_start" if isinstance(self._model, StartingModel) else "initialize"
        if self.pool.decoded is not None:
            return "linear model"
        return "these with noise" if self.pool.restarts else "parameters of the model"

    def _disturb(self, parameters: dict[str, Tensor]) -> None:
        load_snapshot(self._model, self._y, parameters)
        disturb(self._model, self._y, self.pool.best.parameters, self._plan.generator)

    def _assembled(self, first: dict[str, Tensor]) -> Assembly | None:
        """Returns the exchange between restarts, if latents are exchangeable.

        Random parameters show whether they are.
        """
        self._disturb(first)
        state = {**self.pool.best.parameters, **snapshot(self._model, self._y)}
        recombinations = recombinations_of(self._model, self._y, self._settings, self._plan.tolerance, state)
        if not recombinations:
            return None
        settle = partial(settled, self._model, self._y, self._settings, steps=max(1, self._plan.steps // 2))
        fit = partial(fitted, self._model, self._y, self._settings, steps=self._plan.steps)
        assembly = Assembly(recombinations, settle, fit, self._plan.generator, self.pool.moves)
        assembly.join(self.pool.best)
        return assembly

    def _end(self, found: Start, steps: int) -> None:
        if self._plan.is_shared:
            before = found
            found = revive_dead_latents(self._model, self._y, self._settings, found, self._plan.tolerance, self._plan.steps)
            self.pool.moves.count("revival of dead latents", found is not before)
        if can_complete(self._model) or found.probabilities is not None:
            self.pool.found = sorted([*self.pool.found, found], key=lambda one: -one.reached.free_energy)[:_KEPT]
        self.pool.restarts.append(Restart(self._initialisation(), steps, found.reached.free_energy))
        self.pool.apart.append(found.reached)
        if self.pool.assembly is not None:
            self.pool.assembly.join(found)
            found = self.pool.assembly.best
        candidates = [self.pool.best, found] if self.pool.best.parameters else [found]
        self.pool.best = max(candidates, key=lambda one: one.reached.free_energy if math.isfinite(one.reached.free_energy) else -math.inf)


def _first_place(model: Any, y: Tensor) -> dict[str, Tensor]:
    """Returns the first initialisation of a model that draws none.

    It is where the model is, or where ``initialize`` goes with these data.
    """
    if hasattr(model, "initialize"):
        model.initialize(y)
    return snapshot(model, y)
