"""Posteriors that max_count cuts off are told, with their mass on the largest count."""

from __future__ import annotations

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_truncated import AutoTruncated, check_truncation

Y = torch.tensor([12.0, 14.0])


def thinned(y):
    """Half of a Poisson number of mean 20 is seen: the number that is not seen is one of mean 10."""
    with pyro.plate("data", len(y)):
        n = pyro.sample("n", dist.Poisson(20.0))
        pyro.sample("y", dist.Binomial(n, 0.5, validate_args=False), obs=y)


def beside_another(y):
    """The same with a latent that has nothing to do with it."""
    thinned(y)
    with pyro.plate("others", 3):
        z = pyro.sample("z", dist.Categorical(torch.ones(5) / 5))
        pyro.sample("x", dist.Normal(z.float(), 1.0), obs=torch.zeros(3))


def exact_mass(limit: int) -> float:
    """The probability of the largest count, given at most that many, at the data point of most observations."""
    unseen = dist.Poisson(10.0).log_prob(torch.arange(limit - float(Y[1]) + 1)).exp()
    return float(unseen[-1] / unseen.sum())


def caught_warnings(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("model", [thinned, beside_another])
@pytest.mark.parametrize("max_count", [20, {"n": 25}])
def test_mass_on_the_largest_count_is_told(model, max_count):
    limit = max_count["n"] if isinstance(max_count, dict) else max_count
    guide = AutoTruncated(model, 64, max_count=max_count).infer(Y)
    assert (guide.product is not None) == (model is beside_another)
    sentence = f"Of the posterior of 'n', {exact_mass(limit):.2g} lies on {limit}, the largest count that is kept"
    sentence += "" if model is beside_another else " (data point 1)"
    for call in (guide.marginals, lambda: check_truncation(guide, Y)):
        (message,) = caught_warnings(call)
        assert sentence in message
        assert f"max_count={{'n': {2 * limit}}}" in message
    report = check_truncation(guide, Y, warn=False)
    assert not report.is_trusted
    assert sentence in str(report)


def test_it_is_told_of_the_data_points_that_are_read():
    guide = AutoTruncated(thinned, 64, max_count=20).infer(Y)
    (message,) = caught_warnings(lambda: guide.marginals(torch.tensor([1])))
    assert "(data point 1)" in message


@pytest.mark.parametrize("model", [thinned, beside_another])
def test_large_enough_bounds_are_trusted(model):
    guide = AutoTruncated(model, 64, max_count=50).infer(Y)
    assert caught_warnings(guide.marginals) == []
    assert check_truncation(guide, Y).is_trusted


@pytest.mark.parametrize("max_count", [None, 3])
@pytest.mark.parametrize("prior", [dist.Binomial(3, 0.5), dist.Categorical(torch.ones(4) / 4)])
def test_the_end_of_a_finite_support_is_no_cut(prior, max_count):
    """Nearly all mass lies on the largest value there is."""

    def model(y):
        with pyro.plate("data", len(y)):
            n = pyro.sample("n", prior)
            pyro.sample("y", dist.Normal(n.float(), 0.3), obs=y)

    guide = AutoTruncated(model, 4, max_count=max_count).infer(Y)
    assert caught_warnings(lambda: torch.testing.assert_close(guide.marginals()["n"][:, -1], torch.ones(2))) == []
    assert check_truncation(guide, Y).is_trusted
