"""Regression without inducing inputs, against dense formulas."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import Tensor

from pyro_truncated.gp import CountKernel, SubsetGPRegression, smooth_rbf, spectrum
from pyro_truncated.gp.subset.alternation import exact_backward
from pyro_truncated.gp.subset.objectives import noise_from_log
from pyro_truncated.utils.console import note_once

N, H = 40, 2


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 2, N, dtype=torch.float64)[:, None]
    return x, torch.cat([torch.sin(3 * x), 5 + x.square()], 1) + 0.1 * torch.randn(N, H, dtype=torch.float64)


def dense(model: SubsetGPRegression) -> Tensor:
    index = torch.arange(N)
    return model.kernel.columns(index).double() + noise_from_log(model.log_noise) * torch.eye(N, dtype=torch.float64)


def test_objective_is_minus_the_log_evidence_and_has_its_gradient(data: tuple[Tensor, Tensor]) -> None:
    model = SubsetGPRegression(smooth_rbf(data[0]), data[1])
    value = exact_backward(model.kernel, model.targets, model.log_noise)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    density = torch.distributions.MultivariateNormal(torch.zeros(N, dtype=torch.float64), dense(model))
    expected = -density.log_prob(model.targets.mT).sum()
    expected.backward()
    assert value == pytest.approx(expected.item() - N * H / 2 * math.log(2 * math.pi), rel=1e-12)
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.slow
def test_fit_is_better_than_any_sparse_one_and_predicts_as_the_dense_formulas_do(data: tuple[Tensor, Tensor]) -> None:
    x, y = data
    model = SubsetGPRegression(smooth_rbf(x), y)
    value = model.fit()
    assert model.is_exact
    assert value == model.objective_value == model.history[-1][2]
    assert value <= SubsetGPRegression(smooth_rbf(x), y, num_inducing=10).fit() + 1e-6
    new = torch.linspace(-3, 3, 7, dtype=torch.float64)[:, None]
    mean, variance = model.predict(new)
    with torch.no_grad():
        C, cross = dense(model), model.kernel.cross(new, torch.arange(N))
        expected = cross @ torch.linalg.solve(C, model.targets) * model.target_scale + model.target_mean
        left = model.kernel.diag_new(new) - (cross * torch.linalg.solve(C, cross.mT).mT).sum(1) + model.noise
    torch.testing.assert_close(mean, expected)
    torch.testing.assert_close(variance, left[:, None] * model.target_scale.square())


def test_leave_one_out_leaves_one_out(data: tuple[Tensor, Tensor]) -> None:
    model = SubsetGPRegression(smooth_rbf(data[0]), data[1][:, 0])
    model.fit(max_epochs=5)
    mean, variance = model.leave_one_out()
    with torch.no_grad():
        C, keep = dense(model), torch.arange(N) != 7
        weights = torch.linalg.solve(C[keep][:, keep], C[keep, 7])
    expected = weights @ model.targets[keep, 0] * model.target_scale[0] + model.target_mean[0]
    torch.testing.assert_close(mean[7], expected)
    torch.testing.assert_close(variance[7], (C[7, 7] - weights @ C[keep, 7]) * model.target_scale[0].square())


def test_inputs_may_be_anything_and_what_was_learned_is_kept() -> None:
    words = ["abab", "baba", "aabb", "cccc", "acac", "caca"] * 2
    y = torch.tensor([float(word.count("a")) for word in words], dtype=torch.float64) + 0.1 * torch.randn(12, dtype=torch.float64)
    model = SubsetGPRegression(CountKernel(spectrum(words, 2)), y)
    model.fit()
    again = SubsetGPRegression(CountKernel(spectrum(words, 2)), y)
    again.load_state_dict(model.state_dict())
    new = spectrum(["aaaa", "ccab"], 2)
    for found, expected in zip(again.predict(new), model.predict(new), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_line_says_what_is_taken(data: tuple[Tensor, Tensor], caplog: pytest.LogCaptureFixture) -> None:
    note_once.cache_clear()
    many, more = torch.rand(5000, 1, dtype=torch.float64), torch.rand(5001, 1, dtype=torch.float64)
    with caplog.at_level(logging.INFO):
        assert SubsetGPRegression(smooth_rbf(many), many).is_exact
        assert SubsetGPRegression(smooth_rbf(more), more).num_inducing == 512
        SubsetGPRegression(smooth_rbf(more), more, num_inducing=20)
    exact, sparse = caplog.messages
    assert "is exact on up to 5000" in exact
    assert "takes up to 512 inducing inputs" in sparse
    assert SubsetGPRegression(smooth_rbf(data[0]), data[1], num_inducing=N).is_exact
    assert not SubsetGPRegression(smooth_rbf(many), many, num_inducing=4999).is_exact
    assert not SubsetGPRegression(smooth_rbf(more), more, num_inducing=5001).is_exact


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize(("frequency", "least", "most"), [(1.0, 8, 64), (6.0, 33, 128)])
def test_by_default_there_are_as_many_inducing_inputs_as_the_function_needs(frequency: float, least: int, most: int) -> None:
    x = 6 * torch.rand(5001, 1, dtype=torch.float64)
    truth = (frequency * x[:, 0]).sin()
    model = SubsetGPRegression(smooth_rbf(x), truth + 0.1 * torch.randn(5001, dtype=torch.float64))
    model.fit(max_epochs=10)
    assert least <= len(model.subset) <= most
    assert float((model.predict(x, noiseless=True)[0] - truth).square().mean().sqrt()) < 0.03


def test_as_many_inducing_inputs_as_data_are_an_exact_regression(data: tuple[Tensor, Tensor]) -> None:
    models = [SubsetGPRegression(smooth_rbf(data[0]), data[1], num_inducing=size) for size in (None, N)]
    assert models[0].fit(max_epochs=5) == models[1].fit(max_epochs=5)
    for one, other in zip(*(model.predict(data[0][:5] + 0.1) for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_there_is_nothing_to_optimize_inputs(data: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(ValueError, match="give num_inducing"):
        SubsetGPRegression(smooth_rbf(data[0]), data[1]).fit(free_inputs=True)


def test_one_data_point_is_predicted_everywhere() -> None:
    mean, variance = SubsetGPRegression(torch.zeros(1, 2).double(), torch.tensor([3.0]).double()).predict(torch.randn(4, 2).double())
    torch.testing.assert_close(mean, torch.full((4,), 3.0).double())
    assert bool((variance > 0).all())
