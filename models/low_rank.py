"""Low-rank covariances beside noise: mixtures of probabilistic principal component analysers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import Population
from pyro_truncated.distributions import ComponentLowRankNormal
from pyro_truncated.models.covariances import Covariances, Full, Parameters, of_pairs, spread_around

_MAX_NUMBERS = 2**22


class LowRank(Full):
    """Low-rank covariances: ``factor (K, D, R)``, and ``scale (K,)`` or ``()``.

    The scale has the deviations of the noise.
    """

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
        covariance: Tensor = factor @ factor.mT + torch.diag_embed(noise)
        return covariance

    def without_noise(self, population: Population, y: Tensor, loc: Tensor, parameters: Parameters) -> Tensor:
        """Posterior means of what lies in the directions."""
        blocks = []
        for block in population.split(max(1, _MAX_NUMBERS // (population.num_states * loc.shape[1]))):
            rows = block.rows_of(y).to(loc).unsqueeze(1)
            means, *_ = self.likelihood(block.states(torch.int64)[..., 0], loc, parameters).without_noise(rows)
            blocks.append((block.weights().to(loc).unsqueeze(-1) * means).sum(1))
        return torch.cat(blocks)

    def best(self, statistics: dict[str, Tensor], loc: Tensor, floor: Tensor) -> Parameters:
        """The likeliest directions and noise."""
        counts = statistics["counts"].clamp(min=0.0)
        factor, scale = best_low_rank(spread_around(statistics, loc), counts, self.rank, floor, is_shared=self.is_shared)
        return {"factor": factor, "scale": scale}

    def precisions(self, loc: Tensor, parameters: Parameters) -> tuple[Tensor, Tensor, Tensor]:
        """Of covariances of low rank."""
        likelihood = self.likelihood(torch.arange(len(loc), device=loc.device), loc, parameters)
        precision, size = likelihood.precision_matrix, likelihood.half_log_determinant
        return (precision @ loc.unsqueeze(-1)).squeeze(-1), of_pairs(precision), size

    def beside(self, parameters: Parameters, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Of covariances of low rank."""
        factor = parameters["factor"]
        components = torch.arange(len(factor), device=factor.device)
        likelihood = self.likelihood(components, factor.new_zeros(factor.shape[:2]), parameters)
        return likelihood.half_log_determinant, (likelihood.precision_matrix * covariance).sum((-2, -1))


def best_low_rank(covariance: Tensor, counts: Tensor, rank: int, floor: Tensor, *, is_shared: bool) -> tuple[Tensor, Tensor]:
    r"""The likeliest :math:`W_k W_k^\top + \sigma_k^2 I` of data whose covariances are given.

    Let a covariance have eigenvalues :math:`\lambda_1 \ge \lambda_2 \ge \dots` and eigenvectors
    :math:`u_j`. Then :math:`\sigma^2` is the mean of the eigenvalues behind the first ``R``. The
    columns of :math:`W` are :math:`\sqrt{\lambda_j - \sigma^2}\, u_j`. If the noise is shared, it
    is the mean over all components' eigenvalues behind the first ``R``. It includes those of the
    first ``R`` that lie below it.

    Args:
        covariance: of every component's data, ``(K, D, D)``.
        counts: their numbers, ``(K,)``.
        rank: ``R``, below ``D``.
        floor: least variance of the noise.
        is_shared: whether all components have the same noise.

    Returns:
        Factors :math:`W`, ``(K, D, R)``, and standard deviations of the noise, ``(K,)``, or ``()`` if they are shared.

    Reference:
        Tipping and Bishop, "Mixtures of probabilistic principal component analyzers", Neural Computation 11, 1999, equations 8 and 9.
    """
    # Of covariances of few directions and nothing else LAPACK's divide and conquer makes NaN where numbers underflow.
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    values, vectors = torch.linalg.eigh(covariance + floor * identity)
    values = (values - floor).clamp(min=0.0).flip(-1)
    first, rest = values[:, :rank], values[:, rank:]
    noise = _shared_noise(first, rest, counts) if is_shared else rest.mean(-1)
    noise = noise.maximum(floor)
    above = (first - noise.unsqueeze(-1)).clamp(min=0.0)
    return vectors.flip(-1)[..., :rank] * above.sqrt().unsqueeze(-2), noise.sqrt()


def _shared_noise(first: Tensor, rest: Tensor, counts: Tensor) -> Tensor:
    r"""The root of :math:`\sum_k n_k [\sum_{j > R} (v - \lambda_{kj}) + \sum_{j \le R} (v - \lambda_{kj})_+]` in the variance ``v``."""
    weight = counts.unsqueeze(-1)
    value, order = first.flatten().sort()
    share = weight.expand_as(first).flatten()[order]
    total = torch.cat([(weight * rest).sum().reshape(1), share * value]).cumsum(0)
    number = torch.cat([(weight.sum() * rest.shape[-1]).reshape(1), share]).cumsum(0)
    # Means over ever more of the eigenvalues: the first one that does not exceed the next of them.
    mean, following = total / number, torch.cat([value, value.new_full((1,), torch.inf)])
    # To index by a scalar is to look at it.
    best: Tensor = mean.take((mean <= following).to(torch.uint8).argmax())
    return best
