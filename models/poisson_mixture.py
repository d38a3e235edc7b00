"""Mixtures of independent Poisson counts."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.distributions import categorical, defer_validation
from pyro_truncated.extend import names_arguments, selected_rows, takes_arrays
from pyro_truncated.models.binary_causes import FLOOR, count_data
from pyro_truncated.models.linear_mixture import ComponentTable, MixtureOfMeans
from pyro_truncated.models.seeding import grouped
from pyro_truncated.search import MaxInnerProductIndex

_Poisson = defer_validation(dist.Poisson)


class PoissonComponents(ComponentTable):
    """Poisson counts of components."""


_Table = defer_validation(PoissonComponents)


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

    data_support = constraints.nonnegative_integer

    weights: Tensor
    rate: Tensor

    @names_arguments
    def __init__(self, num_observed: int, num_components: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__(num_observed, num_components, dtype)
        self.rate = PyroParam(0.5 + torch.rand(num_components, num_observed, dtype=dtype), constraints.positive)  # type: ignore[assignment]

    @takes_arrays
    def forward(self, y: Tensor | None = None, batch_size: int | None = None, num_data: int | None = None) -> Tensor:
        """The model of counts ``y (N, D)``; without data it generates ``num_data`` observations."""
        weights, rate = self.weights, self.rate
        size = count_data(y, num_data)
        with pyro.plate("data", size, subsample_size=batch_size) as index:
            z = pyro.sample("z", categorical(weights))
            counts = _Table(
                z,
                lambda component: _Poisson(rate[component]).to_event(1),
                lambda values: _log_densities(rate, values),
                self.num_components,
                constraints.nonnegative_integer,
                self.num_observed,
            )
            return pyro.sample("y", counts, obs=selected_rows(y, index))

    def _rows(self, y: Tensor) -> Tensor:
        return y.double()

    def _places(self, rows: Tensor) -> Tensor:
        return rows.sqrt()  # whose variance does not depend on the rate

    def _means(self) -> Tensor:
        return self.rate.double()

    def _take_means(self, means: Tensor, is_used: Tensor) -> None:
        self.rate = torch.where(is_used, means, self.rate.double()).clamp(min=FLOOR).to(self.rate)

    def linear_features(self, y: Tensor) -> Tensor:
        """One, and the data, ``(N, D + 1)``."""
        counts = y.to(self.rate)
        return torch.cat([torch.ones_like(counts[:, :1]), counts], 1)

    def linear_functions(self, y: Tensor) -> MaxInnerProductIndex:
        """Returns all components' log joints as linear functions of features of ``y``."""
        constant = self.weights.log() - self.rate.sum(1)
        coefficients, rate = torch.cat([constant.unsqueeze(-1), self.rate.log()], 1), self.rate.detach()
        return MaxInnerProductIndex(coefficients, self.linear_features(rate), lambda: grouped(rate.sqrt()), len(y), _least_loss)


def _log_densities(rate: Tensor, y: Tensor) -> Tensor:
    """Log probabilities ``(N, K)`` of counts ``(N, D)``, in float64 as terms cancel."""
    counts, exact = y.double(), rate.double()
    found = torch.addmm(exact.sum(1), counts, exact.log().mT, beta=-1) - (counts + 1).lgamma().sum(1, keepdim=True)
    return found.to(torch.promote_types(rate.dtype, y.dtype))


def _least_loss(features: Tensor) -> Tensor:
    """Minus each data point's highest log density, ``(N,)``."""
    counts = features[:, 1:]
    loss: Tensor = (counts - torch.special.xlogy(counts, counts)).sum(1)
    return loss
