"""learn: training from random restarts with annealing, until two agree."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.distributed.shards import own_rows
from pyro_truncated.em.closed_form import restore_driver
from pyro_truncated.multistart.config import LearnConfig
from pyro_truncated.multistart.learn_report import LearnReport
from pyro_truncated.multistart.model_parameters import load_snapshot
from pyro_truncated.multistart.multi_start import MultiStart
from pyro_truncated.multistart.profile import Profile, check_one_array, profile_model
from pyro_truncated.multistart.solution import FreeEnergyEstimate, Solution
from pyro_truncated.multistart.trainer import LAST_RATE, Trainer, finish
from pyro_truncated.search.base import Search
from pyro_truncated.utils.arguments import check_count, check_kinds
from pyro_truncated.utils.console import ProgressBar, progress_bar


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

    Restarts are annealed (:func:`cooling`) and exchange latents. The best one is trained on all data.
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
        generator: source of randomness. Default: torch's global one.
        progress: whether to show a progress bar. Default: in a terminal.
        **former: arguments of version 0.2 that are called otherwise, or are fields of ``config``; they warn.

    Returns:
        The trained guide; beside continuous latents an ``AutoGuideList``, whose last guide is truncated.
        Its ``learn_report`` is a :class:`~pyro_truncated.multistart.LearnReport`, ``starts`` are the
        restarts' free energies per data point, ``steps`` the training steps.

    Warns:
        DisagreeingStartsWarning: if no two restarts agree.
        ConvergenceWarning: if training beside continuous latents has not converged.

    Raises:
        ValueError: if a number is out of range, a count has no bound, or the search does not fit.
        TypeError: if ``search`` is none, such as a second array.
    """
    check_kinds(learn, config=config, max_count=max_count, generator=generator, progress=progress)
    config, restarts = _with_former_arguments(config or LearnConfig(), restarts, former)
    steps = None if steps is None else check_count("steps", steps)
    num_states = None if num_states is None else check_count("num_states", num_states)
    restarts = None if restarts is None else check_count("restarts", restarts)
    settings: dict[str, Any] = {"max_restarts": restarts, "max_count": max_count, "generator": generator, "config": config}
    profile = profile_model(model, check_one_array(y), search, num_states=num_states, **settings)
    steps = steps or (profile.config.companion_steps if profile.has_companion else profile.config.steps)
    restart = profile.for_restarts()
    with restore_driver(model), progress_bar(progress, unit="step") as bar:

        def watch(free_energy: float) -> None:
            bar.set_postfix(free_energy=f"{free_energy:.2f}", refresh=False)
            bar.update()

        multi_start = MultiStart(restart.replace(watch=watch))
        multi_start.run(bar)
        disagreement = multi_start.rule.disagreement(multi_start.pool)
        bar.total = bar.n + steps
        best = multi_start.pool.best if restart.num_data == profile.num_data else multi_start.pool.best.replace(population=None)
        load_snapshot(restart.model, profile.y, best.parameters)
        if restart.model is not model:
            model.load_simplified(restart.model)
        trainer, last = _train(profile.replace(watch=watch), best, steps, bar)
    guide, pool = trainer.guide, multi_start.pool
    if disagreement is not None:
        advice = "Try more restarts, more restart_steps or a higher temperature (LearnConfig)."
        warnings.warn(f"{disagreement}: the best may be a local optimum. {advice}", DisagreeingStartsWarning, stacklevel=3)
    if last.remaining_gain > profile.tolerance:
        gain = "" if math.isinf(last.remaining_gain) else f": more may raise the free energy per data point by {last.remaining_gain:.2g}"
        advice = "Try more steps, or LearnConfig(lr=...) with a larger one."
        warnings.warn(f"training has not converged in {last.steps} steps{gain}. {advice}", ConvergenceWarning, stacklevel=3)
    guide.steps, guide.starts = last.steps, pool.energies
    values = {
        "search": type(trainer.elbo.search).__name__,
        "num_states": profile.num_states,
        "temperature": profile.temperature(0),
    }
    values |= {"tolerance": profile.tolerance, "lr": profile.lr, "num_data": restart.num_data}
    outcome = disagreement, last.steps, last.remaining_gain, profile.optimizer
    guide.learn_report = LearnReport(tuple(pool.restarts), dict(pool.moves), multi_start.reason or "", *outcome, values)
    return guide


# Arguments of version 0.2 that are fields of the configuration, and their names there.
_FORMER = {"short_steps": "restart_steps", "temperature": "temperature", "tolerance": "tolerance", "lr": "lr"}


def _with_former_arguments(config: LearnConfig, restarts: int | None, former: Mapping[str, Any]) -> tuple[LearnConfig, int | None]:
    """Returns the configuration and the number of restarts with arguments of version 0.2.

    Raises:
        TypeError: if an argument was none.

    Warns:
        DeprecationWarning: for each of them.
    """
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
    trainer = Trainer(profile if profile.has_companion else profile.with_decay(steps, LAST_RATE))
    trainer.take_over(best.companion)
    if best.population is not None:
        trainer.insert_states(own_rows(best.states, profile.y))
    else:
        bar.set_description_str("search for states")
        trainer.find_states()
    bar.set_description_str("training")
    # Gibbs chains and continuous latents make the free energy noisy.
    min_gain = profile.config.final_gain if profile.optimizer == "closed-form M-steps" and not profile.has_companion else -math.inf
    # Of an informed initialisation half the gain of its last steps counts.
    return trainer, finish(trainer, steps, best.estimate.noise / 2 if profile.is_informed else min_gain)
