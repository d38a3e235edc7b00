"""Counts are whole numbers of any integer type, and nothing else; empty data and impossible numbers are named."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_truncated import AutoTruncated, EvolutionarySearch, ExhaustiveSearch, StateSpace, Truncated_ELBO
from pyro_truncated import models as library
from pyro_truncated.scenes.occlusion import OccludedScene
from pyro_truncated.utils.arguments import check_count
from pyro_truncated.utils.console import readable_count
from tests import zoo


@pytest.mark.parametrize("two", [2, np.int64(2), np.uint8(2), np.int32(2), torch.tensor(2)])
def test_whatever_is_an_integer_is_a_count(two):
    found = check_count("n", two)
    assert found == 2
    assert type(found) is int
    assert StateSpace([two, 2]).cardinalities == (2, 2)


@pytest.mark.parametrize("value", [0, -1, 2.0, 2.7, True, "2", None, np.float64(2), torch.tensor(2.0), torch.tensor(True), np.bool_(True)])
def test_nothing_else_is(value):
    with pytest.raises(ValueError, match="num_states must be a positive integer; got "):
        AutoTruncated(zoo.binary().model, value)


def test_counts_may_have_another_least_value():
    assert check_count("n", 0, 0) == 0
    with pytest.raises(ValueError, match="num_samples must be an integer of at least 25; got 24"):
        check_count("num_samples", 24, 25)


def model(y, positions=None, size=None):
    with pyro.plate("data", len(y) if size is None else size, subsample=positions):
        s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.3)).to_event(1))
        pyro.sample("y", dist.Normal(s.sum(-1), 1.0), obs=y)


def test_no_data_points_are_named():
    with pytest.raises(ValueError, match=r"a plate has no members: no data points \(N = 0\), or an empty minibatch"):
        AutoTruncated(model, 2)(torch.zeros(0))
    guide = AutoTruncated(model, 2)
    guide(torch.zeros(3))
    with pytest.raises(ValueError, match="an empty minibatch"):
        guide(torch.zeros(0), torch.zeros(0, dtype=torch.long), 3)
    for family in (library.BinarySparseCoding, library.GaussianMixture, library.PoissonMixture, library.NoisyOr):
        with pytest.raises(ValueError, match=r"y must have shape \(N, 3\) with N > 0"):
            family(3, 2).initialize(torch.zeros(0, 3))


def test_an_activity_beyond_the_number_of_latents():
    guide = AutoTruncated(model, 4)
    search = EvolutionarySearch(2, 2, mutation="sparseflips", target_activity=3.5)
    with pytest.raises(ValueError, match=r"must not exceed the number of binary latents, 3; got 3\.5"):
        Truncated_ELBO(search).loss_and_grads(model, guide, torch.ones(4))
    Truncated_ELBO(EvolutionarySearch(2, 2, mutation="sparseflips", target_activity=3.0)).loss_and_grads(model, guide, torch.ones(4))


@pytest.mark.parametrize("code", [10**9, 2, -1])
def test_an_order_that_is_none(code):
    def scene(order):
        return OccludedScene(
            torch.ones(1, 2), torch.tensor([[0, 3]]), torch.rand(2, 2, 2, 1), torch.full((2, 2, 2), 0.5), 0.3, torch.zeros(1), 0.2, (4, 4),
            order=torch.tensor([order]), validate_args=False,
        )  # fmt: skip

    image = torch.rand(1, 4, 4, 1)
    assert bool(scene([0, 1]).log_prob(image).isfinite())
    with pytest.raises(ValueError, match=rf"codes of a depth order of 2 objects must lie in 0 \.\. 1; got .*{code}"):
        scene([0, code]).log_prob(image)


@pytest.mark.parametrize("event", [False, True])
def test_one_total_count_with_logits_of_each_data_point_in_minibatches(event):
    logits, y = torch.randn(6, 2), torch.randn(6, 2)

    def model(total, batch_size=None):
        with pyro.plate("data", 6, subsample_size=batch_size) as i:
            if event:
                n = pyro.sample("n", dist.Binomial(total, logits=logits[i]).to_event(1))
                pyro.sample("y", dist.Normal(n, 1.0).to_event(1), obs=y[i])
            else:
                n = pyro.sample("n", dist.Binomial(total if isinstance(total, int) else total[i], logits=logits[i, 0]))
                pyro.sample("y", dist.Normal(n, 1.0), obs=y[i, 0])

    def losses(guide):
        elbo = Truncated_ELBO(ExhaustiveSearch())
        elbo.loss_and_grads(model, guide, 3, 2)
        return elbo.loss_and_grads(model, guide, 3)

    whole = AutoTruncated(model, 16 if event else 4)
    whole.setup(3)
    assert losses(AutoTruncated(model, 16 if event else 4)) == pytest.approx(losses(whole), rel=1e-6)
    if not event:
        with pytest.raises(ValueError, match=r"may differ between data points, .* Call the guide, or its whole list, once"):
            AutoTruncated(model, 2)(torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 3.0]), 2)


def test_counts_of_more_digits_than_python_prints_have_an_order_of_magnitude():
    assert readable_count(3**20000) == "about 10^9542"
    assert readable_count(10**7) == "about 10^7"
