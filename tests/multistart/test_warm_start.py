"""Networks of a user's own begin with the causes that a linear model finds in what they decode."""

from __future__ import annotations

import itertools
import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_truncated import AutoTruncated, LearnConfig, learn
from pyro_truncated.datasets import linear_bars
from pyro_truncated.em.closed_form import ClosedFormModel
from pyro_truncated.models import BinaryVAE
from pyro_truncated.multistart import DisagreeingStartsWarning, multi_start
from pyro_truncated.multistart.decoders import LinearCauses, decoder_targets
from pyro_truncated.multistart.model_parameters import ModelParameters
from pyro_truncated.multistart.profile import profile_model
from pyro_truncated.multistart.solution import FreeEnergyEstimate, share_most
from pyro_truncated.multistart.trainer import Trainer, fit_states, run_restart
from pyro_truncated.states.space import StateSpace
from tests.multistart.scripted import disagreement, ended, scripted_restarts

NUM_LATENTS, NUM_OBSERVED = 4, 6


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def perceptron(num_latents: int = NUM_LATENTS, width: int = 8, num_observed: int = NUM_OBSERVED) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(num_latents, width), torch.nn.Tanh(), torch.nn.Linear(width, num_observed))


def behind(network: torch.nn.Module, kind: str = "normal", rate: float = 0.3):
    """Binary latents under a network, or something that differs from that in one respect."""
    num_latents = next(network.parameters()).shape[1]

    def model(y: Tensor) -> None:
        decode = pyro.module("network", network)
        probs = torch.full((num_latents,), rate)
        if kind == "shared":
            s = pyro.sample("s", dist.Bernoulli(probs).to_event(1))
        with pyro.plate("data", len(y)):
            if kind == "counts of latents":
                s = pyro.sample("s", dist.Binomial(2, probs).to_event(1))
            elif kind == "two sites":
                s = torch.cat([pyro.sample(name, dist.Bernoulli(probs[:2]).to_event(1)) for name in "ab"], -1)
            elif kind != "shared":
                s = pyro.sample("s", dist.Bernoulli(probs).to_event(1))
            loc = decode(s)
            if kind == "continuous beside":
                loc = loc + pyro.sample("x", dist.Normal(torch.zeros(()), 1.0)).unsqueeze(-1)
            noise = pyro.param("noise", torch.tensor(1.0), constraint=dist.constraints.positive)
            likelihood = dist.Poisson(loc.exp()) if kind == "counts" else dist.Normal(loc, noise)
            if kind == "masked":
                likelihood = likelihood.mask(y > 0)
            pyro.sample("y", likelihood.to_event(1), obs=y)

    return model


class Frozen(torch.nn.Module):
    """The same in a class, with layers that may be frozen."""

    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        self.network = perceptron().requires_grad_(not is_frozen)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((NUM_LATENTS,), 0.3)).to_event(1))
            pyro.sample("y", dist.Normal(self.network(s), self.scale.exp()).to_event(1), obs=y)


def data(number: int = 40) -> Tensor:
    return 3 + 2 * torch.randn(number, NUM_OBSERVED, generator=generator())


@pytest.mark.parametrize("make", [lambda: behind(perceptron()), lambda: Frozen(is_frozen=False)])
def test_what_a_network_decodes_states_into_is_given_in_units_of_its_deviation(make):
    y = data()
    values = decoder_targets(profile_model(make(), y, num_states=4))
    torch.testing.assert_close(values.mean(0), torch.zeros(NUM_OBSERVED), rtol=0, atol=1e-5)
    assert float(values.std(correction=0)) == pytest.approx(1.0)
    ratio = (y - y.mean(0)) / values
    torch.testing.assert_close(ratio, ratio[0, 0].expand_as(ratio), rtol=1e-3, atol=0)


KINDS = ["counts", "counts of latents", "two sites", "continuous beside", "shared", "masked"]


@pytest.mark.parametrize("kind", [*KINDS, "one layer", "frozen", "draws its starts", "nothing varies"])
def test_all_other_models_begin_as_before(kind):
    y = data().clamp(min=0.0).round() if kind == "counts" else data()
    if kind == "nothing varies":
        y = torch.ones_like(y)
    models = {
        "one layer": lambda: behind(torch.nn.Linear(NUM_LATENTS, NUM_OBSERVED)),
        "frozen": lambda: Frozen(is_frozen=True),
        "draws its starts": lambda: BinaryVAE(NUM_OBSERVED, NUM_LATENTS, hidden=(8,)),
    }
    make = models.get(kind, lambda: behind(perceptron(), kind))
    assert decoder_targets(profile_model(make(), y, num_states=4)) is None


def test_the_linear_model_is_what_starts_need_and_its_m_step_is_least_squares():
    """Of states that are known, with an offset."""
    y, model = data(50), LinearCauses(NUM_OBSERVED, 3)
    assert isinstance(model, ClosedFormModel)
    assert profile_model(model, y).is_resizable
    guide = AutoTruncated(model, num_states=1)
    guide.setup(y)
    states = (torch.rand(50, 1, 3, generator=generator()) < 0.4).long()
    guide.populations.store_(torch.zeros(50, 1), None, guide.space.pack(states))
    model.maximize({"num_data": torch.tensor(50.0).double(), **model.sufficient_statistics(guide.population(), y)})
    design = torch.cat([states.squeeze(1).double(), torch.ones(50, 1).double()], 1)
    best = torch.linalg.lstsq(design, y.double()).solution
    torch.testing.assert_close(model.weight, best[:3].mT.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.bias, best[3].float(), rtol=1e-4, atol=1e-4)
    assert float(model.scale) == pytest.approx(float((y - design @ best).square().mean().sqrt()), rel=1e-4)
    assert float(model.prior) == pytest.approx(float(states.double().mean()), rel=1e-4)


def test_a_latent_that_is_never_on_keeps_its_element():
    y, model = data(50), LinearCauses(NUM_OBSERVED, 2)
    model.initialize(y, generator())
    before = model.weight.clone()
    guide = AutoTruncated(model, num_states=1)
    guide.setup(y)
    states = torch.zeros(50, 1, 2, dtype=torch.long)
    states[::2, :, 0] = 1
    guide.populations.store_(torch.zeros(50, 1), None, guide.space.pack(states))
    model.maximize({"num_data": torch.tensor(50.0).double(), **model.sufficient_statistics(guide.population(), y)})
    torch.testing.assert_close(model.weight[:, 1], before[:, 1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model.weight[:, 0], before[:, 0], atol=1e-2)


@pytest.mark.nightly
def test_steps_of_the_linear_model_never_lower_its_free_energy_and_its_causes_are_found():
    pyro.set_rng_seed(0)
    bars = linear_bars(400, 3, mean_active=1.5, generator=generator())
    y = (bars.data - bars.data.mean(0)) / bars.data.std()
    model = LinearCauses(9, 6).initialize(y, generator())
    run = Trainer(profile_model(model, y, None, num_states=64))
    values = [run.step() for _ in range(10)]
    assert all(later > earlier - 1e-4 for earlier, later in itertools.pairwise(values))
    guide = learn(model, y, steps=20, progress=False)
    assert share_most(bars.states.double(), guide.population().marginals().double(), 0.0)


def test_more_latents_are_copies_and_as_many_of_them_are_on():
    model = LinearCauses(NUM_OBSERVED, 4).initialize(data(), generator())
    larger = model.with_latents(torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]))
    torch.testing.assert_close(larger.weight, model.weight.repeat(1, 2))
    assert float(larger.prior) * 8 == pytest.approx(float(model.prior) * 4)
    assert model.weight.shape == (NUM_OBSERVED, 4)


def test_parameters_are_drawn_in_another_order_and_frozen_ones_stay():
    model, y = Frozen(is_frozen=False), data()
    model.network[0].requires_grad_(False)
    before = ModelParameters(model, y).snapshot()
    ModelParameters(model, y).shuffle(generator())
    after = ModelParameters(model, y).snapshot()
    assert torch.equal(after["network.0.weight"], before["network.0.weight"])
    assert not torch.equal(after["network.2.weight"], before["network.2.weight"])
    assert torch.equal(after["network.2.weight"].flatten().sort().values, before["network.2.weight"].flatten().sort().values)
    shuffled = ModelParameters(model, y).snapshot()
    for name, value in model.state_dict().items():
        value.copy_(before[name])
    ModelParameters(model, y).shuffle(generator())
    assert all(torch.equal(value, shuffled[name]) for name, value in ModelParameters(model, y).snapshot().items())


def test_weights_that_are_all_the_same_do_not_stay_so():
    model, y = Frozen(is_frozen=False), data()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
        model.network[2].weight.zero_()
    ModelParameters(model, y).shuffle(generator())
    assert all(len(model.network[layer].weight.unique()) > 1 for layer in (0, 2))
    assert bool((model.network[0].bias == 0.1).all())


def test_covariates_beside_what_is_decoded_leave_the_gap_of_free_energies_as_it_is():
    y = torch.cat([data(200), torch.zeros(200, 50)], 1)
    network, made = perceptron(), []
    code = (torch.rand(200, NUM_LATENTS, generator=generator()) < 0.3).double()

    def model(rows):
        decode = pyro.module("network", network)
        with pyro.plate("data", len(rows)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((NUM_LATENTS,), 0.3)).to_event(1))
            pyro.sample(
                "y", dist.Normal(decode(s) + rows[:, NUM_OBSERVED:].sum(1, keepdim=True), 1.0).to_event(1), obs=rows[:, :NUM_OBSERVED]
            )

    def told(profile, *args):
        made.append(-10.0 - 0.6 * len(made))
        each = made[-1] + torch.randn(len(y), generator=generator(len(made)), dtype=torch.float64)
        return ended(profile, FreeEnergyEstimate(made[-1], each=each), probabilities=code)

    found = scripted_restarts(model, y, told, restart_steps=1, max_restarts=3)
    assert "found the same latents, but free energies" in disagreement(found)
    assert len(made) == 3


@pytest.mark.slow
def test_a_network_learns_states_that_stay_as_they_are_and_a_start_begins_with_them():
    """The states are those that the data were made of; 4096 others are there, of which a search of one step finds few."""
    pyro.set_rng_seed(0)
    torch.manual_seed(0)
    true, network = perceptron(12, 16, 10), perceptron(12, 16, 10)
    states = (torch.rand(60, 12, generator=generator()) < 0.2).float()
    with torch.no_grad():
        y = 3 * true(3 * states) + 0.1 * torch.randn(60, 10, generator=generator(1))
    model = behind(network, rate=0.2)

    def explained() -> float:
        with torch.no_grad():
            return float((network(states) - y).square().mean())

    before = explained()
    profile = profile_model(model, y, num_states=4, config=LearnConfig(restart_steps=100))
    words = profile.space.pack(states.long().unsqueeze(1))
    fit_states(profile, words)
    assert explained() < 0.3 * before
    found = run_restart(profile_model(model, y, num_states=4, config=LearnConfig(lr=1e-9, restart_steps=1)), 1.0, words)
    assert bool((found.states == states.unsqueeze(1)).all(-1).any(1).double().mean() > 0.8)


@pytest.mark.parametrize(("lead", "is_silent"), [(0.08, True), (0.6, False)])
def test_networks_of_the_same_latents_agree_if_their_free_energies_are_near(lead, is_silent):
    """Of six numbers of a data point: 0.12 nats at most."""
    y, made = data(200), []
    code = (torch.rand(200, NUM_LATENTS, generator=generator()) < 0.3).double()

    def told(profile, *args):
        made.append(-10.0 - lead * len(made))
        each = made[-1] + torch.randn(len(y), generator=generator(len(made)), dtype=torch.float64)
        return ended(profile, FreeEnergyEstimate(made[-1], each=each), probabilities=code)

    found = scripted_restarts(BinaryVAE(NUM_OBSERVED, NUM_LATENTS, hidden=(8,)), y, told, restart_steps=1)
    assert (len(made) == 2, disagreement(found) is None) == (is_silent, is_silent)
    assert is_silent or "found the same latents, but free energies" in disagreement(found)


@pytest.mark.nightly
def test_the_states_of_a_later_restart_are_those_that_a_linear_model_finds(monkeypatch):
    """Data made of four causes by a matrix: the second restart is taught their states, in whatever order and sign."""
    taught, linear_code = [], multi_start.linear_code
    monkeypatch.setattr(multi_start, "linear_code", lambda *arguments: taught.append(linear_code(*arguments)) or taught[-1])
    states = (torch.rand(80, NUM_LATENTS, generator=generator()) < 0.3).float()
    weight = torch.tensor([[1.0, 0, 0, 0, 1, 0], [0, 1, 0, 0, 0, 1], [0, 0, 1, 0, 1, 0], [0, 0, 0, 1, 0, 1]])
    y = 4 * states @ weight + 0.1 * torch.randn(80, NUM_OBSERVED, generator=generator(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guide = learn(behind(perceptron()), y, restarts=2, config=LearnConfig(restart_steps=10), steps=1, num_states=8, progress=False)
    assert [restart.initialisation for restart in guide.learn_report.restarts][1] == "linear model"
    code = StateSpace([2] * NUM_LATENTS).unpack(taught[0])
    correlation = torch.corrcoef(torch.cat([code.mT.double(), states.mT.double()]))[:NUM_LATENTS, NUM_LATENTS:].abs()
    assert sorted(correlation.argmax(1).tolist()) == [0, 1, 2, 3]
    assert bool((correlation.amax(1) > 0.9).all())


@pytest.mark.nightly
def test_a_later_restart_of_a_network_of_ones_own_beats_the_first():
    """The first one, from the network's own weights, ends more than three nats below the truth.

    Of two from a linear model the better one has found all latents or all but one of six: what it found is what is kept.
    """
    pyro.clear_param_store()
    pyro.set_rng_seed(20)
    true = perceptron(6, 12, 30)
    for layer in (true[0], true[2]):
        torch.nn.init.normal_(layer.weight, generator=generator(21))
    states = (torch.rand(450, 6, generator=generator(22)) < 0.25).float()
    every = torch.tensor(list(itertools.product([0.0, 1.0], repeat=6)))
    prior = (every * math.log(0.25) + (1 - every) * math.log(0.75)).sum(1)
    with torch.no_grad():
        y = true(states) + 0.5 * torch.randn(450, 30, generator=generator(23))
        likelihood = dist.Normal(true(every), 0.5).to_event(1).log_prob(y.unsqueeze(1))
    truth = float((likelihood + prior).logsumexp(1).mean())
    network = perceptron(6, 12, 30)
    for layer in (network[0], network[2]):
        torch.nn.init.normal_(layer.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DisagreeingStartsWarning)  # of two others the second may have converged or not
        guide = learn(behind(network, rate=0.25), y, restarts=3, progress=False)
    assert guide.starts[0] < truth - 3.0
    assert max(guide.starts[1:]) > guide.starts[0] + 2.0
    assert float(guide.population().free_energy().mean()) > max(guide.starts[1:]) - 0.05
