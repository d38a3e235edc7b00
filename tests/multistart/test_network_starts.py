"""Networks begin as linear models, and agree by what their latents are on for."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_truncated import LearnConfig, learn
from pyro_truncated.datasets import bar_components, matched_bars
from pyro_truncated.models import BinaryVAE
from pyro_truncated.multistart.profile import profile_model
from pyro_truncated.multistart.solution import share_most
from pyro_truncated.multistart.trainer import run_restart

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


def test_layers_on_top_of_each_other_are_a_network():
    y = data()
    for decode, expected in ((network(), True), (torch.nn.Linear(NUM_LATENTS, NUM_OBSERVED), False)):
        pyro.clear_param_store()
        assert profile_model(program(decode), y).is_network == expected
        assert profile_model(BinaryVAE(NUM_OBSERVED, NUM_LATENTS, decoder=decode), y).is_network == expected


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
