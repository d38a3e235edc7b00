"""What removing members of an inducing subset costs, exactly: nothing here grows with the number of data points."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.gp.subset.exchange_factors import ExchangeFactors


def removal_plan(factors: ExchangeFactors, count: int) -> tuple[Tensor, Tensor]:
    r"""The ``count`` members that are cheapest to remove one after the other, and what each of the removals costs, exactly.

    With :math:`M = K_{II}^{-1}`, :math:`N = (K_{In} K_{nI} + \sigma^2 K_{II})^{-1}`, :math:`\beta = N K_{In} Y` and
    :math:`A = M K_{In} K_{nI} M`, removing member ``i`` raises the objective by

    .. math:: \tfrac12 \Big[ \sum_h \frac{\beta_{ih}^2}{\sigma^2 N_{ii}} + H \log \frac{\sigma^2 N_{ii}}{M_{ii}}
        + \frac{H}{\sigma^2} \frac{A_{ii}}{M_{ii}} \Big],

    the last term only for ``"vfe"``; and all four follow a removal by updates of rank one or two. Nothing here grows with ``n``.

    Returns:
        Places ``(count,)`` among the members, and costs ``(count,)``.
    """
    problem = factors.problem
    noise, H, trace = problem.noise, problem.num_outputs, problem.trace_weight
    inverse, R = factors.inverse, factors.cholesky
    half = torch.linalg.solve_triangular(R, inverse, upper=False)
    M, N = inverse.mT @ inverse, half.mT @ half
    beta = half.mT @ torch.linalg.solve_triangular(R, factors.moment, upper=False)
    through = R.mT @ inverse
    A = through.mT @ through - noise * M
    places, costs = [], []
    alive = torch.ones(factors.size, dtype=torch.bool, device=M.device)
    for _ in range(count):
        m, q = M.diagonal().clamp(min=1e-300), N.diagonal().clamp(min=1e-300)
        data = beta.square().sum(1) / (noise * q)
        cost = 0.5 * (data + H * (noise * q / m).log() + trace * A.diagonal() / m)
        i = int(torch.where(alive, cost, torch.inf).argmin())
        places.append(i)
        costs.append(cost[i])
        alive[i] = False
        Mi, Ni, Ai = M[:, i] / M[i, i], N[:, i] / N[i, i], A[:, i]
        crossed = torch.outer(Mi, Ai)
        A = A - crossed - crossed.mT + A[i, i] * torch.outer(Mi, Mi)
        beta = beta - torch.outer(Ni, beta[i])
        M, N = M - torch.outer(Mi, M[i]), N - torch.outer(Ni, N[i])
    return torch.tensor(places, device=M.device), torch.stack(costs)


def removal_costs(factors: ExchangeFactors) -> Tensor:
    """What removing each member alone would cost, exactly, ``(m,)``; see :func:`removal_plan`."""
    noise, H = factors.problem.noise, factors.problem.num_outputs
    inverse, R = factors.inverse, factors.cholesky
    half = torch.linalg.solve_triangular(R, inverse, upper=False)
    beta = half.mT @ torch.linalg.solve_triangular(R, factors.moment, upper=False)
    m, q = inverse.square().sum(0), half.square().sum(0)
    explained = (R.mT @ inverse).square().sum(0) - noise * m
    data = beta.square().sum(1) / (noise * q)
    costs: Tensor = 0.5 * (data + H * (noise * q / m).log() + factors.problem.trace_weight * explained / m)
    return costs
