"""What a run has learned, and short runs from there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from torch import Tensor

from pyro_truncated.multistart.agreement import FreeEnergyEstimate, vary
from pyro_truncated.multistart.convergence import Schedule, fixed_steps, restart_schedule, to_convergence, train
from pyro_truncated.multistart.model_parameters import Medians, forgetting_guides, load_snapshot, snapshot
from pyro_truncated.multistart.profile import Profile
from pyro_truncated.multistart.trainer import LAST_RATE, Trainer
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.search.base import Search, SearchBatch
from pyro_truncated.states.population import Population
from pyro_truncated.utils.annealing import Temperature


@dataclasses.dataclass(frozen=True)
class Solution:
    """What a run has learned, or what a move proposes.

    Attributes:
        estimate: the free energy that was reached.
        parameters: those of the model, and medians of continuous latents.
        population: states that training can begin with, and their log joints when they were found; ``None`` if it shall find others.
        companion: the state of the guide of continuous latents, of this solution or of the one that it was made of.
        spread: what the free energy per data point has from the spread of that guide around its medians.
        probabilities: probabilities ``(N, H)`` that binary latents of a network are active, or chains at all steps; ``None`` where all are
            constant. Parameters of networks do not match, and sets of steps are no populations.
    """

    estimate: FreeEnergyEstimate
    parameters: dict[str, Tensor]
    population: Population | None = None
    companion: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    spread: float = 0.0
    probabilities: Tensor | None = None

    @property
    def free_energy(self) -> float:
        """The free energy per data point."""
        return self.estimate.free_energy + self.spread

    @property
    def states(self) -> Tensor:
        """States of the population, unpacked, ``(N, S, L)``."""
        assert self.population is not None
        return self.population.states()

    def replace(self, **fields: object) -> Solution:
        """Returns a solution with other fields."""
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]


NOTHING = Solution(FreeEnergyEstimate(-math.inf), {})


class FixedStates(Search):
    """Proposes nothing new."""

    def propose(self, batch: SearchBatch) -> Population:
        """The states that there are."""
        return batch.population


def record_solution(trainer: Trainer, estimate: FreeEnergyEstimate, *, has_states: bool = True) -> Solution:
    """What a run has learned."""
    profile, truncated = trainer.profile, trainer.truncated
    population = copy_population(truncated.population()) if truncated is not None and has_states and not profile.is_product else None
    if truncated is None or not profile.has_companion:
        return Solution(estimate, snapshot(profile.model, profile.y), population)
    companion = trainer.companion
    parameters = Medians(profile.model, profile.y, truncated).state(companion)
    return Solution(estimate, parameters, population, {name: value.clone() for name, value in companion.items()})


def copy_population(population: Population) -> Population:
    """Returns a population that later training does not change."""
    return Population(population.space, population.words.clone(), population.log_joint.clone())


def run_restart(profile: Profile, temperature: Temperature, states: Tensor | None = None) -> Solution:
    """Runs a short training from a drawn start, or from present parameters.

    Args:
        profile: of restarts.
        temperature: as a function of the step.
        states: one of each data point, ``(N, L)``, which the search begins with.
    """
    profile.initialize()
    with forgetting_guides(profile.model, profile.y):
        trainer = Trainer(profile, temperature)
        if states is not None:
            trainer.insert_states(states.unsqueeze(1))
        found = record_solution(trainer, train(trainer, restart_schedule(trainer, temperature, profile.config.restart_steps)))
    if profile.is_chain and not profile.has_companion:
        assert trainer.truncated is not None
        (probabilities,) = trainer.truncated.marginals().values()
        return found.replace(probabilities=probabilities.flatten(0, -2).float().cpu())
    is_told = profile.is_by_gradients and profile.is_network and not profile.is_shared and found.population is not None
    if not is_told or not found.population.space.is_binary:  # type: ignore[union-attr]
        return found
    probabilities = found.population.marginals().double().cpu()  # type: ignore[union-attr]
    return found.replace(probabilities=probabilities if bool(vary(probabilities).any()) else None)


def trainer_at(profile: Profile, solution: Solution) -> Trainer:
    """A run that begins at a solution, with states of its own."""
    load_snapshot(profile.model, profile.y, solution.parameters)
    trainer = Trainer(profile)
    if trainer.truncated is not None and solution.companion:
        trainer.set_up()
        medians = Medians(profile.model, profile.y, trainer.truncated)
        trainer.take_over(medians.companion(solution.parameters, solution.companion))
    return trainer


def retrain(profile: Profile, solution: Solution, schedule: Callable[[Trainer], Schedule]) -> Solution:
    """Trains from a solution and its states."""
    with forgetting_guides(profile.model, profile.y):
        trainer = trainer_at(profile, solution)
        if solution.population is not None:
            trainer.insert_states(solution.states)
        return record_solution(trainer, train(trainer, schedule(trainer)))


def converge(profile: Profile, solution: Solution) -> Solution:
    """Trains to convergence from a solution and its states."""
    return retrain(profile, solution, lambda trainer: to_convergence(trainer, profile.config.restart_steps))


def settle(profile: Profile, solution: Solution) -> Solution:
    """Trains briefly in ever smaller steps from a nearly final solution."""
    steps = max(1, profile.config.restart_steps // 2)
    return retrain(profile.with_decay(steps, LAST_RATE), solution, lambda trainer: fixed_steps(steps))


def fit_likeliest_states(profile: Profile, solution: Solution) -> Solution:
    """Fits parameters briefly to the likeliest state of each data point."""
    assert solution.population is not None
    likeliest = solution.population.mode().unsqueeze(1)
    with forgetting_guides(profile.model, profile.y):
        return fit_states(trainer_at(profile.replace(search=FixedStates(), num_states=1), solution), lambda scorer: likeliest)


def fit_states(trainer: Trainer, words: Callable[[LogJoint], Tensor]) -> Solution:
    """Fits parameters to packed states ``(N, S, W)`` that stay as they are."""
    scorer, guide = trainer.scorer(), trainer.truncated
    assert guide is not None
    chosen = words(scorer)
    guide.populations.store_(scorer.score(chosen), None, chosen)
    return record_solution(trainer, train(trainer, fixed_steps(trainer.profile.config.restart_steps)))
