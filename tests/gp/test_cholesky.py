"""Factors of nearly singular matrices: one policy."""

from __future__ import annotations

import pytest
import torch

from pyro_truncated.gp import JitterWarning
from pyro_truncated.gp.cholesky import INDUCING_JITTER, NotPositiveDefiniteError, factorize, inducing_cholesky, stable_cholesky

N = 15


class TestStableCholesky:
    def test_nothing_is_added_where_nothing_needs_to_be(self) -> None:
        factor = torch.randn(N, N, dtype=torch.float64).tril()
        matrix = factor @ factor.mT + torch.eye(N, dtype=torch.float64)
        assert torch.equal(stable_cholesky(matrix), torch.linalg.cholesky(matrix))

    def test_singular_matrices_are_lifted_a_little(self) -> None:
        vector = torch.randn(N, 2, dtype=torch.float64)
        matrix = vector @ vector.mT
        found = stable_cholesky(matrix)
        torch.testing.assert_close(found @ found.mT, matrix, rtol=0, atol=1e-6)

    def test_no_covariance(self) -> None:
        for matrix in (-torch.eye(3), torch.full((3, 3), torch.nan)):
            with pytest.raises(ValueError, match="the covariance matrix is not positive definite"):
                stable_cholesky(matrix)

    def test_a_batch_is_factorised_at_once(self) -> None:
        factors = torch.randn(3, N, N, dtype=torch.float64).tril() + 5 * torch.eye(N, dtype=torch.float64)
        matrices = factors @ factors.mT
        torch.testing.assert_close(stable_cholesky(matrices), torch.stack([stable_cholesky(matrix) for matrix in matrices]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
class TestAdditions:
    """What is added is a share of the mean variance, whatever its unit, and enough where the true matrix is singular."""

    def test_equal_inputs_take_the_floor(self, dtype: torch.dtype) -> None:
        for unit in (1e-6, 1.0, 1e6):
            matrix = torch.full((4, 4), unit, dtype=dtype)
            with pytest.warns(JitterWarning, match="nearly singular"):
                factor, share = factorize(matrix, torch.zeros((), dtype=dtype))
            assert share <= 1e-9 if dtype == torch.float64 else share <= 1e-4
            torch.testing.assert_close(factor @ factor.mT, matrix, rtol=2 * share, atol=0)

    def test_no_addition_saves_what_is_no_covariance_matrix(self, dtype: torch.dtype) -> None:
        matrix = torch.tensor([[1.0, 1.1], [1.1, 1.0]], dtype=dtype)
        with pytest.raises(NotPositiveDefiniteError, match="cannot be factorised"):
            factorize(matrix, torch.zeros((), dtype=dtype))
        with pytest.raises(NotPositiveDefiniteError, match="not positive definite"):
            stable_cholesky(matrix)

    def test_inducing_inputs_always_have_the_same_share(self, dtype: torch.dtype) -> None:
        matrix = 3 * torch.eye(4, dtype=dtype)
        factor = inducing_cholesky(matrix, 100 * INDUCING_JITTER)
        rounding = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(factor @ factor.mT, matrix * (1 + 100 * INDUCING_JITTER), rtol=rounding, atol=0)
