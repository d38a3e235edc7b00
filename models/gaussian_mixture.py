"""Mixtures of Gaussians with full, diagonal, spherical, tied or low-rank covariances."""

from __future__ import annotations

import pyro
import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import Population, UniqueModule, check_counts, check_observable, names_arguments, selected_rows, some_rows, takes_arrays
from pyro_truncated.distributions import Component
from pyro_truncated.models.binary_causes import MOST_ROWS, check_data
from pyro_truncated.models.covariances import COVARIANCES, Covariances, LowRank, floored
from pyro_truncated.models.mixture import NEVER_USED, Shares, best_weights
from pyro_truncated.models.seeding import Clusters, Groups, parted

_VARIANCE_FLOOR = 1e-6
_ROWS_PER_COMPONENT = 5
_BLOCK = 2**14


class GaussianMixture(UniqueModule):
    r"""Mixture of Gaussians, :math:`z \sim \mathrm{Categorical}(\pi)`, :math:`y \sim \mathcal N(\mu_z, \Sigma_z)`.

    Variances, or eigenvalues of covariances, are kept above :math:`10^{-6}` of the data's mean variance (of the rounding error of data that
    do not vary), without which the likelihood has no maximum; the M-step is the exact maximiser under this constraint.

    Example:
        >>> y = torch.cat([torch.randn(50, 2), torch.randn(50, 2) + 5])
        >>> model = GaussianMixture(2, 2).initialize(y)
        >>> guide = AutoTruncated(model, num_states=2)  # both components: exact EM
        >>> svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO())
        >>> losses = [svi.step(y) for _ in range(10)]
        >>> guide.marginals()["z"].shape
        torch.Size([100, 2])

    Args:
        num_observed: number of observed dimensions ``D``.
        num_components: number of components ``K``.
        covariance: ``"full"``, ``"diag"`` or ``"spherical"`` for a covariance of each component, ``"tied"`` for a full one that all share;
            ``"low-rank"`` for :math:`W_k W_k^\top + \sigma_k^2 I`, a mixture of probabilistic principal component analysers: densities
            cost ``D R`` instead of ``D^2``, but the M-step takes ``K D^2`` sums of products as for full ones.
        rank: number of columns ``R`` of :math:`W_k`, below ``D``; of low-rank covariances.
        shared_noise: whether all components of low rank have the same :math:`\sigma`.
        dtype: floating point type of the parameters; default: torch's.

    Attributes:
        weights: mixing proportions :math:`\pi`, ``(K,)``.
        loc: means :math:`\mu`, ``(K, D)``.
        scale: Cholesky factors of the covariances, ``(K, D, D)`` if full and ``(D, D)`` if tied; standard deviations ``(K, D)`` if diagonal
            and ``(K,)`` if spherical; those of the noise :math:`\sigma`, ``(K,)`` or ``()``, if of low rank.
        factor: :math:`W`, ``(K, D, R)``; of low-rank covariances only.
        center: where moments are taken, ``(D,)``; the data's mean after :meth:`initialize`, which avoids cancellation.

    Raises:
        ValueError: for an unknown kind of covariance, or a rank that is missing, out of range, or given for another kind.

    Reference:
        Tipping and Bishop, "Mixtures of probabilistic principal component analyzers", Neural Computation 11, 1999.
    """

    weights: Tensor
    loc: Tensor
    scale: Tensor
    factor: Tensor
    center: Tensor

    @names_arguments
    def __init__(
        self,
        num_observed: int,
        num_components: int,
        *,
        covariance: str = "full",
        rank: int | None = None,
        shared_noise: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_counts(num_observed=num_observed, num_components=num_components)
        self.num_observed, self.num_components, self.covariance, self.rank = num_observed, num_components, covariance, rank
        self._kind = _kind(covariance, num_observed, rank, shared_noise)
        weights = torch.full((num_components,), 1 / num_components, dtype=dtype)
        self.weights = PyroParam(weights, constraints.simplex)  # type: ignore[assignment]
        self.loc = PyroParam(torch.randn(num_components, num_observed, dtype=dtype), constraints.real)  # type: ignore[assignment]
        for name, value in self._kind.start(torch.eye(num_observed, dtype=dtype), num_components).items():
            # Directions of length zero would have no gradient.
            value = 0.1 * torch.randn_like(value) if name == "factor" else value
            setattr(self, name, PyroParam(value, self._kind.supports[name]))
        self.register_buffer("center", torch.zeros(num_observed, dtype=torch.float64))

    @takes_arrays
    def forward(self, y: Tensor | None = None, batch_size: int | None = None, num_data: int | None = None) -> Tensor:
        """The model of data ``y (N, D)``; without data it generates ``num_data`` observations."""
        weights, loc, spreads = self.weights, self.loc, self._spreads()
        size = len(y) if y is not None else num_data or 1
        with pyro.plate("data", size, subsample_size=batch_size) as index:
            z = pyro.sample("z", Component(weights))
            likelihood = self._kind.likelihood(z, loc, spreads)
            return pyro.sample("y", likelihood, obs=selected_rows(y, index))

    @names_arguments
    @torch.no_grad()
    @takes_arrays
    def initialize(self, y: Tensor, generator: torch.Generator | None = None) -> GaussianMixture:
        """Starts from clusters of the data: their means, their shares, and for every component the covariance within them.

        The clusters belong to rows that lie spread over the data (k-means++ with local search), chosen among 20 000 random rows, or five
        for each component if that is more.

        Args:
            y: data ``(N, D)``.
            generator: source of randomness.

        Returns:
            The model itself.

        Raises:
            ValueError: for data that training refuses, in its words: those outside the likelihood's support, by name and data point.
        """
        check_observable(self, check_data(y, self.num_observed), constraints.real)
        rows = some_rows(y, max(MOST_ROWS, _ROWS_PER_COMPONENT * self.num_components), generator).double()
        self.center = rows.mean(0)
        clusters = Clusters(rows - self.center, self.num_components, generator)
        variance = (rows - self.center).square().mean()
        covariance = floored(clusters.covariance, self._floor(variance, rows.square().mean()))
        self.loc = (self.center + parted(clusters.means, covariance, generator)).to(self.loc)
        for name, value in self._kind.start(covariance, self.num_components).items():
            setattr(self, name, value.to(self.loc))
        self.weights = clusters.shares.to(self.weights)
        return self

    @names_arguments
    @torch.no_grad()
    @takes_arrays
    def likeliest_components(self, y: Tensor, num_states: int) -> Tensor:
        r"""The components of highest :math:`\log \pi_k + \log p_k(y_n)`, for populations to start from.

        A population of a few among very many components starts well with these, and the search has little to do. Log joints are linear in
        the data and their squares, so that this is a product of matrices; of more than a thousand components only those are looked at whose
        groups are likely, at a cost that grows with :math:`N \sqrt K`, and few are missed.

        Example:
            >>> y = torch.randn(500, 2)
            >>> model = GaussianMixture(2, 50, covariance="diag").initialize(y)
            >>> guide = AutoTruncated(model, num_states=4, init=model.likeliest_components(y, 4))

        Args:
            y: data ``(N, D)``.
            num_states: how many components ``S``; all if there are fewer.

        Returns:
            Components ``(N, S)``, the likeliest first.

        Raises:
            ValueError: if the data have another number of dimensions, or the number is below 1.
        """
        check_counts(num_states=num_states)
        coefficients = self._coefficients()
        groups = Groups(coefficients.to(y), self.loc.to(y))
        num_states = min(num_states, self.num_components)
        return torch.cat([groups.likeliest(self._features(rows), num_states) for rows in check_data(y, self.num_observed).split(_BLOCK)])

    def _spreads(self) -> dict[str, Tensor]:
        """The parameters of the covariances by name."""
        return {name: getattr(self, name) for name in self._kind.supports}

    def _features(self, y: Tensor) -> Tensor:
        """What log joints are linear in, ``(N, F)``: one, the data, and the squares and products that the covariances need."""
        x = y - self.center.to(y)
        return torch.cat([torch.ones_like(x[:, :1]), x, self._kind.features(x)], 1)

    def _coefficients(self) -> Tensor:
        """Coefficients ``(K, F)`` of the features in the log joints, but for what is the same for all components."""
        loc = self.loc.double() - self.center
        linear, squares, size = self._kind.precisions(loc, {name: value.double() for name, value in self._spreads().items()})
        offset = self.weights.double().log() - size - 0.5 * (linear * loc).sum(-1)
        return torch.cat([offset.unsqueeze(-1), linear, -0.5 * squares], 1)

    @torch.no_grad()
    @takes_arrays
    def sufficient_statistics(
        self, population: Population, y: Tensor, batch_size: int | None = None, num_data: int | None = None, *, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        r"""Sums over the population's data points that :meth:`maximize` needs, see :class:`~pyro_truncated.ClosedFormModel`.

        Returns:
            With responsibilities :math:`r_{nk}` and :math:`x = y - c` for the center :math:`c`: ``counts``, :math:`\sum_n r_{nk}`,
            ``(K,)``; ``sums``, :math:`\sum_n r_{nk} x_n`, ``(K, D)``; ``squares``, :math:`\sum_n x_n^2`, ``(D,)``; ``products``,
            :math:`\sum_n r_{nk} x_n x_n^\top`, ``(K, D, D)``, summed over the components ``(D, D)`` if tied, or only its diagonals
            ``(K, D)`` if the covariances are diagonal or spherical. All can be added and scaled.
        """
        rows = population.rows_of(check_data(y, self.num_observed)).double() - self.center
        shares = Shares(population, self.num_components, temperature)
        products = self._kind.products(shares, rows)
        return {"counts": shares.counts(), "sums": shares.sums(rows), "squares": rows.square().sum(0), "products": products}

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        r"""Sets the parameters to the maximiser of the expected log joint.

        With :math:`n_k = \sum_n r_{nk}`: :math:`\pi_k = n_k / N`, :math:`\mu_k = \frac{1}{n_k} \sum_n r_{nk} y_n`, and :math:`\Sigma_k` the
        weighted covariance around it, averaged over dimensions if spherical and over components if tied. A component without data keeps
        its mean and covariance.
        """
        counts, sums = statistics["counts"], statistics["sums"]
        is_used = counts > NEVER_USED
        loc = torch.where(is_used.unsqueeze(-1), sums / counts.unsqueeze(-1), self.loc.double() - self.center)
        total = counts.sum()
        shift = sums.sum(0) / total
        variance = statistics["squares"] / total - shift.square()
        floor = self._floor(variance.mean().clamp(min=0.0), (variance + (self.center + shift).square()).mean())
        for name, best in self._kind.best(statistics, loc, floor).items():
            old = getattr(self, name)
            is_own = self._kind.is_own and best.dim() > 0
            keeps = ~is_used.reshape(-1, *(1,) * (best.dim() - 1)) if is_own else is_used.new_zeros(())
            setattr(self, name, torch.where(keeps, old, best.to(old)))
        self.loc = (loc + self.center).to(self.loc)
        self.weights = best_weights(counts).to(self.weights)

    @torch.no_grad()
    @takes_arrays
    def reconstruct(self, population: Population, y: Tensor) -> Tensor:
        r"""Posterior mean of the noise-free data, ``(N, D)`` for the population's data points.

        It is :math:`\sum_k r_{nk}\, \mu_k`, with low-rank covariances :math:`\sum_k r_{nk} \langle \mu_k + W_k h \rangle`: all that is not
        in their directions is noise.

        Args:
            population: truncated posteriors, of data points that have been scored; its ``indices`` select these among ``y``.
            y: all data, ``(N, D)``.
        """
        check_data(y, self.num_observed)
        parameters = {name: value.double() for name, value in self._spreads().items()}
        mean: Tensor = self._kind.without_noise(population, y, self.loc.double(), parameters)
        return mean.to(y.dtype)

    def _floor(self, variance: Tensor, power: Tensor) -> Tensor:
        """Least variance of data of the given variance and mean square: the second tells what is rounding where the first is none."""
        unit = torch.where(power > 0, power, 1.0)
        return _VARIANCE_FLOOR * variance.maximum(torch.finfo(self.loc.dtype).eps * unit)


def _kind(covariance: str, num_observed: int, rank: int | None, shared_noise: bool) -> Covariances:
    if covariance not in COVARIANCES:
        raise ValueError(f"covariance must be one of {tuple(COVARIANCES)}; got {covariance!r}")
    if covariance != "low-rank":
        if rank is not None or shared_noise:
            raise ValueError(f"rank and shared_noise are for covariance='low-rank'; got rank={rank} for covariance={covariance!r}")
        kind: Covariances = COVARIANCES[covariance]()
        return kind
    if rank is None or not 0 < rank < num_observed:
        raise ValueError(f"rank must be a number of directions below num_observed={num_observed} for covariance='low-rank'; got {rank}")
    return LowRank(rank, is_shared=shared_noise)
