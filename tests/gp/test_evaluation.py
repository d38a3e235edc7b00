"""Kernels as functions of their own parameters outside of Pyro programs, and of the store's inside."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.contrib.gp import kernels
from pyro.nn import PyroSample

from pyro_truncated.gp.kernels import covariance, covariance_at, evaluate, prior_variance, squared_exponential

KERNELS = [kernels.RBF, kernels.RationalQuadratic, kernels.Matern52, kernels.Linear]


@pytest.mark.parametrize("make", KERNELS)
def test_outside_of_programs_the_store_neither_counts_nor_changes(make):
    x, z = torch.randn(4, 2), torch.randn(3, 2)
    kernel = make(2, torch.tensor(2.0))
    expected, diagonal = kernel(x, z).detach(), kernel(x, diag=True).detach()
    pyro.clear_param_store()
    # What another model's kernel of the same kind has left.
    pyro.param("variance", torch.tensor(7.0), constraint=dist.constraints.positive)
    for found in (evaluate(kernel, x, z), covariance(kernel, x, z), covariance_at(kernel, dict(kernel.named_parameters()))(x, z)):
        torch.testing.assert_close(found.detach(), expected, rtol=1e-5, atol=1e-6)
    for found in (evaluate(kernel, x, diag=True), prior_variance(kernel, x)):
        torch.testing.assert_close(found.detach(), diagonal)
    assert list(pyro.get_param_store().keys()) == ["variance"]
    assert pyro.param("variance").item() == pytest.approx(7)


def test_inside_a_program_parameters_may_be_random():
    kernel = kernels.RBF(2)
    kernel.variance = PyroSample(dist.LogNormal(0.0, 1.0))
    x = torch.randn(4, 2)
    trace = pyro.poutine.trace(lambda: evaluate(kernel, x, x)).get_trace()
    assert [name for name, site in trace.nodes.items() if site["type"] == "sample"] == ["variance"]
    torch.testing.assert_close(trace.nodes["_RETURN"]["value"].diagonal(), trace.nodes["variance"]["value"].expand(4))


def test_inside_a_program_parameters_are_registered():
    kernel = kernels.Matern32(2)
    trace = pyro.poutine.trace(lambda: evaluate(kernel, torch.randn(4, 2))).get_trace()
    assert {"variance", "lengthscale"} <= {name for name, site in trace.nodes.items() if site["type"] == "param"}


def test_squared_exponential_is_pyros():
    x, z = torch.randn(5, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    scale, variance = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64), torch.tensor(1.7, dtype=torch.float64)
    torch.testing.assert_close(squared_exponential(x, z, scale, variance), kernels.RBF(3, variance, scale)(x, z).detach())
