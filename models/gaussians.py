"""Weighted normal components: coefficients of log densities, and M-steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from pyro_truncated.models.covariance_prior import Prior
from pyro_truncated.models.covariances import Covariances, Parameters
from pyro_truncated.models.mixture import NEVER_USED, Shares, best_weights

Statistics = dict[str, Tensor]


def collected(kind: Covariances, shares: Shares, rows: Tensor) -> Statistics:
    """Statistics of data ``(N, D)`` and components' shares for M-steps.

    See :meth:`GaussianMixture.sufficient_statistics`.
    """
    return {"counts": shares.counts(), "sums": shares.sums(rows), "squares": rows.square().sum(0), "products": kind.products(shares, rows)}


def added(parts: Iterable[Statistics]) -> Statistics:
    """The sums of statistics."""
    total: Statistics = {}
    for part in parts:
        total = {name: total[name] + value for name, value in part.items()} if total else part
    return total


def own_statistics(kind: Covariances) -> tuple[str, ...]:
    """The statistics that every component has of its own."""
    return ("counts", "sums", "products") if kind.is_own else ("counts", "sums")


def combined(kind: Covariances, statistics: Statistics, groups: Tensor) -> Statistics:
    """Returns the statistics of components that merge several ``(M, P)``.

    Statistics of all components stay.
    """
    return {**statistics, **{name: statistics[name][groups].sum(1) for name in own_statistics(kind)}}


def least_variance(kind: Covariances, statistics: Statistics, center: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the least variance of components, of each dimension or all.

    The statistics are of data of the given type.
    """
    total = statistics["counts"].sum()
    shift = statistics["sums"].sum(0) / total
    variance = statistics["squares"] / total - shift.square()
    floor: Tensor = kind.floor(variance.clamp(min=0.0), variance + (center + shift).square(), dtype)
    return floor


@dataclasses.dataclass(frozen=True)
class Gaussians:
    r"""Components :math:`\pi_k \mathcal N(\mu_k, \Sigma_k)` of one kind, whose weights need not sum to one.

    Attributes:
        kind: the kind of covariances.
        weights: :math:`\pi`, ``(K,)``.
        loc: means above a center, ``(K, D)``. Data and statistics are relative to it, too.
        spreads: the parameters of the covariances by name, in any type. The others are in float64.
    """

    kind: Covariances
    weights: Tensor
    loc: Tensor
    spreads: Parameters

    def __len__(self) -> int:
        return len(self.weights)

    def scaled(self, units: Tensor) -> Gaussians:
        """Returns the components of data that are multiplied by units ``(D,)``."""
        return dataclasses.replace(self, loc=self.loc * units, spreads=self.kind.scaled(self.spreads, units))

    def coefficients(self) -> Tensor:
        """Returns coefficients ``(K, F)`` of features in the log joints.

        Features are one, the data, and their squares and products.
        """
        linear, squares, size = self.kind.precisions(self.loc, {name: value.double() for name, value in self.spreads.items()})
        offset = self.weights.log() - size - 0.5 * (linear * self.loc).sum(-1)
        return torch.cat([offset.unsqueeze(-1), linear, -0.5 * squares], 1)

    def offset(self, features: Tensor) -> Tensor | None:
        """Returns terms of the log joints that features ``(N, F)`` lack.

        They are the same for all components, ``(N,)``.
        """
        offset: Tensor | None = self.kind.offset(features[:, 1 : self.loc.shape[1] + 1], self.spreads)
        return offset

    def expected(self, statistics: Statistics) -> Tensor:
        r""":math:`\sum_n r_{nk} \log \pi_k \mathcal N(y_n; \mu_k, \Sigma_k)`, ``(K,)``, but for what is the same for all components."""
        features = [statistics["counts"].unsqueeze(-1), statistics["sums"], self.kind.summed_features(statistics)]
        return (self.coefficients() * torch.cat(features, 1)).sum(-1)

    def expected_statistics(self) -> Statistics:
        """The statistics of one data point in expectation."""
        loc, weights = self.loc, self.weights.unsqueeze(-1)
        spreads = {name: value.double() for name, value in self.spreads.items()}
        squares = (weights * (loc.square() + self.kind.variances(loc, spreads))).sum(0)
        products = self.kind.expected_products(self.weights, loc, spreads)
        return {"counts": self.weights, "sums": weights * loc, "squares": squares, "products": products}

    def log_prior(self, prior: Prior) -> Tensor:
        """Log densities ``(K,)`` of the covariances."""
        each: Tensor = prior.log_prob(self.kind, self.spreads)
        return each.expand(len(self))

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        """Returns log joints ``(N, S)`` in the type of the data.

        Data are ``(N, D)`` and components ``(N, S)``.
        """
        spreads = {name: value.to(x) for name, value in self.spreads.items()}
        log_density: Tensor = self.kind.likelihood(z.mT, self.loc.to(x), spreads).log_prob(x)
        return log_density.mT + self.weights.log().to(x)[z]

    def best(self, statistics: Statistics, prior: Prior) -> Gaussians:
        """Returns the components that maximise the expected log joint.

        Those without data keep their means and covariances.
        """
        is_used, loc = self._best_means(statistics)
        return self._where(is_used, statistics, loc, prior.best(self.kind, self.spreads, statistics, loc))

    def best_on_their_own(self, statistics: Statistics, prior: Prior) -> Gaussians:
        """The same, but what all components share stays."""
        is_used, loc = self._best_means(statistics)
        found = prior.best(self.kind, self.spreads, statistics, loc) if self.kind.is_own else self.spreads
        found = {name: value if self._is_own(value) else self.spreads[name] for name, value in found.items()}
        return self._where(is_used, statistics, loc, found)

    def _best_means(self, statistics: Statistics) -> tuple[Tensor, Tensor]:
        """Which components have data, ``(K,)``, and the likeliest means, ``(K, D)``."""
        counts = statistics["counts"]
        is_used = counts > NEVER_USED
        return is_used, torch.where(is_used.unsqueeze(-1), statistics["sums"] / counts.unsqueeze(-1), self.loc)

    def _where(self, is_used: Tensor, statistics: Statistics, loc: Tensor, spreads: Parameters) -> Gaussians:
        """Such components where there are data, these ones elsewhere."""
        found = {}
        for name, value in spreads.items():
            keeps = ~is_used.reshape(-1, *(1,) * (value.dim() - 1)) if self._is_own(value) else is_used.new_zeros(())
            found[name] = torch.where(keeps, self.spreads[name], value.to(self.spreads[name]))
        return Gaussians(self.kind, best_weights(statistics["counts"]), loc, found)

    def of(self, index: Tensor) -> Gaussians:
        """Copies of some of these components."""
        spreads = {name: value[index] if self._is_own(value) else value for name, value in self.spreads.items()}
        return Gaussians(self.kind, self.weights[index], self.loc[index], spreads)

    def with_others(self, index: Tensor, others: Gaussians) -> Gaussians:
        """Returns a copy with some components replaced.

        What all components share stays.
        """
        pairs = {name: (value, others.spreads[name]) for name, value in self.spreads.items()}
        spreads = {name: old.index_copy(0, index, new) if self._is_own(old) else old for name, (old, new) in pairs.items()}
        weights, loc = self.weights.index_copy(0, index, others.weights), self.loc.index_copy(0, index, others.loc)
        return Gaussians(self.kind, weights, loc, spreads)

    def _is_own(self, value: Tensor) -> bool:
        """Whether a parameter is of every component."""
        return self.kind.is_own and value.dim() > 0
