"""Log densities without what is the same for all states are those of the distributions, with the same gradients."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_truncated.program.densities import log_density, site_log_densities

CANDIDATES, DATA, SIZE = 5, 7, 3
FULL, ROW = (CANDIDATES, DATA, SIZE), (SIZE,)
REAL, COUNT = torch.linspace(-2.0, 3.0, DATA * SIZE, dtype=torch.float64).view(DATA, SIZE), torch.arange(21.0).double().view(DATA, SIZE)
THREE = torch.arange(DATA) % 3
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
        (dist.Categorical, FULL, THREE),
        (lambda x: dist.Categorical(logits=x), FULL, THREE),
        (lambda x: dist.Categorical(logits=x).expand([CANDIDATES, DATA]).to_event(1), (DATA, SIZE), THREE),
        (lambda x: dist.Categorical(x).expand([CANDIDATES, DATA]), ROW, torch.arange(CANDIDATES).view(-1, 1) % 3),
        (lambda x: dist.Categorical(logits=x.unsqueeze(1)), (CANDIDATES, SIZE), torch.arange(3).view(3, 1, 1)),
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


@pytest.mark.parametrize("value", [-1, SIZE])
def test_no_category_is_refused_as_by_the_distribution(value):
    fn = dist.Categorical(torch.ones(2, SIZE), validate_args=False)
    with pytest.raises(RuntimeError, match="out of bounds"):
        log_density(fn, torch.tensor([0, value]))


def test_sites_of_one_kind_are_computed_together():
    """Of several families, shapes and wrappers, mixed in any order: each has its own density, and the same gradient."""
    x, one_of_three = on_unit_interval(4), torch.arange(4) % 3
    makes = [
        (lambda a: dist.Normal(a * x, 0.5), torch.tensor(0.3, dtype=torch.float64)),
        (lambda a: dist.Normal(a * x, x), torch.tensor(0.3, dtype=torch.float64)),
        (lambda a: dist.Normal(a * x.unsqueeze(-1), 1.0).expand([4, SIZE]).to_event(1), REAL[0]),
        (lambda a: dist.Poisson(a * x), COUNT[0, 1]),
        (lambda a: dist.Bernoulli(a * x), torch.tensor(1.0, dtype=torch.float64)),
        (lambda a: dist.Bernoulli(logits=(a * x).view(4, 1)), BINARY[:, 0]),
        (lambda a: dist.Categorical(x[:3] ** a).expand([4]), one_of_three),
        (lambda a: dist.Categorical(logits=a * x[:3]), one_of_three.view(4, 1)),
        (lambda a: dist.Categorical((a * x[:1]).expand(3)), one_of_three),
        (lambda a: dist.Laplace(a * x, 1.0), torch.tensor(0.3, dtype=torch.float64)),
        (lambda a: dist.Normal(a * x[0], 1.0).expand([5]).to_event(1), torch.tensor(0.3, dtype=torch.float64)),
        (lambda a: dist.Normal(a * x.mean(), torch.ones(80, 1, dtype=torch.float64)), COUNT.view(-1)[:1].expand(80, 60)),
    ]
    with pyro.validation_enabled(False):
        sites = [{"fn": make(a), "value": value, "args": (), "kwargs": {}} for a in (0.5, 0.7, 0.9) for make, value in makes]
        found, expected = site_log_densities(sites), [site["fn"].log_prob(site["value"]) for site in sites]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    totals = [sum((place + 1) * table.sum() for place, table in enumerate(tables)) for tables in (found, expected)]
    gradients = [torch.autograd.grad(total, x, retain_graph=True)[0] for total in totals]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


def test_probabilities_and_rates_at_the_end_of_their_range():
    for fn, value in ((dist.Bernoulli(torch.tensor([0.0, 1.0])), [0.0, 0.0]), (dist.Poisson(torch.tensor([0.0, 1.0])), [0.0, 2.0])):
        torch.testing.assert_close(log_density(fn.to_event(1), torch.tensor(value)), fn.to_event(1).log_prob(torch.tensor(value)))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_probabilities_out_of_range_are_those_at_its_ends(value):
    """As in Pyro: learned probabilities of more than one would otherwise have densities without bound."""
    probs = torch.tensor([-0.2, 0.0, 1e-9, 0.3, 1.0, 1.5], dtype=torch.float64).requires_grad_()
    with pyro.validation_enabled(False):
        fn, values = dist.Bernoulli(probs), torch.full((6,), value, dtype=torch.float64)
        found, expected = log_density(fn, values), fn.log_prob(values)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-15)
    gradients = [torch.autograd.grad(value.sum(), probs, retain_graph=True)[0] for value in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-15)


@pytest.mark.parametrize("rate", [1.0, 100.0, 1e4])
def test_single_precision_of_counts_is_no_worse_than_that_of_the_distribution(rate):
    """States nearly alike, of 784 entries: sums of terms that only together are small would be wrong by many nats."""
    generator = torch.Generator().manual_seed(0)
    rates = rate * torch.linspace(0.7, 1.4, 784) * torch.tensor([1.0, 1.0001, 1.001, 1.01]).view(4, 1, 1)
    counts = torch.poisson(rates[0].expand(3, 784), generator=generator)
    exact = dist.Poisson(rates.double()).to_event(1).log_prob(counts.double())
    errors = [log_density(dist.Poisson(rates).to_event(1), counts) - exact, dist.Poisson(rates).to_event(1).log_prob(counts) - exact]
    found, expected = (error.abs().max() for error in errors)
    assert found <= 2 * expected + 1e-5
    apart, apart_expected = ((error[1:] - error[:1]).abs().max() for error in errors)
    assert apart <= 2 * apart_expected + 1e-5


@pytest.mark.parametrize("logit", [-20.0, 20.0])
def test_shared_probabilities_near_zero_and_one_keep_their_logarithms(logit):
    fn = dist.Bernoulli(logits=torch.full((784,), logit)).to_event(1)
    values = torch.full((3, 784), float(logit > 0))
    torch.testing.assert_close(
        log_density(fn, values).double(), -784 * torch.full((3,), 20.0).double().neg().exp().log1p(), rtol=1e-5, atol=0.0
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64])
@pytest.mark.parametrize(
    "fn",
    [
        dist.Normal(torch.linspace(0, 1, 5), 0.5),
        dist.Poisson(torch.linspace(1, 2, 5)),
        dist.Bernoulli(torch.linspace(0.1, 0.9, 5)),
        dist.Bernoulli(logits=torch.linspace(-1, 2, 5)),
        dist.Bernoulli(logits=torch.tensor(-1.0)).expand([5]),
    ],
)
def test_integers_and_truth_values_have_the_densities_of_the_same_numbers(fn, dtype):
    value = torch.tensor([0, 1, 1, 0, 1])
    torch.testing.assert_close(log_density(fn, value.to(dtype)), fn.log_prob(value.float()))


def test_bytes_do_not_wrap_around():
    value = torch.tensor([255, 3], dtype=torch.uint8)
    for fn in (dist.Poisson(torch.tensor([250.0, 2.0])), dist.Poisson(torch.tensor(250.0)), dist.Normal(torch.tensor([250.0, 2.0]), 3.0)):
        torch.testing.assert_close(log_density(fn, value), fn.log_prob(value.float()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fn", [dist.Normal(torch.zeros(2, 0), 1.0), dist.Poisson(torch.ones(2, 0)), dist.Bernoulli(torch.ones(2, 0) / 2)])
def test_events_without_entries_have_density_one(fn):
    assert log_density(fn.to_event(1), torch.zeros(2, 0)).tolist() == [0.0, 0.0]


def test_infinite_rates_are_asked_of_the_distribution():
    fn = dist.Poisson(torch.tensor([float("inf"), 1.0]))
    assert log_density(fn, torch.tensor([0.0, 0.0])).tolist() == [-float("inf"), -1.0]
