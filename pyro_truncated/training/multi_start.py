"""Restarts with annealing until two agree, and the best of them.

A rule says how many there are, and whether they disagree about the best one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor

from pyro_truncated.distributed.shards import total_rows
from pyro_truncated.em.closed_form import undriven
from pyro_truncated.training.agreement import are_alike, have_agreed, is_gain_below_error, share_most
from pyro_truncated.training.learn_report import Restart
from pyro_truncated.training.model_parameters import disturb, load_snapshot, snapshot
from pyro_truncated.training.overcomplete import start_overcomplete
from pyro_truncated.training.pool import SolutionPool, have_found_the_same
from pyro_truncated.training.profile import Profile, profile_model
from pyro_truncated.training.recombination import recombinations_of
from pyro_truncated.training.solution import Solution, run_restart
from pyro_truncated.training.solution_moves import revive_dead_latents
from pyro_truncated.training.warm_start import LinearCauses, decoded_values, likeliest_states, shuffle, teach
from pyro_truncated.utils.console import ProgressBar, progress_bar


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
        self._num_steps, self._given = 0, restart
        self._profile = profile.replace(watch=partial(self._count, profile.watch))
        self._first = None if profile.draws_restarts else _first_place(profile)
        self.pool, self.rule = SolutionPool(self._profile), StopRule(self._profile)
        self.reason: str | None = None

    def _count(self, watch: Callable[[float], None], free_energy: float) -> None:
        self._num_steps += 1
        watch(free_energy)

    def run(self, bar: ProgressBar) -> None:
        """Makes independent restarts until two agree."""
        while self.reason is None:
            number = len(self.pool.restarts)
            bar.set_description_str(f"start {number + 1}")
            before = self._num_steps
            name = self._initialize(number)
            found = self._restart()
            steps = self._num_steps - before
            if self._profile.is_shared:
                found = revive_dead_latents(self._profile, found, self.pool.moves)
            self.pool.add(found, Restart(name, steps, found.free_energy))
            self.reason = self.rule.reason(self.pool)

    def _initialize(self, number: int) -> str:
        """Goes where a restart begins; returns the name of the place."""
        profile = self._profile
        if self._first is None:
            return profile.initializer
        if number == 0:
            return "parameters of the model"
        if number == 1 and not profile.is_product:
            self._prepare_exchange(self._first)
        if self.pool.decoded is not None:
            load_snapshot(profile.model, profile.y, self._first)
            shuffle(profile)
            return "linear model"
        self._disturb(self._first)
        return "these with noise"

    def _restart(self) -> Solution:
        profile = self._profile
        if self._given is not None:
            return self._given(profile)
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
        pool.exchange(recombinations_of(profile, profile.tolerance, state))
        pool.is_network = not pool.groups and bool(profile.layers)
        pool.decoded = decoded_values(profile) if pool.is_network else None


def linear_code(profile: Profile, decoded: Tensor) -> Tensor:
    """Returns states ``(N, H)`` of a linear model of the decoded values."""
    assert profile.space is not None
    linear = LinearCauses(decoded.shape[1], profile.space.num_latents).to(decoded.device)
    found = profile_model(linear, decoded, short_steps=profile.short_steps, generator=profile.generator, config=profile.config)
    multi_start = MultiStart(found.replace(watch=lambda free_energy: None))
    with undriven(linear), progress_bar(False) as bar:
        multi_start.run(bar)
        multi_start.pool.complete()
    return likeliest_states(found, multi_start.pool.best)


def _first_place(profile: Profile) -> dict[str, Tensor]:
    """Returns the first initialisation of a model that draws none.

    It is where the model is, or where ``initialize`` goes with these data.
    """
    if profile.initializer == "fixed initialize":
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
                return "two restarts have found each latent of the best"
            if self._have_agreed(pool) and not pool.use_redundant_latents():
                return "two restarts agree"
        if number < self.max_restarts(pool):
            return None
        pool.use_redundant_latents()
        return "all restarts are made"

    def disagreement(self, pool: SolutionPool) -> str | None:
        """Why the best restart may be a local optimum, if it may."""
        number = len(pool.energies)
        if number == 1 or self._have_agreed(pool):
            return None
        if pool.groups:
            number_alone = pool.num_singletons
            return f"{number_alone} latents of the best of {number} starts were found by fewer than two of them" if number_alone else None
        ordered = ", ".join(f"{value:.2f}" for value in sorted(pool.energies, reverse=True))
        unit = "per posterior" if self._profile.is_shared else "per data point"
        if self._profile.is_mixture:
            return f"{number} starts reached different free energies {unit} ({ordered}), and another one may reach more"
        if self._are_equal(pool):
            return f"no two of {number} starts that reached the same free energy {unit} ({ordered}) found the same latents"
        if pool.is_network and pool.kept and self._same_code(pool):
            return f"starts found the same latents, but free energies {unit} ({ordered}) that say that some networks are fitted badly"
        remaining = max(one.remaining for one in sorted(pool.estimates, key=lambda one: -one.free_energy)[:2])
        if remaining > self._profile.tolerance:
            return f"the best two of {number} starts have not converged: free energies {unit} ({ordered}) may rise by {remaining:.2g}"
        return f"no two of {number} starts reached the same free energy {unit} ({ordered})"

    def _have_agreed(self, pool: SolutionPool) -> bool:
        """Whether two restarts reached the best free energy by the same latents.

        Of networks that have found the same latents none need have reached just what the other has: their weights differ everywhere.
        """
        if not pool.kept or not self._profile.compares_latents:
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
