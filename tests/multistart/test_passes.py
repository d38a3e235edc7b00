"""Networks are trained in parts of the data, begin as linear models, and agree by what their latents are on for."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_truncated import LearnConfig, learn
from pyro_truncated.datasets import bar_components, matched_bars
from pyro_truncated.distributed import shard
from pyro_truncated.models import BinarySparseCoding, BinaryVAE
from pyro_truncated.multistart.model_parameters import is_a_network
from pyro_truncated.multistart.profile import profile_model
from pyro_truncated.multistart.solution import share_most
from pyro_truncated.multistart.trainer import Trainer, run_restart
from pyro_truncated.search import EvolutionarySearch, Search, SurrogateSearch

NUM_DATA, NUM_OBSERVED, NUM_LATENTS = 450, 6, 4


def data() -> Tensor:
    return torch.randn(NUM_DATA, NUM_OBSERVED, generator=torch.Generator().manual_seed(0))


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(NUM_LATENTS, 8), torch.nn.Tanh(), torch.nn.Linear(8, NUM_OBSERVED))


def program(decode: torch.nn.Module, beside: Tensor | None = None, is_shared: bool = False):
    """Binary latents under a network, with numbers of the rows beside them or shared by all rows."""

    def model(y: Tensor) -> None:
        net = pyro.module("net", decode)
        prior = dist.Bernoulli(torch.full((NUM_LATENTS,), 0.3)).to_event(1)
        if is_shared:
            s = pyro.sample("s", prior)
        with pyro.plate("data", len(y)):
            if not is_shared:
                s = pyro.sample("s", prior)
            pyro.sample("y", dist.Normal(net(s) + (0.0 if beside is None else beside), 1.0).to_event(1), obs=y)

    return model


def test_a_pass_takes_a_step_for_each_part_and_its_loss_is_that_of_all_data():
    """All 16 states are there, so that the loss is minus the log evidence; at a rate of nearly zero no step changes it."""
    y, model = data(), BinaryVAE(NUM_OBSERVED, NUM_LATENTS, hidden=(8,))
    run = Trainer(profile_model(model, y, num_states=16, config=LearnConfig(lr=1e-9)))
    value = run.step()
    run.end()
    assert run.truncated is not None
    each = run.truncated.population().free_energy()
    assert value == pytest.approx(float(each.mean()), rel=1e-5)
    # Every data point has its own population: rows of a part lie three apart.
    with torch.no_grad():
        exact = run.truncated.posterior(y).free_energy()
    torch.testing.assert_close(each, exact, rtol=1e-5, atol=0)


def test_what_all_data_had_is_begun_with_and_what_parts_have_found_is_kept():
    y, model = data(), BinaryVAE(NUM_OBSERVED, 12, hidden=(8,))
    run = Trainer(profile_model(model, y, None, num_states=8, config=LearnConfig(lr=1e-9)))
    before = run.truncated.refresh_(y).free_energy()
    run.step()
    run.end()
    gained = run.truncated.population().free_energy() - before
    assert float(gained.min()) > -1e-3
    assert float((gained > 1e-3).float().mean()) > 0.9


def in_parts(model, y: Tensor, search: Search | None = None) -> bool:
    pyro.clear_param_store()
    return Trainer(profile_model(model, y, search, num_states=4)).is_in_parts


@pytest.mark.slow
def test_only_networks_of_which_some_rows_can_be_taken_are_trained_in_parts():
    y = data()
    assert in_parts(program(network()), y)
    assert in_parts(program(network()), shard(y))
    assert in_parts(program(network(), torch.ones(NUM_OBSERVED)), y)
    assert not in_parts(program(network()), y[:299])
    assert not in_parts(program(network(), torch.ones(NUM_DATA, NUM_OBSERVED)), y)
    assert not in_parts(program(network(), is_shared=True), y)
    assert not in_parts(program(torch.nn.Linear(NUM_LATENTS, NUM_OBSERVED)), y)
    assert not in_parts(BinarySparseCoding(NUM_OBSERVED, NUM_LATENTS).initialize(y), y)


def test_searches_that_may_remember_data_points_see_all_of_them():
    assert in_parts(program(network()), data(), EvolutionarySearch())
    assert not in_parts(program(network()), data(), SurrogateSearch())


def changed(kind: str):
    """A network whose data points are not what they are among others if only some of them are given, or that holds more than these."""
    decode, covariates = network(), torch.randn(NUM_DATA, NUM_OBSERVED, generator=torch.Generator().manual_seed(1))

    def model(y: Tensor) -> None:
        net = pyro.module("net", decode)
        if kind == "size":
            assert len(y) == NUM_DATA
        if kind == "outside":
            pyro.factor("small weights", -decode[0].weight.square().sum())
        with pyro.plate("data", len(y)) as index:
            if kind == "counts":
                s = pyro.sample("s", dist.Binomial(y[:, :1].abs().ceil().clamp(max=3.0).expand(-1, NUM_LATENTS), 0.5).to_event(1))
            else:
                s = pyro.sample("s", dist.Bernoulli(torch.full((NUM_LATENTS,), 0.3)).to_event(1))
            loc = net(s)
            if kind == "index":
                loc = loc + covariates[index]
            elif kind == "neighbours":
                loc = loc + torch.cat([torch.zeros(1, NUM_OBSERVED), y[:-1]])
            elif kind == "mean":
                loc = loc + y.mean(0)
            pyro.sample("y", dist.Normal(loc, 1.0).to_event(1), obs=y)

    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["index", "neighbours", "mean", "outside", "size"])
def test_programs_in_which_parts_would_be_something_else_are_trained_on_all_rows_at_once(kind):
    assert in_parts(changed("none"), data())
    assert not in_parts(changed(kind), data())


@pytest.mark.slow
def test_counts_whose_bound_is_that_of_all_rows_are_not_divided():
    y = data().clamp(-1.0, 1.0)
    assert in_parts(changed("counts"), y)
    y[3, 0] = 3.0
    assert not in_parts(changed("counts"), y)


def test_data_points_of_different_parts_get_different_random_numbers():
    run = Trainer(profile_model(BinaryVAE(NUM_OBSERVED, 12, hidden=(8,)), data(), num_states=8))
    seeds = [guide.populations.seed for guide in run._parts._guides]
    assert len({*seeds, run.truncated.populations.seed}) == 4


def test_layers_on_top_of_each_other_are_a_network():
    y = data()
    for decode, expected in ((network(), True), (torch.nn.Linear(NUM_LATENTS, NUM_OBSERVED), False)):
        pyro.clear_param_store()
        assert is_a_network(program(decode), y) == expected
        assert is_a_network(BinaryVAE(NUM_OBSERVED, NUM_LATENTS, decoder=decode), y) == expected


@pytest.mark.nightly
def test_training_in_parts_ends_where_the_gradient_of_all_data_is_zero():
    """Two parts of the rows are at 1, one is at 10: clipped gradients of parts end near 1, unclipped ones at the mean."""
    y = torch.ones(NUM_DATA, 1)
    y[::3] = 10.0
    decode = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    with torch.no_grad():
        for layer in decode:
            layer.weight.zero_()
            layer.bias.zero_()

    def model(rows: Tensor) -> None:
        net = pyro.module("net", decode)
        with pyro.plate("data", len(rows)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((1,), 0.5)).to_event(1))
            pyro.sample("y", dist.Normal(net(0.0 * s), 1.0).to_event(1), obs=rows)

    run = Trainer(profile_model(model, y, None, num_states=2, config=LearnConfig(lr=1.0)).with_decay(300, 1e-3))
    for _ in range(300):
        run.step()
    assert run.is_in_parts
    assert float(decode(torch.zeros(1, 1)).detach()) == pytest.approx(4.0, abs=0.1)


def test_latents_are_the_same_in_any_order_and_turned_round():
    on = (torch.rand(500, 10, generator=torch.Generator().manual_seed(0)) < 0.3).double()
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    other = on[:, order]
    other[:, 3] = 1 - other[:, 3]
    assert share_most(on, other, 0.0)
    other[:, 7] = other[:, 7].roll(1)
    assert not share_most(on, other, 0.0)
    assert share_most(on, other, 0.1)
    other[:, 8] = other[:, 8].roll(1)
    assert not share_most(on, other, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "is_code"), [(0.3, True), (1e-12, False)])
def test_latents_that_are_never_on_are_no_code_that_starts_could_agree_on(rate, is_code):
    pyro.clear_param_store()

    def model(y: Tensor) -> None:
        net = pyro.module("net", decode)
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((NUM_LATENTS,), rate)).to_event(1))
            pyro.sample("y", dist.Normal(net(s), 1.0).to_event(1), obs=y)

    decode, y = network(), data()
    found = run_restart(profile_model(model, y, num_states=16, config=LearnConfig(restart_steps=1)), 1.0)
    assert (found.probabilities is not None) == is_code


def sums_of_bars(seed: int, number: int = 300, largest: float = math.inf) -> tuple[Tensor, Tensor]:
    """Eight bars on 4x4 pixels, two of them on average, no brighter than ``largest`` where they cross."""
    generator = torch.Generator().manual_seed(seed)
    bars = bar_components(4)
    on = (torch.rand(number, 8, generator=generator) < 0.25).float()
    means = 5 * (on @ (bars / bars.max()).mT).clamp(max=largest)
    return means + 0.5 * torch.randn(means.shape, generator=generator), bars


@pytest.mark.nightly
def test_a_start_is_the_linear_model_that_explains_the_data_and_a_seed_repeats_it():
    pyro.clear_param_store()
    y, bars = sums_of_bars(0)
    model, weights = BinaryVAE(16, 8, hidden=(32,)), []
    for seed in (1, 1, 2):
        assert model.draw_start(y, torch.Generator().manual_seed(seed)) is model
        weights.append(model.decoder[0].weight.detach().clone())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    with torch.no_grad():
        single = (model.mean(torch.eye(8)) - model.mean(torch.zeros(1, 8))).mT
        pairs = torch.combinations(torch.arange(8))
        both = model.mean(torch.eye(8)[pairs].sum(1)) - model.mean(torch.zeros(1, 8))
    assert matched_bars(single, bars) == 8
    # What two latents add is the sum of what each does: bars, which are five bright.
    assert float((both - single.mT[pairs].sum(1)).square().mean().sqrt()) < 0.25
    assert not len(pyro.get_param_store())
    assert all(value.grad is None for value in model.parameters())


@pytest.mark.nightly
def test_a_start_leaves_layers_alone_that_take_no_gradients_and_refuses_bad_data_before_it_changes_any():
    y, _ = sums_of_bars(0, number=40)
    decode = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 16).requires_grad_(False)).eval()
    model = BinaryVAE(16, 8, decoder=decode)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"y must have shape \(N, 16\)"):
        model.draw_start(y[:, :3])
    with pytest.raises(ValueError, match="y"):
        model.draw_start(y.clone().fill_(math.inf))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.draw_start(y)
    assert torch.equal(decode[1].weight, before["decoder.1.weight"])
    assert not torch.equal(decode[0].weight, before["decoder.0.weight"])
    # A network that nothing changes is not asked to be linear: prior and noise are those of `initialize`.
    decode.requires_grad_(False)
    fixed, prior, scale = decode[0].weight.clone(), model.initialize(y).prior.detach().clone(), model.scale.detach().clone()
    model.draw_start(y)
    assert torch.equal(decode[0].weight, fixed)
    assert torch.equal(model.prior, prior)
    assert torch.equal(model.scale, scale)


@pytest.mark.nightly
@pytest.mark.parametrize("share_missing", [0.0, 0.2])
def test_bars_under_a_network_are_all_found_in_silence(recwarn, share_missing):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    y, bars = sums_of_bars(3, number=600, largest=1.0)
    y[torch.rand(y.shape) < share_missing] = torch.nan
    model = BinaryVAE(16, 8, hidden=(32,))
    guide = learn(model, y, num_states=32, progress=False)
    assert len(guide.starts) == 2
    assert not [warning for warning in recwarn if "starts" in str(warning.message)]
    with torch.no_grad():
        assert matched_bars((model.mean(torch.eye(8)) - model.mean(torch.zeros(1, 8))).mT, bars) == 8
