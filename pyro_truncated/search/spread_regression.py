"""Leave-one-out regression on data points spread over processes."""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.distributed import world
from pyro_truncated.gp.cholesky import stable_cholesky
from pyro_truncated.gp.subset.leave_one_out import LeaveOneOutRegression

# Kernel and pivots are chosen from so many data points; to choose pivots, no more are ever looked at in one process.
MOST_ROWS = 20_000
# As in a regression of one process: below it, what is left of a data point's own share is rounding.
_SMALLEST_SHARE = 1e-12


def rows_of_all(values: Tensor, positions: Tensor, seed: int, most: int | None) -> Tensor:
    """Gathers rows of all processes, or a random part of many.

    The part does not depend on how processes share them.

    Args:
        values: ``(n, ...)`` of the data points of this process.
        positions: of these among the data of all processes.
        seed: the same on every process.
        most: how many, roughly; ``None`` for all.
    """
    number = sum(world.gather(len(values)))
    if most is not None and number > most:
        values = values[ops.uniform(positions, generator=ops.Stream(seed)) < most / number]
    return torch.cat(world.gather(values))


class SpreadRegression(abc.ABC):
    """A regression fitted alike on all processes.

    :meth:`take` is for all of them, predictions are for one.

    Args:
        regression: the regression.
        inputs: those of this process's own data points that it is of, ``(n, D)``.
    """

    def __init__(self, regression: LeaveOneOutRegression, inputs: Tensor) -> None:
        self.regression, self.inputs = regression, inputs

    @abc.abstractmethod
    def take(self, targets: Tensor) -> None:
        """Takes in the targets ``(n, P)`` of this process's own data points."""

    @abc.abstractmethod
    def loo(self, rows: Tensor) -> Tensor:
        """Means ``(m, P)`` of some of its own data points, from all others."""

    @abc.abstractmethod
    def predict(self, new_inputs: Tensor) -> Tensor:
        """Means ``(m, P)`` at new inputs."""


class ExactSpread(SpreadRegression):
    """Every process has the whole matrix, and the targets of all."""

    def take(self, targets: Tensor) -> None:
        """See :class:`SpreadRegression`."""
        every = world.gather(targets)
        self._first = sum(map(len, every[: world.rank()]))
        self._targets = torch.cat(every)

    def loo(self, rows: Tensor) -> Tensor:
        """See :class:`SpreadRegression`."""
        return self.regression.loo(self._targets, self._first + rows)[0]

    def predict(self, new_inputs: Tensor) -> Tensor:
        """See :class:`SpreadRegression`."""
        return self.regression.predict(new_inputs, self._targets)[0]


class LowRankSpread(SpreadRegression):
    r"""A low-rank factor :math:`L` by rows of processes; only sums travel.

    Let :math:`B = I + L^\top L / \lambda` and :math:`c = B^{-1} L^\top R / \lambda`. A row of :math:`C^{-1} R` is
    :math:`(R_n - L_n c) / \lambda`. The diagonal of :math:`C^{-1}` is :math:`(1 - L_n B^{-1} L_n^\top / \lambda) /
    \lambda`. The prediction at a new input with features :math:`f` is :math:`f c`.
    """

    def __init__(self, regression: LeaveOneOutRegression, inputs: Tensor) -> None:
        super().__init__(regression, inputs)
        self._factor, self._noise = regression.features(inputs), regression.noise
        (products,) = world.add([self._factor.mT @ self._factor / self._noise])
        self._cholesky = stable_cholesky(torch.eye(len(products), dtype=products.dtype, device=products.device) + products)

    def take(self, targets: Tensor) -> None:
        """See :class:`SpreadRegression`."""
        (products,) = world.add([self._factor.mT @ targets / self._noise])
        self._targets, self._coefficients = targets, torch.cholesky_solve(products, self._cholesky)

    def loo(self, rows: Tensor) -> Tensor:
        """See :class:`SpreadRegression`."""
        factor, targets = self._factor[rows], self._targets[rows]
        whitened: Tensor = torch.linalg.solve_triangular(self._cholesky, factor.mT, upper=False)
        share: Tensor = (1 - whitened.square().sum(0) / self._noise).clamp(min=_SMALLEST_SHARE)
        return targets - (targets - factor @ self._coefficients) / share.unsqueeze(-1)

    def predict(self, new_inputs: Tensor) -> Tensor:
        """See :class:`SpreadRegression`."""
        means: Tensor = self.regression.features(new_inputs) @ self._coefficients
        return means


def spread(regression: LeaveOneOutRegression, inputs: Tensor) -> SpreadRegression:
    """The kind of spread regression that a regression needs."""
    return (ExactSpread if regression.rank is None else LowRankSpread)(regression, inputs)
