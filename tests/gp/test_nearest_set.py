"""Predictions from the closest data points: against active sets made one by one."""

from __future__ import annotations

import pytest
import torch
from pyro.contrib.gp import kernels

from pyro_truncated.gp import ActiveSet
from pyro_truncated.gp.active_sets import NearestSet

NOISE = torch.tensor(0.1, dtype=torch.float64)


def make(kernel, num_neighbors=6, num_data=40):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(num_data, 3, generator=generator, dtype=torch.float64)
    x = torch.randn(num_data, 4, generator=generator, dtype=torch.float64)
    return NearestSet(z, x, kernel.double(), NOISE, num_neighbors), z, x, torch.randn(5, 3, generator=generator, dtype=torch.float64)


def closest(kernel, z, place, num, without=None):
    correlation = kernel(place[None], z)[0] / kernel(z, diag=True).sqrt()
    order = correlation.argsort(descending=True).tolist()
    return [n for n in order if n != without][:num]


@pytest.mark.parametrize(
    "kernel", [kernels.RBF(3, torch.tensor(2.0), torch.tensor([0.5, 1.0, 2.0])), kernels.Matern32(3), kernels.Polynomial(3, degree=2)]
)
def test_predictions_are_those_of_the_closest_points(kernel):
    nearest, z, x, new = make(kernel)
    for noiseless in (False, True):
        mean, variance = nearest.predict(new, noiseless=noiseless)
        for place, m, v in zip(new, mean, variance, strict=True):
            rows = closest(kernel, z, place, 6)
            expected = ActiveSet(z[rows], x[rows], kernel, NOISE).predict(place[None], noiseless=noiseless)
            torch.testing.assert_close(m, expected[0][0])
            torch.testing.assert_close(v, expected[1][0])
    together = nearest.predict(new.reshape(5, 1, 3))
    assert together[0].shape == (5, 1, 4)
    assert together[1].shape == (5, 1, 1)


def test_neighborhoods_stay_where_they_are_made_and_leave_points_out():
    kernel = kernels.RBF(3, torch.tensor(1.0), torch.ones(3))
    nearest, z, x, new = make(kernel)
    around = nearest.around(z[:5], leave_out=torch.arange(5)).take(torch.tensor([4, 0, 0]))
    mean, variance = around.predict(new[:3])
    for place, own, m, v in zip(new, (4, 0, 0), mean, variance, strict=False):
        rows = closest(kernel, z, z[own], 6, without=own)
        assert own not in rows
        expected = ActiveSet(z[rows], x[rows], kernel, NOISE).predict(place[None])
        torch.testing.assert_close(m, expected[0][0])
        torch.testing.assert_close(v, expected[1][0])


def test_all_points_are_the_whole_posterior_and_gradients_are_right():
    kernel = kernels.RBF(3, torch.tensor(1.0), torch.ones(3))
    nearest, z, x, new = make(kernel, 100, 20)
    whole = ActiveSet(z, x, kernel, NOISE).predict(new)
    for found, expected in zip(nearest.predict(new), whole, strict=True):
        torch.testing.assert_close(found, expected)
    around = nearest.around(new)
    assert torch.autograd.gradcheck(lambda latents: around.predict(latents), new.clone().requires_grad_())
