"""learn of models with networks: starts that exchange nothing, and models that guide their continuous latents themselves."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrizations

from pyro_truncated import AutoTruncated, ExhaustiveSearch, LearnConfig, learn
from pyro_truncated.models import BinaryVAE, GatedDecoder
from pyro_truncated.multistart.model_parameters import ModelParameters
from pyro_truncated.multistart.moves import build_recombinations
from pyro_truncated.multistart.profile import profile_model
from pyro_truncated.multistart.solution import FreeEnergyEstimate
from tests.multistart.scripted import disagreement, ended, scripted_restarts

NUM_LATENTS = 3


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def behind(network: torch.nn.Module) -> Any:
    """A function whose latents act through a network."""

    def model(y: Tensor) -> None:
        decode = pyro.module("network", network)
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((NUM_LATENTS,), 0.3)).to_event(1))
            pyro.sample("y", dist.Normal(decode(s), 1.0).to_event(1), obs=y)

    return model


def perceptron() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(NUM_LATENTS, 6), torch.nn.Tanh(), torch.nn.Linear(6, 5))


@pytest.mark.parametrize(
    ("make", "exchanges"),
    [
        (lambda: behind(perceptron()), False),
        (lambda: BinaryVAE(5, NUM_LATENTS, hidden=(6,)), False),
        (lambda: behind(torch.nn.Linear(NUM_LATENTS, 5)), True),
        (lambda: BinaryVAE(5, NUM_LATENTS, hidden=()), True),
    ],
)
def test_latents_of_a_network_have_nothing_to_exchange_but_those_of_a_linear_layer_have(make, exchanges):
    pyro.set_rng_seed(0)
    model, y = make(), torch.randn(10, 5, generator=generator())
    first = ModelParameters(model, y).snapshot()
    ModelParameters(model, y).disturb(first, generator())
    assert bool(build_recombinations(profile_model(model, y, num_states=4), ModelParameters(model, y).snapshot())) == exchanges


@pytest.mark.parametrize("parametrize", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal])
def test_weights_that_are_made_of_others_are_those_of_layers(parametrize):
    model, y = BinaryVAE(5, NUM_LATENTS, hidden=(6,)), torch.randn(10, 5, generator=generator())
    assert ModelParameters(model, y).layers == {f"decoder.{layer}.{name}" for layer in (0, 2) for name in ("weight", "bias")}
    for layer in (model.decoder[0], model.decoder[2]):
        parametrize(layer)
    parameters = {name for name, _ in model.named_parameters() if name.startswith("decoder.")}
    assert "decoder.0.bias" in parameters
    assert ModelParameters(model, y).layers == parameters
    alone = parametrize(torch.nn.Linear(2, 3, bias=False))
    assert ModelParameters(alone, y).layers == {name for name, _ in alone.named_parameters()} != set()
    # What is behind a network is not exchanged, as if its weights were its own.
    first = ModelParameters(model, y).snapshot()
    ModelParameters(model, y).disturb(first, generator())
    assert not build_recombinations(profile_model(model, y, num_states=4), ModelParameters(model, y).snapshot())


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize(("unlike", "made"), [(1.0, 3), (0.0, 8)])
def test_starts_of_a_network_begin_anew_and_end_where_chance_decides_which_is_better(unlike, made):
    """Each reaches a nat more; free energies of the same data points differ by a deviation of ``unlike`` times ten nats."""
    network, begun = perceptron(), []
    y = torch.randn(60, 5, generator=generator())

    def start(profile, *args):
        begun.append(network[0].weight.detach().clone())
        with torch.no_grad():
            network[0].weight.fill_(3000.0)
        each = len(begun) + 10 * unlike * torch.randn(len(y), dtype=torch.float64)
        return ended(profile, FreeEnergyEstimate(float(len(begun)), each=each))

    found = scripted_restarts(behind(network), y, start, restart_steps=1)
    assert disagreement(found)
    assert len(begun) == made
    # By noise as large as what was reached, around where the first one began, not around 3000.
    assert all(float((loc - begun[0]).mean().abs()) < 2500.0 for loc in begun[1:])


def bumps(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Signals with bumps in two rows of twelve pixels, each there or not, whose places are their poses."""
    switches = torch.bernoulli(torch.full((number, 2), 0.5), generator=generator())
    poses = torch.randn(number, 2, 1, generator=generator().manual_seed(1))
    rows = switches.unsqueeze(-1) * (-(torch.linspace(-2.5, 2.5, 12) - poses).square() / 0.5).exp()
    return rows.flatten(-2) + 0.1 * torch.randn(number, 24, generator=generator().manual_seed(2)), switches, poses


@pytest.mark.nightly
def test_poses_that_a_model_guides_itself_are_left_to_it_and_parts_are_found(recwarn):
    """At least 95 % of 100 switches right; guessing gives one half."""
    pyro.set_rng_seed(0)
    x, switches, poses = bumps(90)
    model = GatedDecoder(x[:40], switches[:40], poses[:40])
    guide = learn(model, x[40:], progress=False)
    assert isinstance(guide, AutoTruncated)
    assert guide.conditional == model.pose_guide
    assert not recwarn.list
    found = guide.infer(x[40:], ExhaustiveSearch(), steps=1).marginals()["b"].round()
    assert float((found == switches[40:]).float().mean()) >= 0.95


@pytest.mark.nightly
def test_what_a_model_guides_itself_is_learned_in_small_steps_unless_a_rate_is_given():
    x, switches, poses = bumps(12)
    rates = []
    for lr in (None, 0.3):
        model = GatedDecoder(x[:8], switches[:8], poses[:8], width=4)
        guide = learn(model, x[8:], restarts=1, steps=1, config=LearnConfig(restart_steps=1, lr=lr), progress=False)
        rates.append(guide.learn_report.settings["lr"])
    guide = learn(behind(perceptron()), torch.randn(8, 5), restarts=1, steps=1, config=LearnConfig(restart_steps=1), progress=False)
    rates.append(guide.learn_report.settings["lr"])
    assert rates == [0.02, 0.3, 0.1]


@pytest.mark.nightly
def test_a_decoder_forgets_what_it_has_learned_and_a_seed_repeats_its_start():
    x, switches, poses = bumps(12)
    model = GatedDecoder(x[:8], switches[:8], poses[:8], width=4)
    before = {name: value.clone() for name, value in model.state_dict().items() if not name.startswith("network")}
    starts = []
    for seed in (1, 1, 2):
        ModelParameters(model, x).disturb(ModelParameters(model, x).snapshot(), generator())
        assert model.initialize(x[8:], torch.Generator().manual_seed(seed)) is model
        starts.append(model.network[0].weight.detach().clone())
        for name, value in before.items():
            torch.testing.assert_close(model.state_dict()[name], value)
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])
    with pytest.raises(ValueError, match=r"y must be images \(N, 24\)"):
        model.initialize(x[:, :3])
