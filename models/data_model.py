"""What models share: data, initialisation, and the prior of binary causes."""

from __future__ import annotations

import abc
from typing import Self

import numpy as np
import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import Population
from pyro_truncated.extend import UniqueModule, check_observable, generator_device, names_arguments, some_rows, takes_arrays

# The least probabilities and rates, and the least share of a mean square, that are learned: from zero no EM step comes back.
FLOOR = 1e-6
# The scale of data is at least this share of their size.
SCALE_FLOOR = 1e-3
# Expected counts below this say nothing; components and objects with fewer expected data points have none.
MIN_COUNT, MIN_COMPONENT_COUNT = 1e-10, 1e-8
# Where learning starts from is seen in so many data points.
MOST_ROWS = 20_000
# Data points of mixtures that are worked on at a time; where most components are not looked at, or few numbers are held, more of them.
ROWS_PER_BLOCK, MAX_ROWS_PER_BLOCK = 2**14, 2**16


def first_rows(y: Tensor, generator: torch.Generator | None) -> Tensor:
    """The data to initialise from, in floating point, subsampled if very many."""
    rows = some_rows(y, MOST_ROWS, generator)
    return cast_like(rows, rows)


def check_data(y: Tensor, num_observed: int) -> Tensor:
    """Returns the data if they have shape ``(N, num_observed)``."""
    check_real(y)
    if y.dim() != 2 or y.shape[1] != num_observed or not len(y):
        raise ValueError(f"y must have shape (N, {num_observed}) with N > 0, one row per data point; got {tuple(y.shape)}")
    return y


def check_real(y: Tensor, name: str = "y") -> None:
    """Refuses complex data, including NumPy arrays."""
    if y.is_complex() if isinstance(y, Tensor) else np.iscomplexobj(y):
        raise TypeError(f"{name} must hold real numbers; got {y.dtype}")


def count_data(y: Tensor | None, num_data: int | None) -> int:
    """The number of data points: observed, or generated, by default one."""
    if y is None:
        return num_data or 1
    check_real(y)
    return len(y)


def cast_like(mean: Tensor, y: Tensor) -> Tensor:
    """Means in the data's type, for integers in torch's default type."""
    return mean.to(y.dtype if y.is_floating_point() else torch.get_default_dtype())


class DataModel(UniqueModule):
    """Base of models of data ``y (N, D)`` with closed-form M-steps."""

    num_observed: int
    data_support: constraints.Constraint

    @names_arguments
    @torch.no_grad()
    @takes_arrays
    def initialize(self, y: Tensor, generator: torch.Generator | None = None) -> Self:
        """Sets the parameters to where learning starts from, as the class says.

        Data ``(N, D)`` that training refuses are refused here in its words, by name and data point. Returns the model itself.
        """
        check_observable(self, check_data(y, self.num_observed), self.data_support)
        self._start(first_rows(y, generator), generator)
        return self

    @abc.abstractmethod
    def _start(self, y: Tensor, generator: torch.Generator | None) -> None:
        """Initialises from data in floating point."""

    @torch.no_grad()
    @takes_arrays
    def sufficient_statistics(
        self, population: Population, y: Tensor, batch_size: int | None = None, num_data: int | None = None, *, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        """Sums over the population's data points that ``maximize`` needs, see :class:`~pyro_truncated.ClosedFormModel`."""
        return self._statistics(population, check_data(y, self.num_observed), temperature)

    @abc.abstractmethod
    def _statistics(self, population: Population, y: Tensor, temperature: float) -> dict[str, Tensor]:
        """The sums, of data that are of the right shape."""


def random_rows(y: Tensor, num_rows: int, generator: torch.Generator | None) -> Tensor:
    """Random data points, distinct if possible, missing entries replaced by means."""
    order = torch.randperm(len(y), generator=generator, device=generator_device(generator)).to(y.device)
    rows = y[order.repeat(-(-num_rows // len(y)))[:num_rows]]
    return torch.where(rows.isnan(), y.nanmean(0).nan_to_num(), rows)


def first_prior(num_latents: int, is_shared: bool, dtype: torch.dtype | None = None) -> Tensor:
    """Initial probabilities, a scalar or ``(H,)``, for two active latents."""
    return torch.full(() if is_shared else (num_latents,), min(0.5, 2 / num_latents), dtype=dtype)


def activation(prior: Tensor, num_latents: int) -> TorchDistribution:
    """The prior of so many latents, each active with its probability."""
    probability = dist.Bernoulli(prior, validate_args=None if prior.is_cpu else False)
    return probability.expand([num_latents]).to_event(1)


def best_prior(active: Tensor, num_data: Tensor, is_shared: bool) -> Tensor:
    r"""The maximiser :math:`\pi_h = \frac1N \sum_n \langle s_h \rangle`, if shared its mean over latents."""
    frequency = active / num_data
    frequency = frequency.mean() if is_shared else frequency
    return frequency.clamp(FLOOR, 1 - FLOOR)
