"""Fits that find nothing from the length-scales they are given try others, and those that find nothing at all say so."""

from __future__ import annotations

import warnings

import pytest
import torch
from pyro.contrib.gp import kernels

from pyro_truncated.gp import AllNoiseWarning, CoregionalizedGPRegression, PyroKernel, SubsetGPRegression, smooth_rbf
from pyro_truncated.gp.optimization import FitRecord
from pyro_truncated.gp.subset.coregionalized import ObservedEntries


def few_relevant(n, dim=16, seed=0):
    """Targets that two of many inputs decide, without a slope in any."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, dim, generator=generator, dtype=torch.float64) * 2 - 1
    y = torch.cos(3 * x[:, 0]) * torch.cos(3 * x[:, 1]) + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)
    return x, y


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 24])
def test_inputs_among_many_irrelevant_ones_are_found(size):
    x, y = few_relevant(900)
    model = SubsetGPRegression(x[:400], y[:400], num_inducing=size, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(max_epochs=30)
    mean, _ = model.predict(x[400:])
    assert float((mean - y[400:]).square().mean() / y[400:].var()) < 0.2
    scales = model.kernel.kernel.lengthscale.detach()
    assert float(scales[:2].max()) < 0.5 * float(scales[2:].min())


@pytest.mark.parametrize("size", [None, 40])
@pytest.mark.parametrize("frequency", [3, 10])
def test_waves_beside_a_trend_are_found(size, frequency):
    generator = torch.Generator().manual_seed(1)
    x = 4 * torch.rand(300, 1, generator=generator, dtype=torch.float64) - 2
    truth = torch.sin(frequency * x[:, 0]) + x[:, 0]
    y = truth + 0.2 * torch.randn(300, generator=generator, dtype=torch.float64)
    model = SubsetGPRegression(smooth_rbf(x[:150]), y[:150], num_inducing=size, generator=generator)
    model.fit()
    assert float((model.predict(x[150:])[0] - truth[150:]).square().mean()) < 0.02


@pytest.mark.parametrize("size", [None, 20])
def test_a_noise_that_is_not_learned_stays_as_it_is(size):
    generator = torch.Generator().manual_seed(1)
    x = 4 * torch.rand(150, 1, generator=generator, dtype=torch.float64) - 2
    y = torch.sin(3 * x[:, 0]) + 0.2 * torch.randn(150, generator=generator, dtype=torch.float64)
    model = SubsetGPRegression(smooth_rbf(x), y, num_inducing=size, generator=generator)
    model.log_noise.requires_grad_(False)
    before = model.log_noise.clone()
    model.fit()
    assert torch.equal(model.log_noise, before)


@pytest.mark.parametrize("seed", [1, 4])
def test_a_constant_input_changes_no_prediction(seed):
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(120, 2, generator=generator, dtype=torch.float64) - 2
    y = torch.sin(3 * x[:, 0]) + 0.5 * x[:, 1] + 0.2 * torch.randn(120, generator=generator, dtype=torch.float64)
    predictions = []
    for inputs in (x, torch.cat([x, torch.ones(120, 1).double()], 1)):
        model = SubsetGPRegression(smooth_rbf(inputs), y)
        model.fit()
        predictions.append(model.predict(inputs)[0])
    torch.testing.assert_close(*predictions, rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_noise_stays_noise():
    x, y = few_relevant(300)
    y = y[torch.randperm(300, generator=torch.Generator().manual_seed(1))]
    model = SubsetGPRegression(x, y, num_inducing=8, generator=torch.Generator().manual_seed(0))
    with pytest.warns(AllNoiseWarning, match=r"account for 0.* of their variance, and it has learned a noise variance of"):
        value = model.fit(max_epochs=5)
    assert value > 0.48 * 300


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 7])
def test_noise_that_looks_explained_by_chance_is_noise(seed):
    # Two of eight draws of which predictions, even from the others' targets, account for more than a fiftieth of the variance.
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 5, generator=generator).double()[torch.randint(200, (300,), generator=generator)]
    x = x if seed == 3 else torch.randn(300, 5, generator=torch.Generator().manual_seed(7)).double()
    y = torch.randn(300, generator=generator).double()
    model = SubsetGPRegression(x, y, num_inducing=32, generator=generator)
    with pytest.warns(AllNoiseWarning):
        model.fit(max_epochs=10)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_seventh_of_the_variance_is_something(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(300, 5, generator=generator, dtype=torch.float64)
    y = 0.15**0.5 * x[:, 0] + 0.85**0.5 * torch.randn(300, generator=generator, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SubsetGPRegression(x, y, num_inducing=32, generator=generator).fit(max_epochs=10)


def test_length_scales_that_are_not_learned_are_left_alone():
    x, y = few_relevant(300)
    kernel = kernels.RBF(16, torch.tensor(1.0, dtype=torch.float64), torch.tensor(50.0, dtype=torch.float64))
    kernel.lengthscale_unconstrained.requires_grad_(False)
    with pytest.warns(AllNoiseWarning):
        SubsetGPRegression(PyroKernel(kernel, x), y, num_inducing=8).fit(max_epochs=3)
    assert float(kernel.lengthscale) == pytest.approx(50.0)


@pytest.mark.slow
def test_a_second_fit_goes_on_from_where_the_first_one_ended():
    x, y = few_relevant(300)
    model = SubsetGPRegression(smooth_rbf(x), y, num_inducing=16, generator=torch.Generator().manual_seed(0))
    first = model.fit(max_epochs=3)
    count = len(model.history)
    assert model.fit(max_epochs=3) <= first + 1e-9
    assert [phase for _, phase, _ in model.history[count:]].count("start") == 1


def test_shares_of_the_time_are_of_what_is_left():
    now = [0.0]
    record = FitRecord([], 10.0, lambda: now[0])
    first = record.budget(0.3)
    assert first() == pytest.approx(3.0)
    now[0] = 4.0
    assert first() == pytest.approx(-1.0)
    second = record.budget(0.5)
    assert second() == pytest.approx(3.0)
    now[0] = 7.5
    assert second() == pytest.approx(-0.5)
    assert record.remaining_seconds() == pytest.approx(2.5)
    assert FitRecord([]).budget(0.1)() == float("inf")


def two_outputs(n, seed=0):
    """Inputs, and two outputs of the same function with noise of their own, one entry in three missing."""
    x, y = few_relevant(n, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    both = torch.stack([y, 3 - 2 * y + 0.2 * torch.randn(n, generator=generator, dtype=torch.float64)], 1)
    return x, both.where(torch.rand(n, 2, generator=generator) > 1 / 3, torch.nan)


@pytest.mark.slow
def test_coregionalised_outputs_among_many_irrelevant_inputs_are_found():
    x, y = two_outputs(240)
    model = CoregionalizedGPRegression(x, y, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit()
    new, target = few_relevant(500, seed=5)
    mean, _ = model.predict(new)
    for column, clean in zip(mean.unbind(1), (target, 3 - 2 * target), strict=True):
        assert float((column - clean).square().mean() / clean.var()) < 0.2
    scales = model.kernel.kernel.lengthscale.detach()
    assert float(scales[:2].max()) < 0.5 * float(scales[2:].min())
    count, value = len(model.history), model.objective_value
    assert model.fit(max_iterations=1) <= value + 1e-9
    assert len(model.history) > count


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_outputs_that_only_go_with_each_other_are_noise(seed):
    # Of four draws of so few data points, the first looks explained by chance; of 300, none does.
    generator = torch.Generator().manual_seed(seed)
    x, shared = torch.randn(120, 4, generator=generator).double(), torch.randn(120, 1, generator=generator).double()
    y = shared + 0.3 * torch.randn(120, 2, generator=generator).double()
    model = CoregionalizedGPRegression(x, y, generator=generator)
    with pytest.warns(AllNoiseWarning, match="leave-one-out predictions account for 0"):
        model.fit()


def test_no_iterations_change_nothing():
    x, y = two_outputs(60)
    model = CoregionalizedGPRegression(x, y)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.warns(AllNoiseWarning):
        model.fit(max_iterations=0)
    for parameter, value in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=0)


def test_entries_left_out_by_input_agree_with_dense_conditioning():
    generator = torch.Generator().manual_seed(0)
    row, output = torch.tensor([[0, 0], [0, 2], [3, 1], [4, 0], [4, 1], [4, 2], [7, 2]]).unbind(1)
    root = torch.randn(7, 7, generator=generator).double()
    covariance, value = root @ root.mT + torch.eye(7).double(), torch.randn(7, generator=generator).double()
    found = ObservedEntries(row, output, value).predict_left_out(torch.linalg.inv(covariance))
    for one in (0, 3, 4, 7):
        own, others = row == one, row != one
        expected = covariance[own][:, others] @ torch.linalg.solve(covariance[others][:, others], value[others])
        torch.testing.assert_close(found[own], expected)


def test_entries_are_drawn_from_as_many_inputs_as_there_are():
    row, output = torch.arange(6).repeat_interleave(3), torch.arange(3).repeat(6)
    entries = ObservedEntries(row, output, torch.arange(18.0))
    for num, most in ((4, 1), (6, 1), (9, 2), (18, 3), (50, 3)):
        some = entries.subsample(num, torch.Generator().manual_seed(num))
        assert len(some) == min(num, 18)
        assert len(some.value.unique()) == len(some)
        counts = some.row.bincount(minlength=6)
        assert int(counts.max()) == most
        assert int(counts.max() - counts.min()) <= 1
        torch.testing.assert_close(some.value, (3 * some.row + some.output).float())
    first, second = (entries.subsample(6, torch.Generator().manual_seed(seed)).output for seed in (0, 1))
    assert not torch.equal(first, second)


def test_exact_fits_do_not_advise_more_inducing_inputs():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(150, 3, generator=generator).double(), torch.randn(150, generator=generator).double()
    with pytest.warns(AllNoiseWarning) as caught:
        SubsetGPRegression(x, y).fit(max_epochs=5)
    assert "inducing" not in str(caught[0].message)


@pytest.mark.parametrize("is_joint", [False, True])
def test_copies_that_make_the_noise_vanish_are_told(is_joint):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(30, 1, generator=generator, dtype=torch.float64)
    y = torch.sin(6 * x[:, 0]) + 0.2 * torch.randn(30, generator=generator, dtype=torch.float64)
    twice = torch.arange(30).repeat(2)

    def fit_to(x, y):
        model = CoregionalizedGPRegression(x, y[:, None]) if is_joint else SubsetGPRegression(x, y)
        model.fit()
        return model

    with pytest.warns(UserWarning, match="30 of 60 targets are copies of others at the same inputs"):
        fit_to(x[twice], y[twice])
    # Neither equal inputs with other targets, nor equal targets, nor no noise without copies.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_to(x[twice], y[twice] + 0.2 * torch.randn(60, generator=generator, dtype=torch.float64))
        fit_to(x, x[:, 0])
