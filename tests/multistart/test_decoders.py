"""The network of a program that decodes binary latents is found and fitted to its posteriors; all others stay as they are."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrizations

from pyro_truncated import AutoTruncated, Population, StateSpace
from pyro_truncated.distributions import NormalOrMissing
from pyro_truncated.em.variable_projection import Decoder, FittedUnits, fit_unit_by_unit, make_targets
from pyro_truncated.models import BinaryVAE
from pyro_truncated.multistart import decoders
from pyro_truncated.multistart.decoders import fit_decoder
from tests.multistart.small_decoders import NUM_LATENTS, NUM_OBSERVED, WIDTH, drawn, every_state, generator, perceptron


def behind(network: torch.nn.Module, kind: str = "normal") -> object:
    """Binary latents under a network, with something else in one respect."""

    def model(y: Tensor) -> None:
        decode = pyro.module("network", network)
        noise = pyro.param("noise", torch.tensor(0.5), constraint=dist.constraints.positive)
        if kind == "penalty":
            pyro.factor("small weights", -network[0].weight.square().sum())
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((NUM_LATENTS,), 0.3)).to_event(1))
            loc = decode(s)
            nothing = decode(torch.zeros(1, NUM_LATENTS))
            loc = {
                "moved": 2 * loc + 3,
                "bent": loc.exp(),
                "covariates": loc + torch.arange(len(y)).unsqueeze(1),
                "away from nothing": loc + 3 * nothing,
            }.get(kind, loc)
            if kind == "noise of the weights":
                noise = network[-1].weight.square().mean().sqrt()
            scale = torch.linspace(0.5, 1, NUM_OBSERVED) * noise if kind == "noises" else noise
            fn = {"laplace": dist.Laplace, "missing": NormalOrMissing, "doubled": doubled, "of anything": OfAnything}.get(
                kind, dist.Normal
            )(loc, scale)
            rows = y[:, 0] > 0
            with (
                poutine.mask(mask=rows if kind == "rows masked" else True),
                poutine.scale(scale=rows + 0.1 if kind == "rows weighted" else 1.0),
            ):
                pyro.sample("y", (fn.mask(y > 0) if kind == "masked" else fn).to_event(1), obs=y)

    return model


def doubled(loc: Tensor, scale: Tensor) -> dist.TransformedDistribution:
    return dist.TransformedDistribution(dist.Normal(loc, scale), [dist.transforms.AffineTransform(0.0, 2.0)])


class OfAnything(dist.Normal):
    """Does not say what it is a distribution of."""

    @property
    def support(self) -> object:
        raise NotImplementedError


def fitted(model: object, y: Tensor, is_random: bool = False) -> tuple[bool, float, float]:
    """Whether a network has changed, and the free energy per data point before and after."""
    guide = AutoTruncated(model, num_states=8)
    guide.setup(y)
    guide.refresh_(y)
    before = float(guide.population().free_energy().mean())
    has_changed = fit_decoder(guide, y)
    stored = guide.population().log_joint.clone()
    guide.refresh_(y)
    if not is_random:
        torch.testing.assert_close(guide.population().log_joint, stored)
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


@pytest.mark.nightly(keep=2)
@pytest.mark.slow
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
    **{
        kind: lambda kind=kind: behind(drawn(perceptron(), 2), kind)
        for kind in ("bent", "covariates", "noises", "laplace", "masked", "doubled", "of anything", "rows masked", "rows weighted")
    },
    "penalty": lambda: behind(drawn(perceptron(), 2), "penalty"),
    "frozen": frozen,
    "one layer": lambda: behind(torch.nn.Linear(NUM_LATENTS, NUM_OBSERVED)),
    "dropout": lambda: behind(torch.nn.Sequential(*drawn(perceptron(), 2)[:2], torch.nn.Dropout(), perceptron()[-1])),
    "centred": lambda: behind(torch.nn.Sequential(perceptron()[0], Centred(), *perceptron()[1:])),
    "not linear at the end": lambda: behind(torch.nn.Sequential(*perceptron(), torch.nn.Tanh())),
    "weights made of others": lambda: behind(
        torch.nn.Sequential(parametrizations.weight_norm(perceptron()[0]), torch.nn.Tanh(), perceptron()[-1])
    ),
}


@pytest.mark.filterwarnings("ignore:site 'y' gets other log probabilities")  # of dropout
@pytest.mark.filterwarnings("ignore:site 'y' of a data point depends on the states of other data points")  # of the centred one
@pytest.mark.parametrize("kind", OTHERS)
def test_all_other_networks_stay_as_they_are(kind):
    pyro.set_rng_seed(0)
    has_changed, before, after = fitted(OTHERS[kind](), data(), kind == "dropout")
    assert not has_changed
    if kind != "dropout":
        assert after == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["away from nothing", "noise of the weights"])
def test_where_the_free_energy_would_fall_a_network_is_put_back(kind, monkeypatch):
    """The same weights are something else in the program, too, which a run of it does not show."""
    fits: list[bool] = []
    monkeypatch.setattr(decoders, "fit_unit_by_unit", lambda *arguments: fits.append(fit_unit_by_unit(*arguments)) or fits[-1])
    pyro.set_rng_seed(0)
    has_changed, before, after = fitted(behind(drawn(perceptron(), 2), kind), data())
    assert fits == [True]
    assert not has_changed
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
    targets, population = make_targets(guide.population(), y.double(), torch.float32), guide.population()
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
        told = FittedUnits(Decoder(network, network[0], network[2]), targets).square_error()
    assert told == pytest.approx(every, rel=1e-3)


def test_targets_are_no_more_than_data_points():
    """And the square error is that of those which count, wherever the data lie."""
    y = data()[:6] + 1e6
    words = StateSpace([2] * NUM_LATENTS).pack(every_state().expand(6, -1, -1))
    log_joint = torch.linspace(0, -1, 32).expand(6, -1)
    targets = make_targets(Population(StateSpace([2] * NUM_LATENTS), words, log_joint), y.double(), torch.float32)
    weights = log_joint[0].double().softmax(0)[:6]
    torch.testing.assert_close(targets.states, every_state()[:6])
    torch.testing.assert_close(targets.weights, 6 * weights, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(targets.means, y.double().mean(0).expand(6, -1))
    assert targets.rest == pytest.approx(float(weights.sum() * (y.double() - y.double().mean(0)).square().sum()), rel=1e-4)
