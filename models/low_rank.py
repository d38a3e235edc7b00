"""Covariances of few directions beside noise: the M-step of a mixture of probabilistic principal component analysers."""

from __future__ import annotations

import torch
from torch import Tensor


def best_low_rank(covariance: Tensor, counts: Tensor, rank: int, floor: Tensor, *, is_shared: bool) -> tuple[Tensor, Tensor]:
    r"""The likeliest :math:`W_k W_k^\top + \sigma_k^2 I` of data whose covariances are given.

    With eigenvalues :math:`\lambda_1 \ge \lambda_2 \ge \dots` and eigenvectors :math:`u_j` of a covariance, :math:`\sigma^2` is the mean of
    the eigenvalues behind the first ``R``, and the columns of :math:`W` are :math:`\sqrt{\lambda_j - \sigma^2}\, u_j`. If the noise is
    shared, it is the mean over all components' eigenvalues behind the first ``R``, and of those among the first that lie below it.

    Args:
        covariance: of the data of every component, ``(K, D, D)``.
        counts: how many data these are, ``(K,)``.
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
