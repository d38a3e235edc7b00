import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_truncated.training.exchanged_states import ExchangedStates, can_exchange_states
from pyro_truncated.training.model_parameters import copies
from pyro_truncated.training.model_runs import Settings
from pyro_truncated.training.starts import start

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


def test_what_comes_of_an_exchange_of_states_is_above_the_start():
    model, y = model_of(network()), torch.randn(20, 5)
    found = start(model, y, SETTINGS, lambda step: 1.0, 2, None)
    best = ExchangedStates(model, y, SETTINGS, 2, 0.01, None).best([found])
    assert best.reached.free_energy > found.reached.free_energy
    assert best.states.shape[::2] == (20, 3)
