"""learn where there are many data points or many latents: what starts see, when they are compared, what the training begins with."""

from __future__ import annotations

from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

from pyro_truncated import AutoTruncated, DisagreeingStartsWarning, EvolutionarySearch, Truncated_ELBO
from pyro_truncated.datasets import linear_bars
from pyro_truncated.guide.batch import Batch
from pyro_truncated.models import BinarySparseCoding, MaxSpikeSlabSparseCoding, NoisyOr, OcclusiveComponents
from pyro_truncated.states.space import StateSpace
from pyro_truncated.training import cooling, learn, learning
from pyro_truncated.training.model_kinds import starts_near_the_end
from pyro_truncated.training.model_runs import Run, Settings
from pyro_truncated.training.relocation import Relocations
from pyro_truncated.training.resting import are_at_rest, climbed, finished, rested
from tests.training.started_models import StartedAtRows


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("model", "number"),
    [
        (BinarySparseCoding(16, 6), 1000),
        (BinarySparseCoding(16, 40), 2000),
        (MaxSpikeSlabSparseCoding(16, 30), 1500),
        (BinarySparseCoding(16, 100), 3000),
    ],
)
def test_starts_see_fifty_data_points_per_latent(monkeypatch, model, number):
    seen = []

    def begin(model, y, settings, plan):
        seen.append(len(y))
        raise InterruptedError

    monkeypatch.setattr(learning, "SeveralStarts", begin)
    with pytest.raises(InterruptedError):
        learn(model, torch.randn(3000, 16, generator=generator()), progress=False)
    assert seen == [number]


def test_of_very_many_latents_there_are_two_starts_of_no_more_of_them(monkeypatch):
    sizes = []
    step = Run.step
    monkeypatch.setattr(Run, "step", lambda run, y: sizes.append(run.truncated.space.num_latents) or step(run, y))
    y = (torch.rand(20, 16, generator=generator()) < 0.3).float()
    with pytest.warns(DisagreeingStartsWarning, match="no two of 2 starts"):
        guide = learn(NoisyOr(16, 260), y, steps=1, short_steps=2, num_states=4, tolerance=0.0, progress=False)
    assert (len(guide.starts), set(sizes)) == (2, {260})


def bars_at_truth(search=None):
    bars = linear_bars(300, 4, mean_active=2.0, noise=1.0, generator=generator())
    model = BinarySparseCoding(16, 8, dtype=torch.float64)
    model.weight, model.prior, model.scale = bars.components.double(), torch.tensor(0.25).double(), torch.tensor(1.0).double()
    y = bars.data.double()
    return model, y, Run(model, y, Settings(search, 32))


@pytest.mark.parametrize("search", [None, EvolutionarySearch(crossover=True)])
def test_training_begins_with_good_states(search):
    torch.manual_seed(0)
    model, y, run = bars_at_truth(search)
    exact = AutoTruncated(model, num_states=2**8)
    optimum = exact.rescored(exact.log_joint_of(y)).free_energy().mean()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run.find_states(y)
    found = run.truncated.population().free_energy().mean()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # The populations hold an eighth of the states; without a search the first step finds a free energy tens of nats lower.
    assert optimum - 0.1 < found <= optimum + 1e-9
    unsearched = bars_at_truth(search)[2].step(y)
    assert unsearched < optimum - 1.0


def test_states_are_looked_for_as_long_as_that_raises_the_free_energy(monkeypatch):
    torch.manual_seed(0)
    _, y, run = bars_at_truth()
    rounds, search = [], Batch.search_

    def searched(batch, *arguments):
        found = search(batch, *arguments)
        rounds.append(found.free_energy().mean())
        return found

    monkeypatch.setattr(Batch, "search_", searched)
    run.find_states(y)
    gains = torch.stack(rounds).diff()
    assert 1 <= len(gains) < 9
    assert (gains[:-1] >= 0.01).all()
    assert gains[-1] < 0.01


def test_a_search_that_was_asked_for_stays():
    search = EvolutionarySearch(crossover=True)
    steps = []
    search.step = lambda batch: steps.append(1) or batch.population
    _, y, run = bars_at_truth(search)
    run.look_closely()
    run.step(y)
    assert steps


def run_of(values):
    guide = SimpleNamespace(conditional=None, population=lambda: SimpleNamespace(free_energy=lambda: torch.zeros(3)))
    run = SimpleNamespace(step=lambda y: values.pop(0), look_closely=lambda: None, end=lambda: None, truncated=guide, guide=guide)
    run.fit_decoder = lambda y: None
    return run


def test_starts_are_compared_when_they_are_at_rest():
    rising = [float(step) for step in range(12)] + [12.0] * 60
    # Five steps from the last rise on are the first that raise nothing.
    assert rested(run_of(rising), None, 60).free_energy == 12.0
    assert len(rising) == 72 - 20
    assert rested(run_of(forever := [float(step) for step in range(60)]), None, 20).free_energy == 19.0
    assert len(forever) == 40
    assert rested(run_of(few := [float(step) for step in range(60)]), None, 7).free_energy == 6.0
    assert len(few) == 53


def test_what_falls_is_not_at_rest():
    assert are_at_rest([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.01], 1.1)
    assert not are_at_rest([1.0, 0.9, 0.8, 0.7, 0.6, 0.5], 0.01)
    # The steps of a new optimiser lose at first what they gain later, even where the last ones have gained a little of it.
    assert not are_at_rest([1.0, 0.0, -1.0, -1.5, -2.0, -2.0, -2.0, -0.9], 0.5)
    # A free energy that has only fallen makes the part of what all steps raised it by negative.
    assert not are_at_rest([1.0, 0.9, 0.8, 0.7, 0.6, 0.5], 0.003 * -0.5)
    falling = [*(1.0 - 0.1 * step for step in range(10)), *[3.0] * 60]
    assert rested(run_of(falling), None, 60).free_energy == 3.0


class Bars(StartedAtRows):
    """Linear bars with noise that is a latent itself, by gradients, which says all a model can say of its starts."""

    starts_near_the_end = True

    def forward(self, y):
        noise = pyro.sample("noise", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((self.num_latents,), 0.3)).to_event(1))
            pyro.sample("y", dist.Normal(s @ self.weight.mT, noise).to_event(1), obs=y)


def test_only_models_with_m_steps_of_their_own_start_near_the_end():
    assert starts_near_the_end(OcclusiveComponents(2, (6, 6), (3, 3)))
    assert not starts_near_the_end(Bars(torch.randn(9, 4)))


def test_states_of_starts_are_not_offered_beside_continuous_latents():
    y = linear_bars(40, 3, mean_active=2.0, generator=generator()).data
    guide = learn(Bars(torch.randn(9, 4)), y, starts=1, short_steps=3, steps=3, num_states=8, generator=generator(), progress=False)
    assert len(guide.starts) == 1


def test_starts_have_half_the_states_unless_all_there_are_fit_into_a_population():
    assert Settings(None, 64).halved(StateSpace([2] * 7)).num_states == 32
    assert Settings(None, 64).halved(StateSpace([2] * 6)).num_states == 64


@pytest.mark.parametrize(
    ("steps", "rises", "expected"),
    [
        (20, 20, ["step"] * 18 + ["look"] + ["step"] * 2),  # it never rests
        (20, 3, ["step"] * 9 + ["look"] + ["step"]),  # five steps from the last rise on raise nothing, and one when it looks closely
        (9, 20, ["step"] * 9),  # no step is left to look closely in
        (9, 0, ["step"] * 6 + ["look"] + ["step"]),
    ],
)
def test_training_ends_at_rest_and_with_a_closer_look_if_a_step_is_left(steps, rises, expected):
    done = []
    values = [float(min(step, rises)) for step in range(20)]
    run = run_of(values)
    take, run.relocations = run.step, Relocations(None, None, None)
    run.step = lambda y: done.append("step") or take(y)
    run.look_closely = lambda: done.append("look") or True
    assert finished(run, None, steps, 0.001) == expected.count("step")
    assert done == expected


def test_starts_by_gradients_go_on_while_they_climb_and_then_rest():
    slowed = []
    rising = [float(step) for step in range(36)] + [36.0] * 90
    run = run_of(rising)
    run.slow_down, run.is_in_parts = lambda steps: slowed.append((126 - len(rising), steps)), False
    # Steps 41 to 50 are on average above those before; the ten after them are not.
    assert climbed(run, None, 20).free_energy == 36.0
    assert slowed == [(60, 20)]
    assert 126 - len(rising) == 80
    forever = [float(step) for step in range(126)]
    run = run_of(forever)
    run.slow_down, run.is_in_parts = lambda steps: slowed.append((126 - len(forever), steps)), False
    assert climbed(run, None, 20).free_energy == 99.0
    assert slowed[1:] == [(80, 20)]
    assert len(forever) == 26
    # Ten steps raise it by a twentieth: in parts another ten are not worth while.
    slowly = [0.05 * step / 10 for step in range(126)]
    run = run_of(slowly)
    run.slow_down, run.is_in_parts = lambda steps: slowed.append((126 - len(slowly), steps)), True
    climbed(run, None, 20)
    assert slowed[2:] == [(20, 20)]


def test_networks_that_decode_states_are_fitted_to_them_once_a_start_has_climbed():
    done: list[str] = []
    run = run_of([0.0] * 60)
    take, run.is_in_parts = run.step, True
    run.step = lambda y: done.append("step") or take(y)
    run.fit_decoder, run.slow_down = lambda y: done.append("fit"), lambda steps: done.append("slow down")
    climbed(run, None, 20)
    assert done == 20 * ["step"] + ["fit", "slow down"] + 20 * ["step"]


def clusters(y):
    """All that is learned of them is in the guide of their centres."""
    with pyro.plate("clusters", 3):
        loc = pyro.sample("loc", dist.Normal(0.0, 20.0).expand([2]).to_event(1))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(torch.ones(3) / 3))
        pyro.sample("y", dist.Normal(loc[z], 1.0).to_event(1), obs=y)


def test_starts_begin_at_draws_of_continuous_latents_from_their_prior():
    run = Run(clusters, torch.randn(9, 2), Settings(None, 3), cooling(1.0, 2))
    run.step(torch.randn(9, 2))
    # Six draws of deviation twenty: all below two by chance once in four million.
    assert run.guide[0].locs.loc.abs().max() > 2


def test_training_goes_on_with_what_the_best_start_has_learned_of_continuous_latents():
    y = 10 * torch.eye(3)[:, :2][torch.arange(90) % 3] + torch.randn(90, 2, generator=generator())
    guide = learn(clusters, y, starts=1, short_steps=60, steps=1, progress=False)
    svi = SVI(clusters, guide, pyro.optim.Adam({"lr": 0.0}), Truncated_ELBO())
    # The start was still rising; at the centre of the prior two thirds of the data would cost fifty nats each.
    assert -svi.evaluate_loss(y) / 90 > guide.starts[0] - 0.3
