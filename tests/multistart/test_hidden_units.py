"""Networks are fitted to known states unit by unit, and leave the bad optima that gradients end in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pyro_truncated.em.variable_projection import Decoder, FittedUnits, Targets, fit_unit_by_unit
from tests.multistart.small_decoders import NUM_LATENTS, NUM_OBSERVED, WIDTH, drawn, every_state, generator, perceptron


def decoder(network: torch.nn.Sequential) -> Decoder:
    return Decoder(network, network[-3], network[-1])


def made_by(network: torch.nn.Sequential, rest: float = 0.0) -> Targets:
    """What a network decodes all states into, each of which one to three data points have."""
    states = every_state(network[0].weight.dtype)
    weights = torch.randint(1, 4, (len(states),), generator=generator()).double()
    with torch.no_grad():
        return Targets(states, weights, network(states).double(), rest)


@pytest.mark.nightly
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


@pytest.mark.nightly(keep=1)
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


@pytest.mark.slow
def test_a_network_that_nothing_is_wrong_with_stays_as_it_is():
    network = drawn(perceptron(torch.float64), 1)
    before = [value.clone() for value in network.parameters()]
    assert not fit_unit_by_unit(decoder(network), made_by(network))
    assert all(torch.equal(value, other) for value, other in zip(network.parameters(), before, strict=True))


@pytest.mark.slow
def test_layers_below_that_are_frozen_stay_so():
    network = drawn(perceptron(deep=True), 2)
    network[0].requires_grad_(False)
    before = network[0].weight.clone()
    assert fit_unit_by_unit(decoder(network), made_by(drawn(perceptron(), 1), rest=20.0))
    assert torch.equal(network[0].weight, before)


class Heads(torch.nn.Module):
    """Has a noise and another head, too, which the program uses elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = torch.nn.Linear(NUM_LATENTS, WIDTH), torch.nn.Linear(WIDTH, NUM_OBSERVED)
        self.other, self.noise = torch.nn.Linear(WIDTH, 3), torch.nn.Parameter(torch.tensor(-3.0))

    def forward(self, states: Tensor) -> Tensor:
        return self.last(input=torch.tanh(self.hidden(states)))


@pytest.mark.slow
def test_what_does_not_decode_stays_as_it_is():
    network = drawn(Heads(), 2)
    before = {name: value.clone() for name, value in network.named_parameters()}
    assert fit_unit_by_unit(Decoder(network, network.hidden, network.last), made_by(drawn(perceptron(), 1), rest=20.0))
    stay = {name for name, value in network.named_parameters() if torch.equal(value, before[name])}
    assert stay == {"other.weight", "other.bias", "noise"}


@pytest.mark.slow
def test_data_may_lie_far_from_zero():
    torch.manual_seed(0)
    targets = made_by(drawn(perceptron(torch.float64), 1), rest=20.0)
    network = drawn(perceptron(torch.float64), 2)
    far = targets._replace(means=targets.means + 1e6)
    with torch.no_grad():
        network[-1].bias.add_(1e6)
    assert fit_unit_by_unit(decoder(network), far)
    assert FittedUnits(decoder(network), far).square_error() - far.rest < 0.5 * far.rest


@pytest.mark.parametrize("kind", ["equal units of nothing", "one layer twice", "hidden units without gradients"])
def test_where_there_is_nothing_to_fit_nothing_is_raised(kind):
    network, targets = drawn(perceptron(), 2), made_by(drawn(perceptron(), 1))
    if kind == "equal units of nothing":
        with torch.no_grad():
            for value in network[0].parameters():
                value.fill_(0.25)
        targets = targets._replace(means=torch.zeros_like(targets.means))
    if kind == "one layer twice":
        layer = torch.nn.Linear(NUM_LATENTS, NUM_LATENTS, bias=False)
        network, targets = torch.nn.Sequential(layer, torch.nn.Tanh(), layer), targets._replace(means=targets.means[:, :NUM_LATENTS])
    if kind == "hidden units without gradients":
        network[1].register_forward_hook(lambda _, arguments, hidden: hidden.detach())
    fit_unit_by_unit(decoder(network), targets)
    assert all(bool(value.isfinite().all()) for value in network.parameters())


def test_a_unit_is_worth_what_the_loss_rises_by_without_it():
    network, targets = drawn(perceptron(torch.float64), 2), made_by(drawn(perceptron(torch.float64), 1), rest=20.0)
    units = FittedUnits(decoder(network), targets)
    root = targets.weights.sqrt().unsqueeze(1)
    noise = units.square_error() / (float(targets.weights.sum()) * NUM_OBSERVED)
    decay = noise / float(network[2].weight.detach().square().mean())

    def loss(columns: list[int]) -> Tensor:
        hidden = functional.leaky_relu(network[0](targets.states), 0.1).detach()
        design = root * torch.cat([hidden, torch.ones_like(hidden[:, :1])], 1)[:, [*columns, WIDTH]]
        moments = design.mT @ design + decay * torch.tensor([*(1.0 for _ in columns), 0.0]).diag().double()
        solution = torch.linalg.solve(moments, design.mT @ (root * targets.means))
        return (design @ solution - root * targets.means).square().sum() + decay * solution[:-1].square().sum()

    every = list(range(WIDTH))
    rises = [loss([other for other in every if other != unit]) - loss(every) for unit in every]
    torch.testing.assert_close(units.deletion_loss(), torch.stack(rises))
