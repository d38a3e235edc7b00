"""Prior of a mixture's covariances.

It has a minimum variance, and pseudo-data of every component.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from pyro_truncated.models.covariances import Covariances, Full, Parameters
from pyro_truncated.models.variance_floor import floored


@dataclasses.dataclass(frozen=True)
class Prior:
    r"""A variance floor, and a prior of each component's covariance.

    The prior is that of ``m`` more data points, shaped as all data.

    .. math:: \log p(\Sigma) = \max_\alpha \left[\tfrac m2 \left(\log |\Sigma^{-1} \alpha S| - \alpha\,\mathrm{tr}\,\Sigma^{-1} S\right)
        + \tfrac D2 (\log \alpha - \alpha)\right] + \text{const}

    is an inverse Wishart density around :math:`\alpha S`. The ratio :math:`\alpha` of component and
    data is estimated with the weight of one data point. The constant makes it zero at :math:`S`.
    What all components share has no prior.

    Attributes:
        floor: least variance, of all dimensions or of each, ``(D,)``.
        number: ``m``. covariance: :math:`S`, ``(D, D)``, or the variances ``(D,)`` where
        covariances are not dense. Without it there is only the floor. size: :math:`\frac12 \log
        |S|` under the covariance type; computed by default.
    """

    floor: Tensor
    number: float | Tensor = 0.0
    covariance: Tensor | None = None
    size: Tensor | None = None

    @classmethod
    def of(cls, floor: Tensor, covariance: Tensor, pseudo: Tensor) -> Prior:
        """Returns the prior from results of :func:`known`.

        If they are empty, it is only the floor.
        """
        return cls(floor, pseudo[0], covariance, pseudo[1]) if len(pseudo) else cls(floor)

    def best(self, kind: Covariances, spreads: Parameters, statistics: dict[str, Tensor], loc: Tensor) -> Parameters:
        r"""Returns covariances that maximise the expected log joint.

        Means are ``(K, D)``; :math:`\alpha` comes from the current covariances.
        """
        if kind.is_own and self.covariance is not None:
            unit = self._units(self._terms(kind, spreads)[1]).unsqueeze(-1)
            dense = unit.unsqueeze(-1) if kind.is_dense else unit
            added = {"counts": 1.0, "sums": loc, "products": dense * kind.product(self.covariance, loc / unit.sqrt())}
            statistics = {**statistics, **{name: statistics[name] + self.number * value for name, value in added.items()}}
        found: Parameters = kind.best(statistics, loc, self.floor)
        return found

    def log_prob(self, kind: Covariances, spreads: Parameters) -> Tensor:
        """Returns log densities of the components' covariances, ``(K,)``.

        They are one zero for a shared covariance or without a prior.
        """
        if not kind.is_own or self.covariance is None:
            return self.floor.new_zeros(())
        highest = size_of(kind, self.covariance) if self.size is None else self.size
        size, trace = self._terms(kind, spreads)
        # What the best unit adds to the trace it takes from its own density.
        return self.number * (highest - size) + (0.5 * self._size * (self.number + 1)) * self._units(trace).log()

    def _terms(self, kind: Covariances, spreads: Parameters) -> tuple[Tensor, Tensor]:
        r""":math:`\frac12 \log |\Sigma|` and :math:`\mathrm{tr}\,\Sigma^{-1} S` of components, ``(K,)`` both."""
        terms: tuple[Tensor, Tensor] = kind.beside({name: value.double() for name, value in spreads.items()}, self.covariance)
        return terms

    def _units(self, trace: Tensor) -> Tensor:
        return (self.number + 1) * self._size / (self.number * trace + self._size)

    @property
    def _size(self) -> int:
        assert self.covariance is not None
        return len(self.covariance)


def unknown(kind: Covariances, number: float, center: Tensor) -> dict[str, Tensor]:
    """Returns buffers of a mixture without data ``(D,)``.

    Covariance and numbers are zero, and empty without a prior.
    """
    sizes: dict[str, tuple[int, ...]] = {"spread": tuple(center.shape) * (1 + kind.is_dense), "pseudo": (2,)}
    return {name: center.new_zeros(size if number else (0,)) for name, size in sizes.items()}


def known(kind: Covariances, number: float, rows: Tensor, floor: Tensor) -> dict[str, Tensor]:
    """These buffers with what is known from data ``(N, D)`` around their mean."""
    if not number:
        return unknown(kind, number, rows[0])
    spread: Tensor = floored(rows.mT @ rows / len(rows), floor) if kind.is_dense else rows.square().mean(0).maximum(floor)
    size = size_of(kind, spread)
    return {"spread": spread, "pseudo": torch.stack([size.new_tensor(number), size])}


def size_of(kind: Covariances, covariance: Tensor) -> Tensor:
    r"""Returns :math:`\frac12 \log |S|` under the covariance type."""
    kind = Full() if kind.is_dense else kind
    sizes: Tensor = kind.beside(kind.start(covariance, 1), covariance)[0]
    return sizes[0]
