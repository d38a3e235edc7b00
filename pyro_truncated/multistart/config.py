"""The configuration of `learn`, and the report of what it did."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.utils.arguments import Renamed, check_count, renames

# Goes where a restart of a model begins, with its data and a source of randomness.
Initializer = Callable[[Any, Tensor, torch.Generator | None], Any]
# Numbers that may be zero: nothing is then asked for, or done.
_MAY_BE_ZERO = frozenset({"min_data", "mixture_min_data", "small_mixture", "pruning_steps", "decay_steps"})


@dataclasses.dataclass(frozen=True)
class LearnConfig:
    """All that :func:`~pyro_truncated.learn` decides by; prints itself.

    Free energies are in nats per data point. Values were chosen on data of other seeds than those of the results pages. ``None`` stands
    for what the model's kind asks for.

    Example:
        >>> y = linear_bars(100, 3, mean_active=2.0).data
        >>> config = LearnConfig(max_restarts=2, data_per_latent=10, restart_steps=5, tolerance=9.0)
        >>> guide = learn(BinarySparseCoding(9, 6), y, steps=5, config=config, progress=False)
        >>> len(guide.starts)
        2

    Attributes:
        restart_steps: steps of a restart; more follow until convergence.
        temperature: first temperature. Default: ``em_temperature``, ``slow_temperature`` without closed-form M-steps, and 1 for mixtures
            and informed initialisation.
        tolerance: largest difference of two restarts that agree. Default: ``coarse_tolerance``, or ``fine_tolerance`` for mixtures and
            beside continuous latents; the same latents are then asked for, too.
        lr: learning rate of gradient steps, in the unit of each parameter. Default: ``gradient_lr``, or ``conditional_lr``
            where a conditional guide must follow the model.
        initializer: called as ``initializer(model, y, generator)`` before each restart, in place of the model's own methods.
        moves: changes of each restart's solution beyond the model's own, each a :class:`~pyro_truncated.multistart.Move`.
        min_data: data points of a restart, at least.
        data_per_latent: data points of a restart for each latent, or value of a single latent.
        mixture_min_data: ``min_data`` of mixtures with closed-form M-steps, as fewer data have other optima.
        mixture_data_per_parameter: data points of their restarts for each parameter.
        num_states: states per data point.
        mixture_num_states: the same for mixtures of more components than ``num_states``.
        em_temperature: first temperature with closed-form M-steps.
        slow_temperature: the same by gradients and of Gibbs samplers, which recover slowly.
        coarse_tolerance: the usual tolerance.
        fine_tolerance: the same for mixtures and beside continuous latents.
        total_tolerance: least tolerance in nats of all data together.
        gradient_lr: the usual learning rate.
        conditional_lr: that of conditional guides.
        steps: training steps on all data.
        companion_steps: the same beside continuous latents.
        max_restarts: most restarts.
        max_exchanging_restarts: the same where restarts exchange latents, or are compared chain by chain.
        max_large_restarts: the same for more than 256 binary latents.
        min_restarts: least number where two restarts often agree on a poor optimum: shared or continuous latents, and small mixtures.
            Among programs by gradients these are small ones, and those that exchange nothing, but for binary chains.
        small_mixture: values of a restart's data times states up to which mixtures and programs are small.
        network_gap: nats per observed number by which networks of the same latents may differ.
        max_unmatched: share of unmatched latents up to which two networks have found the same.
        max_candidates: latents beside which a redundant one is tried.
        growth: latents of an overcomplete restart for each one asked for.
        pruning_steps: training steps after each pruning.
        pruning_depth: latents that may substitute for a redundant one.
        window: closed-form steps of which the gain is measured.
        gain: gain of a window at which closed-form restarts have converged.
        mixture_gain: the same in restarts of mixtures.
        informed_gain: the same where the model initialises informedly, as a share of the whole gain.
        final_gain: gain of a window that ends training on all data.
        gradient_window: gradient steps of which means are compared.
        gradient_gain: gain of these means at convergence.
        network_gain: the same for networks.
        decay_steps: steps at a falling learning rate after convergence.

    Raises:
        ValueError: if a number is out of range; the message names it.
        TypeError: if a value is no number, or the initialiser or a move is none.
    """

    restart_steps: int = 60
    temperature: float | None = None
    tolerance: float | None = None
    lr: float | None = None
    initializer: Initializer | None = None
    moves: tuple[Any, ...] = ()
    min_data: int = 1000
    data_per_latent: int = 50
    mixture_min_data: int = 10_000
    mixture_data_per_parameter: int = 2
    num_states: int = 64
    mixture_num_states: int = 16
    em_temperature: float = 20.0
    slow_temperature: float = 5.0
    coarse_tolerance: float = 0.05
    fine_tolerance: float = 0.01
    total_tolerance: float = 0.5
    gradient_lr: float = 0.1
    conditional_lr: float = 0.02
    steps: int = 100
    companion_steps: int = 2000
    max_restarts: int = 8
    max_exchanging_restarts: int = 16
    max_large_restarts: int = 2
    min_restarts: int = 8
    small_mixture: int = 50_000
    network_gap: float = 0.02
    max_unmatched: float = 0.1
    max_candidates: int = 3
    growth: int = 2
    pruning_steps: int = 3
    pruning_depth: int = 8
    window: int = 5
    gain: float = 0.01
    mixture_gain: float = 0.005
    informed_gain: float = 0.003
    final_gain: float = 0.001
    gradient_window: int = 10
    gradient_gain: float = 0.02
    network_gain: float = 0.1
    decay_steps: int = 20

    def __post_init__(self) -> None:
        if self.initializer is not None and not callable(self.initializer):
            raise TypeError(f"initializer must be called as initializer(model, y, generator); got {self.initializer!r}")
        moves: Any = self.moves
        if not isinstance(moves, (tuple, list)) or not all(hasattr(move, "propose") and hasattr(move, "name") for move in moves):
            raise TypeError(f"moves must be a tuple of pyro_truncated.multistart.Move, with name and propose(best); got {moves!r}")
        object.__setattr__(self, "moves", tuple(moves))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("initializer", "moves") and not (value is None and field.default is None):
                _check_number(field, value)
        if self.lr == 0.0:
            raise ValueError("lr must be positive; got 0")
        if self.temperature is not None and self.temperature < 1.0:
            raise ValueError(f"temperature must be at least 1; got {self.temperature!r}")


LearnConfig.__init__ = renames("max_lead", "min_warm_restarts", "few_rows_per_latent")(LearnConfig.__init__)  # type: ignore[method-assign]


def _check_number(field: dataclasses.Field[Any], value: Any) -> None:
    if isinstance(field.default, int):
        check_count(field.name, value, 0 if field.name in _MAY_BE_ZERO else 1)
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{field.name} must be a number; got {value!r}")
    elif not 0 <= value < math.inf:
        raise ValueError(f"{field.name} must not be negative, and finite; got {value!r}")


@dataclasses.dataclass(frozen=True)
class Restart:
    """A restart of :func:`~pyro_truncated.learn`."""

    initialisation: str  # where it began
    steps: int  # how many it took
    free_energy: float  # what it reached, per data point (or posterior, where data points share latents)


@dataclasses.dataclass(frozen=True)
class LearnReport:
    """What a call of :func:`~pyro_truncated.learn` did; prints itself as a table.

    Example:
        >>> y = linear_bars(100, 3, mean_active=2.0).data
        >>> config = LearnConfig(restart_steps=5, tolerance=9.0)
        >>> guide = learn(BinarySparseCoding(9, 6), y, restarts=2, steps=5, config=config, progress=False)
        >>> [restart.initialisation for restart in guide.learn_report.restarts]
        ['initialize', 'initialize']
        >>> print(guide.learn_report)  # doctest: +ELLIPSIS
        restart  initialisation  steps  free energy
              1  initialize ...
        end of restarts: two restarts agree
        ...

    Attributes:
        restarts: in order.
        moves: changes of the best solution beyond restarts: how many were tried, and how many raised the free energy.
        reason: why no further restart was made.
        disagreement: why the best may be a local optimum; ``None`` if two restarts agree.
        steps: training steps on all data.
        remaining_gain: what more of them are expected to gain per data point; infinity if they were too few to tell. Zero where training
            ends by another rule.
        optimizer: how parameters were changed.
        settings: what was chosen, by the names of the arguments.
    """

    restarts: tuple[Restart, ...]
    moves: dict[str, tuple[int, int]]
    reason: str
    disagreement: str | None
    steps: int
    remaining_gain: float
    optimizer: str
    settings: dict[str, Any]

    remaining = Renamed("remaining_gain")

    def __str__(self) -> str:
        """The table."""
        width = max(len("initialisation"), *(len(one.initialisation) for one in self.restarts))
        lines = [f"restart  {'initialisation':{width}}  steps  free energy"]
        lines += [
            f"{number:7}  {one.initialisation:{width}}  {one.steps:5}  {one.free_energy:11.4f}"
            for number, one in enumerate(self.restarts, 1)
        ]
        lines += [f"{name}: {tried} tried, {accepted} accepted" for name, (tried, accepted) in self.moves.items()]
        lines.append(f"end of restarts: {self.reason}")
        if self.disagreement is not None:
            lines.append(f"disagreement: {self.disagreement}")
        expected = "" if self.remaining_gain == 0.0 or math.isinf(self.remaining_gain) else f", more may gain {self.remaining_gain:.2g}"
        lines.append(f"training: {self.steps} steps{expected}; {self.optimizer}")
        lines.append("settings: " + ", ".join(f"{name}={value}" for name, value in self.settings.items()))
        return "\n".join(lines)
