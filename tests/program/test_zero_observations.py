"""Observations that some states give probability zero rule these out, however improbable the others make them."""

from __future__ import annotations

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_truncated import AutoTruncated, Truncated_ELBO

VISITS = 150
SEEN_ONCE = torch.zeros(2, VISITS)
SEEN_ONCE[0, 0] = 1.0
# Where present, 150 visits see it once with a log probability far below that of torch's least probability.
LEAST = 0.3


def visits(z):
    return dist.Bernoulli((LEAST * z).unsqueeze(-1).expand(*z.shape, VISITS)).to_event(1)


def counted(z):
    return dist.Binomial(VISITS, LEAST * z)


def masked(z):
    return dist.Bernoulli((LEAST * z).unsqueeze(-1).expand(*z.shape, VISITS)).mask(torch.ones(VISITS, dtype=torch.bool)).to_event(1)


def categories(z):
    probs = torch.tensor([[1.0, 0.0], [1 - LEAST, LEAST]])[z.long()]
    return dist.Categorical(probs.unsqueeze(-2).expand(*z.shape, VISITS, 2)).to_event(1)


def multinomial(z):
    return dist.Multinomial(VISITS, torch.tensor([[1.0, 0.0], [1 - LEAST, LEAST]])[z.long()])


def every_visit(z):
    return (LEAST * z).unsqueeze(-1).expand(*z.shape, VISITS)


def geometric(z):
    return dist.Geometric(1 - every_visit(z)).to_event(1)


def zero_inflated(z):
    return dist.ZeroInflatedPoisson(torch.tensor(1.0), gate=1 - every_visit(z)).to_event(1)


def inflated_bernoulli(z):
    return dist.ZeroInflatedDistribution(dist.Bernoulli(every_visit(z)), gate=torch.tensor(0.5)).to_event(1)


def two_components(z):
    both = dist.Bernoulli(torch.stack([every_visit(z), 0.5 * every_visit(z)], -1))
    return dist.MixtureSameFamily(dist.Categorical(torch.tensor([0.3, 0.7])), both).to_event(1)


def either(z):
    shape = every_visit(z).shape
    parts = [dist.Bernoulli(torch.tensor(probability)).expand(shape) for probability in (0.0, LEAST)]
    return dist.MaskedMixture(z.bool().unsqueeze(-1).expand(shape), *parts).to_event(1)


@pytest.mark.parametrize(
    ("likelihood", "data"),
    [
        (visits, SEEN_ONCE),
        (counted, SEEN_ONCE.sum(-1)),
        (masked, SEEN_ONCE),
        (geometric, SEEN_ONCE),
        (zero_inflated, SEEN_ONCE),
        (inflated_bernoulli, SEEN_ONCE),
        (two_components, SEEN_ONCE),
        (either, SEEN_ONCE),
        (categories, SEEN_ONCE.long()),
        (multinomial, torch.stack([VISITS - SEEN_ONCE.sum(-1), SEEN_ONCE.sum(-1)], -1)),
    ],
)
@pytest.mark.parametrize("vectorize", [None, False])
def test_one_observation_rules_a_state_out(likelihood, data, vectorize):
    def model(y):
        with pyro.plate("sites", len(y)):
            z = pyro.sample("z", dist.Bernoulli(0.5))
            pyro.sample("y", likelihood(z), obs=y)

    guide = AutoTruncated(model, vectorize=vectorize)
    loss = Truncated_ELBO().loss_and_grads(model, guide, data)
    with pyro.validation_enabled(False):
        present = likelihood(torch.ones(2)).log_prob(data)
        absent = torch.stack([torch.tensor(-torch.inf), likelihood(torch.zeros(2)).log_prob(data)[1]])
    joint = torch.stack([absent, present], -1) + torch.tensor(0.5).log()
    torch.testing.assert_close(torch.tensor(-loss), joint.logsumexp(-1).sum(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(guide.marginals()["z"], joint.softmax(-1)[:, 1])


def test_searches_see_which_states_explain_more():
    """A noisy-OR without leak: no state near the zero state is possible, and yet the search gets there."""
    weight = 0.9 * torch.eye(12).repeat_interleave(2, 0)
    causes = torch.tensor([1.0, 0.0] * 6)
    data = (weight @ causes > 0).float().expand(3, -1)

    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((12,), 0.3)).to_event(1))
            pyro.sample("y", dist.Bernoulli((s @ weight.mT).clamp(max=0.9)).to_event(1), obs=y)

    guide = AutoTruncated(model, 8).infer(data, steps=10)
    torch.testing.assert_close(guide.mode()["s"], causes.expand(3, -1))
    on = torch.where(causes == 1, 1.0, 0.3 * 0.01 / (0.3 * 0.01 + 0.7))
    torch.testing.assert_close(guide.marginals()["s"], on.expand(3, -1), rtol=0.0, atol=2e-3)


@pytest.mark.filterwarnings("ignore:the data observed at")
@pytest.mark.parametrize("num_states", [2, 8])
def test_observations_of_nodes_with_sets_rule_states_out(num_states):
    """A rare cause of what else is impossible, above a chain: little more probable than the least that torch knows."""
    rare, rates = 1e-6, torch.tensor([0.3, 0.8])

    def model(y):
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(torch.tensor(rare)))
            w = pyro.sample("w", dist.Bernoulli(rates[z.long()]))
            v = pyro.sample("v", dist.Bernoulli(rates[w.long()]))
            pyro.sample("y", dist.Bernoulli(0.5 * z), obs=y)
            pyro.sample("x", dist.Bernoulli(rates[v.long()]), obs=y)

    def evidence(y):
        total = 0.0
        for z, w, v in itertools.product((0, 1), repeat=3):
            shares = [rare if z else 1 - rare, *(float(rates[a] if b else 1 - rates[a]) for a, b in ((z, w), (w, v), (v, y)))]
            total += math.prod(shares) * (0.5 * z if y else 1 - 0.5 * z)
        return math.log(total)

    guide = AutoTruncated(model, num_states)
    for y in (0, 1, 0):
        loss = Truncated_ELBO().loss(model, guide, torch.full((2,), float(y)))
        assert (guide.product is not None) == (num_states == 2)
        assert loss == pytest.approx(-2 * evidence(y), rel=1e-5)


@pytest.mark.filterwarnings("ignore:the data observed at")
def test_data_of_later_calls_rule_states_out_that_those_of_the_first_do_not():
    """Six of ten causes are needed; few sets of causes have so many."""

    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((10,), 0.02)).to_event(1))
            pyro.sample("y", dist.Bernoulli(torch.where(s.sum(-1) >= 6, 0.9, 0.0)), obs=y)

    enough = sum(math.comb(10, k) * 0.02**k * 0.98 ** (10 - k) for k in range(6, 11))
    guide = AutoTruncated(model, num_states=1024)
    for y, expected in ((0.0, 1 - 0.9 * enough), (1.0, 0.9 * enough)):
        loss = Truncated_ELBO().loss(model, guide, torch.tensor([y]))
        assert loss == pytest.approx(-math.log(expected), rel=1e-5, abs=1e-6)
