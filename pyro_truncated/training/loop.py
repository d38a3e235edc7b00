"""A loop around ``svi.step`` with progress bar, record, and checkpoints."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyro
from pyro.infer import SVI

from pyro_truncated.distributed import collectives
from pyro_truncated.distributed.shards import Batches, Portion
from pyro_truncated.training.checkpoint import (
    CheckpointWarning,
    for_this_process,
    lacks_parameters,
    load_state,
    read_checkpoint,
    refuse_other_runs,
    refuse_partial_checkpoint,
    save_checkpoint,
    save_sharded_checkpoint,
)
from pyro_truncated.training.checkpoint_file import claim_path
from pyro_truncated.training.data_parallel import propagate_errors, shared_portion
from pyro_truncated.training.fingerprint import describe_arguments, describe_run
from pyro_truncated.utils.arguments import check_count, check_kinds
from pyro_truncated.utils.console import progress_bar
from pyro_truncated.utils.parameter_store import ShadowWatch, refuse_shadowed_parameters, spare_random_numbers

# A callback that has a method ``start``, too, is given the training once before the first step, whether the run is new or continued.
Callback = Callable[["Training"], Mapping[str, float] | bool | None]


@dataclasses.dataclass
class Training:
    """The record of a training run; callbacks see it after every step.

    Example:
        >>> y = linear_bars(50, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> svi = SVI(model, AutoTruncated(model, num_states=32), ClosedForm(model), Truncated_ELBO())
        >>> training = fit(svi, y, steps=5, progress=False)
        >>> training.steps, len(training.record["free_energy"]), training.stopped_early
        (5, 5, False)

    Attributes:
        svi: the run.
        record: one list per quantity, one entry per step: ``free_energy`` (minus the loss), and what callbacks return.
            ``to_arviz(..., training=training.record)`` takes it as it is.
        seconds: duration of each step.
        stopped_early: whether it ended before the last step asked for: the free energy had stopped growing, or a callback said so.
    """

    svi: SVI
    record: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {"free_energy": []})
    seconds: list[float] = dataclasses.field(default_factory=list)
    stopped_early: bool = False

    @property
    def steps(self) -> int:
        """Number of steps taken so far."""
        return len(self.record["free_energy"])

    @property
    def free_energy(self) -> float:
        """The last step's free energy.

        Raises:
            IndexError: before the first step.
        """
        return self.record["free_energy"][-1]


def fit(
    svi: SVI,
    *args: Any,
    steps: int,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    patience: int | None = None,
    tolerance: float = 1e-5,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = 30.0,
    settings: Mapping[str, Any] | None = None,
    may_differ: Collection[str] = (),
    batches: Batches | None = None,
    **kwargs: Any,
) -> Training:
    r"""Calls ``svi.step(*args, **kwargs)`` up to ``steps`` times and keeps a record.

    With ``patience`` the run ends once :math:`\bar F_t - \bar F_{t - p} < \mathrm{tolerance} \cdot \max(1, |\bar F_t|)`. Here :math:`\bar
    F_t` is the free energy averaged over the last :math:`p` = ``patience`` steps.

    With ``checkpoint`` the run is saved every so many seconds and at its end (see
    :func:`~pyro_truncated.training.checkpoint.save_checkpoint`). It continues from the file if that exists, to the numbers of a run that
    was never interrupted. The file of another run is refused.

    On several processes with shards of the data (:func:`pyro_truncated.distributed.shard`) all call this function. What callbacks return
    counts on the first.

    Example::

        training = fit(SVI(model, guide, Adam({"lr": 0.01}), elbo), y, steps=500, patience=50, checkpoint="run.pt")
        idata = to_arviz(model, guide, y, training=training.record)

    Args:
        svi: the run: model, guide, optimiser, ELBO.
        *args: the model's arguments.
        steps: total number of steps, those from the checkpoint included.
        callbacks: each is called with the :class:`Training` after every step. A mapping that it returns is recorded, ``True`` ends the
            run. A method ``start`` is called before the first step.
        progress: whether to show a bar; default: if standard error is a terminal.
        patience: steps to average over for early stopping, or ``None`` for none.
        tolerance: relative growth below which the run ends.
        checkpoint: file, beside which ``<name>.lock`` lies while the run goes on.
        checkpoint_seconds: time between checkpoints; 0 for one after every step, infinity for one at the end.
        settings: what else must agree for a run to be continued.
        may_differ: parts that may differ, see :func:`~pyro_truncated.training.checkpoint.load_checkpoint`.
        batches: minibatches of the steps, see :class:`pyro_truncated.distributed.Batches`.
        **kwargs: the model's keyword arguments.

    Returns:
        The record.

    Raises:
        TypeError: if ``svi`` or ``callbacks`` are of another type.
        ValueError: if a number is out of range, the checkpoint is damaged or of another run, or callbacks change their names.
        OSError: if checkpoints cannot be written or read.
        RuntimeError: if another run is writing checkpoints there.
        OtherProcessError: if another process of the run has failed.
    """
    if not isinstance(svi, SVI):
        raise TypeError(f"svi must be a pyro.infer.SVI; got {type(svi).__name__}")
    check_kinds(fit, progress=progress, tolerance=tolerance, checkpoint=checkpoint, checkpoint_seconds=checkpoint_seconds)
    steps = check_count("steps", steps)
    patience = None if patience is None else check_count("patience", patience)
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise TypeError(f"callbacks must be a sequence of functions of the training; got {callbacks!r}")
    if not checkpoint_seconds >= 0:
        raise ValueError(f"checkpoint_seconds must be a number of at least 0; got {checkpoint_seconds}")
    loop = _Loop(Training(svi), args, kwargs, batches, callbacks, patience, tolerance)
    with propagate_errors(getattr(svi, "guide", None), (args, kwargs)):
        if checkpoint is None:
            loop.run(steps, progress)
            return loop.training
        path, portion = Path(checkpoint), shared_portion(svi.guide, (args, kwargs))
        if portion is not None:
            refuse_partial_checkpoint(svi)
        run = describe_run(svi) | describe_arguments(args, kwargs if batches is None else {**kwargs, "batches": batches})
        with claim_path(path) if portion is None or collectives.rank() == 0 else contextlib.nullcontext():
            loop.checkpoint = _Checkpoint(path, checkpoint_seconds, settings, run, portion)
            if path.exists() if portion is None else collectives.agree(path.exists()):
                loop.checkpoint.resume(loop, may_differ)
            loop.run(steps, progress)
    return loop.training


@dataclasses.dataclass
class _Loop:
    """A run, what every step is given, and what ends it early."""

    training: Training
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    batches: Batches | None
    callbacks: Sequence[Callback]
    patience: int | None
    tolerance: float
    checkpoint: _Checkpoint | None = None

    def run(self, steps: int, progress: bool | None) -> None:
        training = self.training
        for callback in self.callbacks:
            if callable(start := getattr(callback, "start", None)):
                start(training)
        model, guide = getattr(training.svi, "model", None), getattr(training.svi, "guide", None)
        refuse_shadowed_parameters(model, guide, training=True)
        decide: Callable[[bool], bool] = bool if shared_portion(guide, (self.args, self.kwargs)) is None else collectives.agree
        progress = False if collectives.rank() and decide is not bool else progress
        training.stopped_early = decide(self._check_patience())
        with progress_bar(progress, total=steps, initial=training.steps, unit="step") as bar:
            while training.steps < steps and not training.stopped_early:
                with ShadowWatch(guide) if training.steps == 0 else contextlib.nullcontext():
                    self._step()
                bar.set_postfix_str(f"free energy {training.free_energy:.6g}", refresh=False)
                bar.update()
                training.stopped_early = decide(self._check_patience())
                if self.checkpoint is not None:
                    self.checkpoint.after_step(training, training.steps >= steps or training.stopped_early)

    def _step(self) -> None:
        training, start = self.training, time.monotonic()
        with contextlib.nullcontext() if self.batches is None else self.batches.at(training.steps):
            loss: Any = training.svi.step(*self.args, **self.kwargs)
        training.record["free_energy"].append(-float(loss))
        training.seconds.append(time.monotonic() - start)
        for callback in self.callbacks:
            result = callback(training)
            if isinstance(result, Mapping):
                for name, value in result.items():
                    training.record.setdefault(name, []).append(float(value))
            elif result:
                training.stopped_early = True
        lengths = {name: len(values) for name, values in training.record.items()}
        steps = len(training.seconds)
        if set(lengths.values()) != {steps}:
            raise ValueError(f"callbacks must return the same names at every step, each once; after {steps} steps there are {lengths}")

    def _check_patience(self) -> bool:
        training, patience = self.training, self.patience
        values = training.record["free_energy"]
        if not training.stopped_early and patience is not None and len(values) >= 2 * patience:
            recent, before = float(np.mean(values[-patience:])), float(np.mean(values[-2 * patience : -patience]))
            training.stopped_early = recent - before < self.tolerance * max(1.0, abs(recent))
        return training.stopped_early


@dataclasses.dataclass
class _Checkpoint:
    """The file of a run, read before and written between its steps."""

    path: Path
    seconds: float
    settings: Mapping[str, Any] | None
    run: Mapping[str, str]
    portion: Portion | None
    last_time: float = dataclasses.field(default_factory=time.monotonic)

    def resume(self, loop: _Loop, may_differ: Collection[str]) -> None:
        training, svi, path = loop.training, loop.training.svi, self.path
        content = for_this_process(read_checkpoint(path, svi), path, svi, (loop.args, loop.kwargs))
        history = content["history"]
        if not isinstance(history, dict) or history.keys() != {"record", "seconds", "stopped_early"}:
            raise ValueError(f"{path} holds a checkpoint, but not one that fit wrote; its history has no record")
        refuse_other_runs(content, self.run, self.settings, may_differ, path)
        if lacks_parameters(content, svi):
            # Parameters that are made when they are first asked for must exist before they can be restored.
            with spare_random_numbers():
                svi.evaluate_loss(*loop.args, **loop.kwargs)
        load_state(content, svi, path, may_differ)
        vars(training).update(history)

    def after_step(self, training: Training, is_last: bool) -> None:
        """Writes the file if that is due; a failure is a warning."""
        is_due = is_last or time.monotonic() - self.last_time >= self.seconds
        if not (is_due if self.portion is None else collectives.agree(is_due)):
            return
        history = {"record": training.record, "seconds": training.seconds, "stopped_early": training.stopped_early}
        content: dict[str, Any] = {"history": history, "settings": self.settings, "run": self.run}
        try:
            if self.portion is None:
                save_checkpoint(self.path, training.svi, **content)
            else:
                save_sharded_checkpoint(self.path, training.svi, training.steps, self.portion, **content)
        except OSError as error:
            then = "it has ended, and its last steps are not saved" if is_last else "it goes on, and tries again later"
            message = f"{error}; the last checkpoint of this run, if there is one, is as it was. After {training.steps} steps {then}"
            warnings.warn(message, CheckpointWarning, stacklevel=4)
        self.last_time = time.monotonic()


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
        """The record of the restart with the highest free energy."""
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
            path = None if checkpoint is None else Path(checkpoint).with_stem(f"{Path(checkpoint).stem}-{restart}")
            trainings.append(fit(make(restart), *args, checkpoint=path, **kwargs))
        # Not copies: modules and optimisers keep these tensors.
        stores.append(copy.copy(state))
    # Means over the last tenth of the steps, as minibatches are noisy.
    energies = [np.mean(training.record["free_energy"][-max(1, training.steps // 10) :]) for training in trainings]
    # A run that ended in NaN has reached nothing.
    best = int(np.argmax(np.nan_to_num(energies, nan=-np.inf, neginf=-np.inf)))
    store.set_state(stores[best])
    return Restarts(trainings, best, stores)
