"""learn on latents that all data share: one posterior, however many rows the data have."""

from __future__ import annotations

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_truncated import LearnConfig, Truncated_ELBO, learn
from pyro_truncated.multistart.model_parameters import ModelParameters
from pyro_truncated.multistart.moves import DeadLatents, SolutionPool
from pyro_truncated.multistart.profile import Profile, profile_model
from pyro_truncated.multistart.solution import FreeEnergyEstimate, Solution
from pyro_truncated.multistart.trainer import search_and_train
from pyro_truncated.states.population import Population


def graph(num_nodes: int, generator: torch.Generator) -> tuple[Callable[[Tensor], None], Tensor, Tensor]:
    """A stochastic block model of two blocks, which edges there are between all pairs, and the free energy of the true blocks."""
    first, second = torch.triu_indices(num_nodes, num_nodes, 1)
    same = first % 2 == second % 2
    edges = torch.bernoulli(torch.where(same, 0.6, 0.1), generator=generator)

    def model(edges: Tensor) -> None:
        chance = pyro.param("chance", torch.tensor([0.4, 0.3]), constraint=dist.constraints.unit_interval)
        block = pyro.sample("block", dist.Bernoulli(torch.full((num_nodes,), 0.5)).to_event(1))
        is_same = (block[..., first] == block[..., second]).long()
        pyro.sample("edges", dist.Bernoulli(chance[1 - is_same]).to_event(1), obs=edges)

    share = torch.stack([edges[same].mean(), edges[~same].mean()])
    likelihood = dist.Bernoulli(share[1 - same.long()]).log_prob(edges).sum()
    return model, edges, likelihood - (num_nodes - 1) * torch.tensor(2.0).log()  # a block may be called the other


@pytest.mark.nightly
def test_free_energies_of_starts_are_of_the_one_posterior():
    model, edges, truth = graph(16, torch.Generator().manual_seed(0))
    pyro.set_rng_seed(0)
    guide = learn(model, edges, num_states=16, config=LearnConfig(restart_steps=8), steps=10, progress=False)
    assert len(guide.starts) == 8  # two alike may be a bad optimum
    # The best state and the one with the other names are not all of the mass.
    assert -Truncated_ELBO().loss(model, guide, edges) == pytest.approx(float(truth), abs=1.0)
    assert max(guide.starts) == pytest.approx(float(truth), abs=1.0)


@pytest.mark.slow
def test_starts_see_all_rows():
    """A part of the edges does not fit to the nodes: 120 have more than the 6000 rows that latents of each row would get."""
    model, edges, _ = graph(120, torch.Generator().manual_seed(1))
    pyro.set_rng_seed(0)
    guide = learn(model, edges, num_states=2, restarts=1, config=LearnConfig(restart_steps=1), steps=1, progress=False)
    assert guide.marginals()["block"].shape[-1] == 120


@pytest.mark.parametrize(("is_shared", "expected"), [(True, 1), (False, 12)])
def test_number_of_posteriors(is_shared: bool, expected: int):
    """One of all data, or one of each row."""
    y = torch.randn(12, generator=torch.Generator().manual_seed(2))

    def model(y: Tensor) -> None:
        shared = pyro.sample("on", dist.Bernoulli(0.5)) if is_shared else None
        with pyro.plate("data", 12):
            on = pyro.sample("on", dist.Bernoulli(0.5)) if shared is None else shared
            pyro.sample("y", dist.Normal(on, 1.0), obs=y)

    assert profile_model(model, y).num_posteriors == expected


WEIGHT = torch.tensor([2.0, 0.0, -3.0, 0.0, 0.0, 1.5])


def selection(x: Tensor, weight: Tensor) -> Callable[[Tensor], None]:
    """Which predictors count, and by which weight."""

    def model(y: Tensor) -> None:
        learned = pyro.param("weight", weight.clone())
        chosen = pyro.sample("chosen", dist.Bernoulli(torch.full((len(weight),), 0.2)).to_event(1))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(((chosen * learned).unsqueeze(-2) * x).sum(-1), 0.5), obs=y)

    return model


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("weight", [WEIGHT, torch.tensor([2.0, 1.5, -3.0, 1.0, 2.5, 1.5])])
def test_latents_that_no_state_has_on_are_woken(weight: Tensor):
    """Weights of the wrong sign: to have any predictor on makes the data less likely, so that nothing is learned of its weight.

    Of weights of which none is zero no gradient is anything but zero.
    """
    pyro.set_rng_seed(3)
    x = torch.randn(60, 6)
    y = x @ weight + 0.5 * torch.randn(60)
    model = selection(x, -weight)
    off = in_states(model, y, torch.zeros(1, 1, 6), free_energy=-1000.0)
    found = revived(profile_model(model, y, num_states=8, config=LearnConfig(tolerance=0.05, restart_steps=30)), off)
    chosen = weight != 0
    rest = y - x[:, chosen] @ torch.linalg.lstsq(x[:, chosen], y.unsqueeze(-1)).solution.squeeze(-1)
    truth = dist.Normal(0.0, 0.5).log_prob(rest).sum() + dist.Bernoulli(0.2).log_prob(chosen.float()).sum()
    assert found.free_energy >= float(truth) - 0.05  # other states, and chance beside the truth, add to it
    torch.testing.assert_close(found.parameters["weight"][chosen], weight[chosen], atol=0.3, rtol=0.0)


def revived(profile: Profile, found: Solution) -> Solution:
    return SolutionPool(profile).improve(found, DeadLatents(profile), search_and_train)


def in_states(model: Callable[[Tensor], None], y: Tensor, states: Tensor, free_energy: float = 0.0) -> Solution:
    """A solution with these states of the one posterior, ``(1, S, 6)``."""
    space = profile_model(model, y).set_up_guide().space
    population = Population(space, space.pack(states.to(torch.uint8)), torch.zeros(states.shape[:2]))
    return Solution(FreeEnergyEstimate(free_energy), ModelParameters(model, y).snapshot(), population)


@pytest.mark.slow
def test_nothing_is_woken_where_every_latent_is_on_somewhere():
    pyro.set_rng_seed(4)
    x = torch.randn(10, 6)
    model, y = selection(x, WEIGHT), x @ WEIGHT
    on = in_states(model, y, torch.eye(6).unsqueeze(0))
    assert revived(profile_model(model, y, num_states=6, config=LearnConfig(tolerance=0.05, restart_steps=1)), on) is on


def test_the_states_of_what_is_woken_at_once_have_a_bound():
    """Six bytes are a state of six latents."""
    pyro.set_rng_seed(5)
    x = torch.randn(10, 6)
    model, y = selection(x, -WEIGHT), x @ WEIGHT
    off, profile = in_states(model, y, torch.zeros(1, 1, 6)), profile_model(model, y, num_states=1)
    states = profile.space.unpack(DeadLatents(profile).revive(off))[0]
    assert torch.equal(states, torch.cat([torch.zeros(1, 6), torch.eye(6)]).to(states))
    some = profile.space.unpack(DeadLatents(profile).revive(off, max_bytes=17))[0]
    assert some.sum(1).tolist() == [0, 1, 1]
    assert some[1].argmax() < some[2].argmax()
