"""Programs that put several latents into one tensor."""

from __future__ import annotations

import itertools

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import TraceEnum_ELBO, config_enumerate

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
    expected = -exact_evidence(model)
    for seed in range(4):
        pyro.set_rng_seed(seed)
        loss = Truncated_ELBO().loss(model, AutoTruncated(model, 767), Y)
        # One of the 768 states may be missing.
        assert loss == pytest.approx(expected, abs=0.02)


TABLE = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]], dtype=torch.float64)


def one_hot(z):
    return torch.nn.functional.one_hot(z, 3).to(TABLE)


# Rows of a table by functions that count the dimensions of their arguments.
ROWS = {
    "index": lambda table, z: table[z],
    "index_select": lambda table, z: table.index_select(0, z),
    "einsum": lambda table, z: torch.einsum("nk,kl->nl", one_hot(z), table),
    "bmm": lambda table, z: torch.bmm(one_hot(z).unsqueeze(-2), table.expand(4, 3, 3)).squeeze(-2),
    "mm": lambda table, z: torch.mm(one_hot(z), table),
}


def chain(rows):
    """Four sequences of five steps with three states."""

    def model(y):
        table = pyro.param("table", TABLE.clone, constraint=dist.constraints.simplex)
        with pyro.plate("data", 4):
            z = torch.zeros(4, dtype=torch.long)
            for t in range(5):
                z = pyro.sample(f"z_{t}", dist.Categorical(rows(table, z)))
                pyro.sample(f"y_{t}", dist.Normal(z.double(), 1.0), obs=y[:, t])

    return model


@pytest.mark.filterwarnings("error:the model does not take many states")
@pytest.mark.parametrize("name", ROWS)
def test_functions_that_count_dimensions_keep_sets(name):
    y = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def gradient(elbo, model, guide):
        loss = elbo.loss_and_grads(model, guide, y)
        parameter = pyro.param("table").unconstrained()
        own, parameter.grad = parameter.grad, None
        return loss, own

    expected = gradient(TraceEnum_ELBO(max_plate_nesting=1), config_enumerate(chain(ROWS["index"])), lambda y: None)
    guide = AutoTruncated(chain(ROWS[name]), num_states=3)
    torch.testing.assert_close(gradient(Truncated_ELBO(), guide.model, guide), expected, rtol=1e-10, atol=1e-12)
    assert "all 3 states each (exact)" in repr(guide)


@pytest.mark.filterwarnings("error:the model does not take many states")
def test_einsum_of_named_dimensions_scores_many_states_at_once():
    weight = torch.arange(20.0, dtype=torch.float64).view(5, 4).cos()
    y = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def program_of(mean):
        def model(y):
            with pyro.plate("data", 6):
                s = pyro.sample("s", dist.Bernoulli(torch.full((5,), 0.3, dtype=torch.float64)).to_event(1))
                pyro.sample("y", dist.Laplace(mean(s), 1.0).to_event(1), obs=y)

        return model

    named, plain = program_of(lambda s: torch.einsum("nh,hd->nd", s, weight)), program_of(lambda s: s @ weight)
    expected = Truncated_ELBO().loss(plain, AutoTruncated(plain, num_states=32), y)
    assert Truncated_ELBO().loss(named, AutoTruncated(named, num_states=32), y) == pytest.approx(expected, rel=1e-12)
    # Pyro's own ELBOs run the model as it is.
    assert TraceEnum_ELBO(max_plate_nesting=1).loss(named, AutoTruncated(named, num_states=32), y) == pytest.approx(expected, rel=1e-12)
