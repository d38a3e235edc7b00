"""A dictionary with a learned offset: initialisation and joint M-step."""

from __future__ import annotations

import dataclasses
import math

import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import Population
from pyro_truncated.distributions import LinearSuperposition
from pyro_truncated.extend import UniqueModule
from pyro_truncated.models.dictionary import best_dictionary, best_dictionary_and_offset, first_dictionary, noise_floor, with_ridge
from pyro_truncated.models.offset_warning import row_quantile

Statistics = dict[str, Tensor]

# How many units in the last place of the data their deviation must be, to be one.
_ROUNDING = 2e3


class LinearDictionary(UniqueModule):
    r"""Base of models :math:`y \sim \mathcal N(W s + b, \sigma^2 I)`.

    The offset :math:`b` may be left out.

    Attributes:
        weight: dictionary :math:`W`, ``(D, H)``.
        scale: noise standard deviation :math:`\sigma`, a scalar.
        bias: offset :math:`b`, ``(D,)``; ``None`` in models without.
        center: where moments are taken, ``(D,)``. The data's mean after ``initialize``, which avoids cancellation. Only with an offset.
        ridge: :math:`\lambda` of a prior :math:`W_{dh} \sim \mathcal N(0, \sigma^2 / \lambda)` of the dictionary's entries in the M-step,
            in squares of a coefficient. Where little is observed, elements that fit it closely explain what is missing badly.
            It is for training that has found the elements: at first, elements that are hardly used yet would vanish with it.
    """

    num_observed: int
    num_latents: int
    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    center: Tensor
    ridge: float = 0.0

    def _set_ridge(self, ridge: float) -> None:
        if not 0 <= ridge < math.inf:
            raise ValueError(f"ridge must be a finite number of at least 0; got {ridge}")
        self.ridge = float(ridge)

    def _make_offset(self, offset: bool, dtype: torch.dtype | None) -> None:
        if not offset:
            self.bias = None
            return
        self.bias = PyroParam(torch.zeros(self.num_observed, dtype=dtype), constraints.real)  # type: ignore[assignment]
        self.register_buffer("center", torch.zeros(self.num_observed, dtype=torch.float64))

    def _first_dictionary(self, y: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Sets the offset; returns elements and the noise's deviation.

        With the offset, elements (about) equal random data points.
        """
        if self.bias is None:
            weight, deviation, _ = first_dictionary(y, self.num_latents, generator)
            return weight, deviation
        self.center = y.double().nanmean(0).nan_to_num()
        above = y.double() - self.center
        # Elements that add up lie above the offset, most of which is seen where few of them are on. On bars the lower quartile is a better
        # start than the mean, the median, and quantiles near the minimum; with annealing lower ones are a little better.
        first = row_quantile(above, 4)
        weight, deviation, _ = first_dictionary(above, self.num_latents, generator)
        sums = {"observed": (~above.isnan()).sum(0), "sums": above.nansum(0), "squares": above.square().nansum(0)}
        floor = noise_floor(self._power(sums), sums["observed"].sum())
        self.bias = (first + self.center).to(self.weight)
        return weight - first.unsqueeze(-1), deviation.maximum(floor)

    def _above_center(self, population: Population, y: Tensor) -> tuple[Population, Tensor]:
        """Returns the data for statistics.

        With an offset they are the population's own data points, above the center.
        """
        if self.bias is None:
            return population, y
        return dataclasses.replace(population, indices=None), population.rows_above(y, self.center)

    def _bias_above_center(self) -> Tensor | None:
        return None if self.bias is None else self.bias.double() - self.center

    def _best_dictionary(self, statistics: Statistics) -> tuple[Tensor, Tensor]:
        """Sets the offset; returns the best dictionary and expected squared errors ``(D,)``."""
        weight, bias = self.weight.double(), self._bias_above_center()
        pairs = with_ridge(statistics["pairs"], self.ridge) if self.ridge else statistics["pairs"]
        if bias is None:
            weight = best_dictionary(weight, pairs, statistics["cross"])
        else:
            weight, bias = best_dictionary_and_offset(weight, bias, {**statistics, "pairs": pairs})
            self.bias = (bias + self.center).to(self.weight)
        # The errors do not depend on the noise.
        superposition = LinearSuperposition(weight.new_zeros(self.num_latents), weight, 1.0, bias, validate_args=False)
        return weight, superposition.square_error(statistics)

    def _power(self, statistics: Statistics) -> Tensor:
        """Returns the sum of squares that defines the data's unit.

        With an offset it is about the mean of every dimension.

        What is no more than the rounding of the data has no deviation of its own.
        """
        squares = statistics["squares"]
        if self.bias is None:
            return squares.sum()
        observed, sums = statistics["observed"], statistics["sums"]
        about_mean = squares - sums.square() / observed.clamp(min=torch.finfo(sums.dtype).tiny)
        about_zero = squares + 2 * self.center * sums + observed * self.center.square()
        rounding = _ROUNDING * torch.finfo(self.weight.dtype).eps
        return about_mean.clamp(min=0.0).sum().maximum(rounding**2 * about_zero.clamp(min=0.0).sum())
