"""A neural network under binary latents: bound and gradients against enumeration, training, reconstruction."""

from __future__ import annotations

import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import AutoTruncated, EvolutionarySearch, ExhaustiveSearch, GPSelect, Truncated_ELBO
from pyro_truncated.models import BinaryVAE
from tests.models.enumeration import full_population, generate, log_joint

NUM_DATA, NUM_OBSERVED, NUM_LATENTS = 20, 6, 5


def make_model(decoder: torch.nn.Module | None = None) -> BinaryVAE:
    model = BinaryVAE(NUM_OBSERVED, NUM_LATENTS, hidden=(8,), decoder=decoder, dtype=torch.float64)
    model.prior = 0.1 + 0.5 * torch.rand(NUM_LATENTS).double()
    model.scale = torch.tensor(0.6).double()
    for parameter in model.decoder.parameters():
        parameter.data *= 3
    return model


class Bilinear(torch.nn.Module):
    """A network of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(NUM_OBSERVED, NUM_LATENTS, NUM_LATENTS).double())

    def forward(self, states: Tensor) -> Tensor:
        return torch.einsum("...h,dhi,...i->...d", states, self.table, states)


def log_evidence(model: BinaryVAE, y: Tensor) -> Tensor:
    """Sum over all states, one at a time."""
    terms = []
    for state in itertools.product([0.0, 1.0], repeat=NUM_LATENTS):
        s = torch.tensor(state).double()
        prior = dist.Bernoulli(model.prior).log_prob(s).sum()
        terms.append(prior + dist.Normal(model.mean(s), model.scale).log_prob(y.nan_to_num()).mul(~y.isnan()).sum(-1))
    return torch.stack(terms).logsumexp(0).sum()


@pytest.mark.parametrize("share_missing", [0.0, 0.4])
def test_bound_and_gradients_of_all_states_are_those_of_the_evidence_under_a_network_of_ones_own(share_missing: float) -> None:
    model = make_model(Bilinear())
    y = generate(model, NUM_DATA)
    y[torch.rand(y.shape) < share_missing] = torch.nan
    exact = log_evidence(model, y)
    torch.testing.assert_close(full_population(model, y).free_energy().sum(), exact.detach(), rtol=1e-10, atol=0)
    parameters = [*model.decoder.parameters(), model.prior_unconstrained, model.scale_unconstrained]
    expected = torch.autograd.grad(-exact, parameters)
    elbo, guide = Truncated_ELBO(ExhaustiveSearch()), AutoTruncated(model, num_states=2**NUM_LATENTS)
    pyro.clear_param_store()
    loss = elbo.loss_and_grads(model, guide, y)
    assert loss == pytest.approx(-exact.item(), rel=1e-10)
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_fewer_states_are_a_bound_that_searches_raise_to_that_of_the_best() -> None:
    model = make_model()
    y = generate(model, NUM_DATA)
    everything = full_population(model, y)
    exact, best = everything.free_energy(), everything.log_joint.topk(8).values.logsumexp(1)
    start = AutoTruncated(model, num_states=8)
    start.refresh_(y)
    for search in (EvolutionarySearch(4, 3, 2), GPSelect(3, fit_steps=2)):
        found = start.infer(y, search, steps=20).population().free_energy()
        assert (found <= best + 1e-9).all()
        assert (best < exact).all()
        assert found.sum() > start.population().free_energy().sum() + 1.0
        if isinstance(search, EvolutionarySearch):
            assert (found > best - 1e-9).double().mean() > 0.8


@pytest.mark.nightly
@pytest.mark.parametrize("batch_size", [None, 10])
def test_learns_what_generated_the_data(batch_size: int | None) -> None:
    truth = make_model()
    truth.scale = torch.tensor(0.2).double()
    y = generate(truth, 100)
    best = log_evidence(truth, y).item()
    model = BinaryVAE(NUM_OBSERVED, NUM_LATENTS, hidden=(16,), dtype=torch.float64).initialize(y)
    start = log_evidence(model, y).item()
    svi = SVI(model, AutoTruncated(model, num_states=16), Adam({"lr": 0.02}), Truncated_ELBO(EvolutionarySearch(4, 3, 1)))
    for _ in range(150 if batch_size is None else 400):
        svi.step(y, batch_size)
    # Most of the way from where it started to the parameters that made the data.
    assert log_evidence(model, y).item() > start + 0.7 * (best - start)
    assert model.scale.item() < 0.5


def test_start_explains_the_mean_without_active_latents() -> None:
    y = torch.randn(50, NUM_OBSERVED).double() + 3
    model = make_model().initialize(y)
    torch.testing.assert_close(model.mean(torch.zeros(NUM_LATENTS).double()), y.mean(0), rtol=1e-10, atol=1e-10)
    assert model.scale.item() == pytest.approx(y.var(0, correction=0).mean().sqrt().item())
    # Networks of the user's own are left alone.
    own = make_model(Bilinear())
    before = own.decoder.table.detach().clone()
    assert torch.equal(own.initialize(y).decoder.table, before)


def test_reconstruction_is_the_posterior_mean() -> None:
    model = make_model()
    y = generate(model, NUM_DATA)
    population = full_population(model, y)
    states = population.states(torch.float64)[0]
    weights = log_joint(model, y, states).softmax(-1)
    torch.testing.assert_close(model.reconstruct(population), (weights @ model.mean(states)).detach(), rtol=1e-9, atol=1e-9)


def test_float32_and_linear_networks() -> None:
    model = BinaryVAE(4, 3, hidden=())
    assert [type(layer) for layer in model.decoder] == [torch.nn.Linear]
    y = generate(model, 10)
    guide = AutoTruncated(model, num_states=4)
    SVI(model, guide, Adam({}), Truncated_ELBO(EvolutionarySearch(2, 2, 1))).step(y)
    assert model.reconstruct(guide.population()).dtype == torch.float32


@pytest.mark.slow
def test_what_is_missing_is_filled_in_and_starts_do_not_depend_on_it() -> None:
    """Two states make the data, so that what is missing follows from what is seen."""
    truth = 3.0 * torch.randint(2, (60, 1)).double() * torch.tensor([1.0, -1.0, 2.0, 1.0]).double() + 5.0
    y = truth + 0.1 * torch.randn(60, 4).double()
    hidden = torch.rand(y.shape) < 0.3
    y[hidden] = torch.nan
    model = BinaryVAE(4, 1, hidden=(), dtype=torch.float64).initialize(y)
    torch.testing.assert_close(model.center, y.nanmean(0))
    guide = AutoTruncated(model, num_states=2)
    svi = SVI(model, guide, Adam({"lr": 0.1}), Truncated_ELBO(ExhaustiveSearch()))
    for _ in range(100):
        svi.step(y)
    some = ~hidden.all(1)
    assert (model.reconstruct(guide.population(), y) - truth)[some][hidden[some]].abs().max() < 0.5
