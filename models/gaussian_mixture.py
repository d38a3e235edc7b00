"""Mixtures of Gaussians with full, diagonal, spherical, tied or low-rank covariances."""

from __future__ import annotations

import dataclasses
import math

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import AutoTruncated, ClosedForm, Population
from pyro_truncated.distributions import Component
from pyro_truncated.extend import check_observable, names_arguments, selected_rows, some_rows, takes_arrays
from pyro_truncated.models.covariances import Prior, at_most, bulk_deviation, empty_prior_buffers, make_covariances, prior_buffers
from pyro_truncated.models.data_model import MOST_ROWS, check_data, count_data
from pyro_truncated.models.gaussians import (
    Agglomeration,
    Gaussians,
    Moves,
    MoveSearch,
    accept_moves,
    all_statistics,
    collect_statistics,
    least_variance,
)
from pyro_truncated.models.linear_mixture import LinearMixture, Shares
from pyro_truncated.models.seeding import group_places
from pyro_truncated.search import MaxInnerProductIndex


class GaussianMixture(LinearMixture):
    r"""Mixture of Gaussians, :math:`z \sim \mathrm{Categorical}(\pi)`, :math:`y \sim \mathcal N(\mu_z, \Sigma_z)`.

    Variances are kept above :math:`10^{-6}` of the data's variance in each dimension, without outliers. Else the likelihood has no
    maximum. Covariances of components have a weak prior from :meth:`initialize` on: a few more data points with the covariance of all
    data, scaled to the component. Losses in training include :meth:`log_prior`.

    Example:
        >>> y = torch.cat([torch.randn(50, 2), torch.randn(50, 2) + 5])
        >>> model = GaussianMixture(2, 2).initialize(y)
        >>> guide = AutoTruncated(model, num_states=2)  # both components: exact EM
        >>> svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO())
        >>> losses = [svi.step(y) for _ in range(10)]

    Args:
        num_observed: observed dimensions ``D``.
        num_components: number of components ``K``.
        covariance: ``"full"``, ``"diag"`` or ``"spherical"`` for a covariance of each component, ``"tied"`` for a full one that all
            share, ``"low-rank"`` for :math:`W_k W_k^\top + \sigma_k^2 I`, a mixture of probabilistic principal component analysers.
        rank: number of columns ``R`` of :math:`W_k`, below ``D``; of low-rank covariances.
        shared_noise: whether all components of low rank have the same :math:`\sigma`.
        pseudo_data: how many data points the prior of a covariance counts for, 0 for none. Default: six, one if diagonal or spherical.
        dtype: type of the parameters. Default: torch's.

    Attributes:
        weights: mixing proportions :math:`\pi`, ``(K,)``.
        loc: means :math:`\mu`, ``(K, D)``.
        scale: Cholesky factors ``(K, D, D)`` if full, ``(D, D)`` if tied; standard deviations ``(K, D)`` if diagonal, ``(K,)`` if
            spherical; those of the noise, ``(K,)`` or ``()``, if of low rank.
        factor: :math:`W`, ``(K, D, R)``; of low-rank covariances only.
        center: where moments are taken, ``(D,)``: the data's mean after :meth:`initialize`.
        bulk: deviations of the data without outliers, ``(D,)``, where there are some; else zero.
        spread: the data's covariance ``(D, D)`` in :meth:`initialize`, if diagonal or spherical variances ``(D,)``. Empty without prior.
        pseudo: how many data points it counts for, half its log determinant, ``(2,)``. Zero if unknown.

    Raises:
        ValueError: for an unknown kind of covariance, a rank that is missing, out of range, or given for another kind, or such pseudo-data.

    Reference:
        Tipping and Bishop, "Mixtures of probabilistic principal component analyzers", Neural Computation 11, 1999.
    """

    weights: Tensor
    loc: Tensor
    scale: Tensor
    factor: Tensor
    center: Tensor
    bulk: Tensor
    spread: Tensor
    pseudo: Tensor
    pseudo_data: float = 0.0

    @names_arguments
    def __init__(
        self,
        num_observed: int,
        num_components: int,
        *,
        covariance: str = "full",
        rank: int | None = None,
        shared_noise: bool = False,
        pseudo_data: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_observed, num_components, dtype)
        if pseudo_data is not None and not 0 <= pseudo_data < math.inf:
            raise ValueError(f"pseudo_data must be finite and not negative; got {pseudo_data}")
        self.covariance, self.rank = covariance, rank
        self._kind = make_covariances(covariance, num_observed, rank, shared_noise)
        self.pseudo_data = self._kind.pseudo_data if pseudo_data is None or not self._kind.is_own else pseudo_data
        self.loc = PyroParam(torch.randn(num_components, num_observed, dtype=dtype), constraints.real)  # type: ignore[assignment]
        for name, value in self._kind.start(torch.eye(num_observed, dtype=dtype), num_components).items():
            # Directions of length zero would have no gradient.
            value = 0.1 * torch.randn_like(value) if name == "factor" else value
            setattr(self, name, PyroParam(value, self._kind.supports[name]))
        self.register_buffer("center", torch.zeros(num_observed, dtype=torch.float64))
        for name, value in self.new_buffers().items():
            self.register_buffer(name, value)

    def new_buffers(self) -> dict[str, Tensor]:
        """Mixtures of earlier versions have no prior, and know of no outliers."""
        own = {"bulk": torch.zeros_like(self.center), **empty_prior_buffers(self._kind, self.pseudo_data, self.center)}
        return {**super().new_buffers(), **own}

    @takes_arrays
    def forward(self, y: Tensor | None = None, batch_size: int | None = None, num_data: int | None = None) -> Tensor:
        """The model of data ``y (N, D)``; without data it generates ``num_data`` observations."""
        weights, loc, spreads = self.weights, self.loc, self._spreads()
        size = count_data(y, num_data)
        if y is not None and self.pseudo_data:  # a factor, but no device is waited for
            unit = dist.Unit(self.log_prior(spreads), validate_args=False)
            pyro.sample("covariances", unit, obs=unit.sample(), infer={"is_auxiliary": True, "of_parameters": True})  # type: ignore[arg-type]
        with pyro.plate("data", size, subsample_size=batch_size) as index:
            z = pyro.sample("z", Component(weights))
            return pyro.sample("y", self._kind.likelihood(z, loc, spreads), obs=selected_rows(y, index))

    @names_arguments
    @torch.no_grad()
    @takes_arrays
    def initialize(self, y: Tensor, generator: torch.Generator | None = None) -> GaussianMixture:
        """Initialises from clusters of the data.

        They give means, shares and covariances.

        Twice as many clusters belong to rows that are spread over the data (k-means++). Clusters
        are then merged that one component explains nearly as well as two. This is model-based
        hierarchical clustering, see :class:`~pyro_truncated.models.gaussians.Agglomeration`.
        All of it looks at 20 000 random rows, or fifty per component if more.

        Args:
            y: data ``(N, D)``.
            generator: source of randomness.

        Raises:
            ValueError: for data that training refuses, in its words.
        """
        check_observable(self, check_data(y, self.num_observed), constraints.real)
        rows = some_rows(y, max(MOST_ROWS, 50 * self.num_components), generator).double()
        self.center = rows.mean(0)
        above = rows - self.center
        self.bulk = bulk_deviation(above)
        # The mean of few outliers is far from all other rows, whose moments around it would lose their digits.
        self.center = torch.where(self.bulk > 0, rows.median(0).values, self.center)
        above = rows - self.center
        variance = at_most(above.square().mean(0), self.bulk.square())
        floor = self._kind.floor(variance, variance + self.center.square(), self.loc.dtype)
        self.spread, self.pseudo = prior_buffers(self._kind, self.pseudo_data, above, floor).values()
        self._take(self._first_components(above, floor, generator))
        self.knows_data.fill_(True)
        return self

    def _first_components(self, centred: Tensor, floor: Tensor, generator: torch.Generator | None) -> Gaussians:
        """Components to start from, of data above their center.

        Where dimensions have units, distances are in their deviations. Of many dimensions, distances as they are are tried, too, and of
        data with outliers, distances in deviations without these. They are taken if clearly likelier.
        """

        def start(units: Tensor) -> Gaussians:
            return Agglomeration(self._kind, centred / units, floor / units.square()).components(self.num_components, generator)

        if not self._kind.has_units:
            return start(floor.new_ones(()))
        deviation = centred.square().mean(0).sqrt()
        units = torch.where(deviation > 0, deviation, 1.0)
        # In few dimensions deviations are the better unit.
        others = [torch.ones_like(units)] if centred.shape[1] > 16 else []
        if bool((self.bulk > 0).any()):
            others.append(at_most(units, self.bulk))
        best, rows = start(units).rescale(units), centred[:1000]
        every = torch.arange(self.num_components, device=rows.device).expand(len(rows), -1)
        for other_units in others:
            other = start(other_units).rescale(other_units)
            # Likelier by a tenth of a nat on some rows.
            if bool((other.log_joint(rows, every).logsumexp(1) - best.log_joint(rows, every).logsumexp(1)).mean() > 0.1):
                best = other
        return best

    @names_arguments
    @torch.no_grad()
    @takes_arrays
    def split_and_merge(self, guide: AutoTruncated, y: Tensor, generator: torch.Generator | None = None) -> int:
        """Moves one of two components that explain the same data elsewhere.

        The free energy tells the loss of merging two components, or of removing one. EM on its data tells the gain of two in its place. All
        disjoint moves that gain are done at once; fewer or none, where the free energy would fall. After them
        :class:`~pyro_truncated.ClosedForm` takes a step on all data. Call it after passes, at the cost of two, until nothing moves.

        Example:
            >>> y = torch.cat([torch.randn(200, 2), torch.randn(200, 2) + 9])
            >>> model = GaussianMixture(2, 2, covariance="spherical").initialize(y)
            >>> model.loc = torch.zeros(2, 2) + torch.tensor([[0.0], [0.1]])  # both in the first cluster
            >>> guide = AutoTruncated(model, num_states=2)
            >>> losses = [SVI(model, guide, ClosedForm(model), Truncated_ELBO()).step(y) for _ in range(5)]
            >>> moved = model.split_and_merge(guide, y)

        Args:
            guide: the truncated guide of this very model.
            y: all data ``(N, D)``, those that the guide has the populations of.
            generator: source of randomness.

        Returns:
            How many components have moved.

        Raises:
            ValueError: if the guide is of another model, or the data have another number of dimensions.
            NotImplementedError: where several processes share the data.
        """
        y = check_data(y, self.num_observed)
        if guide.model is not self:
            raise ValueError(f"guide must be the AutoTruncated of this very mixture; got one of {type(guide.model).__name__}")
        population = guide.refresh_(y)
        if guide.populations.is_part:
            raise NotImplementedError("split_and_merge needs all data; got a shard: train the mixture in one process")
        statistics = all_statistics(self, population, y)
        search = MoveSearch(self._components(self.weights), population, self._above_center(y), statistics, self._prior(statistics))
        moves, new_population = accept_moves(search.moves(generator), lambda some: self._move(some, guide, y), self)
        if new_population is None:
            return 0
        guide.populations.store_(new_population.log_joint, None, new_population.words)
        if (driver := ClosedForm.find(self)) is not None:
            driver.collect(all_statistics(self, new_population, y), None, None, len(y))
            driver(())
        return len(moves)

    def _move(self, moves: Moves, guide: AutoTruncated, y: Tensor) -> tuple[Population, Tensor]:
        """Moves components; returns proposed populations and the free energy."""
        self._take(moves.after())
        scorer = guide.make_scorer(y)
        population = guide.rescore(scorer)
        words = moves.candidates(population)
        population = population.merge(Population(population.space, words, scorer.score(words)))
        return population, population.free_energy().sum() + self.log_prior()

    def log_prior(self, spreads: dict[str, Tensor] | None = None) -> Tensor:
        """The log density of the covariances, a scalar, zero without a prior."""
        each: Tensor = Prior.from_pseudo_data(self.center[0], self.spread, self.pseudo).log_prob(
            self._kind, spreads := spreads or self._spreads()
        )
        return each.sum().to(spreads["scale"].dtype)

    def _prior(self, statistics: dict[str, Tensor]) -> Prior:
        floor = least_variance(self._kind, statistics, self.center, self.bulk, self.loc.dtype)
        return Prior.from_pseudo_data(floor, self.spread, self.pseudo)

    def _spreads(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self._kind.supports}

    def linear_features(self, y: Tensor) -> Tensor:
        """Returns features ``(N, F)``: one, the data, and their products."""
        x = self._above_center(y)
        return torch.cat([torch.ones_like(x[:, :1]), x, self._kind.features(x)], 1)

    def linear_functions(self, y: Tensor) -> MaxInnerProductIndex:
        """Returns the log joints, in the data's type."""
        loc, components = self.loc.detach().to(self._dtype_for(y)), self._components(self.weights)
        return MaxInnerProductIndex(
            components.coefficients().to(loc), self.linear_features(loc), lambda: group_places(loc), len(y), components.offset
        )

    def _dtype_for(self, y: Tensor) -> torch.dtype:
        return y.dtype if y.is_floating_point() else self.loc.dtype

    def _above_center(self, y: Tensor) -> Tensor:
        return (y.double() - self.center).to(self._dtype_for(y))

    def _components(self, weights: Tensor) -> Gaussians:
        return Gaussians(self._kind, weights.double(), self.loc.double() - self.center, self._spreads())

    def _take(self, components: Gaussians) -> None:
        for name, value in components.spreads.items():
            setattr(self, name, value.to(self.loc))
        self.loc = (components.loc + self.center).to(self.loc)
        self.weights = components.weights.to(self.weights)

    def _statistics(self, population: Population, y: Tensor, temperature: float) -> dict[str, Tensor]:
        r"""Sums with responsibilities :math:`r_{nk}` over :math:`x = y - c`, :math:`c` the center.

        ``counts (K,)``; ``sums (K, D)`` of :math:`x_n`; ``squares (D,)``, without responsibilities. ``products (K, D, D)`` of :math:`x_n
        x_n^\top`, over all components ``(D, D)`` if tied, only diagonals ``(K, D)`` if diagonal or spherical.
        """
        rows = population.select_rows(y).double() - self.center
        return dict(collect_statistics(self._kind, Shares(population, self.num_components, temperature), rows))

    @torch.no_grad()
    def datum_statistics(self) -> dict[str, Tensor]:
        """What :meth:`sufficient_statistics` are for one data point of the mixture, in expectation."""
        return dict(self._components(self.weights).expected_statistics())

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        r"""Sets the parameters to the maximiser of the expected log joint.

        With :math:`n_k = \sum_n r_{nk}`: :math:`\pi_k = n_k / N` and :math:`\mu_k = \frac{1}{n_k} \sum_n r_{nk} y_n`. The covariance
        :math:`\Sigma_k` is the weighted one around it, with the prior's data, averaged over dimensions if spherical and over components if
        tied. A component without data stays.
        """
        self._take(self._components(statistics["counts"]).best(statistics, self._prior(statistics)))

    @torch.no_grad()
    @takes_arrays
    def reconstruct(self, population: Population, y: Tensor) -> Tensor:
        r"""Posterior mean of the noise-free data, ``(N, D)`` for the population's data points.

        It is :math:`\sum_k r_{nk}\, \mu_k`, of low rank :math:`\sum_k r_{nk} \langle \mu_k + W_k h \rangle`: all else is noise.

        Args:
            population: truncated posteriors, of data points that have been scored; its ``indices`` select these among ``y``.
            y: all data, ``(N, D)``.
        """
        parameters = {name: value.double() for name, value in self._spreads().items()}
        rows = population.select_rows(check_data(y, self.num_observed))
        mean: Tensor = self._kind.without_noise(dataclasses.replace(population, indices=None), rows, self.loc.double(), parameters)
        return mean.to(self._dtype_for(y))
