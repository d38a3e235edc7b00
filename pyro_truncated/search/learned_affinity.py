"""Affinities that are learned, by Gaussian process regression from the data to the posteriors of the populations."""

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
    """An affinity that learns from the data of a training run, and predicts for others from what it has learned.

    New data (``batch.is_new``, as in :meth:`AutoTruncated.infer <pyro_truncated.AutoTruncated.infer>`) are predicted and not remembered,
    unless nothing else is known yet. When training goes on with other data, all that was learned is forgotten. What was learned is part
    of :meth:`state_dict`, so that a run goes on from a checkpoint to the very numbers of one that was never interrupted.

    Attributes:
        regression: the Gaussian process regression, ``None`` before the first batch.
        learns: that it does, and is to :meth:`meet` the data before it is asked for what is searched block by block or on shards. What it
            keeps of this process's data points alone is in :meth:`state_dict` as :mod:`pyro_truncated.distributed.rows_in_states` says.
    """

    learns: ClassVar[bool] = True

    regression: LeaveOneOutRegression | None
    _is_of_new_data: bool

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
        """Learns from all that is searched at a time, of shards of data together: what it has learned is the same on all processes."""
        data, everyone = self._data_of(batch), everyone_of(batch)
        if batch.is_new and self.regression is not None and not self._is_of_new_data:
            return
        if self.regression is not None and not all(everyone(self._knows(data, batch))):
            self.forget()
        self._is_of_new_data = batch.is_new
        self._has_met = all(everyone(self._can_learn_from(batch)))
        if self._has_met:
            self._take_in(data, batch)

    def forget(self) -> None:
        """Forgets all data, and what was fitted to them; a kernel that was given keeps its parameters."""
        self.regression = None
        self._is_of_new_data = self._has_met = False

    def state_dict(self) -> dict[str, Any]:
        """All that was learned, the data remembered included; empty but for the generator if there is nothing."""
        if self.regression is None:
            return super().state_dict()
        learned = {"is_of_new_data": self._is_of_new_data, "memory": self._memory_state(), "regression": self.regression.state_dict()}
        return {**super().state_dict(), **learned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from where an affinity with the same arguments has been; of shards of data, on all processes at a time."""
        self.forget()
        super().load_state_dict(state)
        if "regression" in state:
            self._is_of_new_data = bool(state["is_of_new_data"])
            self.regression = self._remember(state["memory"], state["regression"])

    @abc.abstractmethod
    def _data_of(self, batch: SearchBatch) -> Tensor:
        """What the batch shows to regress on, checked."""

    def _can_learn_from(self, batch: SearchBatch) -> bool:
        """Whether a batch of training data is one to learn from; others are predicted."""
        return True

    @abc.abstractmethod
    def _knows(self, data: Tensor, batch: SearchBatch) -> bool:
        """Whether a batch is of the data remembered."""

    @abc.abstractmethod
    def _take_in(self, data: Tensor, batch: SearchBatch) -> None:
        """Takes in the posteriors of a batch, and fits if it is due."""

    def _predict_met(self, data: Tensor, batch: SearchBatch) -> T:
        """Predicts data points of a batch that it has met, or of which it could not learn."""
        if not self._has_met or (batch.is_new and not self._is_of_new_data):
            return self._predict_new(data)
        if self._has_drawn():
            # The seed that it has fitted with: what comes after it is drawn as if it had learned here.
            ops.draw_seed(batch.source(self.generator))
        return self._predict_known(data, batch)

    def _has_drawn(self) -> bool:
        """Whether it has drawn a seed when it took in the last batch."""
        return True

    @abc.abstractmethod
    def _predict_known(self, data: Tensor, batch: SearchBatch) -> T:
        """Predicts each data point of a batch that it has taken in from the others."""

    @abc.abstractmethod
    def _predict_new(self, data: Tensor) -> T:
        """Predicts data points of which nothing was learned."""

    @abc.abstractmethod
    def _memory_state(self) -> dict[str, Any]:
        """What is remembered beside the parameters of the regression."""

    @abc.abstractmethod
    def _remember(self, memory: Mapping[str, Any], regression: Mapping[str, Any]) -> LeaveOneOutRegression:
        """Takes back what :meth:`_memory_state` has returned; returns a regression on the inputs that the last one had, in its state."""


def everyone_of(batch: SearchBatch) -> Callable[[S], list[S]]:
    """What makes of something that every process of a batch says the list of all that they say."""
    return world.gather if batch.is_spread else lambda value: [value]
