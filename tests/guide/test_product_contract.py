"""What users do to any guide, done to guides with a set of states for each node of the factor graph."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Predictive, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from pyro.ops.indexing import Vindex
from pyro.optim import Adam
from torch import nn

from pyro_truncated import AutoTruncated, EvolutionarySearch, LearnConfig, Truncated_ELBO, check_truncation, fit, learn

NUM_STEPS, NUM_VALUES = 9, 5
TRANSITION = (torch.eye(NUM_VALUES, dtype=torch.float64) + 0.2) / 2.0


def chain(y):
    """Sequences of five values, whose centres are parameters."""
    loc = pyro.param("loc", lambda: torch.linspace(-2, 2, NUM_VALUES, dtype=torch.float64))
    emit(y, loc)


def chain_with_prior(y):
    """The same, whose centres are latents."""
    emit(y, pyro.sample("loc", dist.Normal(torch.linspace(-2, 2, NUM_VALUES, dtype=torch.float64), 1.0).to_event(1)))


def emit(y, loc):
    with pyro.plate("data", len(y)):
        z = torch.tensor(2)
        for t in pyro.markov(range(NUM_STEPS)):
            z = pyro.sample(f"z_{t}", dist.Categorical(Vindex(TRANSITION)[..., z, :]))
            pyro.sample(f"y_{t}", dist.Normal(Vindex(loc)[..., z], 0.7), obs=y[:, t])


@pytest.fixture
def y():
    return torch.randn(6, NUM_STEPS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def fresh(num_states=3):
    return AutoTruncated(chain, num_states=num_states)


def trained(y, steps=3, num_states=3):
    guide = fresh(num_states)
    svi = SVI(chain, guide, Adam({"lr": 0.02}), Truncated_ELBO())
    for _ in range(steps):
        svi.step(y)
    assert guide.product is not None
    return guide, svi


def assert_same_marginals(one, other):
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-12, atol=1e-12)


def test_sets_of_a_scorer_are_searched_and_scored_as_those_of_a_batch(y):
    guide, _ = trained(y)
    twin, scorer = copy.deepcopy(guide), guide.make_scorer(y)
    guide.search_(EvolutionarySearch(), scorer)
    twin.make_batch(y).search_(EvolutionarySearch())
    assert_same_marginals(guide.marginals(), twin.marginals())
    for one, other in zip(guide.rescore(scorer), twin.make_batch(y).rescore(), strict=True):
        torch.testing.assert_close(one.log_joint, other.log_joint, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_copy_reads_the_same_and_trains_on(y):
    guide, _ = trained(y)
    twin = copy.deepcopy(guide)
    assert_same_marginals(guide.marginals(), twin.marginals())
    before = {name: value.clone() for name, value in guide.marginals().items()}
    losses = [SVI(chain, twin, Adam({"lr": 0.0}), Truncated_ELBO()).step(y) for _ in range(3)]
    assert losses[-1] <= losses[0] + 1e-9
    assert_same_marginals(before, guide.marginals())


@pytest.mark.slow
def test_a_pickled_guide_holds_its_sets(y):
    guide, _ = trained(y)
    back = pickle.loads(pickle.dumps(guide))
    for one, other in zip(guide.populations.stores, back.populations.stores, strict=True):
        assert torch.equal(one.words, other.words)


@pytest.mark.slow
def test_a_loaded_guide_asks_for_its_model_first(y):
    guide, _ = trained(y)
    file = io.BytesIO()
    torch.save(guide.state_dict(), file)
    file.seek(0)
    other = fresh()
    other.load_state_dict(torch.load(file))
    for read in (other.marginals, other.mode, other.population):
        with pytest.raises(RuntimeError, match="with the model's arguments"):
            read()
    other(y)
    assert_same_marginals(guide.marginals(), other.marginals())


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_not_ended(y, tmp_path):
    def run(steps, checkpoint):
        pyro.set_rng_seed(1)
        guide = fresh()
        svi = SVI(chain, guide, Adam({"lr": 0.02}), Truncated_ELBO())
        fit(svi, y, steps=steps, checkpoint=checkpoint, progress=False)
        return guide.marginals(), pyro.param("loc").detach().clone()

    expected, loc = run(6, tmp_path / "whole.pt")
    pyro.clear_param_store()
    run(3, tmp_path / "part.pt")
    pyro.clear_param_store()
    found, resumed = run(6, tmp_path / "part.pt")
    torch.testing.assert_close(resumed, loc, rtol=0, atol=0)
    assert_same_marginals(expected, found)


@pytest.mark.nightly
def test_predictions_draw_paths_from_the_posterior(y):
    """The share of each value lies within five standard errors of its probability: false alarms below one in ten thousand."""
    guide, _ = trained(y, num_states=NUM_VALUES)
    draws = Predictive(chain, guide=guide, num_samples=2000)(y)["z_4"]
    share = torch.nn.functional.one_hot(draws.reshape(2000, 6), NUM_VALUES).double().mean(0)
    probs = guide.marginals()["z_4"]
    assert bool(((share - probs).abs() < 5 * (probs * (1 - probs) / 2000).sqrt() + 1e-3).all())


@pytest.mark.parametrize("vectorize", [False, True])
def test_particles_beside_a_point_estimate_equal_enumeration(y, vectorize):
    guide = AutoGuideList(chain_with_prior)
    guide.append(AutoDelta(poutine.block(chain_with_prior, expose=["loc"])))
    guide.append(AutoTruncated(chain_with_prior, num_states=NUM_VALUES))
    elbo = Truncated_ELBO(num_particles=3, vectorize_particles=vectorize)
    loss = SVI(chain_with_prior, guide, Adam({"lr": 0.0}), elbo).evaluate_loss(y)
    stock = TraceEnum_ELBO(max_plate_nesting=1).loss(config_enumerate(chain_with_prior), guide[0], y)
    assert loss == pytest.approx(stock, rel=1e-9)


@pytest.mark.slow
def test_learn_and_check_beside_a_normal_guide(y):
    guide = AutoGuideList(chain_with_prior)
    guide.append(AutoNormal(poutine.block(chain_with_prior, expose=["loc"])))
    guide.append(AutoTruncated(chain_with_prior, num_states=NUM_VALUES))
    svi = SVI(chain_with_prior, guide, Adam({"lr": 0.05}), Truncated_ELBO())
    losses = [svi.step(y) for _ in range(30)]
    assert sum(losses[-10:]) < sum(losses[:10])
    report = check_truncation(guide, y)
    assert report.is_trusted
    torch.testing.assert_close(report.certified, report.free_energy, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_learn_ends_no_lower_than_where_it_started(y):
    stock = -TraceEnum_ELBO(max_plate_nesting=1).loss(config_enumerate(chain), lambda y: None, y)
    guide = learn(chain, y, num_states=NUM_VALUES, steps=40, restarts=2, progress=False)
    assert float(guide.population().free_energy().sum()) > stock
    report = guide.learn_report
    assert [restart.free_energy for restart in report.restarts] == guide.starts
    assert report.steps == guide.steps == 40


def levels(y):
    """A hidden Markov model of two levels that begin near each other."""
    loc = pyro.param("loc", lambda: torch.tensor([0.0, 1.0]))
    scale = pyro.param("scale", torch.tensor(1.0), constraint=dist.constraints.positive)
    stay, state = torch.tensor([[0.9, 0.1], [0.1, 0.9]]), 0
    for t in pyro.markov(range(len(y))):
        state = pyro.sample(f"z_{t}", dist.Categorical(stay[state]))
        pyro.sample(f"y_{t}", dist.Normal(loc[state], scale), obs=y[t])


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::pyro_truncated.DisagreeingStartsWarning")
def test_restarts_converge_before_they_are_compared():
    """A plain run from the levels of the data ends no higher, by more than the tolerance of half a nat."""
    generator = torch.Generator().manual_seed(0)
    y = torch.tensor([-2.0, 2.0]).repeat_interleave(5) + 0.5 * torch.randn(10, generator=generator)
    guide = learn(levels, y, restarts=3, config=LearnConfig(restart_steps=10), progress=False, generator=generator)
    report = guide.learn_report
    assert max(restart.steps for restart in report.restarts) > 10
    best = -Truncated_ELBO().loss(levels, guide, y)
    pyro.get_param_store()["loc"] = torch.tensor([-2.0, 2.0])
    pyro.get_param_store()["scale"] = torch.tensor(0.5)
    svi = SVI(levels, other := AutoTruncated(levels, num_states=2), Adam({"lr": 0.02}), Truncated_ELBO())
    for _ in range(100):
        svi.step(y)
    assert best > -Truncated_ELBO().loss(levels, other, y) - 0.5


NETWORK = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def decoded(y):
    """A chain in a plate, whose states a network decodes."""
    network = pyro.module("network", NETWORK)
    with pyro.plate("data", len(y)):
        state = 0
        for t in pyro.markov(range(2)):
            state = pyro.sample(f"z_{t}", dist.Categorical(torch.tensor([[0.8, 0.2], [0.3, 0.7]])[state]))
            mean = network(nn.functional.one_hot(state.long(), 2).float()).squeeze(-1)
            pyro.sample(f"y_{t}", dist.Normal(mean, 1.0), obs=y[:, t])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pyro_truncated.DisagreeingStartsWarning")
def test_learn_takes_networks_of_many_rows_on_product_sets():
    torch.manual_seed(0)
    y = torch.randn(320, 2)
    guide = learn(decoded, y, num_states=2, restarts=2, config=LearnConfig(restart_steps=2), steps=2, progress=False)
    assert guide.learn_report.steps == 2
    assert all(math.isfinite(restart.free_energy) for restart in guide.learn_report.restarts)


@pytest.mark.slow
def test_whole_states_are_refused_with_advice(y):
    guide, _ = trained(y)
    for read in (guide.weights, guide.states, lambda: guide.expectation(lambda states: states)):
        with pytest.raises(NotImplementedError, match="whole_states=True"):
            read()
    with pytest.raises(AttributeError, match="whole_states=True"):
        _ = guide.population().words


def test_lists_of_whole_states_are_refused_where_there_are_none(y):
    guide, _ = trained(y)
    for name in ("words", "log_joint"):
        with pytest.raises(NotImplementedError, match="each node"):
            getattr(guide, name)


def test_a_state_of_sets_is_refused_by_a_guide_of_whole_states(y):
    guide, _ = trained(y)
    other = AutoTruncated(chain, num_states=3, whole_states=True)
    other.load_state_dict(guide.state_dict())
    with pytest.raises(
        ValueError, match="the saved populations are sets of states of the nodes of a factor graph; this guide keeps whole states"
    ):
        other(y)
