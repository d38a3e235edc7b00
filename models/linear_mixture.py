"""Mixtures whose log joints are linear in features of the data."""

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

from pyro_truncated import Population, Search
from pyro_truncated.distributions import categorical, component_products, component_sums, defer_validation
from pyro_truncated.extend import Renamed, check_counts, names_arguments, selected_rows, takes_arrays
from pyro_truncated.models.data_model import (
    FLOOR,
    MAX_ROWS_PER_BLOCK,
    MIN_COMPONENT_COUNT,
    ROWS_PER_BLOCK,
    DataModel,
    check_data,
    count_data,
)
from pyro_truncated.models.seeding import group_places, spread_rows
from pyro_truncated.search import MaxInnerProductIndex, SearchBatch


def best_weights(counts: Tensor) -> Tensor:
    """Mixing proportions, above a floor, that maximise the expected log prior."""
    weights = (counts / counts.sum()).clamp(min=FLOOR)
    return weights / weights.sum()


# Of shares so small nothing is left in the sums of a component that is used.
_NEGLIGIBLE = 1e-20


class Shares:
    """Responsibilities :math:`r_{nk}` of ``K`` components, and sums weighted with them, in float64.

    Where there are many more components than kept states, only those are looked at.
    """

    def __init__(self, population: Population, num_components: int, temperature: float = 1.0) -> None:
        self.num_components = num_components
        self._dense: Tensor | None = None
        # From so many components per state on the sums go over the states that are kept.
        if num_components < 4 * population.num_states:
            # Products with the smallest numbers there are take a hundred times as long as others.
            self._dense = F.threshold(population.value_probabilities(temperature)[:, 0].double(), 1e-100, 0.0, inplace=True)
        else:
            self._component = population.states(torch.int64)[..., 0]
            self._weight = population.weights(temperature).double()

    def counts(self) -> Tensor:
        r""":math:`\sum_n r_{nk}`, ``(K,)``."""
        if self._dense is not None:
            return self._dense.sum(0)
        return self._weight.new_zeros(self.num_components).index_add_(0, self._component.flatten(), self._weight.flatten())

    def sums(self, rows: Tensor) -> Tensor:
        r""":math:`\sum_n r_{nk} x_n` of rows ``(N, D)``, ``(K, D)``."""
        if self._dense is not None:
            return self._dense.mT @ rows
        return component_sums(self._component, self._weight, rows, self.num_components)

    def means(self, values: Tensor) -> Tensor:
        r""":math:`\sum_k r_{nk} v_k` of values ``(K, D)`` of the components, ``(N, D)``."""
        if self._dense is not None:
            return self._dense @ values
        total = values.new_zeros(len(self._component), values.shape[1])
        for component, weight in zip(self._component.mT, self._weight.mT, strict=True):
            total += weight.unsqueeze(-1) * values[component]
        return total

    def outer_products(self, rows: Tensor) -> Tensor:
        r""":math:`\sum_n r_{nk} x_n x_n^\top` of rows ``(N, D)``, ``(K, D, D)``."""
        if self._dense is not None:
            return _dense_outer_products(self._dense, rows)
        component, weight = self._component, self._weight
        if rows.is_cpu:  # a device would be waited for
            # Most states that are kept explain nothing, and every product costs the square of the dimensions.
            row, state = (~(weight <= _NEGLIGIBLE)).nonzero(as_tuple=True)
            # Numbers in the copies that are made to leave out such states.
            if len(row) * rows.shape[1] <= 2**25:
                rows, component, weight = rows[row], component[row, state].unsqueeze(1), weight[row, state].unsqueeze(1)
        return component_products(rows, component, weight, self.num_components)


def _dense_outer_products(shares: Tensor, rows: Tensor) -> Tensor:
    """Outer products of rows ``(N, D)``, weighted with shares ``(N, K)``."""
    size = rows.shape[1]
    if shares.shape[1] < size:
        # One component at a time: all at once are K times the data.
        return torch.stack([_outer_product(share, rows) for share in shares.mT.contiguous()])
    first, second = torch.triu_indices(size, size, device=rows.device)
    blocks = zip(shares.split(ROWS_PER_BLOCK), rows.split(ROWS_PER_BLOCK), strict=True)
    sums = sum(some.mT @ (block[:, first] * block[:, second]) for some, block in blocks)
    products = rows.new_empty(shares.shape[1], size, size)
    products[:, first, second] = products[:, second, first] = sums
    return products


def _outer_product(share: Tensor, rows: Tensor) -> Tensor:
    if rows.is_cpu:  # a device would be waited for
        is_used = ~(share <= _NEGLIGIBLE)
        if 2 * int(is_used.count_nonzero()) < len(rows):
            share, rows = share[is_used], rows[is_used]
    return (share.unsqueeze(-1) * rows).mT @ rows


_SITE = "y"


class LinearMixture(DataModel):
    """A mixture whose log joints are linear in features of the data.

    Attributes:
        weights: mixing proportions, ``(K,)``.
        knows_data: whether ``initialize`` has taken the parameters from data, a Boolean.
    """

    num_components: int
    weights: Tensor
    knows_data: Tensor

    def __init__(self, num_observed: int, num_components: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        check_counts(num_observed=num_observed, num_components=num_components)
        self.num_observed, self.num_components = num_observed, num_components
        weights = torch.full((num_components,), 1 / num_components, dtype=dtype)
        self.weights = PyroParam(weights, constraints.simplex)  # type: ignore[assignment]
        self.register_buffer("knows_data", torch.zeros((), dtype=torch.bool))

    def new_buffers(self) -> dict[str, Tensor]:
        """Buffers that mixtures of earlier versions lack, as they are in those."""
        return {"knows_data": torch.zeros((), dtype=torch.bool, device=self.weights.device)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickles mixtures of earlier versions, too."""
        super().__setstate__(state)
        for name, value in self.new_buffers().items():
            if name not in self._buffers:
                self.register_buffer(name, value)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Loads states of earlier versions, too."""
        for name, value in self.new_buffers().items():
            saved = state_dict.setdefault(f"{prefix}{name}", value)
            if saved.shape != value.shape and 0 in (saved.numel(), value.numel()):
                state_dict[f"{prefix}{name}"] = value
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @abc.abstractmethod
    def linear_features(self, y: Tensor) -> Tensor:
        """What log joints of data ``(N, D)`` are linear in, ``(N, F)``."""

    @abc.abstractmethod
    def linear_functions(self, y: Tensor) -> MaxInnerProductIndex:
        """The components' log joints as functions of the features."""

    @abc.abstractmethod
    def datum_statistics(self) -> dict[str, Tensor]:
        """Returns one data point's expected ``sufficient_statistics`` in float64."""

    @torch.no_grad()
    def expected_statistics(self) -> dict[str, Tensor] | None:
        """Returns one data point's expected ``sufficient_statistics``, for a mixture with data.

        :class:`~pyro_truncated.ClosedForm` counts data points that have not been visited as that. ``None`` if the mixture has not been
        initialized with data and all components have the same weight.
        """
        lowest, highest = self.weights.aminmax()
        # Equal weights differ by rounding.
        return self.datum_statistics() if bool(self.knows_data | (highest - lowest > 1e-5 * highest)) else None

    @names_arguments
    @torch.no_grad()
    @takes_arrays
    def likeliest_components(self, y: Tensor, num_states: int) -> Tensor:
        r"""The components of highest :math:`\log \pi_k + \log p_k(y_n)`, the best states that populations can have.

        Log joints are linear in features of the data, so that this is a product of matrices. Up to three thousand components, or for fewer
        than ten data points per component, all are looked at. Of more only those in the two likeliest groups and the neighbours of the best
        two, and in sixteen groups for data points without a likely one there. The best component is missed for 0.1 to 0.2 % of the data
        points if components are separate, and for 1 to 2 % if they overlap. In training less is missed.

        Example:
            >>> y = torch.randn(500, 2)
            >>> model = GaussianMixture(2, 50, covariance="diag").initialize(y)
            >>> model.likeliest_components(y, 4).shape
            torch.Size([500, 4])

        Args:
            y: data ``(N, D)``.
            num_states: how many components ``S``; all if there are fewer.

        Returns:
            Components ``(N, S)``, the likeliest first.

        Raises:
            ValueError: if the data have another number of dimensions, or the number is below 1.
        """
        check_counts(num_states=num_states)
        return self.search_components(check_data(y, self.num_observed), min(num_states, self.num_components))

    likeliest_given = Renamed("search_components")

    def search_components(self, y: Tensor, num_states: int, population: Population | None = None) -> Tensor:
        """The same for populations that may hold likely components."""
        functions = self.linear_functions(y)
        # Numbers of features that exist at a time.
        number = min(MAX_ROWS_PER_BLOCK, 2**21 // functions.coefficients.shape[1])
        number = ROWS_PER_BLOCK if functions.are_few else max(ROWS_PER_BLOCK, number)
        rows = y.split(number)
        if population is None or functions.are_few:
            return torch.cat([functions.query(self.linear_features(some), num_states) for some in rows])
        states = population.states(torch.int64)[..., 0].split(number)
        parts = zip(rows, states, strict=True)
        return torch.cat([functions.query(self.linear_features(some), num_states, own) for some, own in parts])

    def default_search(self, num_states: int) -> Search:
        """Returns the default search of :func:`pyro_truncated.learn`.

        Example:
            >>> y = torch.randn(500, 2)
            >>> model = GaussianMixture(2, 50, covariance="diag").initialize(y)
            >>> svi = SVI(model, AutoTruncated(model, num_states=4), ClosedForm(model), Truncated_ELBO(model.default_search(4)))
            >>> losses = [svi.step(y) for _ in range(3)]
        """
        return LikeliestComponents(self, num_states)


class LikeliestComponents(Search):
    """Proposes the likeliest components of every data point, see :meth:`LinearMixture.likeliest_components`.

    Populations need not be likely beforehand. Of more than three thousand components not all likely ones are found at once; later steps
    miss less, in less time. Other models than those of one latent for each data point and an observed site ``y`` are refused.
    """

    mixture_only = True

    def __init__(self, model: LinearMixture, num_states: int) -> None:
        self.model, self.num_states = model, check_counts(num_states=num_states)[0]

    def propose(self, batch: SearchBatch) -> Population:
        """The likeliest components."""
        self.check_space(batch.space)
        if _SITE not in batch.observations:
            raise ValueError(f"LikeliestComponents found no observed site {_SITE!r}; the model has {list(batch.observations)}")
        number, y = min(self.num_states, self.model.num_components), batch.observations[_SITE]
        population = None if batch.is_new else batch.population
        likeliest = self.model.search_components(check_data(y, self.model.num_observed), number, population)
        return batch.evaluate(batch.space.pack(likeliest.unsqueeze(-1)))

    def improve(self, batch: SearchBatch, steps: int = 1) -> Population:
        """The populations after one step, to which further ones would add little."""
        return super().improve(batch, min(steps, 1))


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
        return self._plain(self.component).mean

    @property
    def variance(self) -> Tensor:
        """Variances ``(*batch, D)``."""
        return self._plain(self.component).variance

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws values."""
        return self._plain(self.component).sample(torch.Size(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns log densities of values ``(*batch, D)``."""
        if self._validate_args:
            self._validate_sample(value)
        batch = value.shape[:-1]
        row = torch.arange(batch.numel(), device=value.device).reshape(batch)
        row, component = torch.broadcast_tensors(row, self.component)
        # From this share of all components on one product of matrices costs less than log densities one by one.
        if row.numel() < 1 / 16 * batch.numel() * self._num_components:
            return self._plain(self.component).log_prob(value)
        return self._table(value.reshape(batch.numel(), -1))[row, component.long()]


_Table = defer_validation(ComponentTable)


class MixtureOfMeans(LinearMixture):
    r"""A mixture of components that are known by their means of rows.

    Components start from clusters of the rows (k-means++ with local search). Shares are theirs; means are theirs with the mean of all data
    as one more data point.
    """

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
        r"""Returns posterior means :math:`\sum_k r_{nk}\, \mu_k` of the rows, ``(N, F)``."""
        y = population.select_rows(check_data(y, self.num_observed))
        mean: Tensor = Shares(population, self.num_components).means(self._means())
        return mean.to(y.dtype if y.is_floating_point() else self.weights.dtype)


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
        return super().reconstruct(population, y).unflatten(1, (self.num_observed, self.num_values))


def _indicators(y: Tensor, num_values: int) -> Tensor:
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
    return (counts - torch.special.xlogy(counts, counts)).sum(1)
