"""The numbers that `learn` decides by."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pyro_truncated.utils.arguments import check_count

# Numbers that may be zero: nothing is then asked for, or done.
_MAY_BE_ZERO = frozenset({"min_data", "mixture_min_data", "few_rows_per_latent", "small_mixture", "pruning_steps", "decay_steps"})


@dataclasses.dataclass(frozen=True)
class LearnConfig:
    """Numbers that :func:`~pyro_truncated.learn` decides by; prints itself.

    Free energies are in nats per data point. Values were chosen on data of other seeds than those of the results pages.

    Example:
        >>> y = linear_bars(100, 3, mean_active=2.0).data
        >>> config = LearnConfig(max_restarts=2, data_per_latent=10)
        >>> guide = learn(BinarySparseCoding(9, 6), y, short_steps=5, steps=5, tolerance=9.0, config=config, progress=False)
        >>> len(guide.starts)
        2

    Attributes:
        min_data: data points of a restart, at least.
        data_per_latent: data points of a restart for each latent, or value of a single latent.
        mixture_min_data: ``min_data`` of mixtures with closed-form M-steps, as fewer data have other optima.
        mixture_data_per_parameter: data points of their restarts for each parameter.
        num_states: states per data point.
        mixture_num_states: the same for mixtures of more components than ``num_states``.
        temperature: first temperature with closed-form M-steps.
        slow_temperature: the same by gradients and of Gibbs samplers, which recover slowly.
        tolerance: largest difference of two restarts that agree.
        fine_tolerance: the same for mixtures and beside continuous latents.
        total_tolerance: least tolerance in nats of all data together.
        lr: learning rate in units of a parameter's root mean square.
        conditional_lr: the same where a conditional guide must follow the model.
        steps: training steps on all data.
        companion_steps: the same beside continuous latents.
        max_restarts: most restarts.
        max_exchanging_restarts: the same where restarts exchange latents.
        max_large_restarts: the same for more than 256 binary latents.
        min_restarts: least number for problems in which two restarts often agree on a poor optimum: shared or continuous latents, few
            rows, small mixtures.
        min_warm_restarts: least number of restarts from a linear model before the expected gain counts.
        few_rows_per_latent: rows of data for each latent below which, by gradients, ``min_restarts`` are made.
        small_mixture: data values times components up to which ``min_restarts`` are made.
        max_lead: largest lead of the best restart of a mixture, in tolerances.
        network_gap: nats per observed number by which networks of the same latents may differ.
        max_unmatched: share of unmatched latents up to which two restarts have found the same.
        exchange_gain: least gain of a crossover of converged restarts, in tolerances.
        num_kept: restarts that are kept with their states.
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
        network_gain: the same for networks that are trained in parts.
        decay_steps: steps at a falling learning rate after convergence.

    Raises:
        ValueError: if a number is out of range; the message names it.
        TypeError: if a value is no number.
    """

    min_data: int = 1000
    data_per_latent: int = 50
    mixture_min_data: int = 10_000
    mixture_data_per_parameter: int = 2
    num_states: int = 64
    mixture_num_states: int = 16
    temperature: float = 20.0
    slow_temperature: float = 5.0
    tolerance: float = 0.05
    fine_tolerance: float = 0.01
    total_tolerance: float = 0.5
    lr: float = 0.1
    conditional_lr: float = 0.02
    steps: int = 100
    companion_steps: int = 2000
    max_restarts: int = 8
    max_exchanging_restarts: int = 16
    max_large_restarts: int = 2
    min_restarts: int = 8
    min_warm_restarts: int = 4
    few_rows_per_latent: int = 16
    small_mixture: int = 50_000
    max_lead: float = 4.0
    network_gap: float = 0.02
    max_unmatched: float = 0.1
    exchange_gain: float = 0.1
    num_kept: int = 3
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
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            if isinstance(field.default, int):
                check_count(field.name, value, 0 if field.name in _MAY_BE_ZERO else 1)
            elif isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{field.name} must be a number; got {value!r}")
            elif not 0 <= value < math.inf:
                raise ValueError(f"{field.name} must not be negative, and finite; got {value!r}")
