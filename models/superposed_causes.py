"""Base of models of independent binary causes with a dictionary."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, ClassVar, Self

import pyro
import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import Population
from pyro_truncated.distributions import Superposition
from pyro_truncated.extend import check_counts, names_arguments, selected_rows, takes_arrays
from pyro_truncated.models.data_model import (
    DataModel,
    activation,
    best_prior,
    cast_like,
    check_data,
    count_data,
    first_prior,
)
from pyro_truncated.models.dictionary import best_scale, first_dictionary, warn_about_background


class SuperposedCauses(DataModel):
    r"""Base of models :math:`s_h \sim \mathrm{Bernoulli}(\pi_h)`, :math:`y \sim p(y \mid s; W, \dots)`.

    A subclass says by which likelihood the causes superpose, what it takes beside the dictionary, and whether that is real, positive or
    probabilities.
    """

    superposition: Any  # class of the likelihood, a Superposition
    latent_parameters: ClassVar[tuple[str, ...]] = ("weight", "prior")

    weight: Tensor  # dictionary W, (D, H)
    prior: Tensor  # activation probability, a scalar or (H,)

    def __init__(
        self,
        num_observed: int,
        num_latents: int,
        *,
        shared_prior: bool,
        weight: constraints.Constraint = constraints.real,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_counts(num_observed=num_observed, num_latents=num_latents)
        self.num_observed, self.num_latents, self.shared_prior = num_observed, num_latents, shared_prior
        shape = num_observed, num_latents
        if weight is constraints.real:
            first = torch.randn(shape, dtype=dtype)
        else:  # neither small nor all the same
            uniform = torch.rand(shape, dtype=dtype)
            first = 0.2 + 0.5 * uniform if weight is constraints.unit_interval else 0.5 + uniform
        self.weight = PyroParam(first, weight)  # type: ignore[assignment]
        self.prior = PyroParam(first_prior(num_latents, shared_prior, dtype), constraints.unit_interval)  # type: ignore[assignment]

    @takes_arrays
    def forward(self, y: Tensor | None = None, batch_size: int | None = None, num_data: int | None = None) -> Tensor:
        """The model of data ``y (N, D)``; without data it generates ``num_data`` observations."""
        size = count_data(y, num_data)
        self._warn_about_data(y)
        # Outside of the plate, where parameters that were given a prior are drawn.
        prior, weight, others = self.prior, self.weight, self._likelihood_parameters()
        with pyro.plate("data", size, subsample_size=batch_size) as index:
            states = pyro.sample("s", activation(prior, self.num_latents))
            return pyro.sample("y", self.superposition(states, weight, *others), obs=selected_rows(y, index))

    def likelihood(self, states: Tensor | None = None, weight: Tensor | None = None) -> Superposition:
        r"""The likelihood :math:`p(y \mid s)`, of any states unless some are given."""
        weight, others = self.weight if weight is None else weight, self._likelihood_parameters()
        if states is None:
            # Parameters satisfy their constraints by the way they are kept.
            return self.superposition(weight.new_zeros(self.num_latents), weight, *others, validate_args=False)
        return self.superposition(states, weight, *others)

    @property
    def data_support(self) -> constraints.Constraint:
        """What the likelihood can observe, entry by entry."""
        support: Any = self.likelihood().support
        return support.base_constraint

    def _likelihood_parameters(self) -> tuple[Tensor | None, ...]:
        """What the likelihood takes after the dictionary."""
        return ()

    def _warn_about_data(self, y: Tensor | None) -> None:
        """Warns of data that the model cannot explain."""

    @torch.no_grad()
    @takes_arrays
    def reconstruct(self, population: Population, y: Tensor) -> Tensor:
        """Posterior mean of the noise-free data, for denoising and in-painting.

        Missing entries are filled in. Data points of the population that have never been scored are scored first. The means ``(N, D)`` are
        of the type of the data; of integers in torch's default type.
        """
        population = self._rescore(population, check_data(y, self.num_observed))
        y = cast_like(y, y)
        return self.likelihood().reconstruct(population, y).to(y.dtype)

    def _rescore(self, population: Population, y: Tensor) -> Population:
        """The population, with new data points scored under the current model."""
        is_new = population.log_joint.isnan().any(-1)
        if not bool(is_new.any()):
            return population
        prior = self.prior.double().expand(self.num_latents)
        scores = self.likelihood().packed_log_prob(population.words[is_new], population.select_rows(y)[is_new], prior.logit())
        log_joint = population.log_joint.clone()
        log_joint[is_new] = (scores + torch.log1p(-prior).sum()).to(log_joint)
        return dataclasses.replace(population, log_joint=log_joint)

    def _start_prior(self) -> None:
        self.prior = first_prior(self.num_latents, self.shared_prior, self.prior.dtype).to(self.prior)

    def _maximize_prior(self, statistics: dict[str, Tensor]) -> None:
        self.prior = best_prior(statistics["states"], statistics["num_data"], self.shared_prior).to(self.prior)

    @torch.no_grad()
    def with_latents(self, index: Tensor) -> Self:
        """Returns a new model whose latent ``i`` copies latent ``index[i]``."""
        other = copy.deepcopy(self)
        for name in self.latent_parameters:
            value = getattr(other, f"{name}_unconstrained")
            if value.dim():
                setattr(other, f"{name}_unconstrained", torch.nn.Parameter(value[..., index.to(value.device)].clone()))
        if self.prior.dim() == 0:
            other.prior = (self.prior * self.num_latents / len(index)).clamp(max=0.5)
        other.num_latents = len(index)
        return other


class SparseCoding(SuperposedCauses):
    r"""Base of models :math:`s_h \sim \mathrm{Bernoulli}(\pi_h)`, :math:`y \sim p(y \mid s; W, \sigma)`.

    A subclass says by which likelihood the causes superpose, and whether the dictionary is positive.

    Elements start from random data points: positive ones from their magnitudes, in :class:`BinarySparseCoding` from what others share with
    them. :math:`\sigma^2` starts as the data's variance, :math:`\pi = 2 / H`. Slabs, where a model has them, start with mean 1 and variance
    1/2. An offset starts as the lower quartile of every dimension; elements are then differences from it, and the variance is that within
    dimensions. A positive dictionary warns of data on a background (``BackgroundWarning``).

    Args:
        num_observed: observed dimensions ``D``.
        num_latents: number of latents ``H``.
        shared_prior: whether all latents share one :math:`\pi`.
        dtype: type of the parameters. Default: torch's.

    Attributes:
        weight: dictionary :math:`W`, ``(D, H)``.
        scale: noise standard deviation :math:`\sigma`, a scalar.
        prior: activation probability :math:`\pi`, a scalar or ``(H,)``.

    Raises:
        ValueError: if a size is no positive integer.
    """

    is_positive: ClassVar[bool] = False
    _has_met_data = False

    scale: Tensor

    @names_arguments
    def __init__(self, num_observed: int, num_latents: int, *, shared_prior: bool = True, dtype: torch.dtype | None = None) -> None:
        support = constraints.positive if self.is_positive else constraints.real
        super().__init__(num_observed, num_latents, shared_prior=shared_prior, weight=support, dtype=dtype)
        self.scale = PyroParam(torch.ones((), dtype=dtype), constraints.positive)  # type: ignore[assignment]

    def _likelihood_parameters(self) -> tuple[Tensor | None, ...]:
        return (self.scale,)

    def _start(self, y: Tensor, generator: torch.Generator | None) -> None:
        weight, deviation = self._first_dictionary(y, generator)
        self.weight = weight.to(self.weight).contiguous()
        self.scale = deviation.to(self.scale)
        self._start_prior()

    def _warn_about_data(self, y: Tensor | None) -> None:
        """Looks once, at the first data."""
        if self.is_positive and y is not None and len(y) and not self._has_met_data:
            self._has_met_data = True
            warn_about_background(self, y)

    def _first_dictionary(self, y: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Elements and the deviation of the noise to start from."""
        self._has_met_data = False
        self._warn_about_data(y)
        weight, deviation, floor = first_dictionary(y, self.num_latents, generator)
        return weight.abs().maximum(floor) if self.is_positive else weight, deviation

    def _set_dictionary(self, weight: Tensor, statistics: dict[str, Tensor], errors: Tensor) -> None:
        """Sets the dictionary, and maximises noise and prior."""
        self.weight = weight.to(self.weight)
        self.scale = best_scale(errors.sum(), self._power(statistics), statistics["observed"].sum()).to(self.scale)
        self._maximize_prior(statistics)

    def _power(self, statistics: dict[str, Tensor]) -> Tensor:
        """Returns the sum of squares that defines the data's unit."""
        return statistics["squares"].sum()
