"""Mixtures of independent Poisson counts."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import Population
from pyro_truncated.distributions import categorical, defer_validation
from pyro_truncated.extend import check_counts, check_observable, names_arguments, selected_rows, takes_arrays
from pyro_truncated.models.binary_causes import FLOOR, check_data, count_data, first_rows
from pyro_truncated.models.linear_mixture import NEVER_USED, ComponentTable, LinearMixture, Shares, best_weights
from pyro_truncated.models.seeding import grouped, spread_rows
from pyro_truncated.search import MaxInnerProductIndex

_Poisson = defer_validation(dist.Poisson)


class PoissonComponents(ComponentTable):
    """Poisson counts of components."""


_Table = defer_validation(PoissonComponents)


class PoissonMixture(LinearMixture):
    r"""Mixture of Poisson distributions, :math:`z \sim \mathrm{Categorical}(\pi)`, :math:`y_d \sim \mathrm{Poisson}(\lambda_{zd})`.

    Example:
        >>> y = torch.poisson(torch.cat([torch.full((50, 3), 2.0), torch.full((50, 3), 20.0)]))
        >>> model = PoissonMixture(3, 2).initialize(y)
        >>> svi = SVI(model, AutoTruncated(model, num_states=2), ClosedForm(model), Truncated_ELBO())
        >>> losses = [svi.step(y) for _ in range(10)]

    Args:
        num_observed: observed dimensions ``D``.
        num_components: number of components ``K``.
        dtype: type of the parameters. Default: torch's.

    Attributes:
        weights: mixing proportions :math:`\pi`, ``(K,)``.
        rate: rates :math:`\lambda`, ``(K, D)``, at least ``1e-6``.

    Reference:
        Keck, Savin and Lücke, "Feedforward Inhibition and Synaptic Scaling - Two Sides of the Same Coin?", PLoS Computational Biology 2012.
    """

    weights: Tensor
    rate: Tensor

    @names_arguments
    def __init__(self, num_observed: int, num_components: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        check_counts(num_observed=num_observed, num_components=num_components)
        self.num_observed, self.num_components = num_observed, num_components
        weights = torch.full((num_components,), 1 / num_components, dtype=dtype)
        self.weights = PyroParam(weights, constraints.simplex)  # type: ignore[assignment]
        self.rate = PyroParam(0.5 + torch.rand(num_components, num_observed, dtype=dtype), constraints.positive)  # type: ignore[assignment]

    @takes_arrays
    def forward(self, y: Tensor | None = None, batch_size: int | None = None, num_data: int | None = None) -> Tensor:
        """The model of counts ``y (N, D)``; without data it generates ``num_data`` observations."""
        weights, rate = self.weights, self.rate
        size = count_data(y, num_data)
        with pyro.plate("data", size, subsample_size=batch_size) as index:
            z = pyro.sample("z", categorical(weights))
            counts = _Table(
                z,
                lambda component: _Poisson(rate[component]).to_event(1),
                lambda values: _log_densities(rate, values),
                self.num_components,
                constraints.nonnegative_integer,
                self.num_observed,
            )
            return pyro.sample("y", counts, obs=selected_rows(y, index))

    @names_arguments
    @torch.no_grad()
    @takes_arrays
    def initialize(self, y: Tensor, generator: torch.Generator | None = None) -> PoissonMixture:
        r"""Initialises from clusters of the data, with one mean data point more.

        The clusters belong to spread rows (k-means++ with local search) of :math:`\sqrt y`, whose variance does not depend on the rate.

        Args:
            y: counts ``(N, D)``.
            generator: source of randomness.

        Returns:
            The model itself.

        Raises:
            ValueError: for data that training refuses, in its words: those outside the likelihood's support, by name and data point.
        """
        check_observable(self, check_data(y, self.num_observed), constraints.nonnegative_integer)
        counts = first_rows(y, generator).double()
        _, nearest = spread_rows(counts.sqrt(), self.num_components, generator)
        size = 1 + torch.bincount(nearest, minlength=self.num_components).to(counts)
        total = counts.mean(0).repeat(self.num_components, 1).index_add_(0, nearest, counts)
        self.rate = (total / size.unsqueeze(-1)).clamp(min=FLOOR).to(self.rate)
        self.weights = (size / size.sum()).to(self.weights)
        self.knows_data.fill_(True)
        return self

    def linear_features(self, y: Tensor) -> Tensor:
        """One, and the data, ``(N, D + 1)``."""
        counts = y.to(self.rate)
        return torch.cat([torch.ones_like(counts[:, :1]), counts], 1)

    def linear_functions(self, y: Tensor) -> MaxInnerProductIndex:
        """The log joints."""
        constant = self.weights.log() - self.rate.sum(1)
        coefficients, rate = torch.cat([constant.unsqueeze(-1), self.rate.log()], 1), self.rate.detach()
        return MaxInnerProductIndex(coefficients, self.linear_features(rate), lambda: grouped(rate.sqrt()), len(y), _least_loss)

    @torch.no_grad()
    @takes_arrays
    def sufficient_statistics(
        self, population: Population, y: Tensor, batch_size: int | None = None, num_data: int | None = None, *, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        r"""Sums over the population's data points that :meth:`maximize` needs, see :class:`~pyro_truncated.ClosedFormModel`.

        Returns:
            With responsibilities :math:`r_{nk}`: ``counts``, :math:`\sum_n r_{nk}`, ``(K,)``; ``sums``, :math:`\sum_n r_{nk} y_n`,
            ``(K, D)``. Both can be added and scaled.
        """
        rows = population.rows_of(check_data(y, self.num_observed)).double()
        shares = Shares(population, self.num_components, temperature)
        return {"counts": shares.counts(), "sums": shares.sums(rows)}

    @torch.no_grad()
    def datum_statistics(self) -> dict[str, Tensor]:
        """What :meth:`sufficient_statistics` are for one data point of the mixture, in expectation."""
        weights = self.weights.double()
        return {"counts": weights, "sums": weights.unsqueeze(-1) * self.rate.double()}

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        r"""Sets the parameters to the maximiser of the expected log joint.

        :math:`\lambda_k = \sum_n r_{nk} y_n / \sum_n r_{nk}` and :math:`\pi_k = \frac1N \sum_n r_{nk}`. A component without data stays.
        """
        counts = statistics["counts"].unsqueeze(-1)
        rate = torch.where(counts > NEVER_USED, statistics["sums"] / counts, self.rate.double())
        self.rate = rate.clamp(min=FLOOR).to(self.rate)
        self.weights = best_weights(statistics["counts"]).to(self.weights)

    @torch.no_grad()
    @takes_arrays
    def reconstruct(self, population: Population, y: Tensor) -> Tensor:
        r"""Returns the posterior mean :math:`\sum_k r_{nk}\, \lambda_k` of noise-free data.

        Args:
            population: truncated posteriors, of data points that have been scored; its ``indices`` select these among ``y``.
            y: all data, ``(N, D)``.
        """
        mean: Tensor = Shares(population, self.num_components).means(self.rate.double())
        return mean.to(y.dtype if check_data(y, self.num_observed).is_floating_point() else self.rate.dtype)


def _log_densities(rate: Tensor, y: Tensor) -> Tensor:
    """Log probabilities ``(N, K)`` of counts ``(N, D)``, in float64 as terms cancel."""
    counts, exact = y.double(), rate.double()
    found = torch.addmm(exact.sum(1), counts, exact.log().mT, beta=-1) - (counts + 1).lgamma().sum(1, keepdim=True)
    return found.to(torch.promote_types(rate.dtype, y.dtype))


def _least_loss(features: Tensor) -> Tensor:
    """Minus each data point's highest log density, ``(N,)``."""
    counts = features[:, 1:]
    loss: Tensor = (counts - torch.special.xlogy(counts, counts)).sum(1)
    return loss
