"""What is known of the covariances of a mixture beforehand: a least variance, and data that every component has as good as seen."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_truncated.models.covariances import Covariances, Full, Parameters

if TYPE_CHECKING:
    from pyro_truncated.models.gaussians import Gaussians, Statistics


@dataclasses.dataclass(frozen=True)
class Prior:
    r"""A least variance, and a prior of the covariance of each component: as if it had seen ``m`` data points more, shaped as all data are.

    .. math:: \log p(\Sigma) = \max_\alpha \left[\tfrac m2 \left(\log |\Sigma^{-1} \alpha S| - \alpha\,\mathrm{tr}\,\Sigma^{-1} S\right)
        + \tfrac D2 (\log \alpha - \alpha)\right] + \text{const}

    is an inverse Wishart density around :math:`\alpha S`, where how much smaller than the data a component is, :math:`\alpha`, is known as
    well as from one data point. The constant makes it zero at :math:`S`. What all components share has no prior.

    Attributes:
        floor: least variance.
        number: ``m``.
        covariance: :math:`S`, ``(D, D)``; without it there is only the floor.
    """

    floor: Tensor
    number: float | Tensor = 0.0
    covariance: Tensor | None = None

    @classmethod
    def around(cls, covariance: Tensor, number: float, floor: Tensor) -> Prior:
        """The prior with the covariance of data; without any, as long as that is zero."""
        if not number:
            return cls(floor)
        is_known = covariance.any()
        identity = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
        return cls(floor, number * is_known, torch.where(is_known, covariance, identity))

    def best(self, components: Gaussians, statistics: Statistics, loc: Tensor) -> Parameters:
        r"""Covariances that maximise the expected log joint given means ``(K, D)``, with the :math:`\alpha` of those of components."""
        kind = components.kind
        if self._is_of(kind):
            unit = self._units(self._terms(components)[1]).unsqueeze(-1)
            dense = unit.unsqueeze(-1) if kind.is_dense else unit
            added = {"counts": 1.0, "sums": loc, "products": dense * kind.product(self.covariance, loc / unit.sqrt())}
            statistics = {**statistics, **{name: statistics[name] + self.number * value for name, value in added.items()}}
        found: Parameters = kind.best(statistics, loc, self.floor)
        return found

    def log_prob(self, components: Gaussians) -> Tensor:
        """Log densities of the components' covariances, ``(K,)``."""
        if not self._is_of(components.kind):
            return torch.zeros_like(components.loc[:, 0])
        kind = Full() if components.kind.is_dense else components.kind
        size = kind.precisions(components.loc[:1], kind.start(self.covariance, 1))[2]
        highest: Tensor = -self.number * (size + 0.5 * self._size) - 0.5 * self._size
        return self._log_density(*self._terms(components)) - highest

    def _is_of(self, kind: Covariances) -> bool:
        return kind.is_own and self.covariance is not None

    def _terms(self, components: Gaussians) -> tuple[Tensor, Tensor]:
        r""":math:`\frac12 \log |\Sigma|` and :math:`\mathrm{tr}\,\Sigma^{-1} S` of components, ``(K,)`` both."""
        kind, loc = components.kind, torch.zeros_like(components.loc)
        _, squares, size = kind.precisions(loc, {name: value.double() for name, value in components.spreads.items()})
        features = kind.summed_features({"products": kind.product(self.covariance, loc[:1])})
        return size, (squares * features).sum(-1)

    def _units(self, trace: Tensor) -> Tensor:
        return (self.number + 1) * self._size / (self.number * trace + self._size)

    def _log_density(self, size: Tensor, trace: Tensor) -> Tensor:
        unit = self._units(trace)
        own = -self.number * (size + 0.5 * unit * trace)
        return own + 0.5 * self._size * ((self.number + 1) * unit.log() - unit)

    @property
    def _size(self) -> int:
        assert self.covariance is not None
        return len(self.covariance)
