"""Callbacks of :func:`~pyro_truncated.fit`.

They draw curves, move components and re-initialise unused latents.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from pyro_truncated.em.closed_form import ClosedForm, ClosedFormModel
from pyro_truncated.training.loop import Training
from pyro_truncated.utils.arguments import check_count

__all__ = ["RestartUnused", "SplitAndMerge", "TensorBoard", "WandB"]


class _Curves:
    """Sends the last value of every recorded quantity every so many steps."""

    def __init__(self, every: int) -> None:
        self.every = check_count("every", every)

    def start(self, training: Training) -> None:
        """Called once before the first step, also of a resumed run."""
        self._open()

    def __call__(self, training: Training) -> None:
        """Called after every step.

        It gets the quantities of the callbacks that precede it.
        """
        if training.steps % self.every == 0:
            now = {name: values[-1] for name, values in training.record.items() if values}
            self._send({**now, "seconds": training.seconds[-1]}, training.steps)

    def _open(self) -> None:
        raise NotImplementedError

    def _send(self, values: Mapping[str, float], step: int) -> None:
        raise NotImplementedError


class TensorBoard(_Curves):
    """Writes free energy, seconds and quantities of other callbacks for TensorBoard.

    It needs the package ``tensorboard`` (``pip install "pyro-truncated[tensorboard]"``), which is loaded when training starts. A run that
    is continued from a checkpoint continues the curves.

    Example::

        fit(svi, y, steps=20, callbacks=[TensorBoard("runs/first")])

    Args:
        folder: where the curves go; ``tensorboard --logdir`` of this folder or one above shows them. Default: as TensorBoard chooses.
        every: steps between two points of a curve.
        writer: a ``torch.utils.tensorboard.SummaryWriter`` of one's own, in place of the folder.

    Raises:
        ImportError: when training starts, if the package is missing.
        ValueError: for a folder beside a writer, or ``every`` below 1.
    """

    def __init__(self, folder: str | Path | None = None, *, every: int = 1, writer: Any = None) -> None:
        super().__init__(every)
        if folder is not None and writer is not None:
            raise ValueError(f"TensorBoard takes a folder or a writer, not both; got {folder} and a {type(writer).__name__}")
        self.folder, self.writer = folder, writer

    def _open(self) -> None:
        if self.writer is not None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError('TensorBoard needs the package tensorboard: pip install "pyro-truncated[tensorboard]"') from error
        self.writer = SummaryWriter(None if self.folder is None else str(self.folder))

    def _send(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()


class WandB(_Curves):
    """Sends free energy, seconds and quantities of callbacks to Weights & Biases.

    It needs the package ``wandb`` (``pip install "pyro-truncated[wandb]"``), which is loaded when training starts.

    Example::

        fit(svi, y, steps=20, callbacks=[WandB(project="bars", config={"num_states": 64})])

    Args:
        run: a run of one's own, from ``wandb.init``. Default: one is started with training.
        every: steps between two points of a curve.
        **options: for ``wandb.init``.

    Raises:
        ImportError: when training starts, if the package is missing.
        ValueError: for options beside a run, or ``every`` below 1.
    """

    def __init__(self, run: Any = None, *, every: int = 1, **options: Any) -> None:
        super().__init__(every)
        if run is not None and options:
            raise ValueError(f"options {sorted(options)} cannot change a run that exists; pass them to wandb.init")
        self.run, self.options = run, options

    def _open(self) -> None:
        if self.run is not None:
            return
        try:
            import wandb
        except ImportError as error:
            raise ImportError('WandB needs the package wandb: pip install "pyro-truncated[wandb]"') from error
        self.run = wandb.init(**self.options)

    def _send(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)


@runtime_checkable
class RestartingModel(Protocol):
    """A model whose unused latents can start again, such as ``BinarySparseCoding``."""

    def restart_unused(self, y: Tensor, generator: torch.Generator | None = None) -> int:
        """Gives latents that are hardly ever on another start; how many."""


class SplitAndMerge:
    """A callback of :func:`~pyro_truncated.fit` that moves mixture components.

    Every so many steps it calls :meth:`GaussianMixture.split_and_merge <pyro_truncated.models.GaussianMixture.split_and_merge>`. That
    never lowers the free energy of all data, and costs about two passes through them. Once nothing moves, it is not called again. The
    record ``moved`` counts the components.

    Example:
        >>> from pyro_truncated.callbacks import SplitAndMerge
        >>> from pyro_truncated.models import GaussianMixture
        >>> from pyro_truncated.search import NeighbourSearch
        >>> y = torch.cat([torch.randn(100, 2), torch.randn(100, 2) + 9])
        >>> model = GaussianMixture(2, 10, covariance="diag").initialize(y)
        >>> guide = AutoTruncated(model, num_states=4, init=model.likeliest_components(y, 4))
        >>> svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(NeighbourSearch()))
        >>> training = fit(svi, y, 50, steps=20, callbacks=[SplitAndMerge(y, every=4)], progress=False)
        >>> len(training.record["moved"])
        20

    Args:
        y: all data, those that the guide has the populations of.
        every: steps between two calls; on minibatches those of a pass through the data.
        generator: source of randomness; default: torch's global one.

    Raises:
        ValueError: if ``every`` is below 1.
        TypeError: when training starts, if the model has no ``split_and_merge``.
        NotImplementedError: when it is first called, where data are shared out over several processes.
    """

    # Missing components show after ten steps.
    def __init__(self, y: Tensor, *, every: int = 10, generator: torch.Generator | None = None) -> None:
        self.y, self.every, self.generator = y, check_count("every", every), generator
        self.is_done = False

    def start(self, training: Training) -> None:
        """Prepares a run, new or continued, before its first step."""
        model = training.svi.model
        if not hasattr(model, "split_and_merge"):
            raise TypeError(f"SplitAndMerge needs a mixture with the method split_and_merge; {type(model).__name__} has none")
        self.is_done = False

    def __call__(self, training: Training) -> dict[str, float]:
        """Called after every step."""
        num_moves = 0
        if not self.is_done and training.steps % self.every == 0:
            num_moves = training.svi.model.split_and_merge(training.svi.guide, self.y, self.generator)
            self.is_done = num_moves == 0
        return {"moved": float(num_moves)}


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
        if is_closed_form and ClosedForm.find(model) is not training.svi.optim:
            raise TypeError(
                f"RestartUnused needs a {type(model).__name__} trained by ClosedForm; got {type(training.svi.optim).__name__}. "
                "Pass the last ClosedForm(model) that was made for the model to SVI."
            )

    def __call__(self, training: Training) -> dict[str, float]:
        """Called after every step."""
        is_due = training.steps % self.every == 0 and (self.until is None or training.steps <= self.until)
        return {"restarted": float(training.svi.model.restart_unused(self.y, self.generator) if is_due else 0)}
