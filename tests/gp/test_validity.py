"""What is no covariance function is refused by name, as are new inputs that are no numbers."""

from __future__ import annotations

import pytest
import torch
from pyro.contrib.gp import kernels
from pyro.contrib.gp.likelihoods import Gaussian

from pyro_truncated.gp import (
    InducingSubset,
    LeaveOneOutRegression,
    PrecomputedKernel,
    PyroKernel,
    SubsetGPRegression,
    SubsetSparseGPRegression,
    SubsetVariationalGP,
)
from pyro_truncated.gplvm import Posterior, SASDecoder, SpikeSlabGPLVM

X = torch.linspace(-1, 1, 12, dtype=torch.float64)[:, None]
Y = X.squeeze(1).sin()
GOOD = (-(X - X.mT).square()).exp()


class Matrix:
    """A kernel given by any matrix."""

    def __init__(self, matrix, diagonal=None):
        self.matrix, self.diagonal = matrix, matrix.diagonal() if diagonal is None else diagonal

    def diag(self):
        return self.diagonal

    def columns(self, index):
        return self.matrix[:, index]

    def cross(self, new, index):
        return self.matrix[new][:, index]

    def diag_new(self, new):
        return self.diagonal[new] + torch.nan


class Signed(kernels.Kernel):
    """A kernel of Pyro's with any function of differences."""

    def __init__(self, function):
        super().__init__(1)
        self.function = function

    def forward(self, X, Z=None, diag=False):
        return self.function(X[:, 0] - X[:, 0]) if diag else self.function(X - (X if Z is None else Z).mT)


MATRICES = {
    "is not symmetric": GOOD + 0.1 * torch.ones(12, 12).triu(1),
    "has a negative variance": GOOD - 2 * torch.eye(12),
    "must be positive semi-definite": 0.5 * torch.eye(12) - GOOD.square() + 1,
    "is not finite": GOOD.where(GOOD > 0.1, torch.nan),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["RBF", "RationalQuadratic", "Exponential", "Matern32", "Matern52", "Linear", "Periodic", "Cosine"])
def test_stationary_and_linear_kernels_of_pyro_are_covariances(name, dtype):
    inputs = torch.randn(30, 1, dtype=dtype, generator=torch.Generator().manual_seed(0))
    kernel = getattr(kernels, name)(1).to(dtype)
    assert SubsetGPRegression(inputs, inputs.sum(1), kernel, num_inducing=3).kernel.num_data == 30


@pytest.mark.parametrize("message", MATRICES)
def test_matrices_that_are_no_covariances(message):
    makers = (
        lambda k: InducingSubset(k, Y, num_inducing=3, noise=0.1),
        lambda k: SubsetGPRegression(k, Y, num_inducing=3),
        lambda k: SubsetSparseGPRegression(k, Y, num_inducing=3),
        lambda k: SubsetVariationalGP(k, Y, likelihood=Gaussian(), num_inducing=3),
    )
    for make in makers:
        make(Matrix(GOOD))
        with pytest.raises(ValueError, match=f"ProtocolKernel {message}"):
            make(Matrix(MATRICES[message]))


def test_variances_that_contradict_the_covariances():
    with pytest.raises(ValueError, match="contradicts itself: the variance of input 0 is 2 by diag and 1 by columns"):
        InducingSubset(Matrix(GOOD, 2 * GOOD.diagonal()), Y, num_inducing=3, noise=0.1)


def test_precomputed_matrices_that_are_not_positive():
    with pytest.raises(ValueError, match="PrecomputedKernel must be positive semi-definite"):
        InducingSubset(PrecomputedKernel(MATRICES["must be positive semi-definite"]), Y, num_inducing=3, noise=0.1)


@pytest.mark.parametrize(
    ("function", "message"),
    [(torch.sin, "is not symmetric"), (lambda d: -torch.exp(-d.square()), "negative variance"), (torch.abs, "positive")],
)
def test_kernels_of_regressions_and_decoders(function, message):
    makers = [
        lambda k: LeaveOneOutRegression(X, k),
        lambda k: SASDecoder(6, 2, 1, kernel=k),
        lambda k: SpikeSlabGPLVM(6, 2, 1, kernel=k),
        lambda k: SubsetGPRegression(PyroKernel(k, X), Y, num_inducing=3),
    ]
    for make in makers:
        make(kernels.RBF(1))
        with pytest.raises(ValueError, match=message):
            make(Signed(function))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_new_inputs_that_are_no_numbers(value):
    new = torch.tensor([[0.0], [value]], dtype=torch.float64)
    subset, regression = InducingSubset(PyroKernel(kernels.RBF(1), X), Y, num_inducing=3, noise=0.1), LeaveOneOutRegression(X, "rbf", 3)
    for predict in (subset.predict, lambda x: regression.predict(x, Y[:, None]), regression.features):
        with pytest.raises(ValueError, match="inputs must be finite"):
            predict(new)
    with pytest.raises(ValueError, match="the kernel is not finite at new input 0"):
        InducingSubset(Matrix(GOOD), Y, num_inducing=3, noise=0.1).predict(torch.arange(2))
    decoder = SASDecoder(6, 2, 1)
    decoder.condition_(torch.randn(6, 2))
    for predict in (decoder.predict, Posterior(SpikeSlabGPLVM(6, 2, 1, collapsed=False)).predict):
        with pytest.raises(ValueError, match="latents must be finite"):
            predict(new.float() if predict == decoder.predict else new)


@pytest.mark.parametrize("positions", [[-1], [12], [0.5]])
def test_positions_that_are_none(positions):
    subset = InducingSubset(PrecomputedKernel(GOOD), Y, num_inducing=3, noise=0.1)
    with pytest.raises(ValueError, match="integers from 0 to 11"):
        subset.predict(torch.tensor(positions))


@pytest.mark.slow
@pytest.mark.parametrize("unit", [1e-9, 1e6])
def test_a_sparse_regression_in_other_units_is_the_same_one(unit):
    generator = torch.Generator().manual_seed(0)
    y = Y + 0.1 * torch.randn(12, dtype=torch.float64, generator=generator)
    fits = []
    for targets in (y, unit * y):
        regression = SubsetGPRegression(PyroKernel(kernels.RBF(1), X), targets, num_inducing=3, generator=torch.Generator().manual_seed(1))
        regression.fit()
        fits.append(regression.predict(X[:4]))
    (mean, variance), (other_mean, other_variance) = fits
    torch.testing.assert_close(other_mean / unit, mean, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(other_variance / unit**2, variance, rtol=1e-6, atol=1e-12)
