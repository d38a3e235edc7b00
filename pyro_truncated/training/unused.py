"""Re-initialisation of latents that are hardly ever active."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from pyro_truncated.em.closed_form import ClosedForm, ClosedFormModel
from pyro_truncated.training.loop import Training
from pyro_truncated.utils.counts import check_count


@runtime_checkable
class RestartingModel(Protocol):
    """A model whose unused latents can start again, such as ``BinarySparseCoding``."""

    def restart_unused(self, y: Tensor, generator: torch.Generator | None = None) -> int:
        """Gives latents that are hardly ever on another start; how many."""


class RestartUnused:
    """A callback that re-initialises latents that are hardly ever active.

    It calls :meth:`BinarySparseCoding.restart_unused <pyro_truncated.models.BinarySparseCoding.restart_unused>`. The record gets the number
    of latents that started again, as ``restarted``. Those of the last steps have no time to learn: leave some after the last call.

    Example:
        >>> from pyro_truncated.callbacks import RestartUnused
        >>> y = linear_bars(200, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> svi = SVI(model, AutoTruncated(model, num_states=64), ClosedForm(model), Truncated_ELBO())
        >>> training = fit(svi, y, steps=20, callbacks=[RestartUnused(y, every=5, until=10)], progress=False)
        >>> len(training.record["restarted"])
        20

    Args:
        y: data.
        every: steps between two calls.
        until: the last step after which it is called; default: there is none.
        generator: source of randomness; default: torch's global one.

    Raises:
        ValueError: if a number of steps is below 1.
        TypeError: when training starts, if the model has no ``restart_unused``, or has closed-form M-steps but is not trained by them.
            Only their statistics tell how often latents are active.
    """

    def __init__(self, y: Tensor, *, every: int = 20, until: int | None = None, generator: torch.Generator | None = None) -> None:
        self.y, self.every, self.generator = y, check_count("every", every), generator
        self.until = None if until is None else check_count("until", until)

    def start(self, training: Training) -> None:
        """Prepares a run, new or continued, before its first step."""
        model: Any = training.svi.model
        is_restarting: bool = isinstance(model, RestartingModel)
        if not is_restarting:
            raise TypeError(f"RestartUnused needs a model with the method restart_unused; {type(model).__name__} has none")
        is_closed_form: bool = isinstance(model, ClosedFormModel)
        if is_closed_form and ClosedForm.driving(model) is not training.svi.optim:
            raise TypeError(
                f"RestartUnused needs a {type(model).__name__} that is trained by ClosedForm, whose statistics tell activity: "
                f"pass ClosedForm(model), the last one made for the model, to SVI; got {type(training.svi.optim).__name__}"
            )

    def __call__(self, training: Training) -> dict[str, float]:
        """Called after every step."""
        is_due = training.steps % self.every == 0 and (self.until is None or training.steps <= self.until)
        return {"restarted": float(training.svi.model.restart_unused(self.y, self.generator) if is_due else 0)}
