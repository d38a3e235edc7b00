"""Base of sparse coding models.

They have Gaussian data, independent binary causes and a dictionary.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.distributions import or_missing
from pyro_truncated.extend import check_observable, names_arguments, takes_arrays
from pyro_truncated.models.binary_causes import best_prior, check_data, first_prior, first_rows
from pyro_truncated.models.dictionary import best_scale, first_dictionary
from pyro_truncated.models.offset_warning import warn_about_background
from pyro_truncated.models.superposed_causes import SuperposedCauses


class SparseCoding(SuperposedCauses):
    r"""Base of models :math:`s_h \sim \mathrm{Bernoulli}(\pi_h)`, :math:`y \sim p(y \mid s; W, \sigma)`.

    A subclass says by which likelihood the causes superpose, and whether the dictionary is positive.

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

    weight: Tensor
    prior: Tensor
    scale: Tensor

    def __init__(self, num_observed: int, num_latents: int, *, shared_prior: bool, dtype: torch.dtype | None = None) -> None:
        support = constraints.positive if self.is_positive else constraints.real
        super().__init__(num_observed, num_latents, shared_prior=shared_prior, weight=support, dtype=dtype)
        self.scale = PyroParam(torch.ones((), dtype=dtype), constraints.positive)  # type: ignore[assignment]

    def _parameters_of_superposition(self) -> tuple[Tensor | None, ...]:
        """What the likelihood takes after the dictionary."""
        return (self.scale,)

    @names_arguments
    @torch.no_grad()
    @takes_arrays
    def initialize(self, y: Tensor, generator: torch.Generator | None = None) -> Self:
        r"""Starts from the data.

        Dictionary elements are random data points. Positive elements are their magnitudes, and in
        :class:`BinarySparseCoding` elements are what others share with them. :math:`\sigma^2` is
        the data's variance, and :math:`\pi = 2 / H`. Slabs, where a model has them, start with mean
        1 and variance 1/2. An offset starts as the lower quartile of every dimension. Elements are
        then the difference of random data points from it, and the variance is that within
        dimensions.

        Args:
            y: data ``(N, D)``.
            generator: source of randomness.

        Returns:
            The model itself.

        Raises:
            ValueError: for data that training refuses, in its words: those outside the likelihood's support, by name and data point.

        Warns:
            BackgroundWarning: if the dictionary is positive and the data lie on a background.
        """
        check_observable(self, check_data(y, self.num_observed), or_missing(constraints.real))
        weight, deviation = self._first_dictionary(first_rows(y, generator), generator)
        self.weight = weight.to(self.weight).contiguous()
        self.scale = deviation.to(self.scale)
        self.prior = first_prior(self.num_latents, self.shared_prior, self.prior.dtype).to(self.prior)
        return self

    def _meet(self, y: Tensor | None) -> None:
        """Looks once, at the first data."""
        if self.is_positive and y is not None and not self._has_met_data:
            self._has_met_data = True
            warn_about_background(self, y)

    def _first_dictionary(self, y: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Elements and the deviation of the noise to start from."""
        self._has_met_data = False
        self._meet(y)
        weight, deviation, floor = first_dictionary(y, self.num_latents, generator)
        return weight.abs().maximum(floor) if self.is_positive else weight, deviation

    def _set_dictionary(self, weight: Tensor, statistics: dict[str, Tensor], errors: Tensor) -> None:
        """Sets the dictionary, and maximises noise and prior.

        The expected squared errors are given.
        """
        self.weight = weight.to(self.weight)
        self.scale = best_scale(errors.sum(), self._power(statistics), statistics["observed"].sum()).to(self.scale)
        self.prior = best_prior(statistics["states"], statistics["num_data"], self.shared_prior).to(self.prior)

    def _power(self, statistics: dict[str, Tensor]) -> Tensor:
        """Returns the sum of squares that defines the data's unit."""
        return statistics["squares"].sum()
