"""Latent classes: mixtures of independent categorical variables."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints
from torch.nn import functional as F

from pyro_truncated import Population
from pyro_truncated.distributions import categorical, defer_validation
from pyro_truncated.extend import check_counts, names_arguments, selected_rows, takes_arrays
from pyro_truncated.models.binary_causes import FLOOR, count_data
from pyro_truncated.models.linear_mixture import ComponentTable, MixtureOfMeans
from pyro_truncated.models.seeding import grouped
from pyro_truncated.search import MaxInnerProductIndex

_Categorical = defer_validation(dist.Categorical)


class CategoricalComponents(ComponentTable):
    """Values of the variables of classes."""


_Table = defer_validation(CategoricalComponents)


class CategoricalMixture(MixtureOfMeans):
    r"""Latent class model, :math:`z \sim \mathrm{Categorical}(\pi)`, :math:`y_d \sim \mathrm{Categorical}(\theta_{zd})`.

    Example:
        >>> y = torch.cat([torch.zeros(50, 3), torch.ones(50, 3)])
        >>> model = CategoricalMixture(3, 2, 2).initialize(y)
        >>> svi = SVI(model, AutoTruncated(model, num_states=2), ClosedForm(model), Truncated_ELBO())
        >>> losses = [svi.step(y) for _ in range(10)]

    Args:
        num_observed: number of observed variables ``D``.
        num_components: number of classes ``K``.
        num_values: number of values ``L`` that a variable has at most; they are 0, 1, ... ``L - 1``.
        dtype: type of the parameters. Default: torch's.

    Attributes:
        weights: mixing proportions :math:`\pi`, ``(K,)``.
        probs: probabilities :math:`\theta`, ``(K, D, L)``; before they are normalised at least ``1e-6``.

    Reference:
        Goodman, "Exploratory latent structure analysis using both identifiable and unidentifiable models", Biometrika 61, 1974.
    """

    weights: Tensor
    probs: Tensor

    @names_arguments
    def __init__(self, num_observed: int, num_components: int, num_values: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__(num_observed, num_components, dtype)
        (self.num_values,) = check_counts(num_values=num_values)
        probs = 0.5 + torch.rand(num_components, num_observed, num_values, dtype=dtype)
        self.probs = PyroParam(probs / probs.sum(-1, keepdim=True), constraints.simplex)  # type: ignore[assignment]

    @takes_arrays
    def forward(self, y: Tensor | None = None, batch_size: int | None = None, num_data: int | None = None) -> Tensor:
        """The model of values ``y (N, D)``; without data it generates ``num_data`` observations."""
        weights, probs = self.weights, self.probs
        with pyro.plate("data", count_data(y, num_data), subsample_size=batch_size) as index:
            z = pyro.sample("z", categorical(weights))
            values = _Table(
                z,
                lambda component: _Categorical(probs[component]).to_event(1),
                lambda rows: _log_densities(probs, rows),
                self.num_components,
                self.data_support,
                self.num_observed,
            )
            return pyro.sample("y", values, obs=selected_rows(y, index))

    @property
    def data_support(self) -> constraints.Constraint:
        """The numbers of the values."""
        return constraints.integer_interval(0, self.num_values - 1)

    def _rows(self, y: Tensor) -> Tensor:
        return _indicators(y, self.num_values)

    def _means(self) -> Tensor:
        return self.probs.double().flatten(1)

    def _take_means(self, means: Tensor, is_used: Tensor) -> None:
        floored = means.unflatten(1, (self.num_observed, self.num_values)).clamp(min=FLOOR)
        probs = (floored / floored.sum(-1, keepdim=True)).to(self.probs)
        self.probs = torch.where(is_used.unsqueeze(-1), probs, self.probs)

    def linear_features(self, y: Tensor) -> Tensor:
        """One, and which values the data have, ``(N, 1 + D L)``."""
        return torch.cat([self.probs.new_ones(len(y), 1), _indicators(y, self.num_values).to(self.probs)], 1)

    def linear_functions(self, y: Tensor) -> MaxInnerProductIndex:
        """Returns all components' log joints as linear functions of features of ``y``."""
        probs = self.probs.detach().flatten(1)
        coefficients = torch.cat([self.weights.log().unsqueeze(-1), probs.log()], 1).detach()
        features = torch.cat([torch.ones_like(probs[:, :1]), probs], 1)
        return MaxInnerProductIndex(coefficients, features, lambda: grouped(probs), len(y))

    @torch.no_grad()
    @takes_arrays
    def reconstruct(self, population: Population, y: Tensor) -> Tensor:
        """See :meth:`.MixtureOfMeans.reconstruct`; returns probabilities ``(N, D, L)`` of all values."""
        probs: Tensor = super().reconstruct(population, y).unflatten(1, (self.num_observed, self.num_values))
        return probs


def _indicators(y: Tensor, num_values: int) -> Tensor:
    """Returns which values data points have, ``(N, D L)``."""
    return F.one_hot(y.long(), num_values).flatten(1).double()


def _log_densities(probs: Tensor, y: Tensor) -> Tensor:
    """Returns log probabilities ``(N, K)`` of values ``(N, D)`` under all classes."""
    rows, flat = _indicators(y, probs.shape[-1]).to(probs), probs.flatten(1)
    found = rows @ flat.clamp(min=torch.finfo(probs.dtype).tiny).log().mT
    return found.masked_fill(rows @ (flat == 0).to(rows).mT > 0, -torch.inf)
