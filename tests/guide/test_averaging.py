"""Beside guides of other latents, what a guide says of its states is the average over draws of these."""

from __future__ import annotations

import copy
import pickle
import warnings

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, ExhaustiveSearch, OneDrawWarning, Truncated_ELBO

RATE = torch.tensor([0.3, 0.4])
STATES = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
NUM_DRAWS = 200


def model(y, batch_size=None, positions=None, size=None):
    mean = pyro.sample("mean", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    with pyro.plate("data", size or len(y), subsample_size=batch_size, subsample=positions) as index:
        s = pyro.sample("s", dist.Bernoulli(RATE).to_event(1))
        pyro.sample("y", dist.Normal((s * mean).sum(-1), 1.0), obs=y if positions is not None else y[index])


def with_local_latents(y, batch_size=None):
    with pyro.plate("data", len(y), subsample_size=batch_size) as index:
        mean = pyro.sample("mean", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        s = pyro.sample("s", dist.Bernoulli(RATE).to_event(1))
        pyro.sample("y", dist.Normal((s * mean).sum(-1), 1.0), obs=y[index])


def guide_of(model, scale=0.7, kind=AutoNormal, **options):
    guide = AutoGuideList(model, **options)
    part = poutine.block(model, expose=["mean"])
    guide.append(kind(part, init_scale=scale) if kind is AutoNormal else kind(part))
    guide.append(AutoTruncated(model, 4))
    return guide


def step(model, guide, *args):
    return SVI(model, guide, Adam({"lr": 0.0}), Truncated_ELBO(ExhaustiveSearch())).step(*args)


def expected_weights(guide, y, num_draws=20_000):
    """Weights ``(N, 4)`` of the states averaged over draws of the normal guide, by brute force, and what they may differ by.

    That is six standard errors, and so a false alarm has a probability of about 2e-9 per number.
    """
    loc, scale = guide[0].locs.mean.detach(), guide[0].scales.mean.detach()
    total, squares = torch.zeros(2, len(y), 4)
    for _ in range(10):
        mean = loc + scale * torch.randn(num_draws // 10, *loc.shape)
        predicted = mean @ STATES.mT
        predicted = predicted.unsqueeze(1) if predicted.dim() == 2 else predicted
        scores = dist.Bernoulli(RATE).log_prob(STATES).sum(-1) + dist.Normal(predicted, 1.0).log_prob(y[:, None])
        weights = scores.softmax(-1)
        total += weights.mean(0) / 10
        squares += weights.square().mean(0) / 10
    error = (squares - total.square()).sqrt() * (1 / NUM_DRAWS + 1 / num_draws) ** 0.5
    return total, 6 * error


def assert_averages(weights, guide, y):
    expected, error = expected_weights(guide, y)
    assert bool(((weights_by_state(guide[-1], weights) - expected).abs() <= error).all())


def weights_by_state(part, weights):
    """Weights in the order of ``STATES``."""
    number = (part.states()["s"] @ torch.tensor([2.0, 1.0])).long()
    return torch.zeros_like(weights).scatter(1, number, weights)


@pytest.fixture
def y():
    return 1.5 * torch.randn(7)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize(("program", "batch_size"), [(model, None), (model, 3), (with_local_latents, 3)])
def test_weights_are_averages_over_draws(program, batch_size, y):
    guide = guide_of(program)
    for _ in range(20):
        step(program, guide, y, batch_size)
    guide[-1].num_draws = NUM_DRAWS
    with pytest.raises(AssertionError):
        assert_averages(guide[-1].population().weights(), guide, y)
    assert_averages(guide[-1].weights(), guide, y)


@pytest.mark.slow
def test_everything_that_is_read_is_that_of_the_averaged_weights(y):
    guide = guide_of(model)
    step(model, guide, y)
    part, some = guide[-1], torch.tensor([5, 1])
    part.num_draws = 10
    average = weights_by_state(part, part.weights())
    torch.testing.assert_close(part.marginals()["s"], average @ STATES)
    torch.testing.assert_close(part.marginals(some)["s"], average[some] @ STATES)
    assert torch.equal(part.mode()["s"], STATES[average.argmax(-1)])
    torch.testing.assert_close(part.expectation(lambda values: values["s"].prod(-1)), average[:, 3])
    frequency = part.sample_posterior(4000)["s"].mean(0)
    torch.testing.assert_close(frequency, average @ STATES, atol=6 * 0.5 / 4000**0.5, rtol=0)


@pytest.mark.nightly
def test_refreshed_populations_are_averages_and_keep_the_mean_free_energy(y):
    guide = guide_of(model)
    step(model, guide, y)
    part = guide[-1]
    part.num_draws = NUM_DRAWS
    population = part.refresh_(y)
    averages = population.weights()
    assert_averages(averages, guide, y)
    assert torch.equal(part.weights(), averages)
    single = torch.stack([part.posterior(y).free_energy() for _ in range(NUM_DRAWS)])
    error = 6 * single.std(0) * (2 / NUM_DRAWS) ** 0.5
    assert bool(((population.free_energy() - single.mean(0)).abs() < error).all())
    step(model, guide, y)
    assert not torch.equal(part.population().weights(), averages)
    assert_averages(part.weights(), guide, y)


@pytest.mark.slow
def test_reading_uses_up_no_random_numbers_and_changes_nothing(y):
    guide = guide_of(model)
    step(model, guide, y)
    part = guide[-1]
    before, stored = torch.get_rng_state(), part.log_joint.clone()
    first, second = part.weights(), part.weights()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second)
    assert torch.equal(part.log_joint, stored)


def test_points_need_one_draw(y):
    runs = []

    def counted(*args):
        runs.append(1)
        model(*args)

    guide = guide_of(counted, kind=AutoDelta)
    step(counted, guide, y)
    part = guide[-1]
    runs.clear()
    assert torch.allclose(part.weights(), part.population().weights())
    # Some of them only as far as the plates.
    assert 0 < len(runs) < 8


@pytest.mark.nightly
def test_minibatches_out_of_reach_are_said_to_be_of_one_draw(y):
    def create_plates(y, batch_size, positions, size):
        return pyro.plate("data", size, subsample=positions)

    guide = guide_of(model, create_plates=create_plates)
    batches = torch.arange(7).split(3)
    for positions in batches:
        step(model, guide, y[positions], None, positions, 7)
    part = guide[-1]
    with pytest.warns(OneDrawWarning, match=r"posteriors of 6 data points are those given one draw of the latents \['mean'\]"):
        part.marginals()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        part.marginals(batches[-1])
    part.num_draws = NUM_DRAWS
    for positions in batches:
        part.refresh_(y[positions], None, positions, 7)
    assert_averages(part.weights(), guide, y)


def test_a_guide_alone_reads_what_is_stored(y):
    def alone(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(RATE).to_event(1))
            pyro.sample("y", dist.Normal(s.sum(-1), 1.0), obs=y)

    guide = AutoTruncated(alone, 4)
    step(alone, guide, y)
    assert torch.equal(guide.weights(), guide.population().weights())


def test_copies_share_the_data_and_pickles_have_none(y):
    guide = guide_of(model)
    step(model, guide, y)
    duplicate, loaded = copy.deepcopy(guide[-1]), pickle.loads(pickle.dumps(guide[-1]))
    assert duplicate._last_call.args[0] is y
    assert loaded._last_call is None
    for one in (duplicate, loaded):
        assert torch.equal(one.population().weights(), guide[-1].population().weights())
