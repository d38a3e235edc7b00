"""Networks are fitted to known states unit by unit, and leave the bad optima that gradients end in."""

from __future__ import annotations

import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import parametrizations

from pyro_truncated import AutoTruncated
from pyro_truncated.distributions import NormalOrMissing
from pyro_truncated.models import BinaryVAE
from pyro_truncated.training.decoders import fit_decoder, targets_of
from pyro_truncated.training.hidden_units import Decoder, FittedUnits, Targets, fit_unit_by_unit

NUM_LATENTS, WIDTH, NUM_OBSERVED = 5, 6, 12


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def every_state(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=NUM_LATENTS)), dtype=dtype)


def perceptron(dtype: torch.dtype | None = None, bias: bool = True, deep: bool = False) -> torch.nn.Sequential:
    layers = [torch.nn.Linear(NUM_LATENTS, WIDTH, bias=bias, dtype=dtype), torch.nn.LeakyReLU(0.1)]
    if deep:
        layers += [torch.nn.Linear(WIDTH, WIDTH, dtype=dtype), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, NUM_OBSERVED, bias=bias, dtype=dtype))


def drawn(network: torch.nn.Sequential, seed: int) -> torch.nn.Sequential:
    with torch.no_grad():
        for value in network.parameters():
            value.copy_(torch.randn(value.shape, generator=generator(seed)).to(value))
    return network


def decoder(network: torch.nn.Sequential) -> Decoder:
    return Decoder(network, network[-3], network[-1])


def made_by(network: torch.nn.Sequential, rest: float = 0.0) -> Targets:
    """What a network decodes all states into, each of which one to three data points have."""
    states = every_state(network[0].weight.dtype)
    weights = torch.randint(1, 4, (len(states),), generator=generator()).double()
    with torch.no_grad():
        return Targets(states, weights, network(states).double(), rest)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_network_as_narrow_as_the_one_that_made_the_data_finds_its_units(dtype):
    """Which L-BFGS alone does not: it leaves more than a hundredth of the squares in each of three starts."""
    targets = made_by(drawn(perceptron(dtype), 1), rest=20.0)
    total = float((targets.weights * (targets.means - targets.means.mean(0)).square().sum(1)).sum())
    for seed in (2, 3, 4):
        torch.manual_seed(seed)
        alone, network = drawn(perceptron(dtype), seed), drawn(perceptron(dtype), seed)
        units = FittedUnits(decoder(alone), targets)
        units.fit(1000)
        units.put_last_layer()
        assert units.square_error() - targets.rest > 0.01 * total
        assert fit_unit_by_unit(decoder(network), targets)
        assert network[0].weight.dtype == dtype
        assert FittedUnits(decoder(network), targets).square_error() - targets.rest < 0.005 * total


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shallow", "deep", "no offsets"])
def test_the_square_error_never_rises_and_seeds_reproduce(kind):
    targets = made_by(drawn(perceptron(), 1), rest=20.0)
    networks = [drawn(perceptron(bias=kind != "no offsets", deep=kind == "deep"), 2) for _ in range(2)]
    before = FittedUnits(decoder(networks[0]), targets).square_error()
    for network in networks:
        torch.manual_seed(0)
        fit_unit_by_unit(decoder(network), targets)
    assert FittedUnits(decoder(networks[0]), targets).square_error() < 0.5 * before
    assert all(torch.equal(one, other) for one, other in zip(*(network.parameters() for network in networks), strict=True))
    assert all(value.grad is None for value in networks[0].parameters())


def test_a_network_that_nothing_is_wrong_with_stays_as_it_is():
    network = drawn(perceptron(torch.float64), 1)
    before = [value.clone() for value in network.parameters()]
    assert not fit_unit_by_unit(decoder(network), made_by(network))
    assert all(torch.equal(value, other) for value, other in zip(network.parameters(), before, strict=True))


def test_layers_below_that_are_frozen_stay_so():
    network = drawn(perceptron(deep=True), 2)
    network[0].requires_grad_(False)
    before = network[0].weight.clone()
    assert fit_unit_by_unit(decoder(network), made_by(drawn(perceptron(), 1), rest=20.0))
    assert torch.equal(network[0].weight, before)


def test_a_unit_is_worth_what_the_loss_rises_by_without_it():
    network, targets = drawn(perceptron(torch.float64), 2), made_by(drawn(perceptron(torch.float64), 1), rest=20.0)
    units = FittedUnits(decoder(network), targets)
    root = targets.weights.sqrt().unsqueeze(1)
    noise = units.square_error() / (float(targets.weights.sum()) * NUM_OBSERVED)
    decay = noise / float(network[2].weight.detach().square().mean())

    def loss(columns: list[int]) -> Tensor:
        hidden = functional.leaky_relu(network[0](targets.states), 0.1).detach()
        design = root * torch.cat([hidden, torch.ones_like(hidden[:, :1])], 1)[:, [*columns, WIDTH]]
        moments = design.mT @ design + decay * torch.eye(design.shape[1]).double()
        solution = torch.linalg.solve(moments, design.mT @ (root * targets.means))
        return (design @ solution - root * targets.means).square().sum() + decay * solution.square().sum()

    every = list(range(WIDTH))
    rises = [loss([other for other in every if other != unit]) - loss(every) for unit in every]
    torch.testing.assert_close(units.worth(), torch.stack(rises))


def behind(network: torch.nn.Module, kind: str = "normal") -> object:
    """Binary latents under a network, with something else in one respect."""

    def model(y: Tensor) -> None:
        decode = pyro.module("network", network)
        noise = pyro.param("noise", torch.tensor(0.5), constraint=dist.constraints.positive)
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((NUM_LATENTS,), 0.3)).to_event(1))
            loc = decode(s)
            loc = {"moved": 2 * loc + 3, "bent": loc.exp(), "covariates": loc + torch.arange(len(y)).unsqueeze(1)}.get(kind, loc)
            scale = torch.linspace(0.5, 1, NUM_OBSERVED) * noise if kind == "noises" else noise
            fn = {"laplace": dist.Laplace, "missing": NormalOrMissing}.get(kind, dist.Normal)(loc, scale)
            pyro.sample("y", (fn.mask(y > 0) if kind == "masked" else fn).to_event(1), obs=y)

    return model


def fitted(model: object, y: Tensor) -> tuple[bool, float, float]:
    """Whether a network has changed, and the free energy per data point before and after."""
    guide = AutoTruncated(model, num_states=8)
    guide.setup(y)
    guide.refresh_(y)
    before = float(guide.population().free_energy().mean())
    has_changed = fit_decoder(model, y, guide)
    guide.refresh_(y)
    return has_changed, before, float(guide.population().free_energy().mean())


def data() -> Tensor:
    states = (torch.rand(200, NUM_LATENTS, generator=generator()) < 0.3).float()
    with torch.no_grad():
        return drawn(perceptron(), 1)(states) + 0.5 * torch.randn(200, NUM_OBSERVED, generator=generator())


def autoencoder(dtype: torch.dtype) -> BinaryVAE:
    model = BinaryVAE(NUM_OBSERVED, NUM_LATENTS, hidden=(WIDTH,), dtype=dtype)
    drawn(model.decoder, 2)
    return model.initialize(data())


MAKES = {
    "function": lambda: behind(drawn(perceptron(), 2)),
    "moved": lambda: behind(drawn(perceptron(), 2), "moved"),
    "BinaryVAE": lambda: autoencoder(torch.float32),
    "double precision": lambda: autoencoder(torch.float64),
}


@pytest.mark.parametrize("kind", MAKES)
def test_the_free_energy_of_posteriors_rises(kind):
    pyro.set_rng_seed(0)
    has_changed, before, after = fitted(MAKES[kind](), data())
    assert has_changed
    assert after > before + 0.1


class Centred(torch.nn.Module):
    """Looks at all states at once, as batch normalisation does."""

    def forward(self, values: Tensor) -> Tensor:
        return values - values.mean(-2, keepdim=True)


def frozen() -> BinaryVAE:
    model = autoencoder(torch.float32)
    model.decoder[-1].requires_grad_(False)
    return model.eval()  # Pyro warns of frozen layers otherwise


OTHERS = {
    **{kind: lambda kind=kind: behind(drawn(perceptron(), 2), kind) for kind in ("bent", "covariates", "noises", "laplace", "masked")},
    "frozen": frozen,
    "one layer": lambda: behind(torch.nn.Linear(NUM_LATENTS, NUM_OBSERVED)),
    "dropout": lambda: behind(torch.nn.Sequential(*drawn(perceptron(), 2)[:2], torch.nn.Dropout(), perceptron()[-1])),
    "centred": lambda: behind(torch.nn.Sequential(perceptron()[0], Centred(), *perceptron()[1:])),
    "not linear at the end": lambda: behind(torch.nn.Sequential(*perceptron(), torch.nn.Tanh())),
    "weights made of others": lambda: behind(
        torch.nn.Sequential(parametrizations.weight_norm(perceptron()[0]), torch.nn.Tanh(), perceptron()[-1])
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_all_other_networks_stay_as_they_are(kind):
    pyro.set_rng_seed(0)
    has_changed, before, after = fitted(OTHERS[kind](), data())
    assert not has_changed
    if kind != "dropout":
        assert after == before


def test_missing_entries_leave_a_network_as_it_is():
    y = data()
    y[0, 0] = torch.nan
    model = autoencoder(torch.float32).initialize(y)
    assert not fitted(model, y)[0]


def test_targets_are_the_means_of_each_state_and_what_varies_about_them():
    model, y = behind(drawn(perceptron(), 2)), data()
    guide = AutoTruncated(model, num_states=8)
    guide.setup(y)
    guide.refresh_(y)
    targets, population = targets_of(guide.population(), y.double(), torch.float32), guide.population()
    assert float(targets.weights.sum()) == pytest.approx(len(y), rel=1e-3)
    states, weights = population.states(torch.float32), population.weights().double()
    for state, weight, mean in zip(targets.states, targets.weights, targets.means, strict=True):
        own = (weights * (states == state).all(-1)).sum(1)
        assert float(weight) == pytest.approx(float(own.sum()), rel=1e-5)
        torch.testing.assert_close(mean, own @ y.double() / own.sum(), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        network = perceptron()
        errors = (network(states) - y.unsqueeze(1)).square().sum(-1)
        every = float((weights * errors).sum())
        told = FittedUnits(decoder(network), targets).square_error()
    assert told == pytest.approx(every, rel=1e-3)
