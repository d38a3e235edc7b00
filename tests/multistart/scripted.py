"""Restarts that end where a test says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from pyro_truncated.multistart.config import LearnConfig
from pyro_truncated.multistart.model_parameters import ModelParameters
from pyro_truncated.multistart.multi_start import MultiStart
from pyro_truncated.multistart.profile import Profile, profile_model
from pyro_truncated.multistart.solution import FreeEnergyEstimate, Solution
from pyro_truncated.multistart.trainer import Trainer, finish
from pyro_truncated.utils.console import progress_bar


def ended(profile: Profile, estimate: FreeEnergyEstimate, **fields: Any) -> Solution:
    """A restart that has ended with the present parameters of the model."""
    return Solution(estimate, ModelParameters(profile.model, profile.y).snapshot(), **fields)


def ended_with_states(profile: Profile, estimate: FreeEnergyEstimate) -> Solution:
    """The same with the states that a guide begins with, for restarts that exchange latents."""
    return ended(profile, estimate, population=profile.set_up_guide().population())


class ScriptedMultiStart(MultiStart):
    """Restarts that are given."""

    def __init__(self, profile: Profile, restart: Callable[[Profile], Solution]) -> None:
        super().__init__(profile)
        self.restart = restart  # type: ignore[method-assign]


def scripted_restarts(model: Any, y: Tensor, restart: Callable[[Profile], Solution], **options: Any) -> MultiStart:
    """What is made of restarts that are given, with arguments of ``profile_model`` and fields of the configuration."""
    fields = {name: options.pop(name) for name in ("tolerance", "restart_steps", "min_restarts") if name in options}
    found = ScriptedMultiStart(profile_model(model, y, config=LearnConfig(**fields), **options).for_restarts(), restart)
    found.run(progress_bar(False))
    return found


def train_best(found: MultiStart, model: Any, y: Tensor, **arguments: Any) -> None:
    """Trains on all data from the best restart."""
    ModelParameters(model, y).load(found.pool.best.parameters)
    trainer = Trainer(profile_model(model, y, **arguments))
    trainer.find_states()
    finish(trainer, 100, -math.inf)


def disagreement(found: MultiStart) -> str | None:
    """Why the best may be a local optimum."""
    return found.rule.disagreement()
