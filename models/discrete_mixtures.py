"""Mixtures of independent counts, and of independent categorical variables."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar, Self

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints
from torch.nn import functional as F

from pyro_truncated import Population
from pyro_truncated.distributions import categorical, defer_validation
from pyro_truncated.extend import check_counts, names_arguments, selected_rows, takes_arrays
from pyro_truncated.models.data_model import FLOOR, check_data, count_data
from pyro_truncated.models.linear_mixture import MIN_COMPONENT_COUNT, LinearMixture, Shares, best_weights
from pyro_truncated.models.seeding import group_places, spread_rows
from pyro_truncated.search import MaxInnerProductIndex


class ComponentTable(TorchDistribution):
    """The distribution of a component, with a table of all log densities.

    ``plain`` makes the usual distribution of components, ``table`` log densities ``(N, K)`` of values ``(N, D)``. Where nearly all
    components are asked for, one product of matrices gives the table.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        component: Tensor,
        plain: Callable[[Tensor], TorchDistribution],
        table: Callable[[Tensor], Tensor],
        num_components: int,
        support: Any,
        num_observed: int,
        validate_args: bool | None = None,
    ) -> None:
        self.component, self._plain, self._table, self._num_components, self._support = component, plain, table, num_components, support
        super().__init__(component.shape, torch.Size([num_observed]), validate_args=validate_args)

    @constraints.dependent_property(event_dim=1)
    def support(self) -> Any:
        """The values that are possible."""
        return constraints.independent(self._support, 1)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """The same distribution over a larger batch."""
        kind: Any = type(self)
        component = self.component.expand(torch.Size(batch_shape))
        arguments = (self._plain, self._table, self._num_components, self._support, *self.event_shape)
        larger: Self = kind(component, *arguments, validate_args=False)
        larger._validate_args = self._validate_args
        return larger

    @property
    def mean(self) -> Tensor:
        """Means ``(*batch, D)``."""
        mean: Tensor = self._plain(self.component).mean
        return mean

    @property
    def variance(self) -> Tensor:
        """Variances ``(*batch, D)``."""
        variance: Tensor = self._plain(self.component).variance
        return variance

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws values."""
        draws: Tensor = self._plain(self.component).sample(torch.Size(sample_shape))
        return draws

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns log densities of values ``(*batch, D)``."""
        if self._validate_args:
            self._validate_sample(value)
        batch = value.shape[:-1]
        row = torch.arange(batch.numel(), device=value.device).reshape(batch)
        row, component = torch.broadcast_tensors(row, self.component)
        # From this share of all components on one product of matrices costs less than log densities one by one.
        if row.numel() < 1 / 16 * batch.numel() * self._num_components:
            few: Tensor = self._plain(self.component).log_prob(value)
            return few
        return self._table(value.reshape(batch.numel(), -1))[row, component.long()]


_Table = defer_validation(ComponentTable)


class MixtureOfMeans(LinearMixture):
    r"""A mixture of components that are known by their means of rows.

    Components start from clusters of the rows (k-means++ with local search). Shares are theirs; means are theirs with the mean of all data
    as one more data point.
    """

    weights: Tensor
    _parameter: ClassVar[str]
    _kind: ClassVar[Any]

    @staticmethod
    @abc.abstractmethod
    def _log_densities(parameter: Tensor, y: Tensor) -> Tensor:
        """Log probabilities ``(N, K)`` of data ``(N, D)`` under all components."""

    @abc.abstractmethod
    def _rows(self, y: Tensor) -> Tensor:
        """Rows ``(N, F)`` of data, in float64."""

    @abc.abstractmethod
    def _means(self) -> Tensor:
        """Means ``(K, F)`` of the components, in float64."""

    @abc.abstractmethod
    def _take_means(self, means: Tensor, is_used: Tensor) -> None:
        """Takes the means of components that are used, ``(K, 1)`` or all."""

    def _places(self, rows: Tensor) -> Tensor:
        """Where rows lie for clusters."""
        return rows

    @takes_arrays
    def forward(self, y: Tensor | None = None, batch_size: int | None = None, num_data: int | None = None) -> Tensor:
        """The model of data ``y (N, D)``; without data it generates ``num_data`` observations."""
        mixing, parameter = self.weights, getattr(self, self._parameter)
        with pyro.plate("data", count_data(y, num_data), subsample_size=batch_size) as index:
            z = pyro.sample("z", categorical(mixing))
            values = _Table(
                z,
                lambda component: self._kind(parameter[component]).to_event(1),
                lambda rows: self._log_densities(parameter, rows),
                self.num_components,
                self.data_support,
                self.num_observed,
            )
            return pyro.sample("y", values, obs=selected_rows(y, index))

    def _start(self, y: Tensor, generator: torch.Generator | None) -> None:
        rows = self._rows(y)
        _, nearest = spread_rows(self._places(rows), self.num_components, generator)
        size = 1 + torch.bincount(nearest, minlength=self.num_components).to(rows)
        total = rows.mean(0).repeat(self.num_components, 1).index_add_(0, nearest, rows)
        self._take_means(total / size.unsqueeze(-1), size.unsqueeze(-1) > 0)
        self.weights = (size / size.sum()).to(self.weights)
        self.knows_data.fill_(True)

    def _statistics(self, population: Population, y: Tensor, temperature: float) -> dict[str, Tensor]:
        r"""``counts``, :math:`\sum_n r_{nk}`, ``(K,)``; ``sums`` of the rows, :math:`\sum_n r_{nk} x_n`, ``(K, F)``."""
        shares = Shares(population, self.num_components, temperature)
        return {"counts": shares.counts(), "sums": shares.sums(self._rows(population.select_rows(y)))}

    @torch.no_grad()
    def datum_statistics(self) -> dict[str, Tensor]:
        """What :meth:`sufficient_statistics` are for one data point of the mixture, in expectation."""
        weights = self.weights.double()
        return {"counts": weights, "sums": weights.unsqueeze(-1) * self._means()}

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        r"""Sets the parameters to the maximiser of the expected log joint.

        Means are :math:`\sum_n r_{nk} x_n / \sum_n r_{nk}`, and :math:`\pi_k = \frac1N \sum_n r_{nk}`. A component without data stays.
        """
        counts = statistics["counts"].unsqueeze(-1)
        self._take_means(statistics["sums"] / counts, counts > MIN_COMPONENT_COUNT)
        self.weights = best_weights(statistics["counts"]).to(self.weights)

    @torch.no_grad()
    @takes_arrays
    def reconstruct(self, population: Population, y: Tensor) -> Tensor:
        r"""Returns posterior means :math:`\sum_k r_{nk}\, \mu_k` of the rows, ``(N, F)``.

        Args:
            population: truncated posteriors, of data points that have been scored; its ``indices`` select these among ``y``.
            y: all data, ``(N, D)``.
        """
        mean: Tensor = Shares(population, self.num_components).means(self._means())
        return mean.to(y.dtype if check_data(y, self.num_observed).is_floating_point() else self.weights.dtype)


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

    _parameter = "probs"
    _kind = staticmethod(defer_validation(dist.Categorical))

    weights: Tensor
    probs: Tensor

    @names_arguments
    def __init__(self, num_observed: int, num_components: int, num_values: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__(num_observed, num_components, dtype)
        (self.num_values,) = check_counts(num_values=num_values)
        probs = 0.5 + torch.rand(num_components, num_observed, num_values, dtype=dtype)
        self.probs = PyroParam(probs / probs.sum(-1, keepdim=True), constraints.simplex)  # type: ignore[assignment]

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

    @staticmethod
    def _log_densities(probs: Tensor, y: Tensor) -> Tensor:
        """Returns log probabilities ``(N, K)`` of values ``(N, D)`` under all classes."""
        rows, flat = _indicators(y, probs.shape[-1]).to(probs), probs.flatten(1)
        log_density = rows @ flat.clamp(min=torch.finfo(probs.dtype).tiny).log().mT
        return log_density.masked_fill(rows @ (flat == 0).to(rows).mT > 0, -torch.inf)

    def linear_features(self, y: Tensor) -> Tensor:
        """One, and which values the data have, ``(N, 1 + D L)``."""
        return torch.cat([self.probs.new_ones(len(y), 1), _indicators(y, self.num_values).to(self.probs)], 1)

    def linear_functions(self, y: Tensor) -> MaxInnerProductIndex:
        """Returns all components' log joints as linear functions of features of ``y``."""
        probs = self.probs.detach().flatten(1)
        coefficients = torch.cat([self.weights.log().unsqueeze(-1), probs.log()], 1).detach()
        features = torch.cat([torch.ones_like(probs[:, :1]), probs], 1)
        return MaxInnerProductIndex(coefficients, features, lambda: group_places(probs), len(y))

    @torch.no_grad()
    @takes_arrays
    def reconstruct(self, population: Population, y: Tensor) -> Tensor:
        """See :meth:`.MixtureOfMeans.reconstruct`; returns probabilities ``(N, D, L)`` of all values."""
        probs: Tensor = super().reconstruct(population, y).unflatten(1, (self.num_observed, self.num_values))
        return probs


def _indicators(y: Tensor, num_values: int) -> Tensor:
    """Returns which values data points have, ``(N, D L)``."""
    return F.one_hot(y.long(), num_values).flatten(1).double()


class PoissonMixture(MixtureOfMeans):
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

    _parameter = "rate"
    _kind = staticmethod(defer_validation(dist.Poisson))
    data_support = constraints.nonnegative_integer

    weights: Tensor
    rate: Tensor

    @names_arguments
    def __init__(self, num_observed: int, num_components: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__(num_observed, num_components, dtype)
        self.rate = PyroParam(0.5 + torch.rand(num_components, num_observed, dtype=dtype), constraints.positive)  # type: ignore[assignment]

    def _rows(self, y: Tensor) -> Tensor:
        return y.double()

    def _places(self, rows: Tensor) -> Tensor:
        return rows.sqrt()  # whose variance does not depend on the rate

    def _means(self) -> Tensor:
        return self.rate.double()

    def _take_means(self, means: Tensor, is_used: Tensor) -> None:
        self.rate = torch.where(is_used, means, self.rate.double()).clamp(min=FLOOR).to(self.rate)

    @staticmethod
    def _log_densities(rate: Tensor, y: Tensor) -> Tensor:
        """Log probabilities ``(N, K)`` of counts ``(N, D)``, in float64 as terms cancel."""
        counts, exact = y.double(), rate.double()
        log_density = torch.addmm(exact.sum(1), counts, exact.log().mT, beta=-1) - _log_factorials(counts).sum(1, keepdim=True)
        return log_density.to(torch.promote_types(rate.dtype, y.dtype))

    def linear_features(self, y: Tensor) -> Tensor:
        """One, and the data, ``(N, D + 1)``."""
        counts = y.to(self.rate)
        return torch.cat([torch.ones_like(counts[:, :1]), counts], 1)

    def linear_functions(self, y: Tensor) -> MaxInnerProductIndex:
        """Returns all components' log joints as linear functions of features of ``y``."""
        constant = self.weights.log() - self.rate.sum(1)
        coefficients, rate = torch.cat([constant.unsqueeze(-1), self.rate.log()], 1), self.rate.detach()
        return MaxInnerProductIndex(coefficients, self.linear_features(rate), lambda: group_places(rate.sqrt()), len(y), _least_loss)


def _log_factorials(counts: Tensor) -> Tensor:
    r"""Returns :math:`\log n!`, on the CPU from a table of small counts."""
    if counts.is_cpu and counts.numel():
        least, most = counts.aminmax()
        if bool(least >= 0) and bool(most < counts.numel()) and bool((counts == counts.floor()).all()):
            return torch.arange(1, int(most) + 2, dtype=counts.dtype).lgamma()[counts.long()]
    return (counts + 1).lgamma()


def _least_loss(features: Tensor) -> Tensor:
    """Minus each data point's highest log density, ``(N,)``."""
    counts = features[:, 1:]
    loss: Tensor = (counts - torch.special.xlogy(counts, counts)).sum(1)
    return loss
