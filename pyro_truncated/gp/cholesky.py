"""Cholesky factors of nearly singular covariance matrices: policy and constants.

Inputs close to each other make a covariance matrix singular but for rounding. What is done about it depends on what the matrix is for:

- ``K + noise``: :func:`factorize` raises the noise to where the floating point type has digits left, and warns: that is another model.
- A matrix that only rounding can have made indefinite: :func:`stable_cholesky` adds nothing unless it has to, and then as little as helps.
- Inducing inputs while kernels or inputs are being learned: :func:`inducing_cholesky` always adds
  the same share. This keeps an objective smooth, and a bound a bound.
- Inputs that may be left out: :func:`independent_cholesky` leaves out those that depend on others.

Matrices ``I + A`` with a positive semi-definite ``A`` need none of this: where their factorisation fails no digits are left to save.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_truncated.gp.kernels import Covariance
from pyro_truncated.utils.arguments import check_count, describe, names_arguments
from pyro_truncated.utils.arrays import takes_arrays
from pyro_truncated.utils.constraints import check_entries, finite

# The least share of the mean variance that is added against rounding errors, and how often it may grow tenfold. With the least a factor has
# digits left to trust, measured for 400 points on a plane. A matrix that needs more than the most is no covariance matrix.
_ADDITIONS = {torch.float64: (1e-10, 6), torch.float32: (1e-5, 3), torch.float16: (1e-2, 3), torch.bfloat16: (1e-2, 3)}
# A share of the mean variance that makes the factor of inducing inputs exist wherever an optimiser may look.
INDUCING_JITTER = 1e-6
# And one that is enough in float64 where inducing inputs are some of the data and parameters stay in a box.
FINE_JITTER = 1e-8
# An input whose variance, given others, is below this share of its prior variance adds nothing but rounding errors to them.
DEPENDENT = 1e-8


class JitterWarning(UserWarning):
    """A covariance matrix was nearly singular, and its diagonal was raised.

    Example:
        >>> x = torch.randn(20, 1)
        >>> with warnings.catch_warnings(action="error", category=JitterWarning):  # a covariance that is nearly singular is an error here
        ...     model = SubsetGPRegression(smooth_rbf(x), x.squeeze(-1).sin(), num_inducing=5)
    """


class NotPositiveDefiniteError(ValueError):
    """A matrix is no covariance matrix, by more than rounding."""


def factorize(covariance: Tensor, noise: Tensor) -> tuple[Tensor, float]:
    r"""Returns the Cholesky factor of :math:`K + \sigma^2 I`, and the added share.

    Nothing is added if the noise is above 1e-5 of the mean prior variance in float32, 1e-10 in float64, and the factorisation succeeds.
    Otherwise the noise is raised to this floor, and further by powers of ten if need be; the share is that of the mean prior variance.

    It warns (``JitterWarning``) if something was added, and raises ``NotPositiveDefiniteError`` if no small addition helps.
    """
    if not covariance.shape[-1]:
        return covariance, 0.0
    level = covariance.detach().diagonal(dim1=-2, dim2=-1).mean()
    missing = max(0.0, _additions(covariance.dtype)[0] - float(noise.detach().max() / level))
    factor = _first_factor(_lift(covariance, noise), level, missing)
    if factor is None:
        raise NotPositiveDefiniteError(
            f"the covariance matrix of {covariance.shape[-1]} points cannot be factorised (mean prior variance {float(level):.3g}, noise "
            f"{float(noise.detach().max()):.3g}); check latents and kernel for NaN and infinity"
        )
    if factor[1]:
        warnings.warn(
            f"the covariance of {covariance.shape[-1]} points is nearly singular in {covariance.dtype}: {factor[1]:.1g} of the prior "
            "variance was added to the noise of the active set. Use float64, or a larger noise.",
            JitterWarning,
            stacklevel=2,
        )
    return factor


def stable_cholesky(matrix: Tensor, level: Tensor | None = None) -> Tensor:
    """Cholesky factor of a positive semi-definite matrix, slightly raised only if necessary.

    Rounding errors are relative to ``level``, by default the mean of the diagonal. It raises ``NotPositiveDefiniteError`` if no small
    addition helps.
    """
    level = matrix.detach().diagonal(dim1=-2, dim2=-1).mean() if level is None else level.detach()
    factor = _first_factor(matrix, level)
    if factor is None:
        raise NotPositiveDefiniteError(
            f"the covariance matrix is not positive definite (mean of its diagonal: {float(level):.3g}); check inputs and kernel"
        )
    return factor[0]


def inducing_cholesky(matrix: Tensor, jitter: float = INDUCING_JITTER) -> Tensor:
    """Cholesky factor of inducing inputs' covariance matrix ``(m, m)``, always slightly raised.

    The addition is noise on the inducing variables, so that a lower bound stays one.
    """
    return stable_cholesky(_lift(matrix, jitter * matrix.diagonal().mean()))


def independent_cholesky(matrix: Tensor, prior: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""Positions kept and factor, without rows that depend on earlier ones.

    A row is left out if its variance given those kept before is below a share of its ``prior`` variance, by default the diagonal.
    """
    floor = DEPENDENT * (matrix.diagonal() if prior is None else prior)
    factor, info = torch.linalg.cholesky_ex(matrix)
    if not int(info) and bool((factor.diagonal().square() > floor).all()):
        return torch.arange(len(matrix), device=matrix.device), factor
    positions: list[int] = []
    rows = torch.zeros_like(matrix)
    residual = matrix.diagonal().clone()
    for i in range(len(matrix)):
        if not float(residual[i]) > float(floor[i]):
            continue
        k = len(positions)
        column = (matrix[:, i] - rows[:, :k] @ rows[i, :k]) / residual[i].sqrt()
        rows[:, k] = column
        residual = residual - column.square()
        positions.append(i)
    index = torch.tensor(positions, dtype=torch.int64, device=matrix.device)
    return index, rows[index][:, : len(positions)].tril()


def _first_factor(matrix: Tensor, level: Tensor, base_share: float = 0.0) -> tuple[Tensor, float] | None:
    """The factor with the least share of a level added."""
    least, times = _additions(matrix.dtype)
    for addition in (0.0, *(least * 10**power for power in range(times + 1))):
        share = base_share + addition
        factor, info = torch.linalg.cholesky_ex(_lift(matrix, share * level) if share else matrix)
        if not bool(info.any()) and bool(factor.detach().sum().isfinite()):
            return factor, share
    return None


def _additions(dtype: torch.dtype) -> tuple[float, int]:
    return _ADDITIONS.get(dtype, _ADDITIONS[torch.float32])


def _lift(matrix: Tensor, addition: Tensor) -> Tensor:
    return matrix + torch.diag_embed(addition.expand(matrix.shape[:-1]))


@dataclasses.dataclass(frozen=True)
class PivotedCholesky:
    r"""A pivoted Cholesky approximation :math:`K \approx L L^\top`, exact at the pivots.

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
        """Number of pivots, ``Q``: columns of the factor."""
        return self.factor.shape[1]

    def features(self, cross: Tensor) -> Tensor:
        r"""Rows :math:`L_P^{-1} k(P, x)` that new inputs would have in the factor.

        Args:
            cross: covariances of the new inputs and the pivots, ``(M, Q)``.

        Returns:
            ``(M, Q)``; inner products of these with rows of :attr:`factor` are the approximate covariances.
        """
        triangle = self.factor[self.pivots]
        return torch.linalg.solve_triangular(triangle, cross.mT, upper=False).mT


@names_arguments
@takes_arrays
def pivoted_cholesky(kernel: Covariance, inputs: Tensor, max_rank: int, tolerance: float = 0.0) -> PivotedCholesky:
    r"""Greedy pivoted Cholesky factor of the kernel matrix :math:`K` of the inputs.

    Every step takes the input of largest remaining variance as the next pivot and removes what it explains. It stops at ``max_rank`` pivots
    or if :math:`\operatorname{tr}(K - L L^\top) \le \mathrm{tolerance} \cdot \operatorname{tr} K`, in :math:`O(N Q^2)` time and :math:`O(N
    Q)` memory.

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
    factor = greedy_cholesky(prior, lambda due: kernel(inputs, inputs[due]), max_rank, floor, enough=enough, ahead=ahead)
    if not bool(factor.residual.isfinite().all()):
        raise ValueError(
            f"kernel must be finite at the inputs; got variances {describe(factor.residual)}. Check inputs and kernel parameters"
        )
    return factor


def greedy_cholesky(
    prior: Tensor,
    columns: Callable[[Tensor], Tensor],
    max_rank: int,
    floor: Tensor,
    *,
    enough: float | Tensor = 0.0,
    ahead: int = 1,
) -> PivotedCholesky:
    """The factor by pivots of largest conditional variance.

    ``columns`` gives columns ``(N, b)`` of the matrix at positions ``(b,)``. Inputs below ``floor (N,)`` are no pivots; it ends at the sum
    of variances ``enough``. ``ahead`` columns of likely next pivots are computed along with one that is due.
    """
    residual = prior.clone()
    factor = residual.new_zeros(len(residual), min(max_rank, len(residual)))
    free = torch.ones_like(residual, dtype=torch.bool)
    pivots: list[int] = []
    ready: dict[int, Tensor] = {}
    while len(pivots) < factor.shape[1] and residual.sum() > enough:
        candidates = torch.where(free & (residual > floor), residual, -torch.inf)
        rank, pivot = len(pivots), int(candidates.argmax())
        if not bool(candidates[pivot] > 0):
            break
        if pivot not in ready:
            due = [pivot, *(other for other in candidates.topk(min(ahead, len(candidates))).indices.tolist() if other != pivot)][:ahead]
            ready = dict(zip(due, columns(torch.tensor(due, device=prior.device)).unbind(1), strict=True))
        column = ready[pivot] - factor[:, :rank] @ factor[pivot, :rank]
        # Rounding must not touch what is known: the pivot's variance is the remaining one, and earlier ones are explained.
        column[pivots] = 0.0
        column[pivot] = residual[pivot]
        factor[:, rank] = column / residual[pivot].sqrt()
        residual = (residual - factor[:, rank] ** 2).clamp(min=0.0)
        pivots.append(pivot)
        free[pivot] = False
        residual[pivots] = 0.0
    index = torch.tensor(pivots, dtype=torch.int64, device=prior.device)
    return PivotedCholesky(factor[:, : len(pivots)].contiguous(), index, residual)


def cholesky_at(kernel: Covariance, inputs: Tensor, pivots: Tensor) -> PivotedCholesky:
    r"""Returns the factor at given pivots, without those that depend on others."""
    columns = kernel(inputs, inputs[pivots])
    rows, triangle = independent_cholesky(columns[pivots])
    factor = torch.linalg.solve_triangular(triangle, columns[:, rows].mT, upper=False).mT
    # What the pivots know is known exactly.
    factor[pivots[rows]] = triangle
    residual = (kernel(inputs, diag=True) - factor.square().sum(1)).clamp(min=0.0)
    residual[pivots[rows]] = 0.0
    return PivotedCholesky(factor.contiguous(), pivots[rows], residual)
