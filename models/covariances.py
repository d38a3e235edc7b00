"""Covariance types of Gaussian mixtures: statistics and M-steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import Population
from pyro_truncated.distributions import ComponentLowRankNormal, ComponentMultivariateNormal, ComponentNormal
from pyro_truncated.extend import read_conditions
from pyro_truncated.models.data_model import FLOOR, MIN_COMPONENT_COUNT
from pyro_truncated.models.linear_mixture import Shares

# Outliers are in columns whose deviation is so many times that of their middle half.
OUTLIER_RATIO = 5.0


def bulk_deviation(centred: Tensor) -> Tensor:
    """Returns deviations ``(D,)`` without outliers, of columns with some.

    They are by the middle half of a thousand rows, as of normal numbers. Of other columns they are zero.
    """
    ordered = centred[:: -(-len(centred) // 1000)].sort(0).values
    middle = (ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]) / 1.349
    deviation = centred.square().mean(0).sqrt()
    has_outliers = (middle > 0) & (deviation > OUTLIER_RATIO * middle)
    return torch.where(has_outliers, middle, 0.0)


def at_most(values: Tensor, bounds: Tensor) -> Tensor:
    """Returns values up to bounds, where these are not zero."""
    return torch.where(bounds > 0, values.minimum(bounds), values)


def floor_covariance(covariance: Tensor, floor: Tensor) -> Tensor:
    """The likeliest covariance without eigenvalues below a floor."""
    # Eigenvalues below this share of a variance are rounding errors, and would have no Cholesky factor.
    units = floor.maximum(1e-14 * covariance.diagonal(dim1=-2, dim2=-1)).sqrt()
    squares = units.unsqueeze(-1) * units.unsqueeze(-2)
    relative = covariance / squares
    # What is above the floor has a Cholesky factor; eigenvalues take much longer.
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    _, info = torch.linalg.cholesky_ex(relative - identity)
    if all(read_conditions(info == 0)):
        return covariance
    values, vectors = torch.linalg.eigh(relative)
    return (vectors * values.clamp(min=1.0).unsqueeze(-2)) @ vectors.mT * squares


def floor_cholesky(covariance: Tensor) -> Tensor:
    """The Cholesky factor of :func:`floor_covariance`, without checks."""
    return torch.linalg.cholesky_ex(covariance).L


Parameters = dict[str, Tensor]


class CovariancesBase:
    r"""What kinds of covariances :math:`\Sigma_k` of ``K`` components share.

    Attributes:
        supports: where its parameters live, by name.
        is_own: whether every component has its own covariance.
        is_dense: whether that is a matrix ``(D, D)``.
        has_units: whether every dimension has a unit of its own; else all have one.
        least_directions: how many dimensions data must have.
        pseudo_data: how many data points the prior of a covariance counts for where nobody says it.
    """

    supports: dict[str, constraints.Constraint] = {"scale": constraints.positive}  # noqa: RUF012
    is_own = True
    is_dense = False
    has_units = True
    least_directions = 1
    pseudo_data = 1.0

    def by_itself(self) -> Any:
        """The type of a component that depends on no others."""
        return self

    def offset(self, x: Tensor, parameters: Parameters) -> Tensor | None:
        """Terms of the log densities ``(N,)`` that the features lack."""
        return None

    def floor(self, variance: Tensor, power: Tensor, dtype: torch.dtype) -> Tensor:
        """The least variance of data, of each dimension or of all."""
        if not self.has_units:
            variance, power = variance.mean(), power.mean()
        return variance.maximum(torch.finfo(dtype).eps * torch.where(power > 0, power, 1.0)).mul(FLOOR)

    def rescale(self, parameters: Parameters, units: Tensor) -> Parameters:
        """Returns the parameters of data that are multiplied by units ``(D,)``."""
        return {"scale": parameters["scale"] * units}

    def without_noise(self, population: Population, y: Tensor, loc: Tensor, parameters: Parameters) -> Tensor:
        """Posterior means ``(N, D)`` of noise-free data."""
        return Shares(population, len(loc)).means(loc)


class Diagonal(CovariancesBase):
    """A variance for every dimension: ``scale (K, D)`` holds deviations."""

    def likelihood(self, z: Tensor, loc: Tensor, parameters: Parameters) -> Any:
        """The distribution of data of components ``z``."""
        scale = parameters["scale"]
        return ComponentNormal(z, loc, scale if scale.dim() == 2 else scale.unsqueeze(-1))

    def start(self, covariance: Tensor, number: int) -> Parameters:
        """The parameters of components with one covariance ``(D, D)``, or variances."""
        scale = self._mean(variances(covariance)).sqrt()
        return {"scale": scale.expand(number, *scale.shape).clone()}

    def products(self, shares: Shares, rows: Tensor) -> Tensor:
        """Returns sums of data products ``(N, D)`` for the M-step: squares, ``(K, D)``."""
        return shares.sums(rows.square())

    def variances(self, loc: Tensor, parameters: Parameters) -> Tensor:
        """Variances of all dimensions, of which ``(K, D)`` can be made."""
        return parameters["scale"].reshape(len(loc), -1).square()

    def expected_products(self, weights: Tensor, loc: Tensor, parameters: Parameters) -> Tensor:
        """These products of one data point in expectation."""
        return weights.unsqueeze(-1) * (self.variances(loc, parameters) + loc.square())

    def product(self, covariance: Tensor, loc: Tensor) -> Tensor:
        """The products of data at means ``(K, D)``, spread with a covariance."""
        return variances(covariance) + loc.square()

    def best(self, statistics: dict[str, Tensor], loc: Tensor, floor: Tensor) -> Parameters:
        """Maximum likelihood parameters with eigenvalues above the floor."""
        counts = _counts(statistics).unsqueeze(-1)
        power = statistics["products"] / counts
        variance = torch.addcmul(power, loc, loc - 2 * statistics["sums"] / counts).maximum(rounding_floor(power))
        return {"scale": self._mean(variance).maximum(floor).sqrt()}

    def features(self, x: Tensor) -> Tensor:
        """Squares and products ``(N, F)`` in which log densities are linear."""
        return x.square()

    def summed_features(self, statistics: dict[str, Tensor]) -> Tensor:
        """The features summed over the data of every component, ``(K, F)``."""
        return statistics["products"]

    def precisions(self, loc: Tensor, parameters: Parameters) -> tuple[Tensor, Tensor, Tensor]:
        r""":math:`\Sigma_k^{-1} \mu_k` ``(K, D)``, factors ``(K, F)`` of the features, and :math:`\frac12 \log |\Sigma_k|` ``(K,)``."""
        scale = parameters["scale"].reshape(len(loc), -1)
        return scale**-2 * loc, scale**-2, scale.log().expand_as(loc).sum(-1)

    def log_det_and_trace(self, parameters: Parameters, covariance: Tensor) -> tuple[Tensor, Tensor]:
        r""":math:`\frac12 \log |\Sigma_k|` and :math:`\mathrm{tr}\,\Sigma_k^{-1} S`, ``(K,)`` both."""
        scale = parameters["scale"].reshape(len(parameters["scale"]), -1)
        return scale.log().expand(-1, len(covariance)).sum(-1), (variances(covariance) / scale.square()).sum(-1)

    def _mean(self, variance: Tensor) -> Tensor:
        return variance


class Spherical(Diagonal):
    """One variance for all dimensions: ``scale (K,)`` holds deviations."""

    has_units = False

    def features(self, x: Tensor) -> Tensor:
        """The square length."""
        return x.square().sum(1, keepdim=True)

    def summed_features(self, statistics: dict[str, Tensor]) -> Tensor:
        """Square lengths."""
        return statistics["products"].sum(1, keepdim=True)

    def _mean(self, variance: Tensor) -> Tensor:
        return variance.mean(-1)


class Full(CovariancesBase):
    """Full ones: ``scale (K, D, D)`` holds Cholesky factors."""

    is_dense = True
    # Chosen on other data than those of the tables.
    pseudo_data = 6.0

    supports = {"scale": constraints.lower_cholesky}  # noqa: RUF012

    def likelihood(self, z: Tensor, loc: Tensor, parameters: Parameters) -> Any:
        """The distribution of data of components ``z``."""
        return ComponentMultivariateNormal(z, loc, parameters["scale"])

    def start(self, covariance: Tensor, number: int) -> Parameters:
        """The factors of so many components."""
        return {"scale": floor_cholesky(covariance).repeat(number, 1, 1)}

    def products(self, shares: Shares, rows: Tensor) -> Tensor:
        """Products, ``(K, D, D)``."""
        return shares.outer_products(rows)

    def expected_products(self, weights: Tensor, loc: Tensor, parameters: Parameters) -> Tensor:
        """Products, ``(K, D, D)``."""
        return weights[:, None, None] * self.product(self.matrices(parameters), loc)

    def variances(self, loc: Tensor, parameters: Parameters) -> Tensor:
        """Diagonals of the covariances."""
        return self.matrices(parameters).diagonal(dim1=-2, dim2=-1)

    def matrices(self, parameters: Parameters) -> Tensor:
        """The covariances."""
        return parameters["scale"] @ parameters["scale"].mT

    def rescale(self, parameters: Parameters, units: Tensor) -> Parameters:
        """The factors, whose rows are multiplied."""
        return {"scale": parameters["scale"] * units.unsqueeze(-1)}

    def product(self, covariance: Tensor, loc: Tensor) -> Tensor:
        """Products, ``(K, D, D)``."""
        return covariance + loc.unsqueeze(-1) * loc.unsqueeze(-2)

    def best(self, statistics: dict[str, Tensor], loc: Tensor, floor: Tensor) -> Parameters:
        """The factors of the likeliest covariances."""
        floor = floor.maximum(rounding_floor(statistics["products"].diagonal(dim1=-2, dim2=-1) / _counts(statistics).unsqueeze(-1)))
        return {"scale": floor_cholesky(floor_covariance(spread_around(statistics, loc), floor))}

    def features(self, x: Tensor) -> Tensor:
        """Products, of two dimensions once."""
        row, column = torch.tril_indices(x.shape[1], x.shape[1], device=x.device)
        return x[:, row] * x[:, column]

    def summed_features(self, statistics: dict[str, Tensor]) -> Tensor:
        """Products, of two dimensions once."""
        products = statistics["products"]
        row, column = torch.tril_indices(*products.shape[1:], device=products.device)
        return products[:, row, column]

    def precisions(self, loc: Tensor, parameters: Parameters) -> tuple[Tensor, Tensor, Tensor]:
        """Of full covariances."""
        precision, size = self._invert(parameters)
        row, column = torch.tril_indices(*precision.shape[1:], device=precision.device)
        # Of two dimensions once, so that products count twice.
        factors = precision[:, row, column] * (2.0 - (row == column).to(precision))
        return (precision @ loc.unsqueeze(-1)).squeeze(-1), factors, size

    def log_det_and_trace(self, parameters: Parameters, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Of full covariances."""
        precision, size = self._invert(parameters)
        return size, (precision * covariance).sum((-2, -1))

    def _invert(self, parameters: Parameters) -> tuple[Tensor, Tensor]:
        """Precisions, and halves of the log determinants."""
        scale = parameters["scale"]
        return torch.cholesky_inverse(scale), scale.diagonal(dim1=-2, dim2=-1).log().sum(-1)


class Tied(Full):
    """A full one that all components share: ``scale (D, D)`` holds its Cholesky factor."""

    is_own = is_dense = False
    pseudo_data = 0.0

    def start(self, covariance: Tensor, number: int) -> Parameters:
        """Its factor."""
        return {"scale": floor_cholesky(covariance)}

    def products(self, shares: Shares, rows: Tensor) -> Tensor:
        """Products of all data, ``(D, D)``."""
        return rows.mT @ rows

    def expected_products(self, weights: Tensor, loc: Tensor, parameters: Parameters) -> Tensor:
        """Products, ``(D, D)``."""
        return weights.sum() * self.matrices(parameters) + (weights.unsqueeze(-1) * loc).mT @ loc

    def best(self, statistics: dict[str, Tensor], loc: Tensor, floor: Tensor) -> Parameters:
        """The factor of the likeliest covariance."""
        counts, cross = _counts(statistics).unsqueeze(-1), loc.mT @ statistics["sums"]
        products = statistics["products"]
        spread = products - cross - cross.mT + (counts * loc).mT @ loc
        floor = floor.maximum(rounding_floor(products.diagonal() / counts.sum(), is_shared=True))
        return {"scale": floor_cholesky(floor_covariance(spread / counts.sum(), floor))}

    def features(self, x: Tensor) -> Tensor:
        """None: products count alike for all components."""
        return x[:, :0]

    def offset(self, x: Tensor, parameters: Parameters) -> Tensor | None:
        r""":math:`-\frac12 x^\top \Sigma^{-1} x`."""
        white = torch.linalg.solve_triangular(parameters["scale"].to(x), x.mT, upper=False)
        return -0.5 * white.square().sum(0)

    def summed_features(self, statistics: dict[str, Tensor]) -> Tensor:
        """None."""
        return statistics["sums"][:, :0]

    def precisions(self, loc: Tensor, parameters: Parameters) -> tuple[Tensor, Tensor, Tensor]:
        """Of one covariance."""
        precision, size = self._invert(parameters)
        return loc @ precision, loc[:, :0], size


def variances(covariance: Tensor) -> Tensor:
    """The variances of a covariance ``(D, D)``, or these themselves."""
    return covariance.diagonal() if covariance.dim() == 2 else covariance


def _counts(statistics: dict[str, Tensor]) -> Tensor:
    return statistics["counts"].clamp(min=MIN_COMPONENT_COUNT)


def rounding_floor(power: Tensor, *, is_shared: bool = False) -> Tensor:
    """The variance below which a difference of mean squares has no digits.

    So it is where an outlier is alone in its component. A variance of its own keeps four digits above this floor. A shared one keeps one:
    a higher floor would widen all components.
    """
    return (4 if is_shared else 1e4) * torch.finfo(power.dtype).eps * power


def spread_around(statistics: dict[str, Tensor], loc: Tensor) -> Tensor:
    """Weighted covariances ``(K, D, D)`` around means."""
    counts, cross = _counts(statistics)[:, None, None], loc.unsqueeze(-1) * statistics["sums"].unsqueeze(-2)
    return (statistics["products"] - cross - cross.mT) / counts + loc.unsqueeze(-1) * loc.unsqueeze(-2)


class LowRank(Full):
    """Low-rank covariances: ``factor (K, D, R)``, and noise ``scale (K,)`` or ``()``."""

    has_units = False
    supports = {"scale": constraints.positive, "factor": constraints.independent(constraints.real, 3)}  # noqa: RUF012

    def __init__(self, rank: int, *, is_shared: bool) -> None:
        self.rank, self.is_shared, self.least_directions = rank, is_shared, 2 * rank

    def by_itself(self) -> Covariances:
        """With a noise of its own."""
        return LowRank(self.rank, is_shared=False)

    def likelihood(self, z: Tensor, loc: Tensor, parameters: Parameters) -> Any:
        """The distribution of data of components ``z``."""
        return ComponentLowRankNormal(z, loc, parameters["factor"], parameters["scale"])

    def start(self, covariance: Tensor, number: int) -> Parameters:
        """The directions and the noise of so many components."""
        factor, scale = best_low_rank(covariance.unsqueeze(0), covariance.new_ones(1), self.rank, covariance.new_zeros(()), is_shared=False)
        return {"factor": factor.repeat(number, 1, 1), "scale": scale[0].clone() if self.is_shared else scale.repeat(number)}

    def matrices(self, parameters: Parameters) -> Tensor:
        """The covariances."""
        factor, scale = parameters["factor"], parameters["scale"]
        noise = scale.expand(len(factor))[:, None].square().expand(factor.shape[:2])
        return factor @ factor.mT + torch.diag_embed(noise)

    def without_noise(self, population: Population, y: Tensor, loc: Tensor, parameters: Parameters) -> Tensor:
        """Posterior means of what lies in the directions."""
        blocks = []
        for block in population.split(max(1, 2**22 // (population.num_states * loc.shape[1]))):
            rows = block.select_rows(y).to(loc).unsqueeze(1)
            means, *_ = self.likelihood(block.states(torch.int64)[..., 0], loc, parameters).without_noise(rows)
            blocks.append((block.weights().to(loc).unsqueeze(-1) * means).sum(1))
        return torch.cat(blocks)

    def best(self, statistics: dict[str, Tensor], loc: Tensor, floor: Tensor) -> Parameters:
        """The likeliest directions and noise."""
        counts = statistics["counts"].clamp(min=0.0)
        power = statistics["products"].diagonal(dim1=-2, dim2=-1).mean(-1)
        if self.is_shared:
            floor = floor.maximum(rounding_floor(power.sum() / counts.sum(), is_shared=True))
        else:
            floor = floor.maximum(rounding_floor(power / _counts(statistics)))
        factor, scale = best_low_rank(spread_around(statistics, loc), counts, self.rank, floor, is_shared=self.is_shared)
        return {"factor": factor, "scale": scale}

    def _invert(self, parameters: Parameters) -> tuple[Tensor, Tensor]:
        factor = parameters["factor"]
        likelihood = self.likelihood(torch.arange(len(factor), device=factor.device), factor.new_zeros(factor.shape[:2]), parameters)
        return likelihood.precision_matrix, likelihood.half_log_determinant


def best_low_rank(covariance: Tensor, counts: Tensor, rank: int, floor: Tensor, *, is_shared: bool) -> tuple[Tensor, Tensor]:
    r"""The likeliest :math:`W_k W_k^\top + \sigma_k^2 I` of data whose covariances are given.

    Let a covariance have eigenvalues :math:`\lambda_1 \ge \lambda_2 \ge \dots` and eigenvectors :math:`u_j`. Then :math:`\sigma^2` is the
    mean of the eigenvalues behind the first ``R``, and the columns of :math:`W` are :math:`\sqrt{\lambda_j - \sigma^2}\, u_j`. Shared noise
    is the mean over all components, with those of the first ``R`` that lie below it.

    Of covariances ``(K, D, D)`` of ``counts (K,)`` data points. Returns factors ``(K, D, R)`` and deviations ``(K,)``, or ``()`` if shared.

    Reference:
        Tipping and Bishop, "Mixtures of probabilistic principal component analyzers", Neural Computation 11, 1999, equations 8 and 9.
    """
    # Of covariances of few directions and nothing else LAPACK's divide and conquer makes NaN where numbers underflow.
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    values, vectors = torch.linalg.eigh(covariance + floor[..., None, None] * identity)
    values = (values - floor[..., None]).clamp(min=0.0).flip(-1)
    first, rest = values[:, :rank], values[:, rank:]
    noise = _shared_noise(first, rest, counts) if is_shared else rest.mean(-1)
    noise = noise.maximum(floor)
    above = (first - noise.unsqueeze(-1)).clamp(min=0.0)
    return vectors.flip(-1)[..., :rank] * above.sqrt().unsqueeze(-2), noise.sqrt()


def _shared_noise(first: Tensor, rest_sum: Tensor, counts: Tensor) -> Tensor:
    r"""The root of :math:`\sum_k n_k [\sum_{j > R} (v - \lambda_{kj}) + \sum_{j \le R} (v - \lambda_{kj})_+]` in the variance ``v``."""
    weight = counts.unsqueeze(-1)
    value, order = first.flatten().sort()
    share = weight.expand_as(first).flatten()[order]
    total = torch.cat([(weight * rest_sum).sum().reshape(1), share * value]).cumsum(0)
    number = torch.cat([(weight.sum() * rest_sum.shape[-1]).reshape(1), share]).cumsum(0)
    # Means over ever more of the eigenvalues: the first one that does not exceed the next of them.
    mean, following = total / number, torch.cat([value, value.new_full((1,), torch.inf)])
    # To index by a scalar is to look at it.
    return mean.take((mean <= following).to(torch.uint8).argmax())


Covariances = Diagonal | Full
COVARIANCES: dict[str, Callable[..., Covariances]] = {
    "full": Full,
    "diag": Diagonal,
    "spherical": Spherical,
    "tied": Tied,
    "low-rank": LowRank,
}


def make_covariances(covariance: str, num_observed: int, rank: int | None, shared_noise: bool) -> Covariances:
    """The kind of that name."""
    if covariance not in COVARIANCES:
        raise ValueError(f"covariance must be one of {tuple(COVARIANCES)}; got {covariance!r}")
    if covariance != "low-rank":
        if rank is not None or shared_noise:
            raise ValueError(f"rank and shared_noise are for covariance='low-rank'; got rank={rank} for covariance={covariance!r}")
        return COVARIANCES[covariance]()
    if rank is None or not 0 < rank < num_observed:
        raise ValueError(f"rank must be a number of directions below num_observed={num_observed} for covariance='low-rank'; got {rank}")
    return LowRank(rank, is_shared=shared_noise)


@dataclasses.dataclass(frozen=True)
class Prior:
    r"""A variance floor, and a prior of each component's covariance.

    .. math:: \log p(\Sigma) = \max_\alpha \left[\tfrac m2 \left(\log |\Sigma^{-1} \alpha S| - \alpha\,\mathrm{tr}\,\Sigma^{-1} S\right)
        + \tfrac D2 (\log \alpha - \alpha)\right] + \text{const}

    is an inverse Wishart density around :math:`\alpha S`, that of ``m`` more data points shaped as all data. The ratio :math:`\alpha` of
    component and data is estimated with the weight of one data point. What all components share has no prior.
    """

    floor: Tensor  # least variance, of all dimensions or of each, (D,)
    number: float | Tensor = 0.0  # m
    covariance: Tensor | None = None  # S, (D, D), or the variances (D,) where covariances are not dense. Without it only the floor.
    size: Tensor | None = None  # half of log |S| under the covariance type; computed by default

    @classmethod
    def from_pseudo_data(cls, floor: Tensor, covariance: Tensor, buffers: Tensor) -> Prior:
        """The prior from results of :func:`prior_buffers`, if empty only the floor."""
        return cls(floor, buffers[0], covariance, buffers[1]) if len(buffers) else cls(floor)

    def best(self, kind: Covariances, spreads: Parameters, statistics: dict[str, Tensor], loc: Tensor) -> Parameters:
        r"""Covariances that maximise the expected log joint, :math:`\alpha` from the current ones."""
        if kind.is_own and self.covariance is not None:
            unit = self._units(self._terms(kind, spreads, self.covariance)[1]).unsqueeze(-1)
            dense = unit.unsqueeze(-1) if kind.is_dense else unit
            added: dict[str, Any] = {"counts": 1.0, "sums": loc, "products": dense * kind.product(self.covariance, loc / unit.sqrt())}
            statistics = {**statistics, **{name: statistics[name] + self.number * value for name, value in added.items()}}
        return kind.best(statistics, loc, self.floor)

    def log_prob(self, kind: Covariances, spreads: Parameters) -> Tensor:
        """Log densities of the components' covariances, ``(K,)``, or one zero."""
        if not kind.is_own or self.covariance is None:
            return self.floor.new_zeros(())
        highest = half_log_det(kind, self.covariance) if self.size is None else self.size
        size, trace = self._terms(kind, spreads, self.covariance)
        # What the best unit adds to the trace it takes from its own density.
        return self.number * (highest - size) + (0.5 * self._size * (self.number + 1)) * self._units(trace).log()

    def _terms(self, kind: Covariances, spreads: Parameters, covariance: Tensor) -> tuple[Tensor, Tensor]:
        r""":math:`\frac12 \log |\Sigma|` and :math:`\mathrm{tr}\,\Sigma^{-1} S` of components, ``(K,)`` both."""
        return kind.log_det_and_trace({name: value.double() for name, value in spreads.items()}, covariance)

    def _units(self, trace: Tensor) -> Tensor:
        return (self.number + 1) * self._size / (self.number * trace + self._size)

    @property
    def _size(self) -> int:
        assert self.covariance is not None
        return len(self.covariance)


def empty_prior_buffers(kind: Covariances, number: float, center: Tensor) -> dict[str, Tensor]:
    """Zero buffers of a mixture without data ``(D,)``, empty without prior."""
    sizes: dict[str, tuple[int, ...]] = {"spread": tuple(center.shape) * (1 + kind.is_dense), "pseudo": (2,)}
    return {name: center.new_zeros(size if number else (0,)) for name, size in sizes.items()}


def prior_buffers(kind: Covariances, number: float, rows: Tensor, floor: Tensor) -> dict[str, Tensor]:
    """These buffers with what is known from data ``(N, D)`` around their mean."""
    if not number:
        return empty_prior_buffers(kind, number, rows[0])
    spread: Tensor = floor_covariance(rows.mT @ rows / len(rows), floor) if kind.is_dense else rows.square().mean(0).maximum(floor)
    size = half_log_det(kind, spread)
    return {"spread": spread, "pseudo": torch.stack([size.new_tensor(number), size])}


def half_log_det(kind: Covariances, covariance: Tensor) -> Tensor:
    r"""Returns :math:`\frac12 \log |S|` under the covariance type."""
    kind = Full() if kind.is_dense else kind
    return kind.log_det_and_trace(kind.start(covariance, 1), covariance)[0][0]
