"""Discrete and ternary sparse coding: exact EM by enumeration of all values, with and without missing data."""

from __future__ import annotations

import itertools
import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, ExhaustiveSearch, GPSelect, Preselection, Truncated_ELBO
from pyro_truncated.models import DiscreteSparseCoding
from pyro_truncated.search import Singletons
from pyro_truncated.states import Population, StateSpace
from tests.models.enumeration import assert_never_falls, generate

NUM_DATA, NUM_OBSERVED, NUM_LATENTS = 50, 6, 3
TERNARY, UNEVEN = (-1.0, 0.0, 1.0), (0.0, 2.0, -0.5, 1.0)
NAMES = ("weight", "scale", "prior")


def make_model(values: tuple[float, ...] = TERNARY, dtype: torch.dtype = torch.float64, **options: bool) -> DiscreteSparseCoding:
    model = DiscreteSparseCoding(NUM_OBSERVED, NUM_LATENTS, values, offset=False, dtype=dtype, **options)
    model.weight = 3 * torch.randn(NUM_OBSERVED, NUM_LATENTS, dtype=dtype)
    model.prior = (1 + torch.rand_like(model.prior)) / (1 + torch.rand_like(model.prior)).sum(-1, keepdim=True)
    model.prior = model.prior.detach() / model.prior.detach().sum(-1, keepdim=True)
    return model


def log_joint(model: DiscreteSparseCoding, y: Tensor, states: Tensor) -> Tensor:
    """``log p(s, y_n)`` of states ``(T, H)``, ``(N, T)``, by running the Pyro model."""
    pyro.clear_param_store()
    values = states.unsqueeze(1).expand(-1, len(y), -1)
    trace = poutine.trace(poutine.condition(model, data={"s": values})).get_trace(y)
    trace.compute_log_prob()
    return (trace.nodes["s"]["log_prob"] + trace.nodes["y"]["log_prob"]).mT


def full_population(model: DiscreteSparseCoding, y: Tensor) -> Population:
    space = StateSpace([model.num_values] * model.num_latents)
    words = space.enumerate()
    with torch.no_grad():
        return Population(space, words.expand(len(y), -1, -1), log_joint(model, y, space.unpack(words, torch.int64)))


def free_energies(model: DiscreteSparseCoding, y: Tensor, num_iterations: int) -> list[float]:
    values = []
    for _ in range(num_iterations):
        population = full_population(model, y)
        values.append(population.free_energy().sum().item())
        model.maximize(model.sufficient_statistics(population, y))
    return [*values, full_population(model, y).free_energy().sum().item()]


@pytest.mark.parametrize("values", [TERNARY, UNEVEN])
@pytest.mark.parametrize("shared_prior", [False, True])
def test_log_joint_is_its_definition(values: tuple[float, ...], shared_prior: bool) -> None:
    model = make_model(values, shared_prior=shared_prior)
    y = generate(model, NUM_DATA)
    assert model.values.tolist() == [0.0, *sorted(set(values) - {0.0})]
    prior = model.prior.expand(NUM_LATENTS, -1)
    states = torch.tensor(list(itertools.product(range(len(values)), repeat=NUM_LATENTS)))
    expected = []
    for state in states:
        mean = sum(model.weight[:, h] * model.values[k] for h, k in enumerate(state.tolist()))
        chance = sum(prior[h, k].log() for h, k in enumerate(state.tolist()))
        expected.append(chance + dist.Normal(mean, model.scale).log_prob(y).sum(-1))
    torch.testing.assert_close(log_joint(model, y, states), torch.stack(expected, 1), rtol=1e-10, atol=1e-10)


def test_tied_signs_have_equal_probabilities() -> None:
    model = make_model(TERNARY, tied_signs=True)
    y = generate(make_model(), NUM_DATA)
    population = full_population(model, y)
    counts = model.sufficient_statistics(population, y)["counts"].sum(0)
    model.maximize(model.sufficient_statistics(population, y))
    share = counts[0] / counts.sum()
    torch.testing.assert_close(model.prior.detach(), torch.stack([share, (1 - share) / 2, (1 - share) / 2]))


def test_binary_values_are_binary_sparse_coding() -> None:
    from pyro_truncated.models import BinarySparseCoding
    from tests.models import enumeration

    model, binary = make_model((0.0, 1.0)), BinarySparseCoding(NUM_OBSERVED, NUM_LATENTS, offset=False, dtype=torch.float64)
    y = generate(model, NUM_DATA)
    binary.weight, binary.prior = model.weight.detach().clone(), model.prior[1].detach().clone()
    assert free_energies(model, y, 10) == pytest.approx(enumeration.free_energies(binary, y, 10), rel=1e-10)


def test_values_that_never_occur_keep_a_little_probability() -> None:
    model = make_model()
    y = generate(model, NUM_DATA)
    population = full_population(model, y)
    is_off = (population.states()[..., 2] == 0).all(0)
    scores = population.log_joint.masked_fill(~is_off, -math.inf)
    before = model.weight[:, 2].detach().clone()
    model.prior = model.prior.detach().expand(NUM_LATENTS, -1)
    model.shared_prior = False
    model.maximize(model.sufficient_statistics(Population(population.space, population.words, scores), y))
    torch.testing.assert_close(model.weight[:, 2].detach(), before, rtol=1e-12, atol=0)
    torch.testing.assert_close(model.prior[2, 1:].detach(), torch.full((2,), 1e-6).double(), rtol=1e-5, atol=0)


SEARCHES = {
    "exhaustive": ExhaustiveSearch,
    "evolutionary": lambda: EvolutionarySearch(4, 3, 2),
    "preselection": lambda: Preselection(Singletons(), 2),
    "gp": lambda: GPSelect(2, fit_steps=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("search", SEARCHES)
def test_trains_through_svi_with_every_search(search: str) -> None:
    y = generate(make_model(), NUM_DATA)
    model = make_model().initialize(y)
    guide = AutoTruncated(model, num_states=27 if search == "exhaustive" else 9)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(SEARCHES[search]()))
    losses = [svi.step(y) for _ in range(12)]
    assert_never_falls([-loss for loss in losses])
    assert losses[-1] < losses[0] - 10


@pytest.mark.nightly
def test_gradients_lead_to_the_optimum_of_the_closed_form() -> None:
    y = generate(make_model(), NUM_DATA)
    model = make_model().initialize(y)
    for _ in range(300):
        model.maximize(model.sufficient_statistics(full_population(model, y), y))
    best = full_population(model, y).free_energy().sum().item()
    pyro.clear_param_store()
    guide = AutoTruncated(model, num_states=27)
    svi = SVI(model, guide, Adam({"lr": 1e-3}), Truncated_ELBO(ExhaustiveSearch()))
    # At the optimum there is nothing to gain, and from beside it the way leads back.
    assert svi.step(y) == pytest.approx(-best, rel=1e-9)
    gradients = [getattr(model, f"{name}_unconstrained").grad for name in NAMES]
    assert all(gradient is None or gradient.abs().max() < 0.05 for gradient in gradients)
    model.weight = model.weight.detach() + 0.1 * torch.randn_like(model.weight)
    pyro.clear_param_store()
    svi = SVI(model, AutoTruncated(model, num_states=27), Adam({"lr": 0.01}), Truncated_ELBO(ExhaustiveSearch()))
    losses = [svi.step(y) for _ in range(150)]
    assert losses[0] > -best + 0.5
    assert losses[-1] == pytest.approx(-best, abs=0.1)


@pytest.mark.parametrize("values", [(1.0, 2.0), (0.0,), (0.0, 1.0, 1.0)])
def test_bad_values_are_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="values must be at least two distinct numbers, with zero among them"):
        DiscreteSparseCoding(4, 3, values)
