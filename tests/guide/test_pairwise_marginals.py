"""Joint marginals of two sites equal those of all whole states, whatever the posterior is kept on."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.ops.indexing import Vindex

from pyro_truncated import AutoTruncated, EvolutionarySearch, Truncated_ELBO

TRANSITION = torch.tensor([[0.8, 0.15, 0.05], [0.1, 0.8, 0.1], [0.05, 0.25, 0.7]])


def chain(y):
    """Sequences of three states."""
    with pyro.plate("data", len(y)):
        z = torch.tensor(0)
        for t in pyro.markov(range(y.shape[1])):
            z = pyro.sample(f"z_{t}", dist.Categorical(Vindex(TRANSITION)[z]), infer={"enumerate": "parallel"})
            pyro.sample(f"y_{t}", dist.Normal(z.to(y.dtype), 0.6), obs=y[:, t])


def groups(y):
    """A flag of each group above two decisions of each member."""
    with pyro.plate("groups", y.shape[1], dim=-1):
        flag = pyro.sample("flag", dist.Bernoulli(0.4), infer={"enumerate": "parallel"})
        with pyro.plate("members", len(y), dim=-2):
            kind = pyro.sample("kind", dist.Categorical(TRANSITION[flag.long()]), infer={"enumerate": "parallel"})
            is_on = pyro.sample("is_on", dist.Bernoulli(0.2 + 0.2 * kind), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(is_on - kind, 0.8), obs=y)


def steps(y):
    """Three switches of each step, which form one node, as the observations read all of them."""
    with pyro.plate("data", len(y)):
        a = b = c = torch.tensor(0.0)
        for t in range(y.shape[1]):
            a = pyro.sample(f"a_{t}", dist.Bernoulli(0.3 + 0.4 * a), infer={"enumerate": "parallel"})
            b = pyro.sample(f"b_{t}", dist.Bernoulli(0.2 + 0.5 * b), infer={"enumerate": "parallel"})
            c = pyro.sample(f"c_{t}", dist.Bernoulli(0.4 + 0.2 * c), infer={"enumerate": "parallel"})
            pyro.sample(f"y_{t}", dist.Normal(a + 2 * b - c, 0.9), obs=y[:, t])


def causes(y):
    """Four causes of a data point in one site."""
    weight = torch.tensor([[1.0, 0.5, -1.0, 0.2], [0.3, -0.7, 0.4, 1.1]])
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.tensor([0.2, 0.5, 0.3, 0.4])).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT, 0.5).to_event(1), obs=y)


def full_guide(model, y, num_states=16, **options):
    """A guide whose sets hold all states."""
    guide = AutoTruncated(model, num_states, **options)
    Truncated_ELBO(EvolutionarySearch(2, 2)).loss(model, guide, y)
    guide.refresh_(y)
    return guide


@pytest.mark.parametrize(
    ("model", "shape", "pairs", "expected_shape"),
    [
        (chain, (4, 6), [("z_0", "z_1"), ("z_4", "z_3")], (4, 3, 3)),
        (groups, (3, 2), [("kind", "is_on")], (2, 3, 3, 2)),
        (groups, (3, 2), [("flag", "kind")], (2, 3, 2, 3)),
        (steps, (4, 3), [("a_1", "b_1"), ("c_2", "b_1")], (4, 2, 2)),
        (causes, (5, 2), [("s", "s")], (5, 4, 4, 2, 2)),
    ],
)
def test_pairs_equal_those_of_whole_states(model, shape, pairs, expected_shape):
    y = torch.randn(shape)
    guide, whole = full_guide(model, y), full_guide(model, y, 729, whole_states=True)
    assert (guide.product is None) == (model is causes)
    assert whole.product is None
    if model is steps:
        assert {len(node.sites) for node in guide.product.graph.nodes} == {3}
    for first, second in pairs:
        found = guide.pairwise_marginals(first, second)
        assert found.shape == expected_shape
        torch.testing.assert_close(found, whole.pairwise_marginals(first, second), rtol=0.0, atol=1e-6)
        torch.testing.assert_close(found.sum((-2, -1)), torch.ones(found.shape[:-2], dtype=found.dtype), rtol=0.0, atol=1e-6)
        values = guide.marginals()[second].double()
        own = found.sum(-2) if found.shape[-1] > 2 else found.sum(-2)[..., 1]
        if model is not causes:
            values = values.unsqueeze(1) if values.dim() < own.dim() else values
            torch.testing.assert_close(own, values.expand_as(own), rtol=0.0, atol=1e-6)


def test_pairs_of_whole_states_equal_expectations():
    y = torch.randn(6, 2)
    guide = full_guide(causes, y)
    expected = guide.expectation(lambda values: values["s"].unsqueeze(-1) * values["s"].unsqueeze(-2))
    torch.testing.assert_close(guide.pairwise_marginals("s", "s")[..., 1, 1].to(expected.dtype), expected, rtol=0.0, atol=1e-6)
    some = torch.tensor([4, 1])
    torch.testing.assert_close(guide.pairwise_marginals("s", "s", some), guide.pairwise_marginals("s", "s")[some])


def test_sites_that_no_density_joins_are_refused_by_name():
    guide = full_guide(chain, torch.randn(2, 6))
    with pytest.raises(NotImplementedError, match=r"no density joins the sites 'z_0' and 'z_5'.*sample_posterior"):
        guide.pairwise_marginals("z_0", "z_5")
    with pytest.raises(ValueError, match=r"second must be the name of a discrete latent site.*got 'x'"):
        guide.pairwise_marginals("z_0", "x")


@pytest.mark.parametrize("size", [2, 3])
def test_two_plates_at_one_dimension_are_refused(size):
    def model(y):
        with pyro.plate("data", len(y), dim=-1):
            with pyro.plate("causes", 2, dim=-2):
                a = pyro.sample("a", dist.Bernoulli(0.3))
            with pyro.plate("classes", size, dim=-2):
                b = pyro.sample("b", dist.Categorical(torch.ones(3)))
            pyro.sample("y", dist.Normal(a.sum(-2, keepdim=True) + b.sum(-2, keepdim=True), 1.0), obs=y)

    guide = full_guide(model, torch.randn(4), 108, whole_states=True)
    with pytest.raises(NotImplementedError, match=r"plates 'causes' of 'a' and 'classes' of 'b' have the same dim=-2"):
        guide.pairwise_marginals("a", "b")
