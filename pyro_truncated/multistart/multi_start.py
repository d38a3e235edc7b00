"""Restarts until two agree, training from the best, and short runs."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_truncated.distributed.collectives import agree
from pyro_truncated.distributed.shards import drawn_rows, own_rows
from pyro_truncated.em.closed_form import restore_driver
from pyro_truncated.multistart.config import LearnConfig, LearnReport, Restart
from pyro_truncated.multistart.decoders import LinearCauses, decoder_targets
from pyro_truncated.multistart.moves import Complement, DeadLatents, SolutionPool, build_recombinations
from pyro_truncated.multistart.profile import Profile, check_one_array, profile_model
from pyro_truncated.multistart.pruning import start_overcomplete
from pyro_truncated.multistart.solution import (
    FreeEnergyEstimate,
    Solution,
    best_two,
    energies_agree,
    explain_equally,
    is_gain_below_error,
    share_most,
)
from pyro_truncated.multistart.trainer import (
    Trainer,
    converge,
    finish,
    fit_states,
    run_restart,
    search_and_train,
)
from pyro_truncated.search.base import Search
from pyro_truncated.utils.annealing import Temperature
from pyro_truncated.utils.arguments import check_count, check_counts, check_kinds
from pyro_truncated.utils.arrays import remember_columns
from pyro_truncated.utils.console import ProgressBar, progress_bar
from pyro_truncated.utils.parameter_store import random_numbers_from


class MultiStart:
    """Restarts of a model until two agree."""

    def __init__(self, profile: Profile) -> None:
        self._num_steps = 0
        self._profile = profile.replace(watch=partial(self._count, profile.watch))
        self._first = None
        if profile.initializer is None:
            # Where the model is, or where ``initialize`` goes with these data.
            if profile.initialization == "fixed initialize":
                profile.model.initialize(profile.y)
            self._first = profile.parameters.snapshot()
        self.pool = SolutionPool(self._profile)
        self.rule = StopRule(self.pool)
        self.reason: str | None = None  # why no further restart is made

    def _count(self, watch: Callable[[float], None], free_energy: float) -> None:
        self._num_steps += 1
        watch(free_energy)

    def run(self, bar: ProgressBar) -> None:
        """Makes independent restarts until two agree."""
        profile, pool = self._profile, self.pool
        # Annealing leads all restarts of some programs to one poor optimum, where they agree.
        plain = profile.replace(temperature=lambda step: 1.0) if profile.optimizer == "gradients" else profile
        while self.reason is None:
            number, before = len(pool.restarts), self._num_steps
            bar.set_description_str(f"restart {number + 1}")
            name = self._initialize(number)
            solution = self.restart(profile if number else plain)
            steps = self._num_steps - before
            if profile.shares_latents or (pool.is_network and profile.has_decoder):
                move = DeadLatents(profile) if profile.shares_latents else Complement(profile)
                solution = pool.improve(solution, move, search_and_train)
            for move in profile.config.moves:
                solution = pool.improve(solution, move, converge)
            pool.add(solution, Restart(name, steps, solution.free_energy))
            self.reason = self.rule.reason()

    def _initialize(self, number: int) -> str:
        """Goes where a restart begins; returns the name of the place."""
        profile = self._profile
        if self._first is None:
            return profile.initialization
        if number == 0:
            return "parameters of the model"
        if number == 1 and not profile.is_product:
            self._prepare_exchange(self._first)
        profile.parameters.load(self._first)
        if self.pool.targets is not None:
            profile.parameters.shuffle(profile.generator)
            return "linear model"
        profile.parameters.disturb(self.pool.best.parameters, profile.generator)
        return "perturbed parameters"

    def restart(self, profile: Profile) -> Solution:
        """Trains from where the model is, or from where its initialiser goes."""
        if profile.is_resizable:
            return start_overcomplete(profile)
        if self.pool.targets is None:
            return run_restart(profile, profile.temperature)
        # The network learns to decode these states, one of each data point.
        words = linear_code(profile, self.pool.targets).unsqueeze(1)
        fit_states(profile, words)
        return run_restart(profile, 1.0, words)

    def _prepare_exchange(self, first: dict[str, Tensor]) -> None:
        """Finds out what restarts exchange, or whether a linear model starts them."""
        # Random parameters show which latents are exchangeable.
        profile, pool = self._profile, self.pool
        profile.parameters.load(first)
        profile.parameters.disturb(pool.best.parameters, profile.generator)
        state = {**pool.best.parameters, **profile.parameters.snapshot()}
        pool.exchange(build_recombinations(profile, state))
        pool.is_network = not pool.groups and bool(profile.layers)
        pool.targets = decoder_targets(profile) if pool.is_network else None


def linear_code(profile: Profile, targets: Tensor) -> Tensor:
    """Returns packed states ``(N, W)`` of a linear model of the decoded values."""
    assert profile.space is not None
    linear = LinearCauses(targets.shape[1], profile.space.num_latents).to(targets.device)
    config = dataclasses.replace(profile.config, initializer=None, moves=(), temperature=None, tolerance=None, lr=None)
    linear_profile = profile_model(linear, targets, generator=profile.generator, config=config)
    multi_start = MultiStart(linear_profile)
    with restore_driver(linear), progress_bar(False) as bar:
        multi_start.run(bar)
    best = multi_start.pool.best
    with Trainer(linear_profile, solution=best) as trainer:
        trainer.insert_states(best.kept_population.words)
        return trainer.truncated_guide.population().mode()


class StopRule:
    """Says whether another restart is made, and whether two agree."""

    def __init__(self, pool: SolutionPool) -> None:
        self._profile, self._config, self._pool = pool.profile, pool.profile.config, pool

    @property
    def min_restarts(self) -> int:
        """The least number of restarts: more where these easily agree by chance."""
        profile, config = self._profile, self._config
        if profile.shares_latents or profile.has_companion:
            return config.min_restarts
        by_gradients = profile.optimizer == "gradients" and not self._pool.is_network
        # Restarts of a program without parameters differ in nothing.
        if profile.space is None or not (by_gradients or profile.is_mixture) or not profile.parameters.learned():
            return 1
        is_small = profile.y.numel() * profile.space.size <= config.small_mixture
        # Restarts of chains are compared chain by chain.
        exchanges_nothing = not (profile.is_mixture or profile.is_chain or self._pool.groups)
        return config.min_restarts if is_small or exchanges_nothing else 1

    @property
    def max_restarts(self) -> int:
        """The largest number of restarts."""
        if self._profile.max_restarts is not None:
            return self._profile.max_restarts
        if self._profile.is_resizable and self._profile.is_large:
            return self._config.max_large_restarts
        compares_latents = self._pool.groups or self._profile.is_chain
        return self._config.max_exchanging_restarts if compares_latents else self._config.max_restarts

    def reason(self) -> str | None:
        """Why no further restart is made, ``None`` if one is."""
        number = len(self._pool.energies)
        if number >= self.min_restarts:
            if (self._profile.learns_causes or self._pool.is_network) and is_gain_below_error(self._pool.estimates):
                return "another restart is expected to gain less than chance or more steps"
            if self._pool.groups and self._pool.is_complete():
                return "each latent of the best was found by two restarts"
            if self._agree() and not self._pool.use_redundant_latents():
                return "two restarts agree"
        if number < self.max_restarts:
            return None
        self._pool.use_redundant_latents()
        return "the maximum number of restarts is reached"

    def disagreement(self) -> str | None:
        """Why the best restart may be a local optimum, if it may."""
        number = len(self._pool.energies)
        if number == 1 or self._agree():
            return None
        if self._pool.groups:
            number_alone = self._pool.num_singletons
            return f"{number_alone} latents of the best of {number} restarts were found by at most one of them" if number_alone else None
        if self._profile.is_chain and self._config.tolerance is None:
            return f"some chains of the best of {number} restarts were found by no other one"
        energies = ", ".join(f"{value:.2f}" for value in sorted(self._pool.energies, reverse=True))
        unit = "per posterior" if self._profile.shares_latents else "per data point"
        if self._profile.is_mixture:
            return f"{number} restarts reached different free energies {unit} ({energies}), and another one may reach more"
        if self._reach_equal_energies(must_be_alike=False):
            return f"no two of {number} restarts that reached the same free energy {unit} ({energies}) found the same latents"
        if self._pool.is_network and self._share_code(math.inf):
            return f"restarts found the same latents, but free energies {unit} ({energies}) differ: some networks have not converged"
        gain = max(one.remaining_gain for one in best_two(self._pool.estimates))
        if gain > self._profile.tolerance:
            return f"the best two of {number} restarts have not converged: free energies {unit} ({energies}) may rise by {gain:.2g}"
        return f"no two of {number} restarts reached the same free energy {unit} ({energies})"

    def _agree(self) -> bool:
        """Whether two restarts reached the best free energy by the same latents.

        The same latents are active for the same data points, or explain these equally well. Of networks that have found the same latents
        none need have reached just what the other has: their weights differ everywhere. Free energies of sequences say little: restarts
        that lack other chains had equal ones. Each chain of the best must be that of another restart.
        """
        if self._config.tolerance is not None:
            return self._reach_equal_energies(must_be_alike=False)
        if self._profile.is_chain:
            return self._pool.share_chains()
        gap = self._profile.tolerance
        if self._pool.is_network:
            # Covariates do not count.
            size = (self._profile.y if self._pool.targets is None else self._pool.targets)[0].numel()
            gap = max(gap, self._config.network_gap * size)
        must_be_alike = self._profile.learns_causes or (self._profile.optimizer == "gradients" and not self._profile.is_resizable)
        return self._share_code(gap) or self._reach_equal_energies(must_be_alike)

    def _share_code(self, gap: float) -> bool:
        """Whether a restart within the gap has the latents of the best."""
        codes = self._pool.ranked_codes()
        most = self._config.max_unmatched if self._pool.is_network else 0.0
        return any(codes[0][0] - energy <= gap and share_most(codes[0][1], code, most) for energy, code in codes[1:])

    def _reach_equal_energies(self, must_be_alike: bool) -> bool:
        """Whether the best two independent restarts have equal free energies everywhere."""
        best, *others = sorted(self._pool.estimates, key=lambda one: one.free_energy, reverse=True)
        # How far apart the best two may be.
        lead = self._profile.tolerance * (len(self._pool.estimates) / 2 if self._profile.is_mixture else 1)
        near = [other for other in others if energies_agree(best, other, lead)]
        # A finer tolerance is for means: in one optimum data points differ as much as ever.
        coarse = max(self._profile.tolerance, self._config.coarse_tolerance)
        is_reached = any(not must_be_alike or explain_equally(best, other, coarse) for other in near)
        return is_reached and self._pool.best.free_energy <= best.free_energy + lead


class DisagreeingStartsWarning(UserWarning):
    """No two restarts agree: the best one may be a local optimum.

    Example:
        >>> y = linear_bars(100, 3, mean_active=2.0).data
        >>> config = LearnConfig(tolerance=10.0)
        >>> with warnings.catch_warnings(action="error", category=DisagreeingStartsWarning):  # a run that may be stuck is an error
        ...     guide = learn(BinarySparseCoding(9, 6), y, steps=10, num_states=16, config=config, progress=False)
    """


class ConvergenceWarning(UserWarning):
    """The training has ended before it has converged.

    Example:
        >>> def model(y):
        ...     loc = pyro.sample("loc", dist.Normal(0.0, 9.0).expand([2]).to_event(1))
        ...     with pyro.plate("data", len(y)):
        ...         z = pyro.sample("z", dist.Categorical(torch.ones(2)))
        ...         pyro.sample("y", dist.Normal(loc[z], 1.0), obs=y)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     guide = learn(model, torch.randn(20), restarts=1, steps=5, config=LearnConfig(restart_steps=5), progress=False)
        >>> [warning.category.__name__ for warning in caught]
        ['ConvergenceWarning']
    """


@torch.inference_mode(False)
def learn(
    model: Any,
    y: Tensor,
    search: Search | None = None,
    *,
    num_states: int | None = None,
    steps: int | None = None,
    restarts: int | None = None,
    max_count: int | Mapping[str, int] | None = None,
    config: LearnConfig | None = None,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
    **former: Any,
) -> Any:
    """Trains a model from random restarts with annealing, until two agree.

    Example::

        from pyro_truncated.models import BinarySparseCoding

        model = BinarySparseCoding(100, 20)
        guide = learn(model, y)
        guide.marginals()["s"]

    Restarts are annealed (:func:`cooling`), but for the first one by gradients, and exchange latents. The best one is trained on all data.
    Agreement, exchange and defaults: :doc:`/explanation/learn`.

    Args:
        model: called with the data, changed in place; optional methods: :doc:`/how-to/models`.
        y: data, ``(N, ...)``. Join several arrays: ``torch.cat([x, y], 1)``.
        search: default: the model's own, else one that fits its states.
        num_states: states per data point. Default: 64, or 16 for more than 64 mixture components.
        steps: training steps on all data. Default: 100. A maximum with closed-form M-steps, and beside continuous latents
            (default there: 2000).
        restarts: most restarts. Default: 8, 16 with exchange of latents, 2 for more than 256 binary latents.
        max_count: largest value of count sites, for all or by name.
        config: all else: steps of a restart, temperature, tolerance, learning rate, initialiser and moves of your own.
        generator: source of all randomness, but of searches that have one. Default: torch's global one.
        progress: whether to show a progress bar. Default: in a terminal.
        **former: arguments of version 0.2 that are called otherwise, or are fields of ``config``; they warn.

    Returns:
        The trained guide; beside continuous latents an ``AutoGuideList``, whose last guide is truncated.
        Its ``learn_report`` is a :class:`~pyro_truncated.multistart.LearnReport`, ``starts`` are the
        restarts' free energies per data point, ``steps`` the training steps.

    Warns:
        DisagreeingStartsWarning: if no two restarts agree.
        ConvergenceWarning: if training beside continuous latents has not converged.
        UserWarning: if gradients train parameters whose steps are unlike in the columns of the data, or leave out those of
            modules that Pyro does not know.

    Raises:
        ValueError: if a number is out of range, a count has no bound, or the search does not fit.
        TypeError: if ``search`` is none, such as a second array.
    """
    check_kinds(learn, config=config, max_count=max_count, generator=generator, progress=progress)
    config, restarts = _with_former_arguments(config or LearnConfig(), restarts, former)
    steps = None if steps is None else check_count("steps", steps)
    num_states = None if num_states is None else check_count("num_states", num_states)
    restarts = None if restarts is None else check_count("restarts", restarts)
    options: dict[str, Any] = {"max_restarts": restarts, "max_count": max_count, "generator": generator, "config": config}
    with random_numbers_from(generator):
        profile = profile_model(model, check_one_array(y), search, num_states=num_states, **options)
    steps = steps or (profile.config.companion_steps if profile.has_companion else profile.config.steps)
    if profile.spans_processes:
        profile.parameters.load(agree(profile.parameters.snapshot()))
    restart = profile.for_restarts()
    # Pyro's optimisers find parameters by their names in its store.
    in_store = pyro.settings.context(module_local_params=False)
    with random_numbers_from(generator), in_store, restore_driver(model), progress_bar(progress, unit="step") as bar:

        def watch(free_energy: float) -> None:
            bar.set_postfix(free_energy=f"{free_energy:.2f}", refresh=False)
            bar.update()

        multi_start = MultiStart(restart.replace(watch=watch))
        multi_start.run(bar)
        disagreement = multi_start.rule.disagreement()
        bar.total = bar.n + steps
        best = multi_start.pool.best if restart.num_data == profile.num_data else multi_start.pool.best.replace(population=None)
        restart.parameters.load(best.parameters)
        if restart.model is not model:
            model.load_simplified(restart.model)
        trainer, last = _train(profile.replace(watch=watch), best, steps, bar)
    guide, pool = trainer.guide, multi_start.pool
    remember_columns(trainer.truncated_guide or guide, "data" if trainer.truncated_guide else "y", y)
    if profile.optimizer == "gradients" and profile.y.dim() == 2 and profile.y.is_floating_point() and not profile.spans_processes:
        trainer.parameters.warn_about_columns()
    trainer.warn_about_unknown_parameters()
    if disagreement is not None:
        advice = "Try more restarts, more restart_steps or a higher temperature (LearnConfig)."
        warnings.warn(f"{disagreement}: the best may be a local optimum. {advice}", DisagreeingStartsWarning, stacklevel=3)
    if last.remaining_gain > profile.tolerance:
        gain = "" if math.isinf(last.remaining_gain) else f": more may raise the free energy per data point by {last.remaining_gain:.2g}"
        advice = "Try more steps, or LearnConfig(lr=...) with a larger one."
        warnings.warn(f"training has not converged in {last.steps} steps{gain}. {advice}", ConvergenceWarning, stacklevel=3)
    guide.steps, guide.starts = last.steps, pool.energies
    values = {"search": type(trainer.elbo.search).__name__, "num_states": profile.num_states, "temperature": profile.temperature(0)}
    values |= {"tolerance": profile.tolerance, "lr": profile.lr, "num_data": restart.num_data}
    outcome = disagreement, last.steps, last.remaining_gain, profile.optimizer
    guide.learn_report = LearnReport(tuple(pool.restarts), dict(pool.moves), multi_start.reason or "", *outcome, values)
    return guide


# Arguments of version 0.2 that are fields of the configuration, and their names there.
_FORMER = {"short_steps": "restart_steps", "temperature": "temperature", "tolerance": "tolerance", "lr": "lr"}


def _with_former_arguments(config: LearnConfig, restarts: int | None, former: Mapping[str, Any]) -> tuple[LearnConfig, int | None]:
    """Returns the configuration and the number of restarts with arguments of version 0.2."""
    for name, value in former.items():
        if name == "starts":
            advice, restarts = "restarts=...", value
        elif name in _FORMER:
            advice, config = f"config=LearnConfig({_FORMER[name]}=...)", dataclasses.replace(config, **{_FORMER[name]: value})
        else:
            raise TypeError(f"learn() got an unexpected keyword argument {name!r}")
        warnings.warn(f"{name} of learn has a new name: use {advice}", DeprecationWarning, stacklevel=4)
    return config, restarts


def _train(profile: Profile, best: Solution, steps: int, bar: ProgressBar) -> tuple[Trainer, FreeEnergyEstimate]:
    """Trains on all data from the best restart."""
    trainer = Trainer(profile)
    if not profile.has_companion:
        trainer.slow_down(steps)
    trainer.take_over(best.companion)
    if best.population is not None:
        trainer.insert_states(own_rows(best.population.words, profile.y))
    else:
        bar.set_description_str("search for states")
        trainer.find_states()
    bar.set_description_str("training")
    # Gibbs chains and continuous latents make the free energy noisy.
    min_gain = profile.config.final_gain if profile.optimizer == "closed-form M-steps" and not profile.has_companion else -math.inf
    # Of an informed initialisation half the gain of its last steps counts.
    return trainer, finish(trainer, steps, best.estimate.noise / 2 if profile.is_informed else min_gain)


def best_start(
    model: Any,
    y: Tensor,
    search: Search,
    *,
    num_starts: int = 5,
    num_data: int = 1000,
    steps: int = 50,
    num_states: int = 64,
    temperature: Temperature = 1.0,
    generator: torch.Generator | None = None,
) -> list[float]:
    """Initialises a model by the best of several short EM runs.

    They use a random part of the data.

    EM converges to the local optimum that its initialisation leads to. Merged or split components show after few iterations on few data
    points, in a clearly lower free energy. So the choice costs a small share of the training. Processes that share the data draw the
    same part. Components of a mixture with ``split_and_merge`` move every ten steps, if one process has all data.

    Example:
        >>> y = linear_bars(50, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8)
        >>> reached = best_start(model, y, EvolutionarySearch(crossover=True), num_starts=3, steps=5, num_states=16)
        >>> len(reached)
        3

    Args:
        model: has ``initialize(y, generator)`` and closed-form M-steps; holds the parameters of the best run afterwards. A model with a
            Gibbs sampler, such as :class:`~pyro_truncated.models.MaxSpikeSlabSparseCoding`, is trained by
            :class:`~pyro_truncated.GibbsEM`.
        y: data, ``(N, D)``.
        search: fills the populations of the short runs. What it learns from the data in a run is forgotten after it.
        num_starts: number of starts.
        num_data: data points drawn for the short runs, without replacement; all if there are fewer.
        steps: EM iterations of a short run; of a mixture at most, at temperature one.
        num_states: states per data point in the short runs; all of them if the space has fewer. Has no meaning for Gibbs sampling.
        temperature: as in :class:`~pyro_truncated.Truncated_ELBO` or :class:`~pyro_truncated.GibbsEM`.
        generator: source of all randomness, but of searches that have one. Default: torch's global one.

    Returns:
        The free energy per data point that each start reached; with Gibbs sampling the mean log joint of data and draws.

    Raises:
        ValueError: if a count is below 1.
        TypeError: if the model lacks ``initialize`` or closed-form M-steps, or the search selects no latents for a Gibbs sampler.
    """
    check_kinds(best_start, model=model, temperature=temperature, generator=generator)
    num_starts, num_data, steps, num_states = check_counts(num_starts=num_starts, num_data=num_data, steps=steps, num_states=num_states)
    if not hasattr(model, "initialize"):
        raise TypeError(f"best_start needs a model with the method initialize; {type(model).__name__} has none")
    part = drawn_rows(check_one_array(y), num_data, generator)
    config = LearnConfig(restart_steps=steps, initializer=lambda model, y, generator: model.initialize(y, generator))
    profile = profile_model(model, part, search, num_states=num_states, generator=generator, config=config)
    if profile.optimizer == "gradients":
        raise TypeError(f"best_start needs a model with closed-form M-steps (ClosedFormModel); {type(model).__name__} has none")
    with random_numbers_from(generator), restore_driver(model):
        best = run_restart(profile, temperature)
        energies = [best.free_energy]
        for _ in range(1, num_starts):
            solution = run_restart(profile, temperature)
            energies.append(solution.free_energy)
            # Of equal ones the last.
            best = solution if solution.finite_energy >= best.finite_energy else best
        profile.parameters.load(best.parameters)
    search.forget()
    return energies
