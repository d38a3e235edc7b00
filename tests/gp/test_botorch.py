"""Regressions as BoTorch models, against their own joint posteriors."""

from __future__ import annotations

import warnings

import pytest
import torch

from pyro_truncated.gp import CountKernel, GPyTorchKernel, InducingSubset, SubsetGPRegression, smooth_rbf, spectrum

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("botorch")
    from botorch.acquisition import LogExpectedImprovement, qExpectedImprovement
    from botorch.models import SingleTaskVariationalGP
    from botorch.optim import optimize_acqf, optimize_acqf_discrete

    from pyro_truncated.gp.botorch_models import SubsetAllocator, SubsetGPModel

DOUBLE = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore")


def fitted(size=None, outputs=1):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(40, 2, generator=generator, dtype=DOUBLE)
    y = 0.02 * torch.randn(40, outputs, generator=generator, dtype=DOUBLE) + torch.stack(
        [-(x - 0.3).square().sum(1), torch.sin(5 * x[:, 0])][:outputs], 1
    )
    model = SubsetGPRegression(smooth_rbf(x), y if outputs > 1 else y[:, 0], num_inducing=size)
    model.fit(max_epochs=20)
    return model, y


@pytest.mark.parametrize("size", [None, 15])
@pytest.mark.parametrize("outputs", [1, 2])
def test_posterior_is_that_of_the_regression(size, outputs):
    regression, _ = fitted(size, outputs)
    X = torch.rand(700, 3, 2, dtype=DOUBLE)
    found = SubsetGPModel(regression).posterior(X, observation_noise=True)
    assert found.mean.shape == found.variance.shape == (700, 3, outputs)
    for batch in (0, 350, 699):
        expected = regression.posterior(X[batch], joint=True, noiseless=False)
        mean, covariance = expected.mean.reshape(outputs, 3), expected.covariance_matrix.reshape(outputs, 3, 3)
        torch.testing.assert_close(found.mean[batch].mT, mean)
        dense = found.distribution.covariance_matrix[batch]
        for output in range(outputs):
            own = dense[3 * output : 3 * output + 3, 3 * output : 3 * output + 3]
            torch.testing.assert_close(own, covariance[output], rtol=1e-5, atol=1e-8)
    single = SubsetGPModel(regression).posterior(X[:5, :1], output_indices=[0])
    torch.testing.assert_close(single.mean[:, 0, 0], found.mean[:5, 0, 0])


def test_continuous_inputs_are_optimised():
    regression, y = fitted()
    acquisition = LogExpectedImprovement(SubsetGPModel(regression), best_f=y.max())
    torch.manual_seed(0)
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=DOUBLE)
    candidate, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=3, raw_samples=32)
    torch.testing.assert_close(candidate, torch.full((1, 2), 0.3, dtype=DOUBLE), atol=0.1, rtol=0)


def test_candidates_in_single_precision_leave_the_regression_in_double():
    regression, y = fitted()
    X = torch.rand(6, 1, 2)
    found = LogExpectedImprovement(SubsetGPModel(regression), best_f=float(y.max()))(X)
    assert found.dtype == torch.float32
    assert regression.targets.dtype == DOUBLE
    expected = LogExpectedImprovement(SubsetGPModel(regression), best_f=y.max())(X.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


def test_a_pool_of_strings_is_searched():
    generator = torch.Generator().manual_seed(0)
    words = ["".join("ab"[int(bit)] for bit in torch.randint(2, (8,), generator=generator)) for _ in range(60)]
    value = torch.tensor([float(word.count("ab")) for word in words], dtype=DOUBLE)
    features = spectrum(words, 2)
    known = torch.arange(25)
    regression = SubsetGPRegression(CountKernel(features[known], "inner"), value[known])
    regression.fit()
    model = SubsetGPModel(regression, lambda X: spectrum([words[i] for i in X[:, 0].long().tolist()], 2))
    choices = torch.arange(25.0, 60, dtype=DOUBLE)[:, None]
    best = optimize_acqf_discrete(LogExpectedImprovement(model, best_f=value[known].max() - 1), q=1, choices=choices)[0]
    assert float(value[int(best)]) == float(value[25:].max())
    torch.manual_seed(0)
    several = optimize_acqf_discrete(qExpectedImprovement(model, best_f=value[known].max() - 1), q=2, choices=choices)[0]
    assert len(several.unique()) == 2


def test_inducing_points_explain_the_targets():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(120, 1, generator=generator, dtype=DOUBLE)
    y = torch.where(x > 0.5, torch.sin(20 * x), 0.0)
    model = SingleTaskVariationalGP(x, y, inducing_points=12, inducing_point_allocator=SubsetAllocator(y, 0.01, generator=generator))
    points = model.model.variational_strategy.inducing_points.detach()
    assert bool((points == x.mT).any(1).all())
    kernel, scaled = GPyTorchKernel(model.model.covar_module, x), (y - y.mean()) / y.std()
    value = InducingSubset(kernel, scaled, num_inducing=12, noise=0.01, index=(points == x.mT).nonzero()[:, 1]).objective_value
    other = SingleTaskVariationalGP(x, y, inducing_points=12).model.variational_strategy.inducing_points.detach()
    assert value < InducingSubset(kernel, scaled, num_inducing=12, noise=0.01, index=(other == x.mT).nonzero()[:, 1]).objective_value
    with pytest.raises(ValueError, match="a row for each target"):
        SubsetAllocator(y[:3]).allocate_inducing_points(x, model.model.covar_module, 3, torch.Size())
