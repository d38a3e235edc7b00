"""Length of runs: a number of steps, or until convergence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.training.agreement import Reached, likelihoods, reached_on_a_curve, reached_on_average
from pyro_truncated.training.model_kinds import is_mixture
from pyro_truncated.training.relocation import Relocations
from pyro_truncated.utils.annealing import Temperature, temperature_at

# Steps of closed-form EM, and the gain in nats per data point that means convergence.
_RESTING, _AT_REST = 5, 0.01
# The same for informed initialisation, relative to the total gain.
_NEARLY_AT_REST = 0.003
# The same for restarts of mixtures.
_MIXTURES_AT_REST = 0.005
# The default evolutionary search becomes full conditionals in the last of so many parts of the training.
_LOOKS_CLOSELY = 10
# By gradients: steps of a mean, its gain that means convergence, and the limit in multiples of the steps.
_CLIMBING, _ON_TOP, _LATEST = 10, 0.02, 4
# The same for networks, whose weights change long after their latents are found.
_NEARLY_ON_TOP = 0.1
# Steps at a falling learning rate: at the full rate free energies fluctuate.
_CALMING = 20


class Steps(Protocol):
    """A model and its guide, trained step by step."""

    guide: Any
    truncated: AutoTruncated | None
    relocations: Relocations

    @property
    def is_by_gradients(self) -> bool:
        """Whether the model has no M-steps of its own."""

    @property
    def is_in_parts(self) -> bool:
        """Whether a step is a pass over the data in parts."""

    def step(self, y: Tensor) -> float:
        """Takes a step; the free energy per data point before it."""

    def fit_decoder(self, y: Tensor) -> None:
        """Refits a neural decoder, if any, to the present states."""

    def slow_down(self, steps: int) -> None:
        """Lets the learning rate fall to a tenth in so many steps."""

    def look_closely(self) -> bool:
        """Searches more thoroughly if allowed; returns whether it does."""

    def end(self) -> None:
        """Makes the guide that of the parameters after the last step."""


def started(run: Steps, model: Any, y: Tensor, temperature: Temperature, steps: int) -> Reached:
    """Runs the steps of a restart until convergence.

    By gradients they are more, and fewer for mixtures without annealing.
    """
    if run.is_by_gradients:
        return climbed(run, y, steps)
    if run.truncated is not None and is_mixture(model, run.truncated.space) and temperature_at(temperature, 0) == 1.0:
        return settled_down(run, y, steps)
    return trained(run, y, steps)


def trained(run: Steps, y: Tensor, steps: int) -> Reached:
    """Takes a number of steps; returns the free energy before the last.

    Of a sampler it is the mean over the last sixth of its log joints.
    """
    values = [run.step(y) for _ in range(steps)]
    run.end()
    if run.truncated is None:
        return reached_on_average(values[-max(1, steps // 6) :])._replace(each=likelihoods(run.guide, y))
    return _reached(run, values)


def climbed(run: Steps, y: Tensor, steps: int) -> Reached:
    """Takes steps while the free energy rises, then at a falling rate.

    There are up to three times as many more.

    A neural decoder is refitted to its states before the learning rate falls, where training otherwise ends in bad optima.
    """
    values = [run.step(y) for _ in range(steps)]
    most = _NEARLY_ON_TOP if run.is_in_parts else _ON_TOP
    while len(values) < _LATEST * steps and _rise(values) > most:
        values += [run.step(y) for _ in range(min(_CLIMBING, _LATEST * steps - len(values)))]
    run.fit_decoder(y)
    run.slow_down(_CALMING)
    values += [run.step(y) for _ in range(_CALMING)]
    run.end()
    return _reached(run, values)


def _rise(values: list[float]) -> float:
    number = min(_CLIMBING, len(values) // 2)
    return (sum(values[-number:]) - sum(values[-2 * number : -number])) / number if number else 0.0


def rested(run: Steps, y: Tensor, most: int) -> Reached:
    """Takes steps until five hardly raise the free energy, at most ``most``.

    Free energies that still rise cannot be compared.
    """
    run.look_closely()
    values: list[float] = []
    while len(values) < most and not are_at_rest(values, _AT_REST):
        values += [run.step(y) for _ in range(min(_RESTING, most - len(values)))]
    run.end()
    is_rising = len(values) > _RESTING and not are_at_rest(values, _AT_REST)
    return _reached(run, values)._replace(rise=values[-1] - values[-1 - _RESTING] if is_rising else 0.0)


def nearly_rested(run: Steps, y: Tensor, most: int) -> Reached:
    """Takes steps until five gain a small share of the total.

    Restarts in one optimum may differ by as much.
    """
    values = [run.step(y)]
    while not (is_at_rest := are_at_rest(values, _NEARLY_AT_REST * (values[-1] - values[0]))) and len(values) < most:
        values.append(run.step(y))
    run.end()
    return _reached(run, values)._replace(noise=max(0.0, values[-1] - values[-1 - _RESTING]) if is_at_rest else 0.0)


def settled_down(run: Steps, y: Tensor, most: int) -> Reached:
    """Takes mixture steps until gains are small and no component moves."""
    values = _until_the_end(run, y, most, _MIXTURES_AT_REST)
    run.end()
    return _reached(run, values)


def finished(run: Steps, y: Tensor, most: int, little: float) -> int:
    """Trains on all data to convergence; returns the number of steps.

    The last steps search thoroughly.
    """
    values = _until_the_end(run, y, most - most // _LOOKS_CLOSELY, little)
    # With less than ten steps none is kept back: searched states need a step to be trained.
    is_left = len(values) < most
    if is_left and run.look_closely():
        # One step of full conditionals tells as much as five of evolution, at several times the cost.
        values += _until_the_end(run, y, most - len(values), little / _RESTING, 1, values[-1:])
    elif is_left and not _is_at_the_end(run, values, little):
        values += _until_the_end(run, y, most - len(values), little)
    run.end()
    return len(values)


def _until_the_end(run: Steps, y: Tensor, most: int, little: float, steps: int = _RESTING, before: Sequence[float] = ()) -> list[float]:
    values: list[float] = []
    while len(values) < most and not _is_at_the_end(run, [*before, *values], little, steps):
        values.append(run.step(y))
    return values


def _is_at_the_end(run: Steps, values: list[float], little: float, steps: int = _RESTING) -> bool:
    """Whether recent steps gained no more, and no component moves."""
    if not are_at_rest(values, little, steps):
        return False
    run.relocations.at_rest()
    return run.relocations.are_done


def are_at_rest(values: list[float], little: float, steps: int = _RESTING) -> bool:
    """Whether the free energy is within a margin of its earlier best.

    The last steps do not count. Free energies that have fallen have not converged.
    """
    return len(values) > steps and abs(values[-1] - max(values[:-steps])) <= little


def _reached(run: Steps, values: list[float]) -> Reached:
    assert run.truncated is not None
    if run.guide is not run.truncated or run.truncated.conditional is not None:
        # Continuous latents make the free energy noisy; its trend is no noise.
        return reached_on_a_curve(values[-_CLIMBING:])
    return Reached(values[-1], each=run.truncated.population().free_energy())
