"""The number of restarts, and disagreement about the best one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.distributed.shards import total_rows
from pyro_truncated.em.closed_form import ClosedFormModel
from pyro_truncated.em.gibbs import GibbsModel
from pyro_truncated.training.agreement import FreeEnergyEstimate, are_alike, have_agreed, is_gain_below_error, share_most
from pyro_truncated.training.assembly import Assembly
from pyro_truncated.training.completion import MOST_MISSED, can_complete, have_found_the_same
from pyro_truncated.training.learn_report import Moves, Restart
from pyro_truncated.training.model_kinds import ResizableModel, has_companion_guides
from pyro_truncated.training.model_runs import Settings, layout_of
from pyro_truncated.training.overcomplete import are_many
from pyro_truncated.training.starts import Start

# Most restarts; with exchange of latents; and where one costs as much as the training: more than
# 256 binary latents.
_MOST, _MOST_THAT_EXCHANGE, _MOST_OF_MANY = 8, 16, 2
# Least number of restarts for problems in which two restarts often agree on a poor optimum: shared
# latents, small mixtures, continuous latents, and (by gradients) fewer rows per latent than this.
_FEWEST_OF_SOME, _FEW_ROWS_PER_LATENT = 8, 16
# Data values times components of a small mixture: eight restarts took 0.9 to 5.1 CPU seconds.
_MOST_OF_SMALL_MIXTURES = 50_000
# Warm-started network restarts before the expected gain counts.
_FEWEST_OF_CODES = 4
# Largest lead of the best restart in tolerances, for any number of restarts.
_FARTHEST = 4
# Nats per observed number by which agreeing networks may differ: a noise larger by a fiftieth.
# Two networks that found all bars differed by 0.006 at most, random networks by up to 0.08.
_GAP_OF_A_NUMBER = 0.02


@dataclasses.dataclass(frozen=True)
class Plan:
    """How many starts there are, of which kind, and when they agree.

    Attributes:
        starts: largest number of restarts; ``None``: 8, or 16 if they exchange latents. The latter have half the states each.
        steps: steps of each.
        temperature: as a function of the step.
        tolerance: free energies per data point that differ by less are the same.
        generator: source of randomness.
        is_of_gains: whether the tolerance is twice the expected gain of another restart. That gain is the lead of the best divided by the
            number of restarts. Best restarts further apart than four tolerances do not agree. Small mixtures (data values times components
            at most 50 000) have eight restarts at least.
        is_shared: whether data points share latents. Dead latents of their restarts are revived. There are eight restarts at least, as bad
            optima of a single posterior are met twice.
        are_compared: whether agreement also needs the same latents. With closed-form M-steps these are active for the same data points. By
            gradients data points have the same free energies (see :func:`are_alike`).
        is_product: whether each node of the program has a set of states. Restarts then exchange nothing.
    """

    starts: int | None
    steps: int
    temperature: Callable[[int], float]
    tolerance: float
    generator: torch.Generator | None
    is_of_gains: bool = False
    is_shared: bool = False
    are_compared: bool = False
    is_product: bool = False


@dataclasses.dataclass
class Pool:
    """The solutions of restarts.

    Attributes:
        best: the one with the highest free energy, with what others have added to it.
        apart: of independent restarts: those from one place agree in poor optima.
        found: the best of those that are compared by their latents, with their states.
        assembly: the exchange of latents between them, if there is one.
        decoded: the values that a network decodes states into, if a linear model can warm-start it.
        is_network: whether restarts exchange nothing.
        restarts: what each was.
        moves: what was tried beyond restarts.
    """

    best: Start
    apart: list[FreeEnergyEstimate] = dataclasses.field(default_factory=list)
    found: list[Start] = dataclasses.field(default_factory=list)
    assembly: Assembly | None = None
    decoded: Tensor | None = None
    is_network: bool = False
    restarts: list[Restart] = dataclasses.field(default_factory=list)
    moves: Moves = dataclasses.field(default_factory=Moves)

    @property
    def energies(self) -> list[float]:
        """The free energy per data point of each restart, in order."""
        return [restart.free_energy for restart in self.restarts]

    def gains_by_spare_latents(self) -> bool:
        """Whether the best gains by its own redundant latents.

        They are not tried while other restarts still add to it.
        """
        if self.assembly is None or not self.assembly.use_spare_latents():
            return False
        self.best = max(self.best, self.assembly.best, key=lambda one: one.reached.free_energy)
        return True


class StopRule:
    """Says whether another restart is made, and whether two agree.

    Args:
        model: the model.
        y: data of the restarts.
        settings: what all runs have in common.
        plan: how restarts are made.
    """

    def __init__(self, model: Any, y: Tensor, settings: Settings, plan: Plan) -> None:
        self._model, self._y, self._settings, self._plan = model, y, settings, plan
        self._is_resized = isinstance(model, ResizableModel) and not isinstance(model, GibbsModel)
        self._are_by_gradients = not (self._is_resized or isinstance(model, (ClosedFormModel, GibbsModel)))
        self._fewest = _FEWEST_OF_SOME if plan.is_shared or self._has_few_rows() else 1

    def _has_few_rows(self) -> bool:
        """Whether restarts easily agree on a poor optimum, and are cheap."""
        if isinstance(self._model, GibbsModel):
            return False
        layout = layout_of(self._model, self._y, self._settings)
        if has_companion_guides(self._model, layout):
            return True
        if self._plan.is_product:
            return False
        if self._plan.is_of_gains:
            return self._y.numel() * layout.space.size <= _MOST_OF_SMALL_MIXTURES
        return self._are_by_gradients and total_rows(self._y) < _FEW_ROWS_PER_LATENT * layout.space.num_latents

    def most(self, pool: Pool) -> int:
        """The largest number of restarts."""
        if self._plan.starts is not None:
            return self._plan.starts
        if self._is_resized and are_many(self._model, self._y, self._settings):
            return _MOST_OF_MANY
        return _MOST if pool.assembly is None else _MOST_THAT_EXCHANGE

    def reason(self, pool: Pool) -> str | None:
        """Why no further restart is made, ``None`` if one is."""
        number = len(pool.energies)
        if number >= self._fewest:
            may_be_mended = pool.decoded is not None and number < _FEWEST_OF_CODES
            if (can_complete(self._model) or pool.is_network) and not may_be_mended and is_gain_below_error(pool.apart):
                return "another restart is expected to gain less than chance or more steps"
            if pool.assembly is not None and pool.assembly.is_complete():
                return "two restarts have found each latent of the best"
            if self._have_agreed(pool) and not pool.gains_by_spare_latents():
                return "two restarts agree"
        if number < self.most(pool):
            return None
        pool.gains_by_spare_latents()
        return "all restarts are made"

    def disagreement(self, pool: Pool) -> str | None:
        """Why the best restart may be a local optimum, if it may."""
        number = len(pool.energies)
        if number == 1 or self._have_agreed(pool):
            return None
        if pool.assembly is not None:
            lonely = pool.assembly.num_singletons
            return f"{lonely} latents of the best of {number} starts were found by fewer than two of them" if lonely else None
        ordered = ", ".join(f"{value:.2f}" for value in sorted(pool.energies, reverse=True))
        unit = "per posterior" if self._plan.is_shared else "per data point"
        if self._plan.is_of_gains:
            return f"{number} starts reached different free energies {unit} ({ordered}), and another one may reach more"
        if self._are_equal(pool):
            return f"no two of {number} starts that reached the same free energy {unit} ({ordered}) found the same latents"
        if pool.is_network and pool.found and self._of_one_code(pool):
            return f"starts found the same latents, but free energies {unit} ({ordered}) that say that some networks are fitted badly"
        remaining = max(one.remaining for one in sorted(pool.apart, key=lambda one: -one.free_energy)[:2])
        if remaining > self._plan.tolerance:
            return f"the best two of {number} starts have not converged: free energies {unit} ({ordered}) may rise by {remaining:.2g}"
        return f"no two of {number} starts reached the same free energy {unit} ({ordered})"

    def _have_agreed(self, pool: Pool) -> bool:
        """Whether two restarts reached the best free energy by the same latents.

        Of networks that have found the same latents none need have reached just what the other has: their weights differ everywhere.
        """
        if not pool.found or not self._plan.are_compared:
            return self._are_equal(pool, self._plan.are_compared and self._are_by_gradients)
        best, *others = pool.found
        if best.probabilities is not None:
            # Covariates do not count.
            size = (self._y if pool.decoded is None else pool.decoded)[0].numel()
            return bool(self._of_one_code(pool, max(self._plan.tolerance, _GAP_OF_A_NUMBER * size))) or self._are_equal(pool, True)
        near = [other for other in others if have_agreed([best.reached, other.reached], self._lead(pool))]
        return any(have_found_the_same(self._model, self._y, self._settings, best, other) for other in near)

    def _of_one_code(self, pool: Pool, gap: float = math.inf) -> list[Start]:
        """Returns network restarts with the latents of the best one.

        Their free energies must not be lower by more than the gap.
        """
        best, *others = pool.found
        return [
            other
            for other in others
            if best.reached.free_energy - other.reached.free_energy <= gap
            and best.probabilities is not None
            and other.probabilities is not None
            and share_most(best.probabilities, other.probabilities, MOST_MISSED)
        ]

    def _are_equal(self, pool: Pool, must_be_alike: bool = False) -> bool:
        """Whether two independent restarts have equal free energies everywhere.

        They must be those of the same data points, and none may be higher.
        """
        if not pool.apart:
            return False
        best, *others = sorted(pool.apart, key=lambda one: one.free_energy, reverse=True)
        lead = self._lead(pool)
        near = [other for other in others if have_agreed([best, other], lead)]
        is_met = any(not must_be_alike or are_alike(best, other, self._plan.tolerance) for other in near)
        return is_met and pool.best.reached.free_energy <= best.free_energy + lead

    def _lead(self, pool: Pool) -> float:
        """How far apart the best two restarts may be."""
        return self._plan.tolerance * (min(len(pool.apart) / 2, _FARTHEST) if self._plan.is_of_gains else 1)
