"""Leave-one-out identities against one refit per data point, and likelihoods against multivariate normal densities."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_truncated.gp import DenseCovariance, LowRankCovariance, NoisyCovariance
from pyro_truncated.gp.noisy_covariance import compress

N, Q, P = 25, 6, 4
EXACT = {"rtol": 0, "atol": 1e-8}


def problem(name: str) -> tuple[NoisyCovariance, Tensor, Tensor]:
    """A covariance in the form to be tested, the kernel matrix it stands for, and its noise variances."""
    x = torch.randn(N, 3, dtype=torch.float64)
    kernel_matrix = 1.3 * (-0.5 * torch.cdist(x, x) ** 2).exp()
    noise = torch.tensor(0.07, dtype=torch.float64)
    if name == "dense":
        return DenseCovariance(kernel_matrix, noise), kernel_matrix, noise.expand(N)
    factor = torch.randn(N, Q, dtype=torch.float64)
    if name == "uneven":
        noise = 0.05 + torch.rand(N, dtype=torch.float64)
    return LowRankCovariance(factor, noise), factor @ factor.mT, noise.expand(N)


def refit(kernel_matrix: Tensor, noise: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Predictions of each data point by regression on all others, one at a time."""
    means, variances = [], []
    for n in range(N):
        others = [i for i in range(N) if i != n]
        covariance = kernel_matrix[others][:, others] + noise[others].diag()
        cross = torch.linalg.solve(covariance, kernel_matrix[others, n])
        means.append(cross @ targets[others])
        variances.append(kernel_matrix[n, n] + noise[n] - cross @ kernel_matrix[others, n])
    return torch.stack(means), torch.stack(variances)


@pytest.mark.parametrize("name", ["dense", "low rank", "uneven"])
class TestCovariance:
    def test_leave_one_out_equals_refits(self, name: str) -> None:
        covariance, kernel_matrix, noise = problem(name)
        targets = torch.rand(N, P, dtype=torch.float64)
        mean, variance = covariance.leave_one_out(targets)
        expected_mean, expected_variance = refit(kernel_matrix, noise, targets)
        torch.testing.assert_close(mean, expected_mean, **EXACT)
        torch.testing.assert_close(variance, expected_variance, **EXACT)

    def test_linear_algebra(self, name: str) -> None:
        covariance, kernel_matrix, noise = problem(name)
        targets, full = torch.rand(N, P, dtype=torch.float64), kernel_matrix + noise.diag()
        solution = torch.linalg.solve(full, targets)
        torch.testing.assert_close(covariance.solve(targets), solution, **EXACT)
        torch.testing.assert_close(covariance.quadratic(targets), (targets * solution).sum(), **EXACT)
        torch.testing.assert_close(covariance.inverse_diagonal, full.inverse().diagonal(), **EXACT)
        torch.testing.assert_close(covariance.log_determinant, full.logdet(), **EXACT)

    def test_log_likelihood(self, name: str) -> None:
        covariance, kernel_matrix, noise = problem(name)
        targets = torch.rand(N, P, dtype=torch.float64)
        normal = MultivariateNormal(torch.zeros(N, dtype=torch.float64), kernel_matrix + noise.diag())
        torch.testing.assert_close(covariance.log_likelihood(targets), normal.log_prob(targets.mT).sum(), **EXACT)

    def test_many_outputs_are_compressed(self, name: str) -> None:
        covariance, _, _ = problem(name)
        targets = torch.rand(N, 3 * N, dtype=torch.float64)
        few = compress(targets)
        assert few.shape == (N, N)
        torch.testing.assert_close(covariance.log_likelihood(few, 3 * N), covariance.log_likelihood(targets), rtol=1e-10, atol=1e-8)


def test_few_outputs_stay_as_they_are() -> None:
    targets = torch.rand(N, P)
    assert compress(targets) is targets


def test_means_do_not_depend_on_the_scale_of_the_covariance() -> None:
    x, targets = torch.randn(N, 3, dtype=torch.float64), torch.rand(N, P, dtype=torch.float64)
    kernel_matrix, noise = (-(torch.cdist(x, x) ** 2)).exp(), torch.tensor(0.1, dtype=torch.float64)
    mean, variance = DenseCovariance(kernel_matrix, noise).leave_one_out(targets)
    scaled_mean, scaled_variance = DenseCovariance(9 * kernel_matrix, 9 * noise).leave_one_out(targets)
    torch.testing.assert_close(scaled_mean, mean, **EXACT)
    torch.testing.assert_close(scaled_variance, 9 * variance, **EXACT)


def test_a_factor_of_full_rank_is_exact() -> None:
    dense, kernel_matrix, noise = problem("dense")
    targets = torch.rand(N, P, dtype=torch.float64)
    full = LowRankCovariance(torch.linalg.cholesky(kernel_matrix + 1e-13 * torch.eye(N, dtype=torch.float64)), noise[0])
    for found, expected in zip(full.leave_one_out(targets), dense.leave_one_out(targets), strict=True):
        torch.testing.assert_close(found, expected, **EXACT)
