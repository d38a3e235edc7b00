"""Pivoted incomplete Cholesky factors of kernel matrices that are never formed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_truncated.gp.cholesky import independent_cholesky
from pyro_truncated.gp.kernels.evaluation import Covariance
from pyro_truncated.utils.arguments import check_count, names_arguments
from pyro_truncated.utils.arrays import takes_arrays
from pyro_truncated.utils.constraints import check_entries, finite


@dataclasses.dataclass(frozen=True)
class PivotedCholesky:
    r"""A pivoted Cholesky approximation :math:`K \approx L L^\top`, exact at the pivots.

    Rows and columns of the pivots are exact.

    Example:
        >>> found = pivoted_cholesky(pyro.contrib.gp.kernels.RBF(2), torch.randn(20, 2), 5)
        >>> found.rank, found.pivots.shape
        (5, torch.Size([5]))

    Attributes:
        factor: :math:`L`, ``(N, Q)``. Its rows at the pivots are lower triangular.
        pivots: positions of the pivots among the inputs, ``(Q,)`` int64, in the order they were chosen.
        residual: :math:`k(x_n, x_n) - \|L_n\|^2 \ge 0`, ``(N,)``.
    """

    factor: Tensor
    pivots: Tensor
    residual: Tensor

    @property
    def rank(self) -> int:
        """Number of pivots ``Q``."""
        return self.factor.shape[1]

    def features(self, cross: Tensor) -> Tensor:
        r"""Rows :math:`L_P^{-1} k(P, x)` that new inputs would have in the factor.

        Args:
            cross: covariances of the new inputs and the pivots, ``(M, Q)``.

        Returns:
            ``(M, Q)``; inner products of these with rows of :attr:`factor` are the approximate covariances.
        """
        triangle = self.factor[self.pivots]
        found: Tensor = torch.linalg.solve_triangular(triangle, cross.mT, upper=False).mT
        return found


@names_arguments
@takes_arrays
def pivoted_cholesky(kernel: Covariance, inputs: Tensor, max_rank: int, tolerance: float = 0.0) -> PivotedCholesky:
    r"""Greedy pivoted Cholesky factor of the kernel matrix :math:`K` of the inputs.

    Every step takes the input of largest remaining variance as the next pivot and removes what it
    explains. It stops at ``max_rank`` pivots or if :math:`\operatorname{tr}(K - L L^\top) \le
    \mathrm{tolerance} \cdot \operatorname{tr} K`. It takes :math:`O(N Q^2)` time and :math:`O(N Q)`
    memory. Only the diagonal and one column of :math:`K` per pivot are computed, or a few more if
    inputs have hundreds of dimensions.

    Example:
        >>> x = torch.randn(30, 2, dtype=torch.float64)
        >>> found = pivoted_cholesky(pyro.contrib.gp.kernels.RBF(2), x, 10)
        >>> found.factor.shape
        torch.Size([30, 10])

    Args:
        kernel: covariance function, such as one of :mod:`pyro.contrib.gp.kernels`.
        inputs: ``(N, D)``.
        max_rank: most pivots.
        tolerance: share of the trace that may be missing, at least 0. A matrix whose remaining diagonal is rounding error ends the
            factor at any tolerance.

    Returns:
        The factor in the type of the covariances; use float64.

    Raises:
        ValueError: if the inputs are no matrix with rows, they or their covariances are not finite, or a number is out of range.

    Reference:
        Fine and Scheinberg, "Efficient SVM training using low-rank kernel representations", JMLR 2 (2001).
    """
    if inputs.dim() != 2 or not len(inputs):
        raise ValueError(f"inputs must have shape (N, D) with N > 0; got {tuple(inputs.shape)}")
    check_entries(finite, inputs=inputs)
    max_rank = check_count("max_rank", max_rank)
    if not tolerance >= 0:
        raise ValueError(f"tolerance must not be negative; got {tolerance}")
    # Kernels copy their inputs in every call: with many dimensions, columns of likely next pivots are computed along with one that is due.
    ahead = min(max(1, inputs.shape[1] // 64), 16)
    prior = kernel(inputs, diag=True)
    # Below it, what is left of a diagonal is rounding error.
    floor = (1e-13 * prior.max()).expand(len(prior))
    enough = tolerance * prior.sum()
    found = greedy_cholesky(prior, lambda due: kernel(inputs, inputs[due]), max_rank, floor, enough=enough, ahead=ahead)
    if not bool(found.residual.isfinite().all()):
        raise ValueError("kernel is not finite at these inputs: they, or its parameters, are too large, or not numbers")
    return found


def greedy_cholesky(
    prior: Tensor,
    columns: Callable[[Tensor], Tensor],
    max_rank: int,
    floor: Tensor,
    *,
    noise: float = 0.0,
    enough: float | Tensor = 0.0,
    ahead: int = 1,
) -> PivotedCholesky:
    """Returns the factor by pivots of largest conditional variance.

    Each pivot is given (noisy) function values at those before. Columns define the matrix.

    Args:
        prior: the diagonal ``(N,)``.
        columns: columns ``(N, b)`` of the matrix at positions ``(b,)``.
        max_rank: largest number of pivots.
        floor: variances ``(N,)`` at which an input is no pivot any more, because it depends on others.
        noise: variance of noise in what is known at the pivots. Without any, their variance vanishes.
        enough: sum of variances at which it ends.
        ahead: columns of likely next pivots that are computed along with one that is due.
    """
    residual = prior.clone()
    factor = residual.new_zeros(len(residual), min(max_rank, len(residual)))
    free = torch.ones_like(residual, dtype=torch.bool)
    pivots: list[int] = []
    ready: dict[int, Tensor] = {}
    while len(pivots) < factor.shape[1] and residual.sum() > enough:
        left = torch.where(free & (residual > floor), residual, -torch.inf)
        rank, pivot = len(pivots), int(left.argmax())
        if not bool(left[pivot] > 0):
            break
        if pivot not in ready:
            due = [pivot, *(other for other in left.topk(min(ahead, len(left))).indices.tolist() if other != pivot)][:ahead]
            ready = dict(zip(due, columns(torch.tensor(due, device=prior.device)).unbind(1), strict=True))
        column = ready[pivot] - factor[:, :rank] @ factor[pivot, :rank]
        # Rounding must not touch what is known: the pivot's variance is the remaining one, and without noise earlier ones are explained.
        if not noise:
            column[pivots] = 0.0
        column[pivot] = residual[pivot]
        factor[:, rank] = column / (residual[pivot] + noise).sqrt()
        residual = (residual - factor[:, rank] ** 2).clamp(min=0.0)
        pivots.append(pivot)
        free[pivot] = False
        if not noise:
            residual[pivots] = 0.0
    chosen = torch.tensor(pivots, dtype=torch.int64, device=prior.device)
    return PivotedCholesky(factor[:, : len(pivots)].contiguous(), chosen, residual)


def cholesky_at(kernel: Covariance, inputs: Tensor, pivots: Tensor) -> PivotedCholesky:
    r"""Returns the factor at given pivots, without those that depend on others.

    Only earlier pivots count.

    Args:
        kernel: covariance function.
        inputs: ``(N, D)``.
        pivots: distinct positions, ``(Q,)``.

    Returns:
        The factor; its rows at the pivots are lower triangular in the order given.
    """
    columns = kernel(inputs, inputs[pivots])
    kept, triangle = independent_cholesky(columns[pivots])
    factor = torch.linalg.solve_triangular(triangle, columns[:, kept].mT, upper=False).mT
    # What the pivots know is known exactly.
    factor[pivots[kept]] = triangle
    residual = (kernel(inputs, diag=True) - factor.square().sum(1)).clamp(min=0.0)
    residual[pivots[kept]] = 0.0
    return PivotedCholesky(factor.contiguous(), pivots[kept], residual)
