"""Fits that find nothing from the length-scales they are given try others, and those that find nothing at all say so."""

from __future__ import annotations

import warnings

import pytest
import torch
from pyro.contrib.gp import kernels

from pyro_truncated.gp.data_kernels import PyroKernel, smooth_rbf
from pyro_truncated.gp.subset.all_noise import AllNoiseWarning
from pyro_truncated.gp.subset.fit_record import FitRecord
from pyro_truncated.gp.subset.regression import SubsetGPRegression


def few_relevant(n, dim=16, seed=0):
    """Targets that two of many inputs decide, without a slope in any."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, dim, generator=generator, dtype=torch.float64) * 2 - 1
    y = torch.cos(3 * x[:, 0]) * torch.cos(3 * x[:, 1]) + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)
    return x, y


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


def test_noise_stays_noise():
    x, y = few_relevant(300)
    y = y[torch.randperm(300, generator=torch.Generator().manual_seed(1))]
    model = SubsetGPRegression(x, y, num_inducing=8, generator=torch.Generator().manual_seed(0))
    with pytest.warns(AllNoiseWarning, match="account for 0"):
        value = model.fit(max_epochs=5)
    assert value > 0.48 * 300


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
    first = record.share_left(0.3)
    assert first() == pytest.approx(3.0)
    now[0] = 4.0
    assert first() == pytest.approx(-1.0)
    second = record.share_left(0.5)
    assert second() == pytest.approx(3.0)
    now[0] = 7.5
    assert second() == pytest.approx(-0.5)
    assert record.seconds_left() == pytest.approx(2.5)
    assert FitRecord([]).share_left(0.1)() == float("inf")
