"""Restarts with annealing until two agree, and the best of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from pyro_truncated.em.closed_form import undriven
from pyro_truncated.training.learn_report import Restart
from pyro_truncated.training.model_parameters import disturb, load_snapshot, snapshot
from pyro_truncated.training.overcomplete import start_overcomplete
from pyro_truncated.training.pool import SolutionPool
from pyro_truncated.training.profile import Profile, profile_model
from pyro_truncated.training.recombination import recombinations_of
from pyro_truncated.training.solution import Solution, run_restart
from pyro_truncated.training.solution_moves import revive_dead_latents
from pyro_truncated.training.stop_rule import StopRule
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
