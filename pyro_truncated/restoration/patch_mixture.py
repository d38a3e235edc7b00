"""A mixture of normal distributions of patches with noise.

Each component has few directions and a place in the array.
"""

from __future__ import annotations

import dataclasses

import pyro
import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_truncated.distributions import Component, ComponentLowRankNormal, ComponentNormal, component_products
from pyro_truncated.ops import gather_states
from pyro_truncated.states.population import Population

# Directions whose variance is below this part of the noise's are not worth their estimate.
_LEAST_VARIANCE = 0.05
# Places within so many entries are the same.
_LEAST_SPREAD = 2.0
# Of a patch there are far more entries than coordinates of its place, but they overlap with their neighbours'.
_PLACE_POWER = 0.5
# A patch counts for its most probable components.
_KEPT = 3


class PatchMixture(torch.nn.Module):
    r"""Patches of ``D`` entries as a mixture of ``K`` normal distributions.

    Each component also has a distribution of places in the array. It is a Pyro model.

    .. math:: z_n \sim \pi, \qquad x_n \sim \mathcal N(\mu_z, W_z W_z^\top), \qquad
        p_n \sim \mathcal N(m_z, v_z I)^\beta, \qquad y_n \sim \mathcal N(x_n, \sigma^2 I),

    where :math:`p_n` is the place of patch ``n``; its likelihood has the power :math:`\beta = 1/2`. The patches without noise :math:`x`
    are given for learning: the M-step takes their moments, and leaves out directions with a variance below 5 % of the noise's. The
    posterior of :math:`z` is that of the noisy patches.

    Example:
        >>> mixture = denoise(torch.randn(16, 16), side=4, num_components=3, progress=False).model
        >>> mixture.loc.shape
        torch.Size([3, 16])

    Args:
        num_observed: number of entries of a patch ``D``.
        num_components: number of components ``K``.
        num_dims: number of coordinates of a place ``P``.
        scale: standard deviation of the noise :math:`\sigma`.
        like: a tensor of the type and on the device that parameters shall have.

    Attributes:
        weights: mixing proportions :math:`\pi`, ``(K,)``.
        loc: means :math:`\mu`, ``(K, D)``.
        factor: directions :math:`W`, ``(K, D, R)``: orthogonal columns, the longest first, and zeros where a component has fewer.
        places: :math:`m`, ``(K, P)``.
        spreads: standard deviations :math:`\sqrt v`, ``(K,)``.
        scale: :math:`\sigma`, ``()``.

    References:
        Yu, Sapiro and Mallat, "Solving Inverse Problems With Piecewise Linear Estimators: From Gaussian Mixture Models to Structured
        Sparsity", IEEE Transactions on Image Processing 21, 2012. Tipping and Bishop, "Mixtures of probabilistic principal component
        analyzers", Neural Computation 11, 1999.
    """

    weights: Tensor
    loc: Tensor
    factor: Tensor
    places: Tensor
    spreads: Tensor
    scale: Tensor
    # Its moments are taken around the means as they are.
    statistics_depend_on_parameters = True

    def __init__(self, num_observed: int, num_components: int, num_dims: int, scale: float, like: Tensor) -> None:
        super().__init__()
        self.num_observed, self.num_components = num_observed, num_components
        self.register_buffer("weights", like.new_full((num_components,), 1 / num_components))
        self.register_buffer("loc", like.new_zeros(num_components, num_observed))
        self.register_buffer("factor", like.new_zeros(num_components, num_observed, 1))
        self.register_buffer("places", like.new_zeros(num_components, num_dims))
        self.register_buffer("spreads", like.new_ones(num_components))
        self.register_buffer("scale", like.new_tensor(scale))

    def forward(self, y: Tensor, x: Tensor, places: Tensor) -> None:
        """The model of noisy patches ``y (N, D)`` at places ``(N, P)``.

        Patches without noise ``x (N, D)`` are for learning only.
        """
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", Component(logits=self.weights.log()))
            pyro.sample("y", self.likelihood(z), obs=y)
            with poutine.scale(scale=_PLACE_POWER):
                pyro.sample("place", ComponentNormal(z, self.places, self.spreads.unsqueeze(-1)), obs=places)

    def likelihood(self, z: Tensor) -> ComponentLowRankNormal:
        """The distribution of noisy patches of components ``z``."""
        return ComponentLowRankNormal(z, self.loc, self.factor, self.scale)

    @torch.no_grad()
    def sufficient_statistics(
        self, population: Population, y: Tensor, x: Tensor, places: Tensor, *, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        r"""Sums over the patches without noise that :meth:`maximize` needs, see :class:`~pyro_truncated.ClosedFormModel`.

        Returns:
            With responsibilities :math:`r_{nk}` of the three most probable components of each
            patch: ``counts`` are their sums ``(K,)``. ``sums`` ``(K, D)`` and ``products`` ``(K, D,
            D)`` are those of :math:`x_n - \mu_k`. ``places`` ``(K, P + 2)`` are those of :math:`(1,
            p_n, |p_n|^2)`.
        """
        components, weights = _shares(population, temperature)
        x, places = population.rows_of(x), population.rows_of(places).double()
        products = component_products(x, components, weights, self.num_components, self.loc)
        moments = torch.cat([torch.ones_like(places[:, :1]), places, places.square().sum(1, keepdim=True)], 1)
        of_places, sums = (self._sums(rows, components, weights) for rows in (moments, x))
        counts = of_places[:, 0].to(x)
        return {"counts": counts, "sums": sums - counts.unsqueeze(1) * self.loc, "products": products, "places": of_places}

    def _sums(self, rows: Tensor, components: Tensor, weights: Tensor) -> Tensor:
        total = rows.new_zeros(self.num_components, rows.shape[1])
        for component, weight in zip(components.mT, weights.to(rows).mT, strict=True):
            total.index_add_(0, component, weight.unsqueeze(1) * rows)
        return total

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        """Sets all parameters but the noise to the weighted moments.

        A component without data keeps its mean and is never taken.
        """
        counts = statistics["counts"]
        number = counts.clamp(min=torch.finfo(counts.dtype).tiny).unsqueeze(1)
        shift = statistics["sums"] / number
        covariance = statistics["products"] / number.unsqueeze(2)
        variances, directions = self._eigen(covariance.baddbmm_(shift.unsqueeze(2), shift.unsqueeze(1), alpha=-1.0))
        variances = torch.where(variances > _LEAST_VARIANCE * self.scale.square(), variances, 0.0)
        rank = max(1, int((variances > 0).sum(1).max()))
        self.factor = (directions * variances.sqrt().unsqueeze(1))[..., self.num_observed - rank :].flip(-1)
        self.loc = self.loc + shift
        self.weights = counts / counts.sum()
        total = statistics["places"]
        moments = total[:, 1:] / total[:, :1].clamp(min=torch.finfo(counts.dtype).tiny)
        self.places = moments[:, :-1].to(counts)
        variance = (moments[:, -1] - moments[:, :-1].square().sum(1)).clamp(min=0.0) / (moments.shape[1] - 1)
        self.spreads = (variance + _LEAST_SPREAD**2).sqrt().to(counts)

    def _eigen(self, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of covariances, which are overwritten.

        They include the noise, which is subtracted again. A covariance of few directions alone,
        such as that of two patches, becomes tridiagonal with entries that underflow. LAPACK's
        divide and conquer makes NaN of it.
        """
        diagonal = covariance.diagonal(dim1=1, dim2=2)
        # Where the noise is smaller, rounding takes its part.
        noise = self.scale.square() + torch.finfo(covariance.dtype).eps * diagonal.sum(1, keepdim=True).clamp(min=0.0)
        diagonal += noise
        values, vectors = torch.linalg.eigh(covariance)
        return values - noise, vectors

    @torch.no_grad()
    def posterior_means(self, population: Population, y: Tensor) -> tuple[Tensor, Tensor]:
        r"""Returns means and expected squared errors of :math:`x_n` given :math:`y_n`, both ``(N, D)``.

        Entries of ``y`` that are NaN are missing. The errors are the posterior variances: with means :math:`m_{nk}` and variances
        :math:`v_{nk}` given component :math:`k`, :math:`\sum_k r_{nk} (v_{nk} + (m_{nk} - \sum_l r_{nl} m_{nl})^2)`.
        """
        components, weights = _shares(population)
        y = population.rows_of(y)
        mean, error, share = torch.zeros_like(y), torch.zeros_like(y), y.new_zeros(len(y), 1)
        # One after the other: all of them together are several times the data.
        for component, weight in zip(components.mT, weights.unsqueeze(-1).unbind(1), strict=True):
            means, variances = self.likelihood(component).without_noise(y)
            share = share + weight
            step = means - mean
            mean.addcmul_(weight / share, step)
            error.addcmul_(weight, variances.addcmul(step, means - mean))
        return mean, error

    def reconstruct(self, population: Population, y: Tensor) -> Tensor:
        """Posterior means of the patches without noise, ``(N, D)``, see :meth:`posterior_means`."""
        return self.posterior_means(population, y)[0]


def most_probable(population: Population, number: int) -> Population:
    """Returns the ``number`` most probable states of every data point.

    The most probable comes first. If there are fewer, all are returned.
    """
    log_joint, best = population.log_joint.topk(min(number, population.num_states), 1)
    return dataclasses.replace(population, words=gather_states(population.words, best), log_joint=log_joint)


def _shares(population: Population, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The components that a patch counts for, and their probabilities, ``(N, S)`` both."""
    kept = most_probable(population, _KEPT)
    return kept.states(torch.int64)[..., 0], kept.weights(temperature)
