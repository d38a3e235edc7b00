"""The incomplete factor against dense linear algebra."""

from __future__ import annotations

import pytest
import torch
from pyro.contrib.gp import kernels
from torch import Tensor

from pyro_truncated.gp import pivoted_cholesky


def rbf(lengthscale: float = 1.0) -> kernels.Kernel:
    return kernels.RBF(3, torch.tensor(1.7, dtype=torch.float64), torch.tensor(lengthscale, dtype=torch.float64))


def inputs(num: int = 40) -> Tensor:
    return torch.randn(num, 3, dtype=torch.float64)


@torch.no_grad()
@pytest.mark.parametrize("rank", [1, 7, 40])
def test_it_is_the_nystrom_approximation_of_its_pivots(rank: int) -> None:
    x, k = inputs(), rbf()
    found, matrix = pivoted_cholesky(k, x, rank), k(x)
    assert found.rank == rank
    assert len(found.pivots.unique()) == rank
    columns = matrix[:, found.pivots]
    nystrom = columns @ torch.linalg.solve(matrix[found.pivots][:, found.pivots], columns.mT)
    torch.testing.assert_close(found.factor @ found.factor.mT, nystrom, rtol=0, atol=1e-9)
    torch.testing.assert_close(found.residual, (matrix - nystrom).diagonal().clamp(min=0), rtol=0, atol=1e-9)
    triangle = found.factor[found.pivots]
    assert torch.equal(triangle, triangle.tril())
    if rank == 40:
        torch.testing.assert_close(nystrom, matrix, rtol=0, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("dimensions", [3, 700])
def test_pivots_are_greedy(dimensions: int) -> None:
    x = torch.randn(40, dimensions, dtype=torch.float64) * (3 / dimensions) ** 0.5
    k = kernels.RBF(dimensions, torch.tensor(1.7, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64))
    found, rest = pivoted_cholesky(k, x, 10), k(x)
    for pivot in found.pivots.tolist():
        assert float(rest.diagonal()[pivot]) == pytest.approx(float(rest.diagonal().max()), abs=1e-10)
        rest = rest - torch.outer(rest[:, pivot], rest[pivot]) / rest[pivot, pivot]


@torch.no_grad()
def test_tolerance_bounds_the_missing_trace() -> None:
    x, k = inputs(), rbf(2.0)
    trace = float(k(x, diag=True).sum())
    for tolerance in (0.5, 0.1, 1e-3):
        found = pivoted_cholesky(k, x, 40, tolerance)
        missing = [float(pivoted_cholesky(k, x, rank).residual.sum()) for rank in (found.rank - 1, found.rank) if rank > 0]
        assert missing[-1] <= tolerance * trace
        assert len(missing) == 1 or missing[0] > tolerance * trace


@torch.no_grad()
def test_a_singular_matrix_ends_at_its_rank() -> None:
    x = inputs().repeat(3, 1)
    linear = kernels.Linear(3, torch.tensor(0.8, dtype=torch.float64))
    found = pivoted_cholesky(linear, x, 60)
    assert found.rank == 3
    torch.testing.assert_close(found.factor @ found.factor.mT, linear(x), rtol=0, atol=1e-12)
    repeated = pivoted_cholesky(rbf(0.3), x, 120)
    assert repeated.rank == 40
    torch.testing.assert_close(repeated.factor @ repeated.factor.mT, rbf(0.3)(x), rtol=0, atol=1e-10)


@torch.no_grad()
def test_features_of_the_data_are_the_rows_of_the_factor() -> None:
    x, k = inputs(), rbf()
    found = pivoted_cholesky(k, x, 12)
    torch.testing.assert_close(found.features(k(x, x[found.pivots])), found.factor, rtol=0, atol=1e-10)


def test_only_columns_of_the_pivots_are_evaluated() -> None:
    evaluated = []

    def kernel(X: Tensor, Z: Tensor | None = None, diag: bool = False) -> Tensor:
        evaluated.append("diagonal" if diag else Z is not None and len(Z))
        return torch.ones(len(X), dtype=X.dtype) if diag else (-(torch.cdist(X, Z) ** 2)).exp()

    pivoted_cholesky(kernel, inputs(), 5)
    assert evaluated == ["diagonal", 1, 1, 1, 1, 1]


def test_with_many_dimensions_columns_are_evaluated_ahead() -> None:
    evaluated = []

    def kernel(X: Tensor, Z: Tensor | None = None, diag: bool = False) -> Tensor:
        evaluated.append("diagonal" if diag else Z is not None and len(Z))
        height = X[:, 0].exp()
        return height.square() if diag else height.unsqueeze(1) * (-(torch.cdist(X, Z) ** 2)).exp() * Z[:, 0].exp()

    found = pivoted_cholesky(kernel, torch.randn(40, 300, dtype=torch.float64), 8)
    # Points this far apart explain nothing of each other: what was evaluated ahead is used.
    assert evaluated == ["diagonal", 4, 4]
    assert found.rank == 8


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"inputs must have shape \(N, D\) with N > 0; got \(3,\)"):
        pivoted_cholesky(rbf(), torch.zeros(3), 2)
    with pytest.raises(ValueError, match=r"tolerance must not be negative; got -1"):
        pivoted_cholesky(rbf(), inputs(), 2, -1.0)
