"""A conditional that is not exact: what is read are averages over its draws, against quadrature."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_truncated import AutoTruncated, ExhaustiveSearch, Truncated_ELBO

Y = torch.tensor([0.7, -0.4, 1.6])
GRID = torch.linspace(-9.0, 9.0, 9001, dtype=torch.float64)


def prior_of_state(x):
    return torch.where(x > 0, 0.8, 0.3)


def plated(y):
    with pyro.plate("data", len(y)):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        i = pyro.sample("i", dist.Bernoulli(prior_of_state(x)))
        pyro.sample("y", dist.Normal(x + i, 1.0), obs=y)


def roughly(states, y):
    pyro.sample("x", dist.Normal(0.4 * (y - states["i"]), 0.8))


def exact_evidence(y: Tensor) -> Tensor:
    """Log joints ``(2, N)`` of the two values, by quadrature."""
    x, p = GRID, prior_of_state(GRID).double()
    terms = [
        dist.Normal(0.0, 1.0).log_prob(x) + (p if i else 1 - p).log() + dist.Normal(x + i, 1.0).log_prob(y.double().unsqueeze(-1))
        for i in (0, 1)
    ]
    return torch.stack(terms).logsumexp(-1) + (GRID[1] - GRID[0]).log()


READINGS = {
    "after a loss": lambda guide, y: Truncated_ELBO().loss(plated, guide, y) and guide,
    "after a step": lambda guide, y: Truncated_ELBO().loss_and_grads(plated, guide, y) and guide,
    "after refresh_": lambda guide, y: guide.refresh_(y) and guide,
    "of infer": lambda guide, y: guide.infer(y, ExhaustiveSearch(), 1),
}


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("reading", READINGS)
def test_what_is_read_is_averaged_over_draws(reading):
    joint = exact_evidence(Y)
    guide = AutoTruncated(plated, 2, conditional=roughly)
    guide.num_draws = 100
    guide = READINGS[reading](guide, Y)
    guide.num_draws = 100
    # Up to 800 draws, whose weights vary by less than their mean: off by 0.03 in a sigma at most.
    torch.testing.assert_close(guide.marginals()["i"].double(), joint.softmax(0)[1], rtol=0.0, atol=0.08)
    torch.testing.assert_close(guide.posterior(Y).free_energy(), joint.logsumexp(0), rtol=0.0, atol=0.2)
    assert guide.mode()["i"].tolist() == joint.argmax(0).tolist()
    assert guide.is_conditional_exact is False


def test_an_exact_conditional_is_not_drawn_again():
    def model(y):
        with pyro.plate("data", len(y)):
            i = pyro.sample("i", dist.Bernoulli(0.3))
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(x + i, 1.0), obs=y)

    runs = []

    def exactly(states, y):
        runs.append(0)
        pyro.sample("x", dist.Normal(0.5 * (y - states["i"]), 0.5**0.5))

    guide = AutoTruncated(model, 2, conditional=exactly)
    Truncated_ELBO().loss_and_grads(model, guide, Y)
    guide.marginals()
    runs.clear()
    found = guide.marginals()["i"]
    assert guide.is_conditional_exact
    assert not runs
    terms = torch.stack([dist.Normal(0.0, 2**0.5).log_prob(Y) + torch.tensor(0.7).log()])
    terms = torch.cat([terms, dist.Normal(1.0, 2**0.5).log_prob(Y).unsqueeze(0) + torch.tensor(0.3).log()])
    torch.testing.assert_close(found, terms.softmax(0)[1], rtol=1e-4, atol=1e-5)


def test_a_conditional_opens_no_data_plate():
    def opens(states, y):
        with pyro.plate("data", len(y)):
            roughly(states, y)

    with pytest.raises(ValueError, match="duplicate plate 'data'") as caught:
        Truncated_ELBO().loss(plated, AutoTruncated(plated, conditional=opens), Y)
    causes = [caught.value, caught.value.__cause__]
    assert any("runs inside of the data plates ['data']" in note for one in causes for note in getattr(one, "__notes__", []))
