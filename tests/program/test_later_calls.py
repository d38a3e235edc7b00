"""Later calls of a model in which a discrete latent has other values."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_truncated import AutoTruncated, Truncated_ELBO

Y = torch.tensor([1.0, 2.0])


def _program(latent):
    """A program of two data points that are observed around a latent, or around the sum of its entries."""

    def model(count):
        with pyro.plate("data", 2):
            z = pyro.sample("z", latent(count)).float()
            pyro.sample("y", dist.Normal(z.sum(-1) if latent(count).event_shape else z, 1.0), obs=Y)

    return model


categorical = _program(lambda count: dist.Categorical(torch.ones(count) / count))
one_hot = _program(lambda count: dist.OneHotCategorical(torch.ones(count) / count))
several = _program(lambda count: dist.Bernoulli(0.5).expand([count]).to_event(1))
binomial = _program(lambda count: dist.Binomial(torch.as_tensor(count, dtype=torch.get_default_dtype()), 0.5))
event_totals = _program(lambda count: dist.Binomial(torch.tensor(count, dtype=torch.get_default_dtype()), 0.5).to_event(1))


def boolean_or_categorical(count):
    """A latent that is Boolean for two values."""
    return _program(lambda number: dist.Bernoulli(0.5) if number == 2 else dist.Categorical(torch.ones(number) / number))(count)


def two_nodes(count):
    """A latent with a set of states beside one of its own."""
    with pyro.plate("data", 2):
        for name in ("z", "w"):
            value = pyro.sample(name, dist.Categorical(torch.ones(count) / count))
            pyro.sample(f"y_{name}", dist.Normal(value.float(), 1.0), obs=Y)


@pytest.mark.parametrize(
    ("model", "before", "now", "got", "expected"),
    [
        (categorical, 3, 5, "5 values", "3 when"),
        (categorical, 5, 3, "3 values", "5 when"),
        (one_hot, 3, 5, "5,", "3,"),
        (one_hot, 5, 3, "3,", "5,"),
        (several, 3, 5, "5,", "3,"),
        (boolean_or_categorical, 2, 3, "3 values", "2 when"),
        (boolean_or_categorical, 3, 2, "2 values", "3 when"),
        (two_nodes, 9, 11, "11 values", "9 when"),
        (two_nodes, 11, 9, "9 values", "11 when"),
        (binomial, 3, 5, r"0 \.\. 5", r"0 \.\. 3"),
        (binomial, [3, 3], [3, 5], r"0 \.\. 5", r"0 \.\. 3"),
        (event_totals, [2, 5], [5, 2], r"0 \.\. 5", r"0 \.\. 2"),
    ],
)
def test_other_values_of_a_site_are_refused_by_name(model, before, now, got, expected):
    """The sum over the values of the first call would be another one."""
    guide, elbo = AutoTruncated(model, 64), Truncated_ELBO()
    elbo.loss_and_grads(model, guide, before)
    with pytest.raises(ValueError, match=rf"'z'.* now has .*{got}.* but .*{expected}.*new guide"):
        elbo.loss_and_grads(model, guide, now)


@pytest.mark.parametrize("totals", [3, [3, 5], [2, 1]])
def test_smaller_totals_are_summed_over(totals):
    """Values beyond a total have probability zero."""
    guide, elbo = AutoTruncated(binomial, 64), Truncated_ELBO()
    elbo.loss(binomial, guide, 5)
    each = [totals, totals] if isinstance(totals, int) else totals
    normal = [[-0.5 * (float(y) - z) ** 2 - 0.5 * math.log(2 * math.pi) for z in range(6)] for y in Y]
    terms = [
        sum(math.comb(total, z) * 0.5**total * math.exp(own[z]) for z in range(total + 1)) for total, own in zip(each, normal, strict=True)
    ]
    assert elbo.loss(binomial, guide, totals) == pytest.approx(-sum(map(math.log, terms)), rel=1e-5)


def test_what_max_count_leaves_out_may_grow():
    """Of more values the same are kept."""
    guide, elbo = AutoTruncated(categorical, 64, max_count=3), Truncated_ELBO()
    elbo.loss(categorical, guide, 5)
    normal = [[math.exp(-0.5 * (float(y) - z) ** 2) / math.sqrt(2 * math.pi) / 6 for z in range(4)] for y in Y]
    assert elbo.loss(categorical, guide, 6) == pytest.approx(-sum(math.log(sum(own)) for own in normal), rel=1e-5)
    with pytest.raises(ValueError, match="now has 3 values, but 4 when"):
        elbo.loss(categorical, guide, 3)


class KeepsMinibatch:
    """A model that keeps the rows of every run, of which its conditional reads the last."""

    def __init__(self):
        self.rows = []

    def __call__(self, y):
        with pyro.plate("data", len(y), subsample_size=3) as rows:
            self.rows.append(rows)
            z = pyro.sample("z", dist.Bernoulli(0.4))
            shift = pyro.sample("shift", dist.Normal(z, 1.0))
            pyro.sample("y", dist.Normal(shift, 1.0), obs=y[rows])

    def conditional(self, states, y):
        pyro.sample("shift", dist.Normal((states["z"] + y[self.rows[-1]]) / 2, 0.5**0.5))


def test_looks_at_later_calls_take_the_rows_of_the_call():
    model, y = KeepsMinibatch(), 3 * torch.randn(12)
    guide = AutoTruncated(model, num_states=2, conditional=model.conditional)
    z = torch.tensor([[0.0], [1.0]])
    for _ in range(8):
        loss = Truncated_ELBO().loss(model, guide, y)
        joint = dist.Bernoulli(0.4).log_prob(z) + dist.Normal(z, 2**0.5).log_prob(y[model.rows[-1]])
        assert loss == pytest.approx(-4 * float(joint.logsumexp(0).sum()), rel=1e-5)


def test_a_plate_that_a_later_call_subsamples_below_a_shared_latent_is_named():
    def model(y, batch_size=None):
        flag = pyro.sample("flag", dist.Bernoulli(0.4))
        with pyro.plate("data", len(y), subsample_size=batch_size) as index:
            z = pyro.sample("z", dist.Bernoulli(0.2 + 0.5 * flag))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y[index])

    y = torch.zeros(5)
    for whole_states in (True, False):
        guide = AutoTruncated(model, num_states=64, whole_states=whole_states)
        Truncated_ELBO().loss(model, guide, y)
        with pytest.raises((ValueError, NotImplementedError), match=r"'data'"):
            Truncated_ELBO().loss(model, guide, y, 2)
