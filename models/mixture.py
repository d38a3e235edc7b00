"""Base of mixtures: statistics, and M-step of the mixing proportions.

Statistics are sums over data and over components.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated import Population
from pyro_truncated.distributions import component_products, component_sums

NEVER_USED = 1e-8
# Of shares so small nothing is left in the sums of a component that is used.
_MIN_SHARE = 1e-20
# Numbers in the copies that are made to leave out such states.
_MAX_COPIED_NUMBERS = 2**25
_WEIGHT_FLOOR = 1e-6
# From so many components per state on the sums go over the states that are kept.
_MANY = 4


def best_weights(counts: Tensor) -> Tensor:
    """Returns mixing proportions that maximise the expected log prior.

    None is below a floor, as a component at zero could never recover.
    """
    weights = (counts / counts.sum()).clamp(min=_WEIGHT_FLOOR)
    return weights / weights.sum()


class Shares:
    """Responsibilities :math:`r_{nk}` of ``K`` components, and sums weighted with them, in float64.

    Where there are many more components than states are kept of a data point, only those are looked at.

    Args:
        population: truncated posteriors over the component.
        num_components: ``K``.
        temperature: of the posteriors.
    """

    def __init__(self, population: Population, num_components: int, temperature: float = 1.0) -> None:
        self.num_components = num_components
        self._dense: Tensor | None = None
        if num_components < _MANY * population.num_states:
            self._dense = population.value_probabilities(temperature)[:, 0].double()
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
            # One component at a time: all at once are K times the data.
            return torch.stack([(share.unsqueeze(-1) * rows).mT @ rows for share in self._dense.mT])
        component, weight = self._component, self._weight
        if rows.is_cpu:  # a device would be waited for
            # Most states that are kept explain nothing, and every product costs the square of the dimensions.
            row, state = (~(weight <= _MIN_SHARE)).nonzero(as_tuple=True)
            if len(row) * rows.shape[1] <= _MAX_COPIED_NUMBERS:
                rows, component, weight = rows[row], component[row, state].unsqueeze(1), weight[row, state].unsqueeze(1)
        return component_products(rows, component, weight, self.num_components)
