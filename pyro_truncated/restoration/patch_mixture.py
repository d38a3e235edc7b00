"""A mixture of normal distributions of patches, below noise: each has few directions, and a place in the array."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

# Directions whose variance is below this part of the noise's are not worth their estimate.
_LEAST_VARIANCE = 0.05
# Places within so many entries are the same.
_LEAST_SPREAD = 2.0
# Of a patch there are far more entries than coordinates of its place, but they overlap with their neighbours'.
_PLACE_POWER = 0.5
_ROWS = 2**11


@dataclasses.dataclass(frozen=True)
class Responsibilities:
    """Posterior probabilities of components, of the most probable ones of every data point only.

    Attributes:
        components: their numbers ``(N, S)``.
        weights: their probabilities ``(N, S)``.
    """

    components: Tensor
    weights: Tensor

    def most_probable(self, number: int) -> Responsibilities:
        """Those of fewer components."""
        weights = self.weights[:, :number]
        return Responsibilities(self.components[:, :number], weights / weights.sum(1, keepdim=True))

    def by_component(self, num_components: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For every component: data points, where in the flattened table they are, and their weights."""
        flat = self.components.flatten()
        order = flat.argsort()
        for entries in order.split(flat.bincount(minlength=num_components).tolist()):
            yield entries // self.components.shape[1], entries, self.weights.flatten()[entries]


@dataclasses.dataclass(frozen=True)
class PatchMixture:
    r"""Patches of ``D`` entries as a mixture of ``K`` normal distributions, each around a place of the array.

    .. math:: k_n \sim \pi, \qquad x_n \sim \mathcal N(\mu_k, U_k \Lambda_k U_k^\top), \qquad
        p_n \sim \mathcal N(m_k, v_k I)^\beta, \qquad y_n \sim \mathcal N(x_n, \sigma^2 I),

    where :math:`p_n` is the place of patch ``n``; its likelihood has the power :math:`\beta = 1/2`. Directions with a variance below 5 % of
    the noise's are left out.

    Example:
        >>> mixture = denoise(torch.randn(16, 16), side=4, num_components=3, progress=False).model
        >>> mixture.loc.shape
        torch.Size([3, 16])

    Attributes:
        weights: mixing proportions :math:`\pi`, ``(K,)``.
        loc: means :math:`\mu`, ``(K, D)``.
        directions: orthonormal :math:`U_k`, one ``(D, R_k)`` per component.
        variances: :math:`\Lambda_k`, one ``(R_k,)`` per component.
        places: :math:`m`, ``(K, P)``.
        spreads: :math:`v`, ``(K,)``.
        scale: standard deviation of the noise :math:`\sigma`.

    Reference:
        Yu, Sapiro and Mallat, "Solving Inverse Problems With Piecewise Linear Estimators: From Gaussian Mixture Models to Structured
        Sparsity", IEEE Transactions on Image Processing 21, 2012.
    """

    weights: Tensor
    loc: Tensor
    directions: list[Tensor]
    variances: list[Tensor]
    places: Tensor
    spreads: Tensor
    scale: float

    @classmethod
    def of(cls, patches: Tensor, places: Tensor, responsibilities: Responsibilities, num_components: int, scale: float) -> PatchMixture:
        """The mixture that patches without noise ``(N, D)`` at places ``(N, P)`` ask for: their weighted moments."""
        weights, spreads = patches.new_zeros(num_components), patches.new_ones(num_components)
        loc = patches.new_zeros(num_components, patches.shape[1])
        centers = places.new_zeros(num_components, places.shape[1])
        directions, variances = [], []
        for k, (rows, _, weight) in enumerate(responsibilities.by_component(num_components)):
            weights[k] = weight.sum()
            share = weight / weights[k].clamp(min=torch.finfo(weight.dtype).tiny)
            loc[k], centers[k] = share @ patches[rows], share @ places[rows]
            spreads[k] = share @ (places[rows] - centers[k]).square().mean(1) + _LEAST_SPREAD**2
            variance, basis = _principal(patches[rows] - loc[k], share, _LEAST_VARIANCE * scale**2)
            directions.append(basis)
            variances.append(variance)
        return cls(weights / len(patches), loc, directions, variances, centers, spreads, scale)

    def responsibilities(self, y: Tensor, places: Tensor, number: int) -> Responsibilities:
        """The ``number`` most probable components of every patch ``(N, D)`` at its place ``(N, P)``, of all components."""
        number = min(number, len(self.weights))
        found = []
        for block, place in zip(y.split(_ROWS), places.split(_ROWS), strict=True):
            log_joint = torch.stack([self._log_joint(k, block, place) for k in range(len(self.weights))], 1)
            best, components = log_joint.topk(number, 1)
            found.append((components, best.softmax(1)))
        components, weights = (torch.cat(part) for part in zip(*found, strict=True))
        return Responsibilities(components, weights)

    def among(self, y: Tensor, places: Tensor, candidates: Responsibilities) -> Responsibilities:
        """The responsibilities of the candidates alone, the most probable ones first."""
        log_joint = y.new_empty(candidates.components.numel())
        for k, (rows, entries, _) in enumerate(candidates.by_component(len(self.weights))):
            log_joint[entries] = self._log_joint(k, y[rows], places[rows])
        weights, order = log_joint.view_as(candidates.weights).softmax(1).sort(1, descending=True)
        return Responsibilities(candidates.components.gather(1, order), weights)

    def _log_joint(self, k: int, y: Tensor, places: Tensor) -> Tensor:
        """``log p(k, y, p)``, up to what does not depend on the component."""
        variance, noise = self.variances[k], self.scale**2
        whitened = self.directions[k] * (1 / noise - 1 / (variance + noise)).sqrt()
        energy = (y @ whitened - self.loc[k] @ whitened).square_().sum(1)
        energy += (2 * y @ self.loc[k] - self.loc[k].square().sum()) / noise
        # Weights of components without data are zero.
        constant = self.weights[k].log() - 0.5 * (variance / noise).log1p().sum()
        distance = (places - self.places[k]).square().sum(1) / self.spreads[k] + places.shape[1] * self.spreads[k].log()
        return constant + 0.5 * (energy - _PLACE_POWER * distance)

    def posterior_means(self, y: Tensor, responsibilities: Responsibilities) -> tuple[Tensor, Tensor, Tensor]:
        r"""Means of :math:`x_n` given :math:`y_n`, ``(N, D)``, and their expected squared errors.

        Entries of ``y`` that are NaN are missing. The errors are those within the components.

        Returns:
            The means; the errors summed over all entries of a patch, and over those that are observed, ``(N,)`` each.
        """
        means, errors, seen_errors = torch.zeros_like(y), y.new_zeros(len(y)), y.new_zeros(len(y))
        for k, (rows, _, weight) in enumerate(responsibilities.by_component(len(self.weights))):
            above = y[rows] - self.loc[k]
            coefficients, error, seen_error = _coefficients(above, self.directions[k], self.variances[k], self.scale**2)
            means.index_add_(0, rows, weight.unsqueeze(1) * (self.loc[k] + coefficients @ self.directions[k].mT))
            errors.index_add_(0, rows, weight * error)
            seen_errors.index_add_(0, rows, weight * seen_error)
        return means, errors, seen_errors


def _principal(centred: Tensor, share: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Variances above the least one, and their directions."""
    scaled = centred * share.sqrt().unsqueeze(1)
    variances, basis = torch.linalg.eigh(scaled.mT @ scaled)
    number = int((variances > least).sum())
    return variances[len(variances) - number :], basis[:, len(variances) - number :]


def _coefficients(above: Tensor, directions: Tensor, variances: Tensor, noise: float) -> tuple[Tensor, Tensor, Tensor]:
    """Posterior means of the coefficients of the directions, and what their variances sum to in all entries and in the observed ones."""
    is_missing = above.isnan()
    if not bool(is_missing.any()):
        gain = variances / (variances + noise)
        error = noise * gain.sum().expand(len(above))
        return above @ directions * gain, error, error
    root = directions * variances.sqrt()
    pairs = torch.einsum("dr,nd,ds->nrs", root, (~is_missing).to(above), root)
    identity = torch.eye(root.shape[1], dtype=above.dtype, device=above.device)
    factor = torch.linalg.cholesky(identity + pairs / noise)
    target = above.nan_to_num(0.0) @ root / noise
    solution = torch.cholesky_solve(target.unsqueeze(-1), factor).squeeze(-1)
    inverse = torch.linalg.solve_triangular(factor, identity, upper=False).square()
    return solution * variances.sqrt(), (inverse * variances).sum((1, 2)), noise * (1 - inverse.sum(1)).sum(1)


def k_means(points: Tensor, number: int, steps: int, candidates: int, generator: torch.Generator | None = None) -> Responsibilities:
    """Clusters of points ``(N, D)`` by Lloyd's algorithm from random points.

    Returns:
        Of every point so many clusters, the nearest first, which is certain.
    """
    means = points[torch.randperm(len(points), generator=generator, device="cpu")[:number].to(points.device)]
    for _ in range(steps):
        nearest = _nearest(points, means, 1).squeeze(1)
        count = nearest.bincount(minlength=len(means)).unsqueeze(1)
        sums = torch.zeros_like(means).index_add_(0, nearest, points)
        means = torch.where(count > 0, sums / count.clamp(min=1), means)
    nearest = _nearest(points, means, min(candidates, len(means)))
    return Responsibilities(nearest, torch.zeros_like(nearest, dtype=points.dtype).index_fill_(1, nearest.new_zeros(1), 1.0))


def _nearest(points: Tensor, means: Tensor, number: int) -> Tensor:
    power = 0.5 * means.square().sum(1)
    return torch.cat([(power - block @ means.mT).topk(number, 1, largest=False).indices for block in points.split(_ROWS)])


def cosines(sizes: tuple[int, ...], like: Tensor) -> Tensor:
    """The orthonormal discrete cosine transform of windows, ``(D, D)``; the first row is the constant."""
    basis = torch.ones(1, 1, dtype=torch.float64)
    for size in sizes:
        frequency = torch.arange(size, dtype=torch.float64).unsqueeze(1)
        rows = F.normalize((math.pi / size * frequency * (torch.arange(size, dtype=torch.float64) + 0.5)).cos(), dim=1)
        basis = torch.kron(basis, rows)
    return basis.to(like)
