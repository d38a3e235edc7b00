"""learn where there are many data points or many latents: what starts see, when they are compared, what the training begins with."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import ClassVar

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

from pyro_truncated import AutoTruncated, DisagreeingStartsWarning, EvolutionarySearch, Truncated_ELBO
from pyro_truncated.datasets import linear_bars
from pyro_truncated.guide.batch import Batch
from pyro_truncated.models import BinarySparseCoding, MaxSpikeSlabSparseCoding, NoisyOr, OcclusiveComponents
from pyro_truncated.multistart import LearnConfig, learn
from pyro_truncated.multistart.profile import profile_model
from pyro_truncated.multistart.solution import energies_agree
from pyro_truncated.multistart.trainer import Schedule, Trainer, convergence_schedule, finish, gradient_schedule, remaining_gain, train
from pyro_truncated.training import cooling
from tests.multistart.started_models import StartedAtRows


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
def test_starts_see_fifty_data_points_per_latent(model, number):
    assert len(profile_model(model, torch.randn(3000, 16, generator=generator())).for_restarts().y) == number


class Counted(NoisyOr):
    """Notes how many latents the models have that are initialised."""

    sizes: ClassVar[set[int]] = set()

    def initialize(self, y, generator=None):
        self.sizes.add(self.num_latents)
        return super().initialize(y, generator)


@pytest.mark.slow
def test_of_very_many_latents_there_are_two_starts_of_no_more_of_them():
    y = (torch.rand(20, 16, generator=generator()) < 0.3).float()
    model = Counted(16, 260)
    with pytest.warns(DisagreeingStartsWarning, match="no two of 2 restarts"):
        guide = learn(model, y, steps=1, config=LearnConfig(restart_steps=2, tolerance=0.0), num_states=4, progress=False)
    assert (len(guide.starts), Counted.sizes) == (2, {260})


def bars_at_truth(search=None):
    bars = linear_bars(300, 4, mean_active=2.0, noise=1.0, generator=generator())
    model = BinarySparseCoding(16, 8, dtype=torch.float64)
    model.weight, model.prior, model.scale = bars.components.double(), torch.tensor(0.25).double(), torch.tensor(1.0).double()
    y = bars.data.double()
    return model, y, Trainer(profile_model(model, y, search, num_states=32))


@pytest.mark.parametrize("search", [None, EvolutionarySearch(crossover=True)])
def test_training_begins_with_good_states(search):
    torch.manual_seed(0)
    model, y, run = bars_at_truth(search)
    exact = AutoTruncated(model, num_states=2**8)
    optimum = exact.rescore(exact.make_scorer(y)).free_energy().mean()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run.find_states()
    found = run.truncated_guide.population().free_energy().mean()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # The populations hold an eighth of the states; without a search the first step finds a free energy tens of nats lower.
    assert optimum - 0.1 < found <= optimum + 1e-9
    unsearched = bars_at_truth(search)[2].step()
    assert unsearched < optimum - 1.0


def test_states_are_looked_for_as_long_as_that_raises_the_free_energy(monkeypatch):
    torch.manual_seed(0)
    _, _, run = bars_at_truth()
    rounds, search = [], Batch.search_

    def searched(batch, *arguments):
        found = search(batch, *arguments)
        rounds.append(found.free_energy().mean())
        return found

    monkeypatch.setattr(Batch, "search_", searched)
    run.find_states()
    gains = torch.stack(rounds).diff()
    assert 1 <= len(gains) < 9
    assert (gains[:-1] >= 0.01).all()
    assert gains[-1] < 0.01


def test_a_search_that_was_asked_for_stays():
    search = EvolutionarySearch(crossover=True)
    steps = []
    search.step = lambda batch: steps.append(1) or batch.population
    _, _, run = bars_at_truth(search)
    run.intensify_search()
    run.step()
    assert steps


def run_of(values, has_companion=False, has_decoder=False):
    guide = SimpleNamespace(conditional=None, population=lambda: SimpleNamespace(free_energy=lambda: torch.zeros(3)))
    run = SimpleNamespace(step=lambda: values.pop(0), intensify_search=lambda: None, end=lambda: None, truncated_guide=guide, guide=guide)
    run.fit_decoder, run.relocate = lambda: None, lambda: False
    kind = {"has_companion": has_companion, "is_conditional": False, "is_product": False, "has_decoder": has_decoder}
    run.profile = SimpleNamespace(**kind, config=LearnConfig(), tolerance=0.0)
    return run


def test_starts_are_compared_at_convergence():
    def reached(values, steps):
        run = run_of(values)
        return train(run, convergence_schedule(run.profile, steps))

    rising = [float(step) for step in range(12)] + [12.0] * 60
    # Five steps from the last rise on are the first that raise nothing.
    assert reached(rising, 60)[:4:3] == (12.0, 0.0)
    assert len(rising) == 72 - 20
    assert reached(forever := [float(step) for step in range(60)], 20)[:4:3] == (19.0, 5.0)
    assert len(forever) == 40
    assert reached(few := [float(step) for step in range(60)], 7).free_energy == 6.0
    assert len(few) == 53


def test_what_falls_has_not_converged():
    def has_converged(values, tol, **options):
        return Schedule(0, 60, tol, **options).has_converged(values)

    assert has_converged([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.01], 1.1)
    assert not has_converged([1.0, 0.9, 0.8, 0.7, 0.6, 0.5], 0.01)
    # The steps of a new optimiser lose at first what they gain later, even where the last ones have gained a little of it.
    assert not has_converged([1.0, 0.0, -1.0, -1.5, -2.0, -2.0, -2.0, -0.9], 0.5)
    # A free energy that has only fallen makes the part of what all steps raised it by negative.
    assert not has_converged([1.0, 0.9, 0.8, 0.7, 0.6, 0.5], 0.003, is_relative=True)
    falling = [*(1.0 - 0.1 * step for step in range(10)), *[3.0] * 60]
    run = run_of(falling)
    assert train(run, convergence_schedule(run.profile, 60)).free_energy == 3.0


@pytest.mark.parametrize("approach", [lambda t: 1 - 1 / t, lambda t: 1 - torch.exp(-t / 100), lambda t: 1 - torch.exp(-t / 400)])
def test_what_remains_to_be_gained_is_not_underestimated(approach):
    """Of curves without noise, by at most a half where the free energy approaches its limit more slowly than the steps that there were."""
    times = torch.arange(1.0, 401.0, dtype=torch.float64)
    values = approach(times)
    remaining = remaining_gain(values.tolist(), 20)
    assert 0.5 * (1 - values[-1]) < remaining < max(6 * (1 - values[-1]), 0.2)


def test_what_remains_to_be_gained_is_told_from_noise():
    """Means of 100 values of deviation one differ by more than a standard error, 0.14, in one case of six; by three in one of 700."""
    remaining = [remaining_gain(torch.randn(400, generator=generator(seed)).tolist(), 20) for seed in range(100)]
    assert sum(gain == 0.0 for gain in remaining) > 65
    assert max(remaining) < 2 * 3 * 0.2
    assert remaining_gain([0.0] * 39, 20) == math.inf


class Bars(StartedAtRows):
    """Linear bars with noise that is a latent itself, by gradients, which says all a model can say of its starts."""

    has_informed_init = True

    def forward(self, y):
        noise = pyro.sample("noise", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((self.num_latents,), 0.3)).to_event(1))
            pyro.sample("y", dist.Normal(s @ self.weight.mT, noise).to_event(1), obs=y)


def test_only_models_with_m_steps_of_their_own_start_near_the_end():
    assert profile_model(OcclusiveComponents(2, (6, 6), (3, 3)), torch.rand(4, 6, 6, 3)).is_informed
    assert not profile_model(Bars(torch.randn(9, 4)), torch.randn(20, 9)).is_informed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pyro_truncated.ConvergenceWarning")
def test_states_of_starts_are_not_offered_beside_continuous_latents():
    y = linear_bars(40, 3, mean_active=2.0, generator=generator()).data
    guide = learn(
        Bars(torch.randn(9, 4)),
        y,
        restarts=1,
        config=LearnConfig(restart_steps=3),
        steps=3,
        num_states=8,
        generator=generator(),
        progress=False,
    )
    assert len(guide.starts) == 1


def own_bars(number):
    """Latents that begin where the program is."""

    def model(y):
        weight = pyro.param("weight", lambda: torch.randn(number, 4))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((number,), 0.5)).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight, 1.0).to_event(1), obs=y)

    return model


def test_starts_have_half_the_states_unless_all_there_are_fit_into_a_population():
    for number, expected in ((7, 32), (6, 64)):
        pyro.clear_param_store()
        assert profile_model(own_bars(number), torch.randn(20, 4), num_states=64).for_restarts().num_states == expected


@pytest.mark.parametrize(
    ("steps", "rises", "expected"),
    [
        (20, 20, ["step"] * 18 + ["look"] + ["step"] * 2),  # it never rests
        (20, 3, ["step"] * 9 + ["look"] + ["step"]),  # five steps from the last rise on raise nothing, and one when it looks closely
        (9, 20, ["step"] * 9),  # no step is left to look closely in
        (9, 0, ["step"] * 6 + ["look"] + ["step"]),
    ],
)
def test_training_ends_at_convergence_and_with_a_thorough_search_if_a_step_is_left(steps, rises, expected):
    done = []
    values = [float(min(step, rises)) for step in range(20)]
    run = run_of(values)
    take = run.step
    run.step = lambda: done.append("step") or take()
    run.intensify_search = lambda: done.append("look") or True
    assert finish(run, steps, 0.001).steps == expected.count("step")
    assert done == expected


@pytest.mark.parametrize(
    ("values", "has_decoder", "reached", "steps"),
    [
        # Steps 41 to 50 are on average above those before; the ten after them are not.
        ([float(step) for step in range(36)] + [36.0] * 90, False, 36.0, 60),
        ([float(step) for step in range(126)], False, 99.0, 80),
        # Ten steps raise it by a twentieth: of networks another ten are not worth while.
        ([0.05 * step / 10 for step in range(126)], True, 0.195, 20),
    ],
)
def test_starts_by_gradients_go_on_while_they_rise_and_then_slow_down(values, has_decoder, reached, steps):
    slowed = []
    run = run_of(values, has_decoder=has_decoder)
    run.slow_down = lambda steps: slowed.append((126 - len(values), steps))
    assert train(run, gradient_schedule(run.profile, 20)).free_energy == pytest.approx(reached)
    assert slowed == [(steps, 20)]
    assert 126 - len(values) == steps + 20


class Noisy:
    """Free energies that rise as 1 / t, and by a nat with the learning rate, with noise of a deviation of 0.02."""

    guide, truncated = None, SimpleNamespace()
    profile = SimpleNamespace(has_companion=True, is_conditional=False, config=LearnConfig(), tolerance=0.02)

    def __init__(self):
        self.steps, self.rates, self.noise = 0, [], 0.02 * torch.randn(2000, generator=generator())

    def set_rate(self, rate):
        self.rates.append(rate)

    def relocate(self):
        return False

    def step(self):
        self.steps += 1
        return -20 / (self.steps + 20) - self.rates[-1] + float(self.noise[self.steps])

    def end(self):
        pass


def test_runs_beside_continuous_latents_end_where_neither_steps_nor_smaller_rates_gain():
    run = Noisy()
    reached = train(run, gradient_schedule(run.profile, 60))
    assert run.rates == pytest.approx([1.0, 0.3, 0.09, 0.027, 0.0081][: len(run.rates)])
    assert len(run.rates) >= 4
    assert 300 < reached.steps == run.steps <= 60 * 16
    assert reached.remaining_gain <= 0.02
    # Twenty nats over the steps, a fifth of them for the steps that are averaged, and the rate are left.
    assert abs(reached.free_energy + 20 / run.steps + run.rates[-1]) < reached.noise + 0.02


def test_runs_that_are_cut_off_say_what_they_would_have_gained_and_do_not_agree():
    run = Noisy()
    reached = train(run, Schedule(0, 100, 0.02, window=20, stride=20, first_rate=1.0))
    # Half of the steps that are left are taken at each rate.
    assert reached.steps == run.steps == 100
    assert run.rates == pytest.approx([1.0, 0.3, 0.09, 0.027, 0.0081])
    assert reached.remaining_gain > 0.1
    assert not energies_agree(reached, reached, 0.02)
    converged = reached._replace(remaining_gain=0.01)
    assert energies_agree(converged, converged, 0.02)
    cut = train(Noisy(), Schedule(0, 30, 0.02, window=20, stride=20, first_rate=1.0))
    assert (cut.remaining_gain, cut.steps) == (math.inf, 30)


class Slow(Noisy):
    """A tenth of a nat in three hundred steps, at any rate, after a quick beginning: less in any twenty than the noise."""

    profile = SimpleNamespace(config=LearnConfig(), has_companion=True, tolerance=0.01)

    def step(self):
        self.steps += 1
        return -0.5 * math.exp(-self.steps / 10) - 0.1 * math.exp(-self.steps / 300) + float(self.noise[self.steps])

    def intensify_search(self):
        return False


def test_the_last_training_beside_continuous_latents_sees_gains_that_short_windows_do_not():
    run = Slow()
    reached = finish(run, 1600, 0.0)
    # Of the tenth of a nat at most the tolerance is left.
    assert 0.1 * math.exp(-run.steps / 300) < 0.01
    assert reached.remaining_gain <= 0.01


class Constant(Slow):
    """Nothing but noise."""

    def step(self):
        self.steps += 1
        return float(self.noise[self.steps])


def test_a_short_last_training_knows_the_noise_of_its_steps():
    """A line through less than four values has little noise or none: of windows of two steps the first would have converged by chance."""
    run = Constant()
    finish(run, 100, 0.0)
    assert run.steps >= 48


def test_networks_that_decode_states_are_fitted_to_them_once_a_start_has_converged():
    done: list[str] = []
    run = run_of([0.0] * 60)
    take = run.step
    run.step = lambda: done.append("step") or take()
    run.fit_decoder, run.slow_down = lambda: done.append("fit"), lambda steps: done.append("slow down")
    train(run, gradient_schedule(run.profile, 20))
    assert done == 20 * ["step"] + ["fit", "slow down"] + 20 * ["step"]


def clusters(y):
    """All that is learned of them is in the guide of their centres."""
    with pyro.plate("clusters", 3):
        loc = pyro.sample("loc", dist.Normal(0.0, 20.0).expand([2]).to_event(1))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(torch.ones(3) / 3))
        pyro.sample("y", dist.Normal(loc[z], 1.0).to_event(1), obs=y)


def test_starts_begin_at_draws_of_continuous_latents_from_their_prior():
    run = Trainer(profile_model(clusters, torch.randn(9, 2), None, num_states=3), cooling(1.0, 2))
    run.step()
    # Six draws of deviation twenty: all below two by chance once in four million.
    assert run.guide[0].locs.loc.abs().max() > 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pyro_truncated.ConvergenceWarning")
def test_training_goes_on_with_what_the_best_start_has_learned_of_continuous_latents():
    y = 10 * torch.eye(3)[:, :2][torch.arange(90) % 3] + torch.randn(90, 2, generator=generator())
    guide = learn(clusters, y, restarts=1, config=LearnConfig(restart_steps=60), steps=1, progress=False)
    svi = SVI(clusters, guide, pyro.optim.Adam({"lr": 0.0}), Truncated_ELBO())
    # The start was still rising; at the centre of the prior two thirds of the data would cost fifty nats each.
    assert -svi.evaluate_loss(y) / 90 > guide.starts[0] - 0.3
