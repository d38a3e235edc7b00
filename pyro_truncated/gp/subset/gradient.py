r"""Objectives of sparse regression as functions of hyper-parameters and inducing inputs, with gradients in closed form.

With the inducing inputs' columns :math:`K_{nI} = L C^\top`, :math:`P = L C^{-1}`, :math:`S = L L^\top + \sigma^2 I`, :math:`a = S^{-1} Y`
and :math:`W = H S^{-1} - a a^\top - [\text{VFE}] H I / \sigma^2`, the gradient of the objective is

.. math:: dF = \langle W P, dK_{nI} \rangle - \tfrac12 \langle P^\top W P, dK_{II} \rangle
    + [\text{VFE}] \tfrac{H}{2 \sigma^2} \operatorname{tr} dK ,

so that only the kernel itself is differentiated automatically, a block of rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_truncated.gp.cholesky import independent_cholesky
from pyro_truncated.gp.noisy_covariance import LowRankCovariance
from pyro_truncated.gp.subset.basis import Basis
from pyro_truncated.gp.subset.objective import SubsetProblem

# Noise below this share of the targets' variance is rounding error.
NOISE_FLOOR = 1e-6
_CHUNK = 2**24


def noise_of(log_noise: Tensor) -> Tensor:
    """Noise variance of an unconstrained parameter."""
    return NOISE_FLOOR + log_noise.exp()


def backward(basis: Basis, targets: Tensor, log_noise: Tensor, objective: str) -> float:
    """The objective, whose gradient is added to all leaves that covariances and noise depend on.

    Args:
        basis: inducing inputs.
        targets: ``(n, H)`` float64.
        log_noise: unconstrained noise parameter, see :func:`noise_of`.
        objective: ``"vfe"``, ``"pp"`` or ``"fitc"``, the last as minus the log likelihood without its constant.

    Returns:
        The objective; NaN, and no gradient, if the inducing inputs' covariance matrix has no factor.
    """
    if objective == "fitc":
        return _fitc_backward(basis, targets, log_noise)
    return _closed_form_backward(basis, targets, log_noise, objective)


def _fitc_backward(basis: Basis, targets: Tensor, log_noise: Tensor) -> float:
    with torch.enable_grad():
        columns, square = basis.columns(), basis.square()
        # Which inputs depend on others is no differentiable question; the factor of the rest is one.
        kept, _ = independent_cholesky(square.detach())
        triangle, info = torch.linalg.cholesky_ex(square[kept][:, kept])
        if not len(kept) or int(info):
            return math.nan
        factor = torch.linalg.solve_triangular(triangle, columns[:, kept].mT, upper=False).mT
        missing = (basis.kernel.diag().double() - factor.square().sum(1)).clamp(min=0.0)
        covariance = LowRankCovariance(factor, noise_of(log_noise) + missing)
        value = -covariance.log_likelihood(targets) - 0.5 * targets.numel() * math.log(2 * math.pi)
        value.backward()
    return float(value.detach())


def _closed_form_backward(basis: Basis, targets: Tensor, log_noise: Tensor, objective: str) -> float:
    with torch.enable_grad():
        square, noise = basis.square(), noise_of(log_noise)
        blocks = list(_blocks(len(targets), len(basis)))
        # One block keeps its graph; several are evaluated twice to save memory.
        first = basis.columns() if len(blocks) == 1 else None
        diagonal = basis.kernel.diag().double()
    with torch.no_grad():
        columns = torch.cat([basis.columns(rows) for rows in blocks]) if first is None else first.detach()
        problem = SubsetProblem(basis.kernel, targets, float(noise), objective)
        terms = _gradient_terms(problem, columns, square.detach(), diagonal.detach().sum())
    if terms is None:
        return math.nan
    with torch.enable_grad():
        fixed = (terms.square * square).sum() + 0.5 * problem.trace_weight * diagonal.sum() + terms.noise * noise
        backward_through([(fixed, None)] if first is None else [(fixed, None), (first, terms.columns)])
        for rows in blocks if first is None else ():
            backward_through([(basis.columns(rows), terms.columns[rows])])
    return terms.value


def backward_through(outputs: list[tuple[Tensor, Tensor | None]]) -> None:
    """Differentiates outputs with their gradients, but for those that depend on nothing that is learned (a frozen kernel)."""
    learned = [(output, gradient) for output, gradient in outputs if output.requires_grad]
    if learned:
        torch.autograd.backward([output for output, _ in learned], [gradient for _, gradient in learned])


class _Terms(NamedTuple):
    value: float
    columns: Tensor
    square: Tensor
    noise: float


def _gradient_terms(problem: SubsetProblem, columns: Tensor, square: Tensor, trace: Tensor) -> _Terms | None:
    """The objective, and its derivatives in the inducing inputs' columns and square and in the noise."""
    Y, s2, H, n = problem.targets, problem.noise, problem.num_outputs, problem.num_data
    kept, C = independent_cholesky(square)
    if not len(kept):
        return None
    whole = len(kept) == len(square)
    L = torch.linalg.solve_triangular(C, (columns if whole else columns[:, kept]).mT, upper=False).mT
    gram = L.mT @ L
    if not bool(gram.isfinite().all()):
        return None
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    R, info = torch.linalg.cholesky_ex(gram + s2 * identity)
    if int(info):
        return None
    whitened = torch.linalg.solve_triangular(R, L.mT @ Y, upper=False)
    residual = trace - gram.diagonal().sum()
    value = problem.value_from(R, whitened, residual)
    B_inverse = torch.cholesky_inverse(R)
    weights = torch.linalg.solve_triangular(R.mT, whitened, upper=True)
    a = (Y - L @ weights) / s2
    C_inverse = torch.linalg.solve_triangular(C, identity, upper=False)
    inner = (H * B_inverse - problem.trace_weight * identity) @ C_inverse
    projected = weights.mT @ C_inverse
    for_columns = (L @ inner).addmm_(a, projected, alpha=-1)
    for_square = -0.5 * C_inverse.mT @ (gram @ inner - weights @ projected)
    d_noise = 0.5 * (
        H * ((n - len(gram)) / s2 + B_inverse.diagonal().sum()) - a.square().sum() - problem.trace_weight * residual.clamp(min=0.0) / s2
    )
    if not whole:
        for_columns = torch.zeros_like(columns).index_copy_(1, kept, for_columns)
        padded = torch.zeros_like(square)
        padded[kept[:, None], kept] = for_square
        for_square = padded
    return _Terms(float(value), for_columns, for_square, float(d_noise))


def _blocks(n: int, m: int) -> Iterator[Tensor]:
    yield from torch.arange(n).split(max(1, _CHUNK // max(1, m)))
