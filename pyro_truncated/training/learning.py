"""learn: training from random restarts with annealing, until two agree."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_truncated.distributed.shards import drawn_rows, own_rows, some_rows, total_rows
from pyro_truncated.em.closed_form import ClosedFormModel, undriven
from pyro_truncated.em.gibbs import GibbsModel
from pyro_truncated.program.chain_scorer import ChainLayout
from pyro_truncated.search.base import Search
from pyro_truncated.search.preselection import Preselection
from pyro_truncated.states.space import StateSpace
from pyro_truncated.training.convergence import finish
from pyro_truncated.training.model_kinds import (
    ConditionalModel,
    StartingModel,
    has_companion_guides,
    has_informed_init,
    is_mixture,
    starting,
)
from pyro_truncated.training.model_parameters import load_snapshot, parameters_of
from pyro_truncated.training.model_runs import Run, Settings, insert_states, num_posteriors
from pyro_truncated.training.multi_start import MultiStart
from pyro_truncated.training.stop_rule import Plan
from pyro_truncated.utils.annealing import cooling
from pyro_truncated.utils.arguments import check_count, names_arguments
from pyro_truncated.utils.arrays import as_tensors
from pyro_truncated.utils.console import ProgressBar, progress_bar

# Data points of a restart: at least, and for each latent (or value of a single one). Of 100 latents,
# restarts found 5 to 50 on 1000 data points, and 88 to 100 on 2000 to 6000.
_SHORT_DATA, _DATA_PER_LATENT = 1000, 50
# Data points of a mixture's restart: at least, and for each parameter. Fewer data have other optima.
_SHORT_DATA_OF_MIXTURES, _DATA_PER_NUMBER = 10_000, 2
# States per data point. Of 200 components 16 states lost 0.0001 nats, eight 0.0007, four 0.006.
_NUM_STATES, _NUM_STATES_OF_LARGE_MIXTURES = 64, 16
# Relative to the restart's last five steps: the gain of five steps that ends an informed training.
_LITTLE = 0.5
# Gain of five steps in nats per data point that ends other closed-form training.
_LITTLE_OF_ALL = 0.001
# Steps on all data; the most beside continuous latents, where training ends at convergence.
_STEPS, _STEPS_BESIDE = 100, 2000
# Learning rate with a conditional guide, which must follow the model: at larger rates no restarts agreed.
_RATE, _RATE_OF_CONDITIONALS = 0.1, 0.02
# First temperature and tolerance. Mixture components that a high temperature makes equal do not separate.
# Gibbs chains and gradients lose most components at the high temperature, and recover too slowly.
_DEFAULTS = 20.0, 0.05
_DEFAULTS_OF_MIXTURES = 1.0, 0.01
_DEFAULTS_OF_SLOW_STEPS = 5.0, 0.05
_DEFAULTS_NEAR_THE_END = 1.0, 0.05
# Beside continuous latents the free energy bounds the evidence, where a nat in all tells models apart.
_DEFAULTS_BESIDE = 1.0, 0.01
# Tolerance for all data together: with one posterior, restarts in one optimum differed by up to 0.15 nats.
_NEAR_OF_ALL = 0.5


class DisagreeingStartsWarning(UserWarning):
    """No two restarts agree: the best one may be a local optimum.

    Example:
        >>> y = linear_bars(100, 3, mean_active=2.0).data
        >>> with warnings.catch_warnings(action="error", category=DisagreeingStartsWarning):  # a run that may be stuck is an error
        ...     guide = learn(BinarySparseCoding(9, 6), y, steps=10, num_states=16, tolerance=10.0, progress=False)
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
        ...     guide = learn(model, torch.randn(20), starts=1, short_steps=5, steps=5, progress=False)
        >>> [warning.category.__name__ for warning in caught]
        ['ConvergenceWarning']
    """


@names_arguments
@torch.inference_mode(False)
def learn(
    model: Any,
    y: Tensor,
    search: Search | None = None,
    *,
    num_states: int | None = None,
    steps: int | None = None,
    starts: int | None = None,
    short_steps: int = 60,
    temperature: float | None = None,
    tolerance: float | None = None,
    lr: float | None = None,
    max_count: int | Mapping[str, int] | None = None,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> Any:
    """Trains a model from random restarts with annealing, until two agree.

    Example::

        from pyro_truncated.models import BinarySparseCoding

        model = BinarySparseCoding(100, 20)
        guide = learn(model, y)
        guide.marginals()["s"]

    EM converges to a local optimum. Restarts are annealed (:func:`cooling`) and exchange latents. The best one is trained on all data.
    Agreement, exchange and defaults: :doc:`/explanation/learn`.

    Args:
        model: called with the data, changed in place; optional methods: :doc:`/how-to/models`.
        y: data, ``(N, ...)``. Join several arrays: ``torch.cat([x, y], 1)``.
        search: default: the model's own, else one that fits its states.
        num_states: states per data point. Default: 64, or 16 for more than 64 mixture components.
        steps: training steps on all data. Default: 100. A maximum with closed-form M-steps, and beside continuous latents
            (default there: 2000).
        starts: most restarts. Default: 8, 16 with exchange of latents, 2 for more than 256 binary latents.
        short_steps: steps of a restart; more follow until convergence.
        temperature: first temperature. Default: 20, 5 without closed-form M-steps, 1 for mixtures and informed initialisation.
        tolerance: largest difference in nats per data point of restarts that agree. Default: 0.05; 0.01 for mixtures
            and beside continuous latents.
        lr: learning rate of gradient steps, in units of a parameter's root mean square. Default: 0.1.
        max_count: largest value of count sites, for all or by name.
        generator: source of randomness. Default: torch's global one.
        progress: whether to show a progress bar. Default: in a terminal.

    Returns:
        The trained guide. Its ``learn_report`` is a :class:`~pyro_truncated.training.LearnReport`, ``starts`` are the restarts'
        free energies per data point, ``steps`` the training steps.

    Warns:
        DisagreeingStartsWarning: if no two restarts agree.
        ConvergenceWarning: if training beside continuous latents has not converged.

    Raises:
        ValueError: if a number is out of range, a count has no bound, or the search does not fit.
        TypeError: if the search is none, as a second array of data.
    """
    short_steps = check_count("short_steps", short_steps)
    steps = None if steps is None else check_count("steps", steps)
    num_states = None if num_states is None else check_count("num_states", num_states)
    starts = None if starts is None else check_count("starts", starts)
    _check_search(model, search)
    if max_count is not None and isinstance(model, GibbsModel):
        raise ValueError("max_count bounds count sites, and a Gibbs sampler has none: leave it out")
    lr = _rate(model) if lr is None else lr
    if not (tolerance is None or tolerance >= 0.0) or not lr > 0.0:
        raise ValueError(f"tolerance must not be negative and lr must be positive; got {tolerance} and {lr}")
    y = as_tensors(y)
    settings = Settings(search, num_states or 1, lr, max_count=max_count)
    guide = None if isinstance(model, GibbsModel) else settings.guide_for(model, y)
    layout, space = (None, None) if guide is None else (guide.layout, guide.layout.space)
    is_beside = has_companion_guides(model, layout)
    steps = steps or (_STEPS_BESIDE if is_beside else _STEPS)
    num_states = num_states or _num_states(model, space)
    settings = dataclasses.replace(settings, num_states=num_states)
    if search is not None and space is not None and space.size > num_states:
        search.check_space(space)
    number = _number_for_starts(model, y, space)
    posteriors = total_rows(y) if guide is None else num_posteriors(guide, y)
    # Sets of nodes: rows of data may be steps of one sequence.
    is_product = guide is not None and guide.product is not None
    if guide is not None and isinstance(guide.product, ChainLayout) and temperature not in (None, 1.0):
        raise ValueError(f"temperature must be 1 for sites of chains, whose sets are not annealed; got {temperature}")
    is_shared = posteriors < total_rows(y) and not is_product
    is_all = is_shared or is_product or total_rows(y) <= number
    part = some_rows(y, total_rows(y)) if is_all else drawn_rows(y, number, generator)
    first_temperature, nearness = _DEFAULTS_BESIDE if is_beside else _DEFAULTS_NEAR_THE_END if is_product else _defaults(model, space)
    nearness = max(nearness, _NEAR_OF_ALL / posteriors) if tolerance is None else tolerance
    falling = cooling(first_temperature if temperature is None else temperature, short_steps)
    plan = Plan(starts, short_steps, falling, nearness, generator, is_mixture(model, space), is_shared, tolerance is None, is_product)
    with undriven(model), progress_bar(progress, unit="step") as bar:
        settings = dataclasses.replace(settings, watch=partial(_show, bar))
        with starting(model):
            found = MultiStart(model, part, settings, plan)
            found.make(bar)
            disagreement = found.rule.disagreement(found.pool)
            found.complete()
        load_snapshot(model, part, found.pool.best.parameters)
        bar.total, run = bar.n + steps, Run(model, y, settings if is_beside else settings.slowing(steps))
        run.take_over(found.pool.best.beside, y)
        if found.pool.best.states is not None and is_all:
            insert_states(run, y, own_rows(found.pool.best.states, y))
        else:
            bar.set_description_str("finding states")
            run.find_states(y)
        bar.set_description_str("training")
        last = finish(run, y, steps, _little(model, run, found.pool.best.reached.noise), nearness)
    if disagreement is not None:
        _warn(disagreement)
    if last.remaining > nearness:
        _warn_of_gain(last.steps, last.remaining)
    run.guide.steps, run.guide.starts = last.steps, found.pool.energies
    chosen = {"search": type(run.search).__name__, "num_states": num_states, "temperature": falling(0), "tolerance": nearness, "lr": lr}
    run.guide.learn_report = found.report(disagreement, last, chosen | {"num_data": total_rows(part)})
    return run.guide


def _check_search(model: Any, search: Search | None) -> None:
    if isinstance(search, (Tensor, np.ndarray)):
        raise TypeError(
            "learn takes one array of data, and the argument after it is a search. A model of several takes them side by side: "
            "learn(lambda rows: model(rows[:, :p], rows[:, p:]), torch.cat([x, y], 1))"
        )
    if search is not None and not isinstance(search, Preselection if isinstance(model, GibbsModel) else Search):
        raise TypeError(
            "search must be one of pyro_truncated.search, such as EvolutionarySearch(), and for a Gibbs sampler one that selects latents, "
            f"such as GPSelect(5); got {search!r}"
        )


def _num_states(model: Any, space: StateSpace | None) -> int:
    """Returns the default number of states.

    Of small mixtures these are all components.
    """
    is_large = space is not None and is_mixture(model, space) and space.size > _NUM_STATES
    return _NUM_STATES_OF_LARGE_MIXTURES if is_large else _NUM_STATES


def _number_for_starts(model: Any, y: Tensor, space: StateSpace | None) -> int:
    """How many data points starts use, if there are as many."""
    number = max(_SHORT_DATA, _DATA_PER_LATENT * _num_causes(model, space))
    if not is_mixture(model, space):
        return number
    return max(number, _SHORT_DATA_OF_MIXTURES, _DATA_PER_NUMBER * sum(value.numel() for value in parameters_of(model, y).values()))


def _num_causes(model: Any, space: StateSpace | None) -> int:
    """Returns how many latents, or values of one, share the data."""
    if space is None:
        return model.num_latents  # type: ignore[no-any-return]
    return space.cardinalities[0] if space.num_latents == 1 else space.num_latents


def _defaults(model: Any, space: StateSpace | None) -> tuple[float, float]:
    if has_informed_init(model) or isinstance(model, StartingModel):
        return _DEFAULTS_NEAR_THE_END
    if space is not None and space.num_latents == 1:
        return _DEFAULTS_OF_MIXTURES
    return _DEFAULTS_OF_SLOW_STEPS if space is None or not isinstance(model, ClosedFormModel) else _DEFAULTS


def _rate(model: Any) -> float:
    return _RATE_OF_CONDITIONALS if isinstance(model, ConditionalModel) else _RATE


def _little(model: Any, run: Run, noise: float) -> float:
    """Returns the gain of five steps below which training ends early."""
    if has_informed_init(model):
        return noise * _LITTLE
    # Gibbs chains and continuous latents make the free energy noisy.
    return _LITTLE_OF_ALL if isinstance(model, ClosedFormModel) and run.guide is run.truncated else -math.inf


def _warn_of_gain(steps: int, remaining: float) -> None:
    gain = "" if math.isinf(remaining) else f": more may raise the free energy per data point by {remaining:.2g}"
    warnings.warn(f"training has not converged in {steps} steps{gain}. Try more steps, or a larger lr.", ConvergenceWarning, stacklevel=5)


def _show(bar: ProgressBar, free_energy: float) -> None:
    bar.set_postfix(free_energy=f"{free_energy:.2f}", refresh=False)
    bar.update()


def _warn(disagreement: str) -> None:
    warnings.warn(
        f"{disagreement}: the best may be a local optimum. Try more starts, more short_steps, or a higher temperature.",
        DisagreeingStartsWarning,
        stacklevel=5,
    )
