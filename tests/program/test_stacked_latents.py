"""Programs that put several latents into one tensor."""

from __future__ import annotations

import itertools

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch

from pyro_truncated import AutoTruncated, Truncated_ELBO

Y = torch.tensor(0.7, dtype=torch.float64)


def bernoulli(prob):
    return dist.Bernoulli(torch.tensor(prob, dtype=torch.float64))


def program(value):
    """Three latents below one observation, and six others, each with its own."""

    def model(y):
        a, b = pyro.sample("a", bernoulli(0.4)), pyro.sample("b", bernoulli(0.7))
        c = pyro.sample("c", dist.Binomial(2, torch.tensor(0.3, dtype=torch.float64)))
        pyro.sample("y", dist.Normal(value(a, b, c), 1.0), obs=y)
        for number in range(6):
            pyro.sample(f"y_{number}", dist.Normal(pyro.sample(f"e_{number}", bernoulli(0.5)), 1.0), obs=y)

    return model


def summed(a, b, c):
    return torch.stack([a, b, c]).sum(-1)


def chosen(a, b, c):
    return torch.take_along_dim(torch.stack([a, b], -1), (c > 0).long().unsqueeze(-1)).squeeze(-1)


def exact_evidence(model):
    """By enumeration of the states of three latents; each of the others has two."""
    own = []
    for a, b, c in itertools.product((0.0, 1.0), (0.0, 1.0), (0.0, 1.0, 2.0)):
        values = {name: torch.tensor(number, dtype=torch.float64) for name, number in zip("abc", (a, b, c), strict=True)}
        trace = poutine.trace(poutine.condition(model, values)).get_trace(Y)
        own.append(sum(trace.nodes[name]["fn"].log_prob(trace.nodes[name]["value"]) for name in "abcy"))
    other = torch.stack([dist.Normal(value, 1.0).log_prob(Y) for value in (0.0, 1.0)]).logsumexp(0) - torch.tensor(2.0).log()
    return float(torch.stack(own).logsumexp(0) + 6 * other)


@pytest.mark.filterwarnings("ignore:the model does not take many states")
@pytest.mark.parametrize("value", [summed, chosen])
def test_whole_states_serve_where_states_would_be_mixed(value):
    """A sum over all dimensions but one, and entries of a flat tensor, whatever the seed."""
    model = program(value)
    for seed in range(10):
        pyro.set_rng_seed(seed)
        loss = Truncated_ELBO().loss(model, AutoTruncated(model, 767), Y)
        # One of the 768 states may be missing.
        assert loss == pytest.approx(-exact_evidence(model), abs=0.02)
