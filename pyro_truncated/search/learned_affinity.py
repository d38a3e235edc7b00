"""Affinities that are learned, by Gaussian process regression from the data to the posteriors of the populations."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

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
        learns_together: whether it learns from shards of data, by a method ``meet`` like that of a search.
    """

    learns_together: ClassVar[bool] = False

    regression: LeaveOneOutRegression | None
    _is_of_new_data: bool

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator
        self.forget()

    def __call__(self, batch: SearchBatch) -> T:
        """Affinities of the batch's data points.

        Raises:
            ValueError: if the inputs are not those of the batch's data points, or there are none.
            NotImplementedError: for shards of data, if it does not learn from these together.
        """
        if batch.is_spread and not self.learns_together:
            raise NotImplementedError(
                f"{type(self).__name__} learns from the data of one process; these are shards: train it on whole data"
            )
        data = self._data_of(batch)
        if batch.is_met and self.learns_together:
            return self._predict_met(data, batch)
        knows = self.regression is not None and not self._is_of_new_data
        if (batch.is_new and knows) or not self._can_learn_from(batch):
            return self._predict_new(data)
        if self.regression is not None and not self._knows(data, batch):
            self.forget()
        self._is_of_new_data = batch.is_new
        return self._learn(data, batch)

    def forget(self) -> None:
        """Forgets all data, and what was fitted to them; a kernel that was given keeps its parameters."""
        self.regression = None
        self._is_of_new_data = False

    def state_dict(self) -> dict[str, Any]:
        """All that was learned, the data remembered included; empty but for the generator if there is nothing."""
        if self.regression is None:
            return super().state_dict()
        learned = {"is_of_new_data": self._is_of_new_data, "memory": self._memory_state(), "regression": self.regression.state_dict()}
        return {**super().state_dict(), **learned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from where an affinity with the same arguments has been."""
        self.forget()
        super().load_state_dict(state)
        if "regression" in state:
            self._is_of_new_data = bool(state["is_of_new_data"])
            self.regression = self._remember(state["memory"])
            self.regression.load_state_dict(state["regression"])

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
    def _learn(self, data: Tensor, batch: SearchBatch) -> T:
        """Takes in a batch, fits if it is due, and predicts each data point from the others."""

    def _predict_met(self, data: Tensor, batch: SearchBatch) -> T:
        """Predicts data points that it has met."""
        return self._predict_new(data)

    @abc.abstractmethod
    def _predict_new(self, data: Tensor) -> T:
        """Predicts data points of which nothing was learned."""

    @abc.abstractmethod
    def _memory_state(self) -> dict[str, Any]:
        """What is remembered beside the parameters of the regression."""

    @abc.abstractmethod
    def _remember(self, memory: Mapping[str, Any]) -> LeaveOneOutRegression:
        """Takes back what :meth:`_memory_state` has returned; returns a regression on the inputs that the last one had."""


def alone(value: S) -> list[S]:
    """What every process says, where there is one."""
    return [value]
