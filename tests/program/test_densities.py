"""Log densities without what is the same for all states are those of the distributions, with the same gradients."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_truncated.program.densities import log_density

CANDIDATES, DATA, SIZE = 5, 7, 3
FULL, ROW = (CANDIDATES, DATA, SIZE), (SIZE,)
REAL, COUNT = torch.linspace(-2.0, 3.0, DATA * SIZE, dtype=torch.float64).view(DATA, SIZE), torch.arange(21.0).double().view(DATA, SIZE)
BINARY, STATES = COUNT % 2, torch.arange(105.0).double().view(FULL) % 2


def on_unit_interval(*shape):
    return torch.linspace(0.05, 0.95, torch.Size(shape).numel(), dtype=torch.float64).view(shape).requires_grad_()


@pytest.mark.parametrize(
    ("make", "shape", "value"),
    [
        (lambda x: dist.Normal(x, x.mean()).to_event(1), FULL, REAL),
        (lambda x: dist.Normal(x.mean(), x), FULL, REAL),
        (lambda x: dist.Normal(x, 0.5).to_event(1).expand([CANDIDATES, DATA]), ROW, REAL),
        (lambda x: dist.Normal(x, x).expand([DATA, SIZE]).to_event(2), ROW, STATES),
        (lambda x: dist.Poisson(x).to_event(1), FULL, COUNT),
        (lambda x: dist.Poisson(x).to_event(1).expand([CANDIDATES, DATA]), ROW, COUNT),
        (lambda x: dist.Bernoulli(x).to_event(1), FULL, BINARY),
        (lambda x: dist.Bernoulli(logits=x).to_event(1), FULL, BINARY),
        (lambda x: dist.Bernoulli(x).expand([DATA, SIZE]).to_event(1), ROW, STATES),
        (lambda x: dist.Bernoulli(logits=x.mean()).expand([DATA, SIZE]), ROW, STATES),
        (lambda x: dist.Bernoulli(x).to_event(1), FULL, 0.25 + 0.5 * BINARY),
        (lambda x: dist.Laplace(x, 1.0).to_event(1), FULL, REAL),
    ],
)
def test_densities_and_gradients_are_those_of_the_distribution(make, shape, value):
    parameter = on_unit_interval(*shape)
    with pyro.validation_enabled(False):
        fn = make(parameter)
        found, expected = log_density(fn, value), fn.log_prob(value)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1.0, 1.0, expected.numel(), dtype=torch.float64).view(expected.shape)
    gradients = [torch.autograd.grad((value * weights).sum(), parameter, retain_graph=True)[0] for value in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


def test_probabilities_and_rates_at_the_end_of_their_range():
    for fn, value in ((dist.Bernoulli(torch.tensor([0.0, 1.0])), [0.0, 0.0]), (dist.Poisson(torch.tensor([0.0, 1.0])), [0.0, 2.0])):
        torch.testing.assert_close(log_density(fn.to_event(1), torch.tensor(value)), fn.to_event(1).log_prob(torch.tensor(value)))
