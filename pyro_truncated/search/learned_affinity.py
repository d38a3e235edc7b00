"""Affinities learned by Gaussian processes from data to posteriors."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.distributed import world
from pyro_truncated.gp.subset.leave_one_out import LeaveOneOutRegression
from pyro_truncated.search.base import SearchBatch, Stateful

S = TypeVar("S")
T = TypeVar("T")


class LearnedAffinity(Stateful, abc.ABC, Generic[T]):
    """An affinity that learns from training data and predicts for others.

    New data (``batch.is_new``, as in :meth:`AutoTruncated.infer <pyro_truncated.AutoTruncated.infer>`) are predicted
    and not remembered, unless nothing else is known. When training continues with other data, everything is
    forgotten. What was learned is part of :meth:`state_dict`. So a run resumed from a checkpoint has the numbers of
    one that was never interrupted.

    Attributes:
        regression: the Gaussian process regression, ``None`` before the first batch.
        learns: that it has to :meth:`meet` the data first where they are searched in blocks or on shards. What it
            keeps of this process's data points is in :meth:`state_dict` in the form of
            :func:`pyro_truncated.distributed.shards.rows_of`.
    """

    learns: ClassVar[bool] = True

    regression: LeaveOneOutRegression | None
    _is_of_new_data: bool
    # Whether it drew a seed when it took in the last batch.
    _has_drawn: bool = True

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator
        self.forget()

    def __call__(self, batch: SearchBatch) -> T:
        """Affinities of the batch's data points.

        Raises:
            ValueError: if the inputs are not those of the batch's data points, or there are none.
        """
        data = self._data_of(batch)
        if batch.is_met:
            return self._predict_met(data, batch)
        knows = self.regression is not None and not self._is_of_new_data
        if (batch.is_new and knows) or not self._can_learn_from(batch):
            return self._predict_new(data)
        if self.regression is not None and not self._knows(data, batch):
            self.forget()
        self._is_of_new_data = batch.is_new
        self._take_in(data, batch)
        return self._predict_known(data, batch)

    def meet(self, batch: SearchBatch) -> None:
        """Learns from all data searched at a time, of shards together.

        All processes learn the same.
        """
        data, everyone = self._data_of(batch), gather_function(batch)
        if batch.is_new and self.regression is not None and not self._is_of_new_data:
            return
        if self.regression is not None and not all(everyone(self._knows(data, batch))):
            self.forget()
        self._is_of_new_data = batch.is_new
        self._has_met = all(everyone(self._can_learn_from(batch)))
        if self._has_met:
            self._take_in(data, batch)

    def forget(self) -> None:
        """Forgets all data and fits; a given kernel keeps its parameters."""
        self.regression = None
        self._is_of_new_data = self._has_met = False

    def state_dict(self) -> dict[str, Any]:
        """Returns all that was learned, the remembered data included.

        It is empty but for the generator if there is nothing.
        """
        if self.regression is None:
            return super().state_dict()
        learned = {"is_of_new_data": self._is_of_new_data, "memory": self._memory_state(), "regression": self.regression.state_dict()}
        return {**super().state_dict(), **learned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores an affinity with the same arguments.

        Of shards of data it must be called on all processes.
        """
        self.forget()
        super().load_state_dict(state)
        if "regression" in state:
            self._is_of_new_data = bool(state["is_of_new_data"])
            self.regression = self._remember(state["memory"], state["regression"])

    @abc.abstractmethod
    def _data_of(self, batch: SearchBatch) -> Tensor:
        """What the batch shows to regress on, checked."""

    def _can_learn_from(self, batch: SearchBatch) -> bool:
        """Whether to learn from a batch of training data; others are predicted."""
        return True

    @abc.abstractmethod
    def _knows(self, data: Tensor, batch: SearchBatch) -> bool:
        """Whether a batch is of the data remembered."""

    @abc.abstractmethod
    def _take_in(self, data: Tensor, batch: SearchBatch) -> None:
        """Stores the posteriors of a batch, and fits if due."""

    def _predict_met(self, data: Tensor, batch: SearchBatch) -> T:
        """Predicts met data points, or those of which it could not learn."""
        if not self._has_met or (batch.is_new and not self._is_of_new_data):
            return self._predict_new(data)
        if self._has_drawn:
            # The seed that it has fitted with: what comes after it is drawn as if it had learned here.
            ops.draw_seed(batch.source(self.generator))
        return self._predict_known(data, batch)

    @abc.abstractmethod
    def _predict_known(self, data: Tensor, batch: SearchBatch) -> T:
        """Predicts each data point of a batch from the others."""

    @abc.abstractmethod
    def _predict_new(self, data: Tensor) -> T:
        """Predicts data points of which nothing was learned."""

    @abc.abstractmethod
    def _memory_state(self) -> dict[str, Any]:
        """What is remembered beside the parameters of the regression."""

    @abc.abstractmethod
    def _remember(self, memory: Mapping[str, Any], regression: Mapping[str, Any]) -> LeaveOneOutRegression:
        """Restores :meth:`_memory_state`, and returns a regression in its state.

        It is on the inputs of the last one.
        """


def gather_function(batch: SearchBatch) -> Callable[[S], list[S]]:
    """Returns a function that gathers what all processes of a batch say."""
    return world.gather if batch.is_spread else lambda value: [value]
