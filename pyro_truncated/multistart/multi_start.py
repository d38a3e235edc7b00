"""Restarts with annealing until two agree, and the best of them.

A rule says how many there are, and whether they disagree about the best one. Models that can be resized begin overcomplete and are
pruned.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_truncated.distributed.shards import total_rows
from pyro_truncated.em.closed_form import restore_driver
from pyro_truncated.multistart.agreement import are_alike, have_agreed, is_gain_below_error, share_most
from pyro_truncated.multistart.convergence import to_convergence, train
from pyro_truncated.multistart.learn_report import Restart
from pyro_truncated.multistart.model_parameters import disturb, learned_tensors, load_snapshot, snapshot
from pyro_truncated.multistart.pool import SolutionPool, have_found_the_same, resolve_difference_codes
from pyro_truncated.multistart.profile import Profile, profile_model
from pyro_truncated.multistart.recombination import build_recombinations
from pyro_truncated.multistart.redundancy import gained_from_noise, is_redundant, losses_with_substitutes, select_for_pruning
from pyro_truncated.multistart.solution import NOTHING, Solution, converge, record_solution, run_restart
from pyro_truncated.multistart.solution_moves import improve, revive_dead_latents
from pyro_truncated.multistart.trainer import Trainer
from pyro_truncated.multistart.warm_start import LinearCauses, decoded_values, likeliest_states, shuffle, teach
from pyro_truncated.states.population import Population
from pyro_truncated.utils.annealing import Temperature
from pyro_truncated.utils.console import ProgressBar, progress_bar
from pyro_truncated.utils.parameter_store import empty_store


class MultiStart:
    """Restarts of a model.

    Args:
        profile: of restarts.
        restart: makes one, from where the model is; default: as the profile says.

    Attributes:
        pool: their solutions.
        rule: says whether another one is made.
        reason: why no further one is.
    """

    def __init__(self, profile: Profile, restart: Callable[[Profile], Solution] | None = None) -> None:
        self._num_steps, self._make_restart = 0, restart
        self._profile = profile.replace(watch=partial(self._count, profile.watch))
        self._first = None if profile.initializer is not None else _first_place(profile)
        self.pool, self.rule = SolutionPool(self._profile), StopRule(self._profile)
        self.reason: str | None = None

    def _count(self, watch: Callable[[float], None], free_energy: float) -> None:
        self._num_steps += 1
        watch(free_energy)

    def run(self, bar: ProgressBar) -> None:
        """Makes independent restarts until two agree."""
        while self.reason is None:
            number = len(self.pool.restarts)
            bar.set_description_str(f"restart {number + 1}")
            before = self._num_steps
            name = self._initialize(number)
            found = self._restart()
            steps = self._num_steps - before
            if self._profile.is_shared:
                found = revive_dead_latents(self._profile, found, self.pool.moves)
            for move in self._profile.config.moves:
                found = improve(found, move, partial(converge, self._profile), self._profile.tolerance, self.pool.moves)
            self.pool.add(found, Restart(name, steps, found.free_energy))
            self.reason = self.rule.reason(self.pool)

    def _initialize(self, number: int) -> str:
        """Goes where a restart begins; returns the name of the place."""
        profile = self._profile
        if self._first is None:
            return profile.initialization
        if number == 0:
            return "parameters of the model"
        if number == 1 and not profile.is_product:
            self._prepare_exchange(self._first)
        if self.pool.decoded is not None:
            load_snapshot(profile.model, profile.y, self._first)
            shuffle(profile)
            return "linear model"
        self._disturb(self._first)
        return "perturbed parameters"

    def _restart(self) -> Solution:
        profile = self._profile
        if self._make_restart is not None:
            return self._make_restart(profile)
        if profile.is_resizable:
            return start_overcomplete(profile)
        if self.pool.decoded is None:
            return run_restart(profile, profile.temperature)
        states = linear_code(profile, self.pool.decoded)
        teach(profile, states)
        return run_restart(profile, 1.0, states)

    def _disturb(self, parameters: dict[str, Tensor]) -> None:
        load_snapshot(self._profile.model, self._profile.y, parameters)
        disturb(self._profile.model, self._profile.y, self.pool.best.parameters, self._profile.generator)

    def _prepare_exchange(self, first: dict[str, Tensor]) -> None:
        """Finds out what restarts exchange, or whether a linear model warm-starts them.

        Random parameters show which latents are exchangeable.
        """
        profile, pool = self._profile, self.pool
        self._disturb(first)
        state = {**pool.best.parameters, **snapshot(profile.model, profile.y)}
        pool.exchange(build_recombinations(profile, profile.tolerance, state))
        pool.is_network = not pool.groups and bool(profile.layers)
        pool.decoded = decoded_values(profile) if pool.is_network else None


def linear_code(profile: Profile, decoded: Tensor) -> Tensor:
    """Returns states ``(N, H)`` of a linear model of the decoded values."""
    assert profile.space is not None
    linear = LinearCauses(decoded.shape[1], profile.space.num_latents).to(decoded.device)
    config = dataclasses.replace(profile.config, initializer=None, moves=(), temperature=None, tolerance=None, lr=None)
    found = profile_model(linear, decoded, generator=profile.generator, config=config)
    multi_start = MultiStart(found.replace(watch=lambda free_energy: None))
    with restore_driver(linear), progress_bar(False) as bar:
        multi_start.run(bar)
    return likeliest_states(found, multi_start.pool.best)


def _first_place(profile: Profile) -> dict[str, Tensor]:
    """Returns the first initialisation of a model that draws none.

    It is where the model is, or where ``initialize`` goes with these data.
    """
    if profile.initialization == "fixed initialize":
        profile.model.initialize(profile.y)
    return snapshot(profile.model, profile.y)


class StopRule:
    """Says whether another restart is made, and whether two agree.

    Args:
        profile: of restarts.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile, self._config = profile, profile.config
        self._are_by_gradients = profile.is_by_gradients and not profile.is_resizable
        self._fewest = self._config.min_restarts if profile.is_shared or self._has_few_rows() else 1

    def _has_few_rows(self) -> bool:
        """Whether restarts easily agree on a poor optimum, and are cheap."""
        profile = self._profile
        if profile.space is None or profile.has_companion or profile.is_product:
            return profile.has_companion
        if profile.is_mixture:
            return profile.y.numel() * profile.space.size <= self._config.small_mixture
        return self._are_by_gradients and total_rows(profile.y) < self._config.few_rows_per_latent * profile.space.num_latents

    def max_restarts(self, pool: SolutionPool) -> int:
        """The largest number of restarts."""
        if self._profile.max_restarts is not None:
            return self._profile.max_restarts
        if self._profile.is_resizable and self._profile.is_large:
            return self._config.max_large_restarts
        return self._config.max_exchanging_restarts if pool.groups else self._config.max_restarts

    def reason(self, pool: SolutionPool) -> str | None:
        """Why no further restart is made, ``None`` if one is."""
        number = len(pool.energies)
        if number >= self._fewest:
            is_early = pool.decoded is not None and number < self._config.min_warm_restarts
            if (self._profile.is_matched or pool.is_network) and not is_early and is_gain_below_error(pool.estimates):
                return "another restart is expected to gain less than chance or more steps"
            if pool.groups and pool.is_complete():
                return "each latent of the best was found by two restarts"
            if self._have_agreed(pool) and not pool.use_redundant_latents():
                return "two restarts agree"
        if number < self.max_restarts(pool):
            return None
        pool.use_redundant_latents()
        return "the maximum number of restarts is reached"

    def disagreement(self, pool: SolutionPool) -> str | None:
        """Why the best restart may be a local optimum, if it may."""
        number = len(pool.energies)
        if number == 1 or self._have_agreed(pool):
            return None
        if pool.groups:
            number_alone = pool.num_singletons
            return f"{number_alone} latents of the best of {number} restarts were found by at most one of them" if number_alone else None
        if self._profile.is_chain and self._profile.compares_latents and len(pool.kept) > 1 and not pool.num_found_once:
            return None
        ordered = ", ".join(f"{value:.2f}" for value in sorted(pool.energies, reverse=True))
        unit = "per posterior" if self._profile.is_shared else "per data point"
        if self._profile.is_mixture:
            return f"{number} restarts reached different free energies {unit} ({ordered}), and another one may reach more"
        if self._are_equal(pool):
            return f"no two of {number} restarts that reached the same free energy {unit} ({ordered}) found the same latents"
        if pool.is_network and pool.kept and self._same_code(pool):
            return f"restarts found the same latents, but free energies {unit} ({ordered}) differ: some networks have not converged"
        remaining = max(one.remaining for one in sorted(pool.estimates, key=lambda one: -one.free_energy)[:2])
        if remaining > self._profile.tolerance:
            return f"the best two of {number} restarts have not converged: free energies {unit} ({ordered}) may rise by {remaining:.2g}"
        return f"no two of {number} restarts reached the same free energy {unit} ({ordered})"

    def _have_agreed(self, pool: SolutionPool) -> bool:
        """Whether two restarts reached the best free energy by the same latents.

        Of networks that have found the same latents none need have reached just what the other has: their weights differ everywhere.
        """
        if not pool.kept or self._profile.is_chain or not self._profile.compares_latents:
            return self._are_equal(pool, self._profile.compares_latents and self._are_by_gradients)
        best, *others = pool.kept
        if best.probabilities is not None:
            # Covariates do not count.
            size = (self._profile.y if pool.decoded is None else pool.decoded)[0].numel()
            return bool(self._same_code(pool, max(self._profile.tolerance, self._config.network_gap * size))) or self._are_equal(pool, True)
        near = [other for other in others if have_agreed([best.estimate, other.estimate], self._lead(pool))]
        return any(have_found_the_same(self._profile, best, other) for other in near)

    def _same_code(self, pool: SolutionPool, gap: float = math.inf) -> list[Solution]:
        """Returns network restarts with the latents of the best one.

        Their free energies must not be lower by more than the gap.
        """
        best, *others = pool.kept
        return [
            other
            for other in others
            if best.free_energy - other.free_energy <= gap
            and best.probabilities is not None
            and other.probabilities is not None
            and share_most(best.probabilities, other.probabilities, self._config.max_unmatched)
        ]

    def _are_equal(self, pool: SolutionPool, must_be_alike: bool = False) -> bool:
        """Whether two independent restarts have equal free energies everywhere.

        They must be those of the same data points, and none may be higher.
        """
        if not pool.estimates:
            return False
        best, *others = sorted(pool.estimates, key=lambda one: one.free_energy, reverse=True)
        lead = self._lead(pool)
        near = [other for other in others if have_agreed([best, other], lead)]
        is_met = any(not must_be_alike or are_alike(best, other, self._profile.tolerance) for other in near)
        return is_met and pool.best.free_energy <= best.free_energy + lead

    def _lead(self, pool: SolutionPool) -> float:
        """How far apart the best two restarts may be."""
        return self._profile.tolerance * (min(len(pool.estimates) / 2, self._config.max_lead) if self._profile.is_mixture else 1)


def start_overcomplete(profile: Profile) -> Solution:
    """Trains with surplus latents, then prunes the redundant ones.

    Redundant latents (see :func:`~pyro_truncated.multistart.redundancy.is_redundant`) fit noise, slowly and never alike. With closed-form
    M-steps they are removed too, before the run has converged. The free energy is that of the others alone. Parameters are those of all
    latents asked for; redundant ones are unchanged and inactive in all states.

    More than 256 binary latents are neither doubled nor pruned: to evaluate each of them costs more than the steps.

    Args:
        profile: of a model that can be resized; the model stays as it is.
    """
    model, steps = profile.model, profile.config.restart_steps
    with empty_store():
        # Pyro's store holds the larger model's parameters under these names.
        pyro.clear_param_store()
        growth = 1 if profile.is_large else profile.config.growth
        larger = profile.replace(model=model.with_latents(torch.arange(model.num_latents).repeat(growth)))
        larger.initialize()
        pruner = _Pruner(larger, profile.temperature)
        pruner.take(steps)
        if profile.is_large:
            return pruner.converge(max(1, steps // 2))
        pruner.prune(model.num_latents)
        requested = record_solution(pruner.trainer, NOTHING.estimate)
        if not profile.is_matched:
            found = pruner.converge(steps)
            noise = gained_from_noise(pruner.losses()[0], pruner.num_parameters, total_rows(profile.y))
            return found.replace(estimate=found.estimate._replace(noise=found.estimate.noise + noise))
        kept = pruner.prune_redundant()
        found = resolve_difference_codes(pruner.trainer.profile, pruner.converge(steps))
        return found if len(kept) == model.num_latents else _add_inactive_latents(pruner.trainer.profile, found, requested, kept)


class _Pruner:
    """A run whose model loses latents."""

    def __init__(self, profile: Profile, temperature: Temperature) -> None:
        self.trainer = Trainer(profile, temperature)
        self.num_parameters = num_parameters_per_latent(profile)

    def converge(self, steps: int) -> Solution:
        """Trains to convergence; returns what was learned."""
        return record_solution(self.trainer, train(self.trainer, to_convergence(self.trainer, steps)))

    def take(self, steps: int) -> None:
        """Takes steps of training."""
        for _ in range(steps):
            self.trainer.step()

    def losses(self) -> tuple[Tensor, Tensor]:
        """Returns deletion losses ``(H,)`` of latents, and substitutes ``(H, H)``."""
        assert self.trainer.truncated is not None
        depth = self.trainer.profile.config.pruning_depth
        return losses_with_substitutes(self.trainer.truncated.population(), self.trainer.scorer(), depth)

    def prune(self, number: int) -> None:
        """Prunes to so many latents, a third of the surplus each time."""
        while (surplus := self.trainer.profile.model.num_latents - number) > 0:
            self._lose(select_for_pruning(*self.losses(), max(1, surplus // 3)))

    def prune_redundant(self) -> Tensor:
        """Prunes redundant latents, a third at a time.

        Returns the positions ``(K,)`` of the remaining ones.
        """
        kept = torch.arange(self.trainer.profile.model.num_latents)
        while len(kept) > 1:
            losses, substitutes = self.losses()
            num_spare = int(is_redundant(losses, self.num_parameters, total_rows(self.trainer.profile.y)).sum())
            if not num_spare:
                break
            lost = select_for_pruning(losses, substitutes, min(max(1, num_spare // 3), len(kept) - 1))
            kept = kept[self._lose(lost).to(kept.device)]
        return kept

    def _lose(self, lost: Tensor) -> Tensor:
        """Drops some latents and returns the positions of the others."""
        before, model = self.trainer, self.trainer.profile.model
        assert before.truncated is not None
        kept = torch.ones(model.num_latents, dtype=torch.bool, device=lost.device).index_fill(0, lost, False).nonzero().squeeze(1)
        states = before.truncated.population().states()[..., kept]
        profile = before.profile.replace(model=model.with_latents(kept))
        if len(kept) > 1:  # a single latent keeps its parameters
            self.num_parameters = num_parameters_per_latent(profile)
        # Pyro's store holds the larger model's parameters under these names.
        pyro.clear_param_store()
        self.trainer = Trainer(profile)
        self.trainer.take_over(before.companion)
        self.trainer.insert_states(states)
        self.take(profile.config.pruning_steps)
        return kept


def _add_inactive_latents(profile: Profile, found: Solution, requested: Solution, kept: Tensor) -> Solution:
    """Adds inactive latents of ``requested`` to the learned latents ``kept``.

    The model keeps these parameters.
    """
    assert requested.population is not None
    model, y, number = profile.model, profile.y, requested.states.shape[-1]
    place = torch.zeros(number, dtype=torch.long).index_copy(0, kept, torch.arange(len(kept)))
    spare = torch.ones(number, dtype=torch.bool).index_fill(0, kept, False).nonzero().squeeze(1)
    load_snapshot(model, y, found.parameters)
    parameters = snapshot(model.with_latents(place), y)
    for name, value in parameters.items():
        # Sizes differ along axes of latents. Parameters of pairs, such as covariances, have two and stay.
        axes = [axis for axis, (one, other) in enumerate(zip(value.shape, found.parameters[name].shape, strict=True)) if one != other]
        if len(axes) == 1:
            index = spare.to(value.device)
            parameters[name] = value.index_copy(axes[0], index, requested.parameters[name].index_select(axes[0], index))
    states = torch.zeros_like(requested.states[:, :1]).repeat(1, found.states.shape[1], 1)
    states[..., kept] = found.states
    space = requested.population.space
    # Training scores them anew.
    words = space.pack(states)
    return found.replace(parameters=parameters, population=Population(space, words, states.new_zeros(words.shape[:-1], dtype=y.dtype)))


def num_parameters_per_latent(profile: Profile) -> int:
    """Returns how many parameters one latent has.

    Covariances are of pairs, and fewer with fewer latents.
    """
    model, y = profile.model, profile.y
    return _num_parameters(model, y) - _num_parameters(model.with_latents(torch.arange(model.num_latents - 1)), y)


def _num_parameters(model: Any, y: Tensor) -> int:
    return sum(value.numel() for value in learned_tensors(model, y).values())
