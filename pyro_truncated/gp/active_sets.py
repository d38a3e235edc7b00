r"""Gaussian processes with many outputs, conditioned on an active set.

The outputs are independent Gaussian processes over the latents with one kernel and one noise variance :math:`\sigma^2`. So one Cholesky
factor of :math:`C = K_{AA} + \sigma^2 I` serves them all, in :math:`O(|A|^3 + |A|^2 (D + R) + |A| R D)` for :math:`R` further points.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyro.distributions as dist
import torch
from pyro.contrib.gp import kernels
from pyro.contrib.gp.kernels import Kernel
from torch import Tensor
from torch.nn import functional

from pyro_truncated.gp.cholesky import FINE_JITTER, factorize, inducing_cholesky, stable_cholesky
from pyro_truncated.gp.kernels import covariance, prior_variance
from pyro_truncated.utils.arguments import check_count, check_counts, describe, names_arguments
from pyro_truncated.utils.arrays import takes_arrays


@dataclasses.dataclass(frozen=True)
class _Factor:
    """A group of outputs with the same observed rows and Cholesky factor."""

    rows: Tensor | slice
    columns: Tensor | slice
    cholesky: Tensor
    whitened: Tensor
    jitter: float


class ActiveSet:
    r"""The Gaussian process posterior given the outputs of an active set.

    .. math:: m_n = k_{nA} C^{-1} x_A, \qquad c_n = k_{nn} + \sigma^2 - k_{nA} C^{-1} k_{An}, \qquad C = K_{AA} + \sigma^2 I

    Outputs that are NaN are missing. A complete active set needs one Cholesky factor, others need one for each pattern of missing entries.

    Example:
        >>> kernel, noise = pyro.contrib.gp.kernels.RBF(1), torch.tensor(0.1)
        >>> active = ActiveSet(torch.randn(8, 1), torch.randn(8, 2), kernel, noise)
        >>> mean, variance = active.predict(torch.zeros(3, 1))
        >>> mean.shape, variance.shape
        (torch.Size([3, 2]), torch.Size([3, 1]))

    Args:
        latents: ``(*batch, A, Q)``.
        outputs: ``(*batch, A, D)``. NaN where missing.
        kernel: kernel of :mod:`pyro.contrib.gp.kernels`.
        noise: noise variance :math:`\sigma^2`, a scalar.
        matrix: kernel matrix ``(*batch, A, A)`` of the latents, if it is known already.

    Attributes:
        jitter: share of the prior variance that was added to the noise for the sake of the factorisation; 0 if none.

    Raises:
        ValueError: if latents and outputs disagree, or the covariance matrix is not positive definite.
    """

    @names_arguments
    @takes_arrays
    def __init__(self, latents: Tensor, outputs: Tensor, kernel: kernels.Kernel, noise: Tensor, matrix: Tensor | None = None) -> None:
        if latents.dim() < 2 or outputs.dim() < 2 or latents.shape[-2] != outputs.shape[-2]:
            raise ValueError(
                f"latents (*batch, A, Q) and outputs (*batch, A, D) must agree; got {tuple(latents.shape)}, {tuple(outputs.shape)}"
            )
        self.kernel, self.latents, self.outputs = kernel, latents, outputs
        self.noise = torch.as_tensor(noise, dtype=latents.dtype, device=latents.device)
        if self.noise.numel() != 1:
            raise ValueError(f"noise must be one variance for all outputs and data points; got shape {tuple(self.noise.shape)}")
        self.noise = self.noise.reshape(())
        matrix = covariance(kernel, latents, latents) if matrix is None else matrix
        observed = ~outputs.isnan()
        if bool(observed.all()):
            self.factors = [self._factor(matrix, slice(None), slice(None), outputs)]
        else:
            self.factors = self._factor_patterns(matrix, observed)
        self.jitter = max(factor.jitter for factor in self.factors)

    def _factor(self, matrix: Tensor, rows: Tensor | slice, columns: Tensor | slice, outputs: Tensor) -> _Factor:
        cholesky, jitter = factorize(matrix, self.noise)
        whitened = torch.linalg.solve_triangular(cholesky, outputs, upper=False)
        return _Factor(rows, columns, cholesky, whitened, jitter)

    def _factor_patterns(self, matrix: Tensor, is_observed: Tensor) -> list[_Factor]:
        if is_observed.dim() > 2:
            raise ValueError(
                f"an active set with batch dimensions must be complete; got outputs {describe(self.outputs)}. Make one for each batch entry"
            )
        patterns, which = torch.unique(is_observed.mT, dim=0, return_inverse=True)
        factors = []
        for number, pattern in enumerate(patterns):
            rows, columns = pattern.nonzero().squeeze(-1), (which == number).nonzero().squeeze(-1)
            factors.append(self._factor(matrix[..., rows, :][..., rows], rows, columns, self.outputs[rows][:, columns]))
        return factors

    @property
    def size(self) -> int:
        """Number of active points ``A``."""
        return self.latents.shape[-2]

    def log_prob_terms(self) -> Tensor:
        r"""Sequential log densities :math:`\log p(x_a \mid x_{<a})`, ``(*batch, A)``, which sum to :math:`\log p(x_A)`."""
        total = self.latents.new_zeros(())
        for factor in self.factors:
            scale = factor.cholesky.diagonal(dim1=-2, dim2=-1).log() + 0.5 * math.log(2 * math.pi)
            terms = -0.5 * factor.whitened.square().sum(-1) - factor.whitened.shape[-1] * scale
            if not isinstance(factor.rows, slice):
                terms = terms.new_zeros(*terms.shape[:-1], self.size).index_add(-1, factor.rows, terms)
            total = total + terms
        return total

    @takes_arrays
    def predict(self, latents: Tensor, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        r"""Predictive means :math:`m_n`, ``(*batch, B, D)``, and variances :math:`c_n`, ``(*batch, B, 1)`` or ``(*batch, B, D)``.

        The variance is that of the observations, or ``noiseless`` that of the function; one column serves all outputs, unless entries of
        the active set are missing.
        """
        if latents.shape[-1:] != self.latents.shape[-1:]:
            raise ValueError(f"latents must have shape (*batch, B, {self.latents.shape[-1]}); got {tuple(latents.shape)}")
        if self.latents.dim() == 2 and self.outputs.dim() == 2 and latents.dim() != 2:
            mean, variance = self.predict(latents.reshape(-1, latents.shape[-1]), noiseless=noiseless)
            shape = latents.shape[:-1]
            return mean.reshape(*shape, mean.shape[-1]), variance.reshape(*shape, variance.shape[-1])
        return self.predict_from(prior_variance(self.kernel, latents), covariance(self.kernel, self.latents, latents), noiseless=noiseless)

    def predict_from(self, prior: Tensor, cross: Tensor, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """As :meth:`predict`, from variances ``(*batch, B)`` and covariances ``(*batch, A, B)``."""
        parts = []
        for factor in self.factors:
            basis = torch.linalg.solve_triangular(factor.cholesky, cross[..., factor.rows, :], upper=False)
            rest = (prior - basis.square().sum(-2)).clamp(min=0.0)
            parts.append((basis.mT @ factor.whitened, (rest if noiseless else rest + self.noise).unsqueeze(-1)))
        if len(parts) == 1 and isinstance(self.factors[0].columns, slice):
            return parts[0]
        order = torch.cat([torch.as_tensor(factor.columns) for factor in self.factors]).argsort()
        means = torch.cat([mean for mean, _ in parts], -1)
        variances = torch.cat([variance.expand_as(mean) for mean, variance in parts], -1)
        return means[..., order], variances[..., order]


def conditional_log_prob(value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Log densities ``(*batch, B)`` of observed entries ``(*batch, B, D)`` under independent normals."""
    observed = ~value.isnan()
    if variance.shape[-1] == 1 and bool(observed.all()):
        spread = variance.squeeze(-1)
        return -0.5 * ((value - mean).square().sum(-1) / spread + value.shape[-1] * (2 * math.pi * spread).log())
    terms = (torch.where(observed, value, mean) - mean).square() / variance + (2 * math.pi * variance).log()
    return -0.5 * torch.where(observed, terms, 0.0).sum(-1)


def log_prob_of_each(value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Log densities ``(M, K)`` of observed entries under independent normals ``(K, D)``."""
    observed, value = ~value.isnan(), value.nan_to_num(0.0)
    if variance.shape[-1] == 1:
        # All outputs share a variance: for complete data one product with the means remains.
        norms = mean.square().sum(-1) if bool(observed.all()) else observed.to(value) @ mean.square().mT
        squares = (value.square().sum(-1, keepdim=True) - 2 * value @ mean.mT + norms) / variance.mT
        spread = observed.sum(-1, keepdim=True) * (2 * math.pi * variance).log().mT
    else:
        precision, weights = variance.reciprocal(), observed.to(value)
        squares = value.square() @ precision.mT - 2 * value @ (precision * mean).mT + weights @ (precision * mean.square()).mT
        spread = weights @ (2 * math.pi * variance).log().mT
    return -0.5 * (squares + spread)


class NearestSet:
    r"""Posteriors of a process, each given the data points closest to it.

    The active set :math:`A(z)` depends on the latent :math:`z`.

    .. math:: m(z) = k_{zA} C^{-1} x_A, \qquad c(z) = k_{zz} + \sigma^2 - k_{zA} C^{-1} k_{Az}, \qquad C = K_{AA} + \sigma^2 I,
        \qquad A = A(z)

    Closest are those whose function values correlate most with that at the latent, under the prior. Cost of a prediction: :math:`O(N Q +
    |A|^3 + |A| D)`, or without the first term :meth:`around` it. Means jump, a little, where the closest points change.

    Reference:
        Vecchia, "Estimation and model identification for continuous spatial processes", JRSS B 50 (1988).
    """

    def __init__(self, latents: Tensor, outputs: Tensor, kernel: Kernel, noise: Tensor, num_neighbors: int) -> None:
        self.latents, self.outputs, self.kernel = latents, outputs, kernel
        self.noise = torch.as_tensor(noise, dtype=latents.dtype, device=latents.device).reshape(())
        self.num_neighbors = min(num_neighbors, len(latents))
        self._scale = prior_variance(kernel, latents).detach().rsqrt()

    @torch.no_grad()
    def around(self, latents: Tensor, leave_out: Tensor | None = None) -> Neighborhoods:
        """Fixes the active sets of latents ``(M, Q)``, each without ``leave_out (M,)``."""
        # Several large tensors come and go, and small ones are not asked of the system each time.
        rows = max(1, 1_000_000 // max(len(self.latents), self.num_neighbors**2))
        own = torch.full((len(latents),), -1, device=latents.device) if leave_out is None else leave_out
        nearest = [self._closest(z, n) for z, n in zip(latents.split(rows), own.split(rows), strict=True)]
        near = torch.cat(nearest) if nearest else own.new_empty(0, self.num_neighbors)
        return Neighborhoods(self, near, torch.cat([self._factor(part) for part in near.split(rows)]))

    def _closest(self, latents: Tensor, leave_out: Tensor) -> Tensor:
        correlation = covariance(self.kernel, latents, self.latents) * self._scale
        out = (leave_out >= 0).nonzero().squeeze(1)
        correlation[out, leave_out[out]] = -torch.inf
        return correlation.topk(self.num_neighbors, dim=1).indices

    def _factor(self, near: Tensor) -> Tensor:
        z = self.latents[near]
        return factorize(covariance(self.kernel, z, z), self.noise)[0]

    def predict(self, latents: Tensor, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Predictive means ``(*batch, D)`` and variances ``(*batch, 1)``, or ``noiseless`` ones."""
        flat = latents.reshape(-1, latents.shape[-1])
        mean, variance = self.around(flat.detach()).predict(flat, noiseless=noiseless)
        return mean.reshape(*latents.shape[:-1], mean.shape[-1]), variance.reshape(*latents.shape[:-1], 1)


@dataclasses.dataclass(frozen=True)
class Neighborhoods:
    """Active sets of a :class:`NearestSet`, one for each of ``M`` places."""

    data: NearestSet  # what they are parts of
    near: Tensor  # their data points (M, A)
    cholesky: Tensor  # factors of their covariance matrices (M, A, A), noise included

    def take(self, rows: Tensor) -> Neighborhoods:
        """Those at positions ``(L,)``, which may repeat."""
        return Neighborhoods(self.data, self.near[rows], self.cholesky[rows])

    def predict(self, latents: Tensor, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Means ``(M, D)`` and variances ``(M, 1)``, each given its own set."""
        data = self.data
        cross = covariance(data.kernel, data.latents[self.near], latents.unsqueeze(-2))
        basis = torch.linalg.solve_triangular(self.cholesky, cross, upper=False)
        weights = torch.linalg.solve_triangular(self.cholesky.mT, basis, upper=True).squeeze(-1)
        # A sum over rows of the data by index: no tensor of places by neighbours by outputs.
        mean = functional.embedding_bag(self.near, data.outputs, per_sample_weights=weights, mode="sum")
        variance = (prior_variance(data.kernel, latents) - basis.square().sum((-2, -1))).clamp(min=0.0)
        return mean, (variance if noiseless else variance + data.noise).unsqueeze(-1)


@dataclasses.dataclass(frozen=True)
class ProjectedStatistics:
    """Sums over data points that a :class:`ProjectedSet` consists of."""

    latents: Tensor  # latents U of the points projected on, (M, Q)
    gram: Tensor  # sum of the products k_Un k_nU, (M, M) in float64
    moment: Tensor  # sum of the products k_Un x_n, (M, D) in float64


def projected_statistics(kernel: Kernel, points: Tensor, latents: Tensor, outputs: Tensor, block: int = 5000) -> ProjectedStatistics:
    """Sums over complete data points, projected on latents ``(M, Q)``: ``O(N M (M + D))``."""
    gram = points.new_zeros(len(points), len(points), dtype=torch.float64)
    moment = points.new_zeros(len(points), outputs.shape[1], dtype=torch.float64)
    for z, x in zip(latents.split(block), outputs.split(block), strict=True):
        cross = covariance(kernel, points.double(), z.double()).double()
        gram += cross @ cross.mT
        moment += cross @ x.double()
    return ProjectedStatistics(points, gram, moment)


class ProjectedSet:
    r"""The posterior given all data points through a few latents :math:`U`.

    .. math:: m_* = \tfrac{1}{\sigma^2} k_{*U} \Sigma^{-1} K_{UN} x, \qquad
        c_* = k_{**} + \sigma^2 - k_{*U} (K_{UU}^{-1} - \Sigma^{-1}) k_{U*}, \qquad \Sigma = K_{UU} + \tfrac{1}{\sigma^2} K_{UN} K_{NU}

    If the latents cover those of the data within a length-scale, this is close to conditioning on every data point, at a cost linear in
    their number. Factors are computed in float64.

    Reference:
        Quiñonero-Candela and Rasmussen, "A unifying view of sparse approximate Gaussian process regression", JMLR 6 (2005), section 5.
    """

    def __init__(self, kernel: Kernel, noise: Tensor, statistics: ProjectedStatistics) -> None:
        self.kernel, self.latents = kernel, statistics.latents
        self.noise = torch.as_tensor(noise).reshape(())
        prior = covariance(kernel, self.latents.double(), self.latents.double())
        outer = inducing_cholesky(prior, FINE_JITTER)
        identity = torch.eye(len(outer), dtype=torch.float64, device=outer.device)
        # Everything is expressed in features L^-1 k_U*, in which the weights are well-conditioned; K_UU itself is not.
        self._whiten = torch.linalg.solve_triangular(outer, identity, upper=False)
        gram = self._whiten @ statistics.gram @ self._whiten.mT / self.noise.double()
        inner = stable_cholesky(identity + (gram + gram.mT) / 2)
        moment = self._whiten @ statistics.moment / self.noise.double()
        self._shrink = torch.linalg.solve_triangular(inner, identity, upper=False)
        self._weights = torch.cholesky_solve(moment, inner).to(self.latents.dtype)

    def predict(self, latents: Tensor, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Predictive means ``(*batch, D)`` and variances ``(*batch, 1)``, or ``noiseless`` ones."""
        cross = covariance(self.kernel, latents.reshape(-1, latents.shape[-1]).double(), self.latents.double())
        features = cross @ self._whiten.mT
        rest = prior_variance(self.kernel, latents).reshape(-1) - features.square().sum(-1) + (features @ self._shrink.mT).square().sum(-1)
        variance = rest.clamp(min=0.0).to(latents.dtype) + (0.0 if noiseless else self.noise)
        mean = features.to(latents.dtype) @ self._weights
        return mean.reshape(*latents.shape[:-1], mean.shape[-1]), variance.reshape(*latents.shape[:-1], 1)


Schedule = int | Callable[[int], int]
Choose = Callable[[Kernel, Tensor, int], Tensor]


def split_weights(batch_size: int, num_active: int, num_data: int, like: Tensor | None = None) -> Tensor:
    r"""Returns weights ``(B,)`` that correct a plate's scale ``N / B``.

    They are :math:`B/N` for the active points, the first ones, which then count once. For the rest they are :math:`(B/N)(N-|A|)/|R|`, so
    that it stands for all points that are not active.

    Impossible sizes are refused.
    """
    if not 0 <= num_active <= batch_size <= num_data:
        raise ValueError(f"sizes must satisfy 0 <= num_active <= batch_size <= num_data; got {num_active}, {batch_size}, {num_data}")
    if num_active == batch_size < num_data:
        raise ValueError(
            f"all {batch_size} points of the batch are active, and none stands for the other {num_data - batch_size} data points; "
            "make num_active smaller than the batch"
        )
    weights = (torch.empty(0) if like is None else like).new_full((batch_size,), batch_size / num_data)
    if num_active < batch_size:
        weights[num_active:] *= (num_data - num_active) / (batch_size - num_active)
    return weights


@dataclasses.dataclass(frozen=True)
class Split:
    """A minibatch, active set first.

    .. note:: Where a minibatch is all data in another order, Pyro's plate takes no subsample of parameters, as those of ``AutoNormal``, and
        they would belong to other data points: index what belongs to data points by ``indices`` yourself, or take smaller minibatches.

    Example:
        >>> split = Split(torch.tensor([4, 2, 7, 1]), 2)
        >>> split.active.tolist(), split.rest.tolist()
        ([4, 2], [7, 1])

    Attributes:
        indices: positions ``(B,)`` in the data set.
        num_active: how many of them, from the first on, are the active set.
    """

    indices: Tensor
    num_active: int

    @property
    def active(self) -> Tensor:
        """Positions of the active points."""
        return self.indices[: self.num_active]

    @property
    def rest(self) -> Tensor:
        """Positions of the other points."""
        return self.indices[self.num_active :]

    def weights(self, num_data: int, like: Tensor | None = None) -> Tensor:
        """Weights ``(B,)`` that correct the scale of a plate, see :func:`split_weights`."""
        return split_weights(len(self.indices), self.num_active, num_data, like)

    def rows(self, x: Tensor) -> Tensor:
        """The minibatch's rows ``(B, ...)`` of all data."""
        return x[self.indices]

    def latents(self, variables: Sequence[Tensor]) -> list[Tensor]:
        """The minibatch's rows of what is held of all data points."""
        return [self.rows(values) for values in variables]

    def normal(self, loc: Tensor, scale: Tensor) -> Any:
        """Normal distributions of its latents, with their means and deviations."""
        return dist.Normal(loc, scale).to_event(1)


class UniformSplits:
    """Uniformly random active sets, as in the paper.

    An epoch is a random partition of the data; the first points of a part are active. A last part too small to have points beside its
    active set is filled up with others. The estimate of the objective is unbiased.

    Example:
        >>> splits = UniformSplits(1000, 200, 50)
        >>> [len(split.active) for split in splits.epoch(0)]
        [50, 50, 50, 50, 50]

    Args:
        num_data: number of data points ``N``.
        batch_size: data points per minibatch ``B``. The last one of an epoch may hold fewer.
        num_active: size of the active set, or a function of the epoch (0, 1, ...), such as :func:`linear_growth`.
        generator: source of randomness.

    Raises:
        ValueError: if the sizes are impossible.
    """

    @names_arguments
    def __init__(self, num_data: int, batch_size: int, num_active: Schedule, generator: torch.Generator | None = None) -> None:
        num_data = check_count("num_data", num_data)
        batch_size = check_count("batch_size", batch_size, most=num_data, limit="the number of data points")
        self.num_data, self.batch_size, self.num_active, self.generator = num_data, batch_size, num_active, generator
        self._size(0)

    def _size(self, epoch: int) -> int:
        size = check_count("num_active", self.num_active(epoch) if callable(self.num_active) else self.num_active, least=0)
        split_weights(self.batch_size, size, self.num_data)
        return size

    def epoch(self, number: int = 0) -> Iterator[Split]:
        """Yields the minibatches of an epoch."""
        order, size = torch.randperm(self.num_data, generator=self.generator), self._size(number)
        for part in order.split(self.batch_size):
            yield Split(part if len(part) > 2 * size else torch.cat([part, order[: self.batch_size - len(part)]]), size)


def some_positions(total: int, number: int) -> Tensor:
    """Draws at most so many positions, ascending, the same at each call."""
    # Every so many-th row may be of one kind.
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0), device="cpu")
    return order[:number].sort().values


def least_variance(kernel: Kernel, latents: Tensor, size: int, noise: Tensor | float | None = None, num_targets: int = 500) -> Tensor:
    r"""Returns positions ``(size,)`` of latents that leave the least predictive variance.

    With :math:`E` the posterior covariance given the points chosen so far, the next one is the ``j`` of largest :math:`\sum_n E_{nj}^2 /
    (E_{jj} + \sigma^2)`, the decrease of the sum of variances by observing it. Unlike a pivoted Cholesky factor, this prefers points
    with many neighbours to outliers. Cost :math:`O(|A| N T)`, memory :math:`O(N T)`.

    The default ``noise`` is a hundredth of the mean prior variance; ``num_targets`` is ``T``.
    """
    if not 0 < size <= len(latents):
        raise ValueError(f"size must lie in 1 .. {len(latents)}, the number of candidates; got {size}")
    with torch.no_grad():
        points = latents.detach().double()
        which = some_positions(len(points), num_targets).to(points.device)
        prior = covariance(kernel, points[which], points).double()
        spread = prior_variance(kernel, points).double()
        noise = 1e-2 * spread.mean() if noise is None else noise
        spread = spread + noise
        # E is never formed: it is the prior less the outer products of these rows, and the sums of squares are updated with it.
        rows = points.new_empty(size, len(points))
        squares = prior.square().sum(0)
        index = torch.empty(size, dtype=torch.int64, device=points.device)
        free = torch.ones(len(points), dtype=torch.bool, device=points.device)
        for step in range(size):
            best = torch.where(free, squares / spread, -1.0).argmax()
            index[step], free[best] = best, False
            row = covariance(kernel, points[best].unsqueeze(0), points).squeeze(0).double() - rows[:step, best] @ rows[:step]
            row = row / spread[best].sqrt()
            column = row[which]
            projection = column @ prior - (rows[:step, which] @ column) @ rows[:step]
            squares = squares - 2 * row * projection + row.square() * column.square().sum()
            rows[step] = row
            spread = (spread - row.square()).clamp(min=float(noise))
    return index


@names_arguments
def linear_growth(start: int, stop: int, epochs: int) -> Callable[[int], int]:
    """A size that grows linearly from ``start`` to ``stop``, then stays.

    Example:
        >>> size = linear_growth(50, 200, 10)
        >>> size(0), size(10), size(20)
        (50, 200, 200)
    """
    start, stop, epochs = check_counts(start=start, stop=stop, epochs=epochs)
    if start > stop:
        raise ValueError(f"sizes must satisfy start <= stop; got {start} and {stop}")
    return lambda epoch: start + round((stop - start) * min(1.0, epoch / epochs))
