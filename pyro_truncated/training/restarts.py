"""Runs from several starts, each with a parameter store of its own."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyro
from pyro.infer import SVI

from pyro_truncated.training.loop import Training, fit
from pyro_truncated.utils.arguments import check_count, check_kinds


@dataclasses.dataclass(frozen=True)
class Restarts:
    """Runs from different starts.

    Example:
        >>> y = linear_bars(50, 4, mean_active=2.0).data
        >>> def make(seed):
        ...     pyro.set_rng_seed(seed)
        ...     model = BinarySparseCoding(16, 8).initialize(y)
        ...     return SVI(model, AutoTruncated(model, num_states=16), ClosedForm(model), Truncated_ELBO())
        >>> restarts = fit_restarts(make, y, restarts=2, steps=3, progress=False)
        >>> restarts.best in (0, 1)
        True

    Attributes:
        trainings: one record per start.
        best: position of the restart with the highest final free energy, a mean over its last tenth of the steps.
        stores: states of Pyro's parameter store after each run, for models that are plain functions.
    """

    trainings: list[Training]
    best: int
    stores: list[Any]

    @property
    def training(self) -> Training:
        """The best run."""
        return self.trainings[self.best]

    @property
    def record(self) -> dict[str, np.ndarray]:
        """Returns records ``(num_restarts, steps)`` for ``to_arviz(training=...)``.

        They are NaN after the end of a run.
        """
        longest = max(training.steps for training in self.trainings)
        names = self.trainings[0].record
        return {
            name: np.array([training.record[name] + [math.nan] * (longest - training.steps) for training in self.trainings])
            for name in names
        }


def fit_restarts(
    make: Callable[[int], SVI], *args: Any, restarts: int = 5, checkpoint: str | Path | None = None, **kwargs: Any
) -> Restarts:
    """Runs :func:`fit` several times and keeps the best parameters.

    Each restart has a parameter store of its own.

    Example:
        >>> y = linear_bars(50, 4, mean_active=2.0).data
        >>> def make(seed):
        ...     pyro.set_rng_seed(seed)
        ...     model = BinarySparseCoding(16, 8).initialize(y)
        ...     return SVI(model, AutoTruncated(model, num_states=16), ClosedForm(model), Truncated_ELBO())
        >>> restarts = fit_restarts(make, y, restarts=2, steps=3, progress=False)
        >>> len(restarts.trainings)
        2

    Args:
        make: called with ``0 .. restarts - 1``; makes model, guide and SVI afresh, seeds included if wanted.
        *args: the model's arguments.
        restarts: number of starts.
        checkpoint: file; start ``i`` takes ``<stem>-<i><suffix>``.
        **kwargs: what :func:`fit` takes, and the model's keyword arguments.

    Returns:
        All runs, and which is the best.

    Raises:
        ValueError: if ``restarts`` is below 1.
    """
    check_kinds(fit_restarts, make=make, checkpoint=checkpoint)
    restarts = check_count("restarts", restarts)
    store = pyro.get_param_store()
    trainings, stores = [], []
    for restart in range(restarts):
        with store.scope() as state:
            path = None if checkpoint is None else _numbered(Path(checkpoint), restart)
            trainings.append(fit(make(restart), *args, checkpoint=path, **kwargs))
        # Not copies: modules and optimisers keep these tensors.
        stores.append(copy.copy(state))
    reached = [np.mean(training.record["free_energy"][-max(1, training.steps // 10) :]) for training in trainings]
    # A run that ended in NaN has reached nothing.
    best = int(np.argmax(np.nan_to_num(reached, nan=-np.inf, neginf=-np.inf)))
    store.set_state(stores[best])
    return Restarts(trainings, best, stores)


def _numbered(path: Path, restart: int) -> Path:
    return path.with_name(f"{path.stem}-{restart}{path.suffix}")
