"""Restarts with annealing until two agree, and the best of them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import Tensor

from pyro_truncated.distributed.shards import total_rows
from pyro_truncated.em.closed_form import ClosedFormModel, undriven
from pyro_truncated.em.gibbs_guide import GibbsModel
from pyro_truncated.training.agreement import Reached, are_alike, hardly_pays, have_agreed
from pyro_truncated.training.assembly import Assembly
from pyro_truncated.training.codes import share_most
from pyro_truncated.training.completion import MOST_MISSED, can_complete, completed, have_found_the_same
from pyro_truncated.training.exchanges import fitted, recombinations_of, settled
from pyro_truncated.training.growth import are_many, grown_start
from pyro_truncated.training.linear_causes import LinearCauses
from pyro_truncated.training.linear_codes import decoded_values, likeliest_code, likeliest_states, shuffle, teach
from pyro_truncated.training.model_kinds import ResizableModel, StartingModel, starts_near_the_end
from pyro_truncated.training.model_parameters import copies, disturb, draws_starts, layers_of, put_back
from pyro_truncated.training.model_runs import Settings, layout_of
from pyro_truncated.training.pairwise_codes import explaining_pairs
from pyro_truncated.training.plan import Plan
from pyro_truncated.training.starts import Start, start
from pyro_truncated.training.temperature import cooling
from pyro_truncated.training.waking import woken
from pyro_truncated.utils.console import ProgressBar, progress_bar

_MOST, _MOST_THAT_EXCHANGE = 8, 16
# Least number of restarts for problems in which two restarts often agree on a poor optimum:
# shared latents, small mixtures, and (by gradients) fewer rows per latent than this.
_FEWEST_OF_SOME, _FEW_ROWS_PER_LATENT = 8, 16
# Data values times components of a small mixture: eight restarts took 0.9 to 5.1 CPU seconds.
_MOST_OF_SMALL_MIXTURES = 50_000
# Most restarts where one costs as much as the training: more than 256 binary latents.
_MOST_OF_MANY = 2
# Warm-started network restarts before the expected gain counts; the fourth begins near the best.
_FEWEST_OF_CODES = 4
# Restarts that are kept with their states.
_KEPT = 3
# States, temperature and tolerance of the linear model's restarts, as for such a model alone.
_STATES_OF_CODES, _TEMPERATURE_OF_CODES, _TOLERANCE_OF_CODES = 64, 20.0, 0.05


class SeveralStarts:
    """What the starts of a model have reached.

    Attributes:
        best: the one with the highest free energy, with what others have added to it.
        energies: the free energy per data point of each, in order.
    """

    def __init__(self, model: Any, y: Tensor, settings: Settings, plan: Plan) -> None:
        self.best = Start(Reached(-math.inf), {}, None)
        self.energies: list[float] = []
        self._model, self._y, self._plan = model, y, plan
        # Only independent restarts count: those from one place agree in poor optima.
        self._apart: list[Reached] = []
        self._first = None if draws_starts(model) else _first_place(model, y)
        is_full = plan.starts == 1 or (self._first is None and not starts_near_the_end(model))
        self._settings = settings if is_full else settings.halved(layout_of(model, y, settings).space)
        self._is_resized = isinstance(model, ResizableModel) and not isinstance(model, GibbsModel)
        self._are_by_gradients = not (self._is_resized or isinstance(model, (ClosedFormModel, GibbsModel)))
        self._fewest = _FEWEST_OF_SOME if plan.is_shared or self._has_few_rows() else 1
        self._assembly: Assembly | None = None
        # Network restarts exchange nothing and are all independent.
        self._is_network = isinstance(model, StartingModel)
        self._found: list[Start] = []
        # Decoded values, if a linear model can warm-start the network.
        self._decoded: Tensor | None = None
        # The restart that this one begins near; the last one near which a network began.
        self._near: Start | None = None
        self._tried = -math.inf

    def _has_few_rows(self) -> bool:
        """Whether restarts easily agree on a poor optimum, and are cheap."""
        if isinstance(self._model, GibbsModel):
            return False
        space = layout_of(self._model, self._y, self._settings).space
        if self._plan.is_of_gains:
            return self._y.numel() * space.size <= _MOST_OF_SMALL_MIXTURES
        return self._are_by_gradients and total_rows(self._y) < _FEW_ROWS_PER_LATENT * space.num_latents

    def make(self, bar: ProgressBar) -> None:
        """Makes restarts until two independent ones agree.

        Those that begin at another's end return to it too often.
        """
        number = 0
        while number < self._most():
            bar.set_description_str(f"start {number + 1}")
            self._begin(number)
            self._end(number, self._start())
            if self._is_enough():
                return
            number += 1
        self._gains_by_spare_latents()

    def _start(self) -> Start:
        plan = self._plan
        if self._is_resized:
            return grown_start(self._model, self._y, self._settings, plan.temperature, plan.steps, plan.generator, plan.tolerance)
        if self._decoded is None:
            return start(self._model, self._y, self._settings, plan.temperature, plan.steps, plan.generator)
        code = self._linear_code(self._decoded) if self._near is None else likeliest_code(self._near)
        states = explaining_pairs(code, self._decoded, plan.generator)
        teach(self._model, self._y, self._settings, states, plan.steps)
        return start(self._model, self._y, self._settings, 1.0, plan.steps, plan.generator, states)

    def _linear_code(self, decoded: Tensor) -> Tensor:
        """Returns states ``(N, H)`` of a linear model of the decoded values."""
        linear = LinearCauses(decoded.shape[1], layout_of(self._model, self._y, self._settings).space.num_latents).to(decoded.device)
        falling = cooling(_TEMPERATURE_OF_CODES, self._plan.steps)
        plan = Plan(None, self._plan.steps, falling, _TOLERANCE_OF_CODES, self._plan.generator, are_compared=True)
        found = SeveralStarts(linear, decoded, settings := Settings(None, _STATES_OF_CODES), plan)
        with undriven(linear), progress_bar(False) as bar:
            found.make(bar)
            found.complete()
        return likeliest_states(linear, decoded, settings, found.best)

    def complete(self) -> None:
        """Adds latents of other restarts to the best, after the comparison.

        It is for causes with closed-form M-steps.
        """
        if len(self._found) > 1 and can_complete(self._model):
            self.best = completed(self._model, self._y, self._settings, self._found, self._plan.tolerance, self._plan.steps)

    def _most(self) -> int:
        if self._plan.starts is not None:
            return self._plan.starts
        if self._is_resized and are_many(self._model, self._y, self._settings):
            return _MOST_OF_MANY
        return _MOST if self._assembly is None else _MOST_THAT_EXCHANGE

    def doubts(self) -> str | None:
        """Why the best start may be a local optimum, if it may."""
        number = len(self.energies)
        if number == 1 or self._have_agreed():
            return None
        if self._assembly is not None:
            lonely = self._assembly.num_lonely
            return f"{lonely} latents of the best of {number} starts were found by fewer than two of them" if lonely else None
        ordered = ", ".join(f"{value:.2f}" for value in sorted(self.energies, reverse=True))
        unit = "per posterior" if self._plan.is_shared else "per data point"
        if self._plan.is_of_gains:
            return f"{number} starts reached different free energies {unit} ({ordered}), and another one may reach more"
        if self._are_equal():
            return f"no two of {number} starts that reached the same free energy {unit} ({ordered}) found the same latents"
        if self._is_network and self._found and self._of_one_code():
            return f"starts found the same latents, but free energies {unit} ({ordered}) that say that some networks are fitted badly"
        return f"no two of {number} starts reached the same free energy {unit} ({ordered})"

    def _is_enough(self) -> bool:
        if len(self.energies) < self._fewest:
            return False
        may_be_mended = self._decoded is not None and len(self.energies) < _FEWEST_OF_CODES
        if (can_complete(self._model) or self._is_network) and not may_be_mended and hardly_pays(self._apart):
            return True
        if self._assembly is not None and self._assembly.is_complete():
            return True
        return self._have_agreed() and not self._gains_by_spare_latents()

    def _gains_by_spare_latents(self) -> bool:
        """Whether the best gains by its own redundant latents.

        They are not tried while other restarts still add to it.
        """
        if self._assembly is None or not self._assembly.use_spare_latents():
            return False
        self.best = max(self.best, self._assembly.best, key=lambda one: one.reached.free_energy)
        return True

    def _have_agreed(self) -> bool:
        """Whether two restarts reached the best free energy by the same latents.

        Of networks that have found the same latents none need have reached just what the other has: their weights differ everywhere.
        """
        if not self._found or not self._plan.are_compared:
            return self._are_equal(self._plan.are_compared and self._are_by_gradients)
        best, *others = self._found
        if best.probabilities is not None:
            # Covariates do not count.
            size = (self._y if self._decoded is None else self._decoded)[0].numel()
            return bool(self._of_one_code(self._plan.gap(size))) or self._are_equal(must_be_alike=True)
        near = [other for other in others if have_agreed([best.reached, other.reached], self._plan.lead(len(self._apart)))]
        return any(have_found_the_same(self._model, self._y, self._settings, best, other) for other in near)

    def _of_one_code(self, gap: float = math.inf) -> list[Start]:
        """Returns network restarts with the latents of the best one.

        Their free energies must not be lower by more than the gap.
        """
        best, *others = self._found
        return [
            other
            for other in others
            if best.reached.free_energy - other.reached.free_energy <= gap
            and best.probabilities is not None
            and other.probabilities is not None
            and share_most(best.probabilities, other.probabilities, MOST_MISSED)
        ]

    def _are_equal(self, must_be_alike: bool = False) -> bool:
        """Whether two independent restarts have equal free energies everywhere.

        They must be those of the same data points, and none may be higher.
        """
        if not self._apart:
            return False
        best, *others = sorted(self._apart, key=lambda one: one.free_energy, reverse=True)
        lead = self._plan.lead(len(self._apart))
        near = [other for other in others if have_agreed([best, other], lead)]
        is_met = any(not must_be_alike or are_alike(best, other, self._plan.tolerance) for other in near)
        return is_met and self.best.reached.free_energy <= best.free_energy + lead

    def _begin(self, number: int) -> None:
        """Initialises a restart if the model does not.

        It begins near the model's parameters, or near the end of the best.
        """
        self._near = None
        if self._first is None or number == 0:
            return
        if number == 1:
            self._assembly = self._assembled(self._first)
            self._is_network = self._assembly is None and bool(layers_of(self._model, self._y))
            self._decoded = decoded_values(self._model, self._y, self._settings) if self._is_network else None
        if number % 2 == 1 and self._can_begin_near_best():
            self._near, self._tried = self.best, self.best.reached.free_energy
        if self._decoded is not None:
            put_back(self._model, self._y, self._first)
            shuffle(self._model, self._y, self._plan.generator)
            return
        self._disturb(self._first if self._near is None else self._near.parameters)

    def _can_begin_near_best(self) -> bool:
        """Whether a network can begin with the best restart's states.

        It may once for each best one, from the fourth restart on.
        """
        if not self._is_network:
            return bool(self._first) and self._assembly is None
        is_better = self.best.reached.free_energy > self._tried + self._plan.tolerance
        return is_better and self._decoded is not None and len(self.energies) > 1 and self.best.probabilities is not None

    def _disturb(self, parameters: dict[str, Tensor]) -> None:
        put_back(self._model, self._y, parameters)
        disturb(self._model, self._y, self.best.parameters, self._plan.generator)

    def _assembled(self, first: dict[str, Tensor]) -> Assembly | None:
        """Returns the exchange between restarts, if latents are exchangeable.

        Random parameters show whether they are.
        """
        self._disturb(first)
        state = {**self.best.parameters, **copies(self._model, self._y)}
        recombinations = recombinations_of(self._model, self._y, self._settings, self._plan.tolerance, state)
        if not recombinations:
            return None
        settle = partial(settled, self._model, self._y, self._settings, steps=max(1, self._plan.steps // 2))
        fit = partial(fitted, self._model, self._y, self._settings, steps=self._plan.steps)
        assembly = Assembly(recombinations, settle, fit, self._plan.generator)
        assembly.join(self.best)
        return assembly

    def _end(self, number: int, found: Start) -> None:
        if self._plan.is_shared:
            found = woken(self._model, self._y, self._settings, found, self._plan.tolerance, self._plan.steps)
        # A restart that began near the best and ended above it is independent.
        is_above = found.reached.free_energy > self.best.reached.free_energy + self._plan.tolerance
        is_new = self._near is None or is_above
        if self._near is not None and self._is_network and is_above:
            # A restart does not agree with its own continuation.
            self._found = [one for one in self._found if one is not self._near]
            self._apart = [one for one in self._apart if one is not self._near.reached]
        if can_complete(self._model) or (found.probabilities is not None and is_new):
            self._found = sorted([*self._found, found], key=lambda one: -one.reached.free_energy)[:_KEPT]
        self.energies.append(found.reached.free_energy)
        if is_new:
            self._apart.append(found.reached)
        if self._assembly is not None:
            self._assembly.join(found)
            found = self._assembly.best
        self.best = max(self.best, found, key=lambda one: one.reached.free_energy)


def _first_place(model: Any, y: Tensor) -> dict[str, Tensor]:
    """Returns the first initialisation of a model that draws none.

    It is where the model is, or where ``initialize`` goes with these data.
    """
    if hasattr(model, "initialize"):
        model.initialize(y)
    return copies(model, y)
