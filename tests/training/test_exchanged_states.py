import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_truncated.training import exchanged_states, several_starts
from pyro_truncated.training.agreement import Reached
from pyro_truncated.training.exchanged_states import ExchangedStates, can_exchange_states, switched_off, taken_over
from pyro_truncated.training.model_parameters import copies
from pyro_truncated.training.model_runs import Settings
from pyro_truncated.training.several_starts import Plan, SeveralStarts
from pyro_truncated.training.starts import Start
from pyro_truncated.utils.progress import progress_bar

SETTINGS = Settings(None, 8)


def model_of(decoder):
    def model(y):
        decode = pyro.module("decoder", decoder)
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.4)).to_event(1))
            pyro.sample("y", dist.Normal(decode(s), 0.5).to_event(1), obs=y)

    return model


def network():
    return torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 5))


@pytest.mark.parametrize(("decoder", "expected"), [(network, True), (lambda: torch.nn.Linear(3, 5), False)])
def test_starts_exchange_states_where_most_weights_belong_to_no_latent(decoder, expected):
    model, y = model_of(decoder()), torch.randn(20, 5)
    assert can_exchange_states(model, y, SETTINGS, copies(model, y)) is expected


def constant():
    """Parameters whose entries can change places with each other to no effect."""
    first, second = torch.nn.Linear(3, 6), torch.nn.Linear(6, 5)
    for layer, value in ((first, 0.5), (second, 0.1)):
        torch.nn.init.constant_(layer.weight, value)
        torch.nn.init.zeros_(layer.bias)
    return torch.nn.Sequential(first, torch.nn.Tanh(), second)


@pytest.mark.parametrize(("decoder", "exchanges"), [(network, True), (constant, False)])
def test_starts_begin_apart_wherever_the_first_one_does(decoder, exchanges, monkeypatch):
    made = []
    monkeypatch.setattr(several_starts, "ExchangedStates", lambda *args: made.append(args) or object())
    pyro.clear_param_store()
    model, y = model_of(decoder()), torch.randn(20, 5)
    begun, begin = [], several_starts.start
    monkeypatch.setattr(several_starts, "start", lambda model, *args: begun.append(copies(model, args[0])) or begin(model, *args))
    starts = SeveralStarts(model, y, SETTINGS, Plan(2, 1, lambda step: 1.0, 0.0, torch.Generator().manual_seed(0)))
    starts.make(progress_bar(False))
    assert len(made) == exchanges
    first, second = begun
    assert all(not torch.equal(first[name], second[name]) for name in first if first[name].dim() > 1)


def random_states(*chances, number=40):
    return (torch.rand(number, len(chances), generator=torch.Generator().manual_seed(1)) < torch.tensor(chances)).long()


@pytest.mark.parametrize("chance", [0.2, 0.8])
def test_what_another_start_has_found_is_taken_over_where_it_resembles_most_what_differs(chance):
    states = random_states(0.4, 0.4, 0.4)
    new = random_states(0.5, 0.5, 0.5, chance)[:, 3]
    others = torch.stack([states[:, 2], 1 - states[:, 0], new], 1)
    changed = taken_over(states, others, None)
    assert torch.equal(changed[:, [0, 2]], states[:, [0, 2]])
    assert torch.equal(changed[:, 1], new if chance < 0.5 else 1 - new)
    assert taken_over(states, torch.stack([1 - states[:, 1], *others[:, :2].T], 1), None) is None


def test_a_latent_is_switched_off_where_another_one_is_on():
    generator = torch.Generator().manual_seed(0)
    states = random_states(0.5, 0.5)
    here, there = states.T
    possible = [torch.stack([here * (1 - there), there], 1), torch.stack([here, there * (1 - here)], 1)]
    drawn = [changed for changed in (switched_off(states, generator) for _ in range(20)) if changed is not None]
    assert 0 < len(drawn) < 20
    assert all(any(torch.equal(changed, one) for changed in drawn) for one in possible)
    assert all(any(torch.equal(changed, one) for one in possible) for changed in drawn)
    assert all(switched_off(possible[0], generator) is None for _ in range(10))


def test_what_comes_of_an_exchange_of_states_is_trained_and_takes_the_place_of_what_it_came_from(monkeypatch):
    children, train = [], exchanged_states.trained
    monkeypatch.setattr(exchanged_states, "trained", lambda *args: children.append(train(*args)) or children[-1])
    monkeypatch.setattr(exchanged_states, "_TRIED", 4)
    pyro.clear_param_store()
    model, states = model_of(network()), random_states(0.4, 0.4, 0.4, 0.3)
    y = 3 * states[:, :3].float() @ torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    # The second start has another latent in the place of the first one.
    found = [Start(Reached(-1000.0), copies(model, y), states[:, chosen].unsqueeze(1)) for chosen in ([0, 1, 2], [3, 1, 2])]
    best = ExchangedStates(model, y, SETTINGS, 2, 0.01, torch.Generator().manual_seed(2)).best(found)
    assert children
    assert best.reached.free_energy > max(child.free_energy for child in children) > -1000.0
    assert best.states.shape[::2] == (40, 3)
