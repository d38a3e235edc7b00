"""Covariance types of Gaussian mixtures: statistics and M-steps."""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import Population
from pyro_truncated.distributions import ComponentMultivariateNormal, ComponentNormal
from pyro_truncated.models.mixture import NEVER_USED, Shares
from pyro_truncated.models.variance_floor import floored, floored_cholesky, variance_floor

Parameters = dict[str, Tensor]


class Covariances(abc.ABC):
    r"""One kind of covariances :math:`\Sigma_k` of ``K`` components.

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

    @abc.abstractmethod
    def likelihood(self, z: Tensor, loc: Tensor, parameters: Parameters) -> Any:
        """The distribution of data of components ``z``."""

    @abc.abstractmethod
    def start(self, covariance: Tensor, number: int) -> Parameters:
        """Returns the parameters of components with one covariance ``(D, D)``."""

    @abc.abstractmethod
    def products(self, shares: Shares, rows: Tensor) -> Tensor:
        """Returns sums of data products ``(N, D)`` for the M-step."""

    def by_itself(self) -> Covariances:
        """Returns the type of a component that depends on no others.

        There may be none.
        """
        return self

    @abc.abstractmethod
    def variances(self, loc: Tensor, parameters: Parameters) -> Tensor:
        """Variances of all dimensions, of which ``(K, D)`` can be made."""

    @abc.abstractmethod
    def expected_products(self, weights: Tensor, loc: Tensor, parameters: Parameters) -> Tensor:
        """Returns these products of one data point in expectation.

        The components have such weights.
        """

    @abc.abstractmethod
    def product(self, covariance: Tensor, loc: Tensor) -> Tensor:
        """Returns the products of data at means ``(K, D)``.

        The data spread with a covariance ``(D, D)``.
        """

    @abc.abstractmethod
    def best(self, statistics: dict[str, Tensor], loc: Tensor, floor: Tensor) -> Parameters:
        """Returns maximum likelihood parameters with eigenvalues above the floor.

        Means are around the center.
        """

    @abc.abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """Returns features ``(N, F)`` in which log densities are linear.

        They are squares and products of the data ``(N, D)``.
        """

    def offset(self, x: Tensor, parameters: Parameters) -> Tensor | None:
        """Returns terms of the log densities ``(N,)`` that components share.

        They are those that the features lack.
        """
        return None

    @abc.abstractmethod
    def summed_features(self, statistics: dict[str, Tensor]) -> Tensor:
        """The features summed over the data of every component, ``(K, F)``."""

    def floor(self, variance: Tensor, power: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the least variance of data, of each dimension or of all.

        The data have such variances and mean squares, ``(D,)``.
        """
        unit = (variance, power) if self.has_units else (variance.mean(), power.mean())
        least: Tensor = variance_floor(*unit, dtype)
        return least

    def scaled(self, parameters: Parameters, units: Tensor) -> Parameters:
        """Returns the parameters of data that are multiplied by units ``(D,)``."""
        return {"scale": parameters["scale"] * units}

    @abc.abstractmethod
    def precisions(self, loc: Tensor, parameters: Parameters) -> tuple[Tensor, Tensor, Tensor]:
        r""":math:`\Sigma_k^{-1} \mu_k` ``(K, D)``, factors ``(K, F)`` of the features, and :math:`\frac12 \log |\Sigma_k|` ``(K,)``."""

    @abc.abstractmethod
    def beside(self, parameters: Parameters, covariance: Tensor) -> tuple[Tensor, Tensor]:
        r""":math:`\frac12 \log |\Sigma_k|` and :math:`\mathrm{tr}\,\Sigma_k^{-1} S`, ``(K,)`` both."""

    def without_noise(self, population: Population, y: Tensor, loc: Tensor, parameters: Parameters) -> Tensor:
        """Returns posterior means ``(N, D)`` of noise-free data.

        If nothing is noise, they are those of the means.
        """
        means: Tensor = Shares(population, len(loc)).means(loc)
        return means


class Diagonal(Covariances):
    """A variance for every dimension: ``scale (K, D)`` holds deviations."""

    def likelihood(self, z: Tensor, loc: Tensor, parameters: Parameters) -> Any:
        """The distribution of data of components ``z``."""
        scale = parameters["scale"]
        return ComponentNormal(z, loc, scale if scale.dim() == 2 else scale.unsqueeze(-1))

    def start(self, covariance: Tensor, number: int) -> Parameters:
        """The deviations of so many components; the covariance may be variances ``(D,)``."""
        scale = self._mean(_variances(covariance)).sqrt()
        return {"scale": scale.expand(number, *scale.shape).clone()}

    def products(self, shares: Shares, rows: Tensor) -> Tensor:
        """Squares, ``(K, D)``."""
        squares: Tensor = shares.sums(rows.square())
        return squares

    def variances(self, loc: Tensor, parameters: Parameters) -> Tensor:
        """Of the deviations."""
        return parameters["scale"].reshape(len(loc), -1).square()

    def expected_products(self, weights: Tensor, loc: Tensor, parameters: Parameters) -> Tensor:
        """Squares, ``(K, D)``."""
        return weights.unsqueeze(-1) * (self.variances(loc, parameters) + loc.square())

    def product(self, covariance: Tensor, loc: Tensor) -> Tensor:
        """Squares, ``(K, D)``; the covariance may be variances ``(D,)``."""
        return _variances(covariance) + loc.square()

    def best(self, statistics: dict[str, Tensor], loc: Tensor, floor: Tensor) -> Parameters:
        """The likeliest deviations."""
        counts = _counts(statistics).unsqueeze(-1)
        variance = (statistics["products"] - 2 * loc * statistics["sums"] + counts * loc.square()) / counts
        return {"scale": self._mean(variance).maximum(floor).sqrt()}

    def features(self, x: Tensor) -> Tensor:
        """Squares."""
        return x.square()

    def summed_features(self, statistics: dict[str, Tensor]) -> Tensor:
        """Squares."""
        return statistics["products"]

    def precisions(self, loc: Tensor, parameters: Parameters) -> tuple[Tensor, Tensor, Tensor]:
        """Of diagonal covariances."""
        scale = parameters["scale"].reshape(len(loc), -1)
        return scale**-2 * loc, scale**-2, scale.log().expand_as(loc).sum(-1)

    def beside(self, parameters: Parameters, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Of diagonal covariances."""
        scale = parameters["scale"].reshape(len(parameters["scale"]), -1)
        return scale.log().expand(-1, len(covariance)).sum(-1), (_variances(covariance) / scale.square()).sum(-1)

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


class Full(Covariances):
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
        return {"scale": floored_cholesky(covariance).repeat(number, 1, 1)}

    def products(self, shares: Shares, rows: Tensor) -> Tensor:
        """Products, ``(K, D, D)``."""
        products: Tensor = shares.outer_products(rows)
        return products

    def expected_products(self, weights: Tensor, loc: Tensor, parameters: Parameters) -> Tensor:
        """Products, ``(K, D, D)``."""
        return weights[:, None, None] * self.product(self.matrices(parameters), loc)

    def variances(self, loc: Tensor, parameters: Parameters) -> Tensor:
        """Diagonals of the covariances."""
        return self.matrices(parameters).diagonal(dim1=-2, dim2=-1)

    def matrices(self, parameters: Parameters) -> Tensor:
        """The covariances."""
        return parameters["scale"] @ parameters["scale"].mT

    def scaled(self, parameters: Parameters, units: Tensor) -> Parameters:
        """The factors, whose rows are multiplied."""
        return {"scale": parameters["scale"] * units.unsqueeze(-1)}

    def product(self, covariance: Tensor, loc: Tensor) -> Tensor:
        """Products, ``(K, D, D)``."""
        return covariance + loc.unsqueeze(-1) * loc.unsqueeze(-2)

    def best(self, statistics: dict[str, Tensor], loc: Tensor, floor: Tensor) -> Parameters:
        """The factors of the likeliest covariances."""
        return {"scale": floored_cholesky(floored(spread_around(statistics, loc), floor))}

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
        precision, size = _invert(parameters["scale"])
        return (precision @ loc.unsqueeze(-1)).squeeze(-1), of_pairs(precision), size

    def beside(self, parameters: Parameters, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Of full covariances."""
        precision, size = _invert(parameters["scale"])
        return size, (precision * covariance).sum((-2, -1))


class Tied(Full):
    """A full one that all components share: ``scale (D, D)`` holds its Cholesky factor."""

    is_own = is_dense = False
    pseudo_data = 0.0

    def start(self, covariance: Tensor, number: int) -> Parameters:
        """Its factor."""
        return {"scale": floored_cholesky(covariance)}

    def products(self, shares: Shares, rows: Tensor) -> Tensor:
        """Products of all data, ``(D, D)``."""
        return rows.mT @ rows

    def expected_products(self, weights: Tensor, loc: Tensor, parameters: Parameters) -> Tensor:
        """Products, ``(D, D)``."""
        return weights.sum() * self.matrices(parameters) + (weights.unsqueeze(-1) * loc).mT @ loc

    def best(self, statistics: dict[str, Tensor], loc: Tensor, floor: Tensor) -> Parameters:
        """The factor of the likeliest covariance."""
        counts, cross = _counts(statistics).unsqueeze(-1), loc.mT @ statistics["sums"]
        spread = statistics["products"] - cross - cross.mT + (counts * loc).mT @ loc
        return {"scale": floored_cholesky(floored(spread / counts.sum(), floor))}

    def features(self, x: Tensor) -> Tensor:
        """None: products count alike for all components."""
        return x[:, :0]

    def offset(self, x: Tensor, parameters: Parameters) -> Tensor | None:
        r""":math:`-\frac12 x^\top \Sigma^{-1} x`."""
        white = torch.linalg.solve_triangular(parameters["scale"].to(x), x.mT, upper=False)
        squares: Tensor = white.square().sum(0)
        return -0.5 * squares

    def summed_features(self, statistics: dict[str, Tensor]) -> Tensor:
        """None."""
        return statistics["sums"][:, :0]

    def precisions(self, loc: Tensor, parameters: Parameters) -> tuple[Tensor, Tensor, Tensor]:
        """Of one covariance."""
        precision, size = _invert(parameters["scale"])
        return loc @ precision, loc[:, :0], size


def _variances(covariance: Tensor) -> Tensor:
    return covariance.diagonal() if covariance.dim() == 2 else covariance


def _counts(statistics: dict[str, Tensor]) -> Tensor:
    return statistics["counts"].clamp(min=NEVER_USED)


def spread_around(statistics: dict[str, Tensor], loc: Tensor) -> Tensor:
    """Weighted covariances ``(K, D, D)`` around means."""
    counts, cross = _counts(statistics)[:, None, None], loc.unsqueeze(-1) * statistics["sums"].unsqueeze(-2)
    return (statistics["products"] - cross - cross.mT) / counts + loc.unsqueeze(-1) * loc.unsqueeze(-2)


def of_pairs(precision: Tensor) -> Tensor:
    """Returns factors ``(K, F)`` of products in quadratic forms ``(K, D, D)``.

    Each pair of dimensions occurs once.
    """
    row, column = torch.tril_indices(*precision.shape[1:], device=precision.device)
    factors: Tensor = precision[:, row, column] * (2.0 - (row == column).to(precision))
    return factors


def _invert(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Precisions, and halves of the log determinants, of Cholesky factors."""
    return torch.cholesky_inverse(scale), scale.diagonal(dim1=-2, dim2=-1).log().sum(-1)
