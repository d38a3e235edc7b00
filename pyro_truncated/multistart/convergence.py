"""When runs end: after a number of steps, or at convergence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from pyro_truncated.multistart.agreement import STANDARD_ERRORS, FreeEnergyEstimate, estimate_mean, estimate_on_trend, likelihoods
from pyro_truncated.multistart.trainer import Trainer
from pyro_truncated.utils.annealing import Temperature, temperature_at

# Share of the steps that is a window there, so that slow gains are seen; least steps of one.
_WINDOW_SHARE, _COMPANION_WINDOW_STEPS = 0.25, 20
# There the learning rate is multiplied by this at each plateau, so many times at most.
_RATE_FACTOR, _REDUCTIONS = 0.3, 4


def last_gain(values: Sequence[float], window: int) -> float:
    """Returns how far the last value is from the earlier best one.

    The last steps do not count. Free energies that have fallen have not converged.
    """
    return abs(values[-1] - max(values[:-window])) if len(values) > window else math.inf


def mean_gain(values: Sequence[float], window: int) -> float:
    """Returns the gain of a window's mean over the previous one's."""
    number = min(window, len(values) // 2)
    return (sum(values[-number:]) - sum(values[-2 * number : -number])) / number if number else 0.0


def remaining_gain(values: Sequence[float], window: int) -> float:
    r"""Returns what noisy free energies will still gain, beyond their noise.

    A window is the last quarter of the steps, or larger. A free energy that approaches its limit as :math:`1 / t` will still gain twice
    what this window has gained beside the one before; one that approaches it exponentially will gain less. One standard error of the
    gain does not count.
    """
    number = _window_length(values, window)
    if len(values) < 2 * number:
        return math.inf
    before, last = (estimate_on_trend(some) for some in (values[-2 * number : -number], values[-number:]))
    return 2 * max(0.0, last.free_energy - before.free_energy - _error(before, last))


def _window_length(values: Sequence[float], window: int) -> int:
    """Returns how many steps are compared: a quarter, or a window."""
    return max(window, int(_WINDOW_SHARE * len(values)))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When a run has converged, and what its last steps are.

    Attributes:
        steps: least number of steps.
        max_steps: largest number, without those at a falling rate.
        tol: gain in nats per data point at convergence.
        gain: measures it, given free energies per data point and the window.
        window: steps of which the gain is measured.
        stride: steps between two measurements.
        is_relative: whether the gain is divided by that of all steps.
        decay: steps at a falling learning rate, after convergence.
        first_rate: what the learning rate is multiplied by before the first plateau; ``None``: it does not fall from plateau to plateau.
        is_thorough: whether the search is intensified, from the beginning or from the second plateau on.
    """

    steps: int
    max_steps: int
    tol: float = 0.0
    gain: Callable[[Sequence[float], int], float] = last_gain
    window: int = 5
    stride: int = 1
    is_relative: bool = False
    decay: int = 0
    first_rate: float | None = None
    is_thorough: bool = False

    def has_converged(self, values: Sequence[float]) -> bool:
        """Whether the gain is below the tolerance."""
        unit = values[-1] - values[0] if self.is_relative and values else 1.0
        return self.gain(values, self.window) <= self.tol * unit


def fixed_steps(steps: int) -> Schedule:
    """A number of steps."""
    return Schedule(steps, steps)


def to_convergence(trainer: Trainer, max_steps: int) -> Schedule:
    """Closed-form EM at temperature one, with a thorough search.

    Beside continuous latents it is :func:`by_gradients`.
    """
    profile = trainer.profile
    if profile.has_companion:
        return by_gradients(trainer, max_steps)
    return Schedule(0, max_steps, profile.config.gain, window=profile.config.window, stride=profile.config.window, is_thorough=True)


def by_gradients(trainer: Trainer, steps: int) -> Schedule:
    """Gradient steps while the free energy rises, then at a falling rate.

    Beside continuous latents it is noisy, and rises for long; nats up to the tolerance may remain to be gained there.

    Args:
        trainer: the trainer.
        steps: least number of them.
    """
    profile, config = trainer.profile, trainer.profile.config
    if profile.has_companion:
        # The same beside continuous latents, where 240 steps ended up to 250 nats below the
        # optimum.
        return by_plateaus(16 * steps, profile.tolerance, steps=steps)
    # Weights of networks change long after their latents are found.
    least, window = config.network_gain if trainer.is_in_parts else config.gradient_gain, config.gradient_window
    # Most steps by gradients, in multiples of the least.
    return Schedule(steps, 4 * steps, least, mean_gain, window, window, decay=config.decay_steps)


def restart_schedule(trainer: Trainer, temperature: Temperature, steps: int) -> Schedule:
    """Returns the schedule of a restart.

    Args:
        trainer: the trainer.
        temperature: of the run, as a function of the step.
        steps: how many there are, at least by gradients, and at most where EM may converge before.
    """
    profile, config = trainer.profile, trainer.profile.config
    if profile.is_informed:
        return Schedule(1, steps, config.informed_gain, window=config.window, is_relative=True)
    if profile.is_by_gradients:
        return by_gradients(trainer, steps)
    if profile.is_mixture and temperature_at(temperature, 0) == 1.0:
        return Schedule(0, steps, config.mixture_gain, window=config.window)
    return fixed_steps(steps)


def by_plateaus(max_steps: int, tol: float, *, steps: int = 0, first_rate: float = 1.0) -> Schedule:
    """Gradient steps at a learning rate that falls at each plateau.

    Args:
        max_steps: the most steps.
        tol: what may remain to be gained.
        steps: least number of a restart. Zero is the last training: its windows are an eighth of all steps, as a slow gain hides in the
            noise of short ones.
        first_rate: what the learning rate is multiplied by at first.
    """
    window = max(2, max_steps // 8)
    if steps:
        window = min(_COMPANION_WINDOW_STEPS, window)
    return Schedule(steps, max_steps, tol, remaining_gain, window, window, first_rate=first_rate, is_thorough=not steps)


def train(trainer: Trainer, schedule: Schedule) -> FreeEnergyEstimate:
    """Trains until convergence; returns the free energy that is reached.

    A neural decoder is refitted to its states before the learning rate falls, where training otherwise ends in bad optima.
    """
    if schedule.first_rate is not None:
        return _train_by_plateaus(trainer, schedule)
    if schedule.is_thorough:
        trainer.intensify_search()
    values = _until_convergence(trainer, schedule)
    if schedule.decay:
        trainer.fit_decoder()
        trainer.slow_down(schedule.decay)
        values += [trainer.step() for _ in range(schedule.decay)]
    trainer.end()
    return _estimate(trainer, schedule, values)


def _train_by_plateaus(trainer: Trainer, schedule: Schedule) -> FreeEnergyEstimate:
    r"""Trains until neither more steps nor a smaller learning rate gain more.

    The noise of gradients lowers the free energy by an amount proportional to the rate. If a reduction of the rate by a factor :math:`f`
    has gained :math:`g`, all further ones will gain :math:`g f / (1 - f)`.
    """
    assert schedule.first_rate is not None
    reached, steps = FreeEnergyEstimate(-math.inf, remaining=math.inf), 0
    for reduction in range(1 + _REDUCTIONS):
        trainer.set_rate(schedule.first_rate * _RATE_FACTOR**reduction)
        if reduction and schedule.is_thorough:
            trainer.intensify_search()
        # Half of the steps that are left, so that some are taken at smaller rates.
        left = schedule.max_steps - steps
        most = left if reduction == _REDUCTIONS else (left + 1) // 2
        # Two windows fit into them.
        window = min(schedule.window, max(_COMPANION_WINDOW_STEPS, most // 2))
        least = 0 if reduction else min(schedule.steps, most)
        some = dataclasses.replace(schedule, steps=least, max_steps=most, window=window, stride=window)
        values = _until_convergence(trainer, some)
        steps, before = steps + len(values), reached
        if values:
            reached = estimate_on_trend(values[-_window_length(values, window) :])
        gain = max(0.0, reached.free_energy - before.free_energy - _error(before, reached))
        remaining = remaining_gain(values, window) + gain * _RATE_FACTOR / (1 - _RATE_FACTOR)
        reached = reached._replace(remaining=remaining, steps=steps)
        if remaining <= schedule.tol:
            break
    trainer.end()
    return reached


def _error(one: FreeEnergyEstimate, other: FreeEnergyEstimate) -> float:
    """The standard error of a difference of noisy free energies."""
    return math.hypot(one.noise, other.noise) / STANDARD_ERRORS


def finish(trainer: Trainer, max_steps: int, tol: float) -> FreeEnergyEstimate:
    """Trains on all data to convergence; returns what is reached.

    The last steps search thoroughly. One such step of full conditionals tells as much as five of evolution, at several times the cost.

    Args:
        trainer: the run.
        max_steps: the most steps. With less than ten none is kept back: searched states need a step to be trained.
        tol: gain of a window in nats per data point at convergence; minus infinity where it is not looked for.
    """
    profile, window = trainer.profile, trainer.profile.config.window
    if profile.has_companion:
        return train(trainer, by_plateaus(max_steps, profile.tolerance, first_rate=_RATE_FACTOR))
    # A training by closed-form M-steps searches thoroughly in the last of so many parts.
    values = _until_convergence(trainer, Schedule(0, max_steps - max_steps // 10, tol, window=window))
    left = max_steps - len(values)
    if left and trainer.intensify_search():
        values += _until_convergence(trainer, Schedule(0, left, tol / window, window=1), values[-1:])
    elif left and not Schedule(0, left, tol, window=window).has_converged(values):
        values += _until_convergence(trainer, Schedule(0, left, tol, window=window))
    trainer.end()
    return FreeEnergyEstimate(values[-1], steps=len(values))


def _until_convergence(trainer: Trainer, schedule: Schedule, before: Sequence[float] = ()) -> list[float]:
    """Takes steps until gains are small and no mixture component moves."""
    values = [trainer.step() for _ in range(schedule.steps)]
    while len(values) < schedule.max_steps:
        if schedule.has_converged([*before, *values]):
            trainer.relocations.move_at_convergence()
            if trainer.relocations.are_done:
                break
        values += [trainer.step() for _ in range(min(schedule.stride, schedule.max_steps - len(values)))]
    return values


def _estimate(trainer: Trainer, schedule: Schedule, values: list[float]) -> FreeEnergyEstimate:
    steps = len(values)
    if trainer.truncated is None:
        # The log joint of a sampler's draws: a mean over the last sixth.
        return estimate_mean(values[-max(1, steps // 6) :])._replace(each=likelihoods(trainer.guide, trainer.profile.y), steps=steps)
    if trainer.profile.has_companion or trainer.profile.is_conditional:
        # Continuous latents make the free energy noisy; its trend is no noise.
        return estimate_on_trend(values[-trainer.profile.config.gradient_window :])._replace(steps=steps)
    reached = FreeEnergyEstimate(values[-1], each=trainer.truncated.population().free_energy(), steps=steps)
    if schedule.max_steps == schedule.steps or schedule.gain is not last_gain or steps <= schedule.window:
        return reached
    gain = values[-1] - values[-1 - schedule.window]
    if not schedule.has_converged(values):
        return reached._replace(rise=gain)
    return reached._replace(noise=max(0.0, gain)) if schedule.is_relative else reached
