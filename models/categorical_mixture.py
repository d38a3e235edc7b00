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
from pyro_truncated.extend import check_counts, check_observable, names_arguments, selected_rows, takes_arrays
from pyro_truncated.models.binary_causes import FLOOR, check_data, count_data, first_rows
from pyro_truncated.models.linear_mixture import NEVER_USED, ComponentTable, LinearMixture, Shares, best_weights
from pyro_truncated.models.seeding import grouped, spread_rows
from pyro_truncated.search import MaxInnerProductIndex

_Categorical = defer_validation(dist.Categorical)


class CategoricalComponents(ComponentTable):
    """Values of the variables of classes."""


_Table = defer_validation(CategoricalComponents)


class CategoricalMixture(LinearMixture):
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
        super().__init__()
        check_counts(num_observed=num_observed, num_components=num_components, num_values=num_values)
        self.num_observed, self.num_components, self.num_values = num_observed, num_components, num_values
        self.weights = PyroParam(torch.full((num_components,), 1 / num_components, dtype=dtype), constraints.simplex)  # type: ignore[assignment]
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
                constraints.integer_interval(0, self.num_values - 1),
                self.num_observed,
            )
            return pyro.sample("y", values, obs=selected_rows(y, index))

    @names_arguments
    @torch.no_grad()
    @takes_arrays
    def initialize(self, y: Tensor, generator: torch.Generator | None = None) -> CategoricalMixture:
        """Starts from the shares and frequencies of clusters, with one mean datum.

        Args:
            y: values ``(N, D)``.
            generator: source of randomness.

        Returns:
            The model itself.

        Raises:
            ValueError: for data that training refuses, in its words.
        """
        check_observable(self, check_data(y, self.num_observed), constraints.integer_interval(0, self.num_values - 1))
        rows = _indicators(first_rows(y, generator), self.num_values)
        _, nearest = spread_rows(rows, self.num_components, generator)
        size = 1 + torch.bincount(nearest, minlength=self.num_components).to(rows)
        total = rows.mean(0).repeat(self.num_components, 1).index_add_(0, nearest, rows)
        self.probs = self._floored(total / size.unsqueeze(-1))
        self.weights = (size / size.sum()).to(self.weights)
        self.knows_data.fill_(True)
        return self

    def linear_features(self, y: Tensor) -> Tensor:
        """One, and which values the data have, ``(N, 1 + D L)``."""
        return torch.cat([self.probs.new_ones(len(y), 1), _indicators(y, self.num_values).to(self.probs)], 1)

    def linear_functions(self, y: Tensor) -> MaxInnerProductIndex:
        """The log joints."""
        probs = self.probs.detach().flatten(1)
        coefficients = torch.cat([self.weights.log().unsqueeze(-1), probs.log()], 1).detach()
        features = torch.cat([torch.ones_like(probs[:, :1]), probs], 1)
        return MaxInnerProductIndex(coefficients, features, lambda: grouped(probs), len(y))

    @torch.no_grad()
    @takes_arrays
    def sufficient_statistics(
        self, population: Population, y: Tensor, batch_size: int | None = None, num_data: int | None = None, *, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        r"""Sums over the population's data points that :meth:`maximize` needs, see :class:`~pyro_truncated.ClosedFormModel`.

        Returns:
            With responsibilities :math:`r_{nk}`: ``counts``, :math:`\sum_n r_{nk}`, ``(K,)``; ``sums``, of the data points with each value,
            ``(K, D L)``. Both can be added and scaled.
        """
        rows = _indicators(population.rows_of(check_data(y, self.num_observed)), self.num_values)
        shares = Shares(population, self.num_components, temperature)
        return {"counts": shares.counts(), "sums": shares.sums(rows)}

    @torch.no_grad()
    def datum_statistics(self) -> dict[str, Tensor]:
        """What :meth:`sufficient_statistics` are for one data point of the mixture, in expectation."""
        weights = self.weights.double()
        return {"counts": weights, "sums": weights.unsqueeze(-1) * self.probs.double().flatten(1)}

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        """Sets the parameters to frequencies; classes without data keep theirs."""
        counts = statistics["counts"].unsqueeze(-1)
        self.probs = torch.where(counts.unsqueeze(-1) > NEVER_USED, self._floored(statistics["sums"] / counts), self.probs)
        self.weights = best_weights(statistics["counts"]).to(self.weights)

    @torch.no_grad()
    @takes_arrays
    def reconstruct(self, population: Population, y: Tensor) -> Tensor:
        r"""Posterior mean :math:`\sum_k r_{nk}\, \theta_k` of the probabilities of all values.

        Args:
            population: truncated posteriors, of data points that have been scored; its ``indices`` select these among ``y``.
            y: all data, ``(N, D)``.

        Returns:
            Probabilities ``(N, D, L)`` for the population's data points.
        """
        mean: Tensor = Shares(population, self.num_components).means(self.probs.double().flatten(1))
        probs: Tensor = mean.unflatten(1, (self.num_observed, self.num_values))
        return probs.to(y.dtype if check_data(y, self.num_observed).is_floating_point() else self.probs.dtype)

    def _floored(self, probs: Tensor) -> Tensor:
        """Probabilities ``(K, D, L)`` of ``(K, D L)``, none zero."""
        floored: Tensor = probs.unflatten(1, (self.num_observed, self.num_values)).clamp(min=FLOOR)
        return (floored / floored.sum(-1, keepdim=True)).to(self.probs)


def _indicators(y: Tensor, num_values: int) -> Tensor:
    """Returns which values data points have, ``(N, D L)``."""
    return F.one_hot(y.long(), num_values).flatten(1).double()


def _log_densities(probs: Tensor, y: Tensor) -> Tensor:
    """Returns log probabilities ``(N, K)`` of values ``(N, D)`` under all classes."""
    rows, flat = _indicators(y, probs.shape[-1]).to(probs), probs.flatten(1)
    found = rows @ flat.clamp(min=torch.finfo(probs.dtype).tiny).log().mT
    return found.masked_fill(rows @ (flat == 0).to(rows).mT > 0, -torch.inf)
