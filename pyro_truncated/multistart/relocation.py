"""Moves of mixture components between training steps."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from pyro_truncated.training.loop import Training
from pyro_truncated.utils.arguments import check_count


@runtime_checkable
class RelocatingModel(Protocol):
    """A mixture with moves of components, such as ``GaussianMixture``."""

    def split_and_merge(self, guide: Any, y: Tensor, generator: torch.Generator | None = None) -> int:
        """Moves components while the free energy rises; returns how many."""


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
        is_relocating: bool = isinstance(model, RelocatingModel)
        if not is_relocating:
            raise TypeError(f"SplitAndMerge needs a mixture with the method split_and_merge; {type(model).__name__} has none")
        self.is_done = False

    def __call__(self, training: Training) -> dict[str, float]:
        """Called after every step."""
        return {"moved": float(self.after(training.steps, training.svi.model, training.svi.guide))}

    def after(self, steps: int, model: Any, guide: Any) -> int:
        """How many components move after so many steps."""
        if self.is_done or steps % self.every:
            return 0
        moved: int = model.split_and_merge(guide, self.y, self.generator)
        self.is_done = moved == 0
        return moved


class Relocations:
    """Moves mixture components every ten steps of a run.

    All data must be here. Random numbers are its own.

    Args:
        model: any model.
        guide: its truncated guide, which has seen the data, if it has one.
        y: all data.
    """

    def __init__(self, model: Any, guide: Any, y: Tensor) -> None:
        is_relocating: bool = isinstance(model, RelocatingModel) and guide is not None and not guide.populations.is_part
        self._moves = SplitAndMerge(y, generator=torch.Generator().manual_seed(0)) if is_relocating else None
        self._model, self._guide, self._steps = model, guide, 0

    @property
    def are_done(self) -> bool:
        """Whether nothing will move any more."""
        return self._moves is None or self._moves.is_done

    def before_step(self) -> None:
        """Moves components if it is time, never before the first step."""
        if self._moves is not None and self._steps:
            self._moves.after(self._steps, self._model, self._guide)
        self._steps += 1

    def move_at_convergence(self) -> None:
        """Moves components at once, after EM has converged."""
        if self._moves is not None and not self._moves.is_done:
            self._moves.after(0, self._model, self._guide)
