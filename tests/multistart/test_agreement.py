"""When two starts have reached the same optimum: differences in few data points, of spare latents and of draws do not count."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.ops.indexing import Vindex

from pyro_truncated import GPSelect, Truncated_ELBO, learn
from pyro_truncated.datasets import linear_bars, matched_bars
from pyro_truncated.models import MaxSpikeSlabSparseCoding
from pyro_truncated.multistart import LearnConfig
from pyro_truncated.multistart.profile import profile_model
from pyro_truncated.multistart.solution import (
    FreeEnergyEstimate,
    energies_agree,
    estimate_mean,
    estimate_on_trend,
    explain_equally,
    is_gain_below_error,
)
from pyro_truncated.multistart.trainer import Trainer, finish, run_restart
from tests.multistart.scripted import disagreement, ended, ended_with_states, scripted_restarts


def start(each: torch.Tensor, **fields: float) -> FreeEnergyEstimate:
    return FreeEnergyEstimate(float(each.mean()) + fields.pop("beside", 0.0), each=each, **fields)


EACH = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NOISE = 0.1 * torch.randn(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def missing(number: int, nats: float) -> torch.Tensor:
    """The free energies of another start, which has missed states of so many data points."""
    each = EACH + NOISE
    each[:number] -= nats
    return each


@pytest.mark.parametrize(("number", "agree"), [(0, True), (9, True), (50, False)])
def test_what_few_data_points_miss_does_not_count_and_what_many_miss_does(number: int, agree: bool) -> None:
    one, other = start(EACH), start(missing(number, 100.0))
    assert (abs(one.free_energy - other.free_energy) > 0.5) == (number > 0)
    assert energies_agree(one, other, 0.05) == agree
    assert energies_agree(other, one, 0.05) == agree


def test_the_best_two_count_even_where_the_second_is_better_in_most_data_points() -> None:
    # Better by ten nats in a few data points, worse by 0.1 in all others.
    one, other = start(EACH), start(EACH + 0.1 - 10.0 * (torch.arange(1000) < 12))
    assert one.free_energy > other.free_energy
    assert not energies_agree(one, other, 0.05)
    assert energies_agree(one, start(EACH - 0.01), 0.05)


def causes(y: torch.Tensor) -> None:
    """Causes whose probabilities are known, so that none may take another one's place."""
    weight = pyro.param("weight", lambda: torch.randn(2, 2))
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.tensor([0.1, 0.4])).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight, 1.0).to_event(1), obs=y)


@pytest.mark.parametrize(("one", "number", "tolerance"), [(EACH + 0.2 * NOISE, 2, None), (EACH.roll(1), 3, None), (EACH.roll(1), 2, 0.05)])
def test_starts_by_gradients_agree_where_they_explain_the_same_data_points(one: torch.Tensor, number: int, tolerance: float | None) -> None:
    assert energies_agree(start(EACH), start(one), 0.05)
    assert explain_equally(start(EACH), start(one), 0.05) == (number == 2 and tolerance is None)
    starts = iter([start(EACH), start(one), start(EACH - 5.0)])
    options = {"max_restarts": 3, "min_restarts": 1, "tolerance": tolerance}
    found = scripted_restarts(causes, torch.randn(32, 2), lambda profile, *_: ended(profile, next(starts)), **options)
    assert len(found.pool.energies) == number
    assert (disagreement(found) is None) == (number == 2)


def candidates(y: torch.Tensor) -> None:
    """Which of five records is that of a person, if any: four fields agree with the right one often, and with others seldom."""
    right, wrong = (pyro.param(name, torch.full((4,), 0.5), constraint=dist.constraints.unit_interval) for name in ("right", "wrong"))
    none = pyro.param("none", torch.tensor(0.5), constraint=dist.constraints.unit_interval)
    with pyro.plate("people", len(y)):
        z = pyro.sample("z", dist.Categorical(torch.cat([((1 - none) / 5).expand(5), none.unsqueeze(0)])))
        is_right = torch.nn.functional.one_hot(z, 6)[..., :5].unsqueeze(-1)
        pyro.sample("y", dist.Bernoulli(wrong + (right - wrong) * is_right).to_event(2), obs=y)


@pytest.mark.nightly
@pytest.mark.parametrize(("rows", "seed"), [(400, 2), (1000, 5)])
def test_programs_that_exchange_nothing_do_not_end_where_their_first_restarts_agree(rows: int, seed: int) -> None:
    """Half of the restarts end a nat lower, where fields of the right record agree seldom."""
    pyro.set_rng_seed(seed)
    is_right = torch.nn.functional.one_hot(dist.Categorical(torch.tensor([0.12] * 5 + [0.4])).sample((rows,)), 6)[:, :5, None]
    wrong = torch.tensor([0.1, 0.3, 0.05, 0.25])
    y = torch.bernoulli(wrong + (torch.tensor([0.9, 0.85, 0.95, 0.8]) - wrong) * is_right)
    guide = learn(candidates, y, progress=False)
    assert guide.starts[0] == pytest.approx(guide.starts[1], abs=0.01)
    assert -Truncated_ELBO().loss(candidates, guide, y) / len(y) > guide.starts[0] + 0.5


def schools(y: torch.Tensor) -> None:
    """Kinds of schools, by the shares of classes of their pupils: each school and each pupil has a set of states."""
    share = pyro.param("share", torch.full((3, 4), 0.25), constraint=dist.constraints.simplex)
    loc, scale = pyro.param("loc", torch.zeros(4, 3)), pyro.param("scale", torch.tensor(2.0), constraint=dist.constraints.positive)
    with pyro.plate("schools", len(y), dim=-2):
        c = pyro.sample("c", dist.Categorical(torch.ones(3)))
        with pyro.plate("pupils", 6, dim=-1):
            z = pyro.sample("z", dist.Categorical(Vindex(share)[c]))
            pyro.sample("y", dist.Normal(Vindex(loc)[z], scale).to_event(1), obs=y)


@pytest.mark.nightly
def test_programs_with_sets_for_each_node_do_not_end_where_their_first_restarts_agree() -> None:
    """The second and the third restart agree where two classes share a location."""
    pyro.set_rng_seed(5)
    share = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1], [0.05, 0.05, 0.45, 0.45]])
    z = dist.Categorical(share[torch.arange(100) % 3]).expand([6, 100]).sample().mT
    loc = 2.5 * torch.randn(4, 3)
    y = loc[z] + torch.randn(100, 6, 3)
    guide = learn(schools, y, progress=False)
    assert guide.starts[1] == pytest.approx(guide.starts[2], abs=0.05)
    reached, store = -Truncated_ELBO().loss(schools, guide, y), pyro.get_param_store()
    store["share"], store["loc"], store["scale"] = share, loc, torch.tensor(1.0)
    assert reached > -Truncated_ELBO().loss(schools, guide, y)


def component(y: torch.Tensor) -> None:
    """A mixture by gradients, whose components do not change places."""
    loc = pyro.param("loc", lambda: torch.randn(4))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.4, 0.3, 0.2, 0.1])))
        pyro.sample("y", dist.Normal(loc[z].unsqueeze(-1), 1.0).expand([*z.shape, y.shape[1]]).to_event(1), obs=y)


@pytest.mark.parametrize(
    ("program", "shape"),
    [(component, (1000, 100)), (candidates, (1000, 5, 4)), (schools, (1000, 6, 3))],
)
def test_programs_that_exchange_nothing_have_eight_restarts_even_if_two_agree(program: Any, shape: tuple[int, ...]) -> None:
    """Data points differ by 0.05, more than three tolerances of a mixture."""
    starts = itertools.cycle([start(EACH), start(EACH + 0.5 * NOISE)])
    y = torch.randn(shape)
    found = scripted_restarts(program, (y > 0).float() if program is candidates else y, lambda profile, *_: ended(profile, next(starts)))
    assert len(found.pool.energies) == 8
    assert disagreement(found) is None


@pytest.mark.parametrize(("columns", "is_small"), [(1200, True), (1300, False)])
def test_programs_that_exchange_values_have_eight_restarts_up_to_50_000_values_times_states(columns: int, is_small: bool) -> None:
    """Four classes, which the first restarts find; larger programs end with the second."""

    def classes(y: torch.Tensor) -> None:
        loc = pyro.param("loc", torch.randn(4, columns))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(4)))
            pyro.sample("y", dist.Normal(loc[z], 1.0).to_event(1), obs=y)

    found = scripted_restarts(classes, torch.randn(10, columns), lambda profile, *_: ended_with_states(profile, start(EACH[:10])))
    assert len(found.pool.energies) == (8 if is_small else 2)


def test_programs_without_parameters_have_no_more_restarts_than_agree() -> None:
    """Nothing is learned, so that restarts differ in nothing."""

    def known(y: torch.Tensor) -> None:
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.4, 0.3, 0.2, 0.1])))
            pyro.sample("y", dist.Normal(1.0 * z.unsqueeze(-1), 1.0).expand([*z.shape, y.shape[1]]).to_event(1), obs=y)

    found = scripted_restarts(known, torch.randn(1000, 12), lambda profile, *_: ended(profile, start(EACH)))
    assert len(found.pool.energies) == 2


def causes_with_prior(y: torch.Tensor) -> None:
    weight = pyro.sample("weight", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.tensor([0.1, 0.4])).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight, 1.0).to_event(1), obs=y)


def test_beside_continuous_latents_data_points_count_too_up_to_the_scatter_of_the_posterior() -> None:
    """Restarts of an Indian buffet agreed though these differed by a deviation of 3.6; a plain run ended 94 nats higher."""
    profile = profile_model(causes_with_prior, torch.randn(36, 2), config=LearnConfig(restart_steps=2)).for_restarts()
    estimate = run_restart(profile, profile.temperature).estimate
    assert estimate.each is not None
    assert estimate.each.shape == (36,)
    assert estimate.scatter == pytest.approx((4 / 36) ** 0.5)
    assert explain_equally(start(EACH, scatter=0.3), start(EACH + 2.0 * NOISE), 0.01)
    assert not explain_equally(start(EACH, scatter=0.3), start(EACH.roll(1), scatter=0.3), 0.01)


def test_what_belongs_to_no_data_point_counts_in_full() -> None:
    assert not energies_agree(start(EACH, beside=0.2), start(EACH), 0.05)
    assert energies_agree(start(EACH, beside=0.2), start(EACH), 0.25)


def test_what_both_may_have_gained_from_noise_does_not_count() -> None:
    assert energies_agree(start(EACH + 0.2, noise=0.3), start(EACH, noise=0.16), 0.05)
    assert not energies_agree(start(EACH + 0.2, noise=0.3), start(EACH, noise=0.1), 0.05)


def test_free_energies_that_are_not_known_by_data_point_are_compared_as_they_are() -> None:
    assert energies_agree(FreeEnergyEstimate(-1.0), FreeEnergyEstimate(-1.04), 0.05)
    assert not energies_agree(FreeEnergyEstimate(-1.0), FreeEnergyEstimate(-1.06, each=EACH), 0.05)
    assert not energies_agree(FreeEnergyEstimate(-1.0, each=EACH), FreeEnergyEstimate(float("nan"), each=EACH), 0.05)


def test_means_over_draws_are_known_to_three_standard_errors() -> None:
    reached = estimate_mean([1.0, 2.0, 3.0, 6.0])
    assert reached.free_energy == 3.0
    # Squared deviations 4 + 1 + 0 + 9 over three, and four values.
    assert reached.noise == pytest.approx(3 * (14 / 3 / 4) ** 0.5)
    assert estimate_mean([2.0]).noise == 0.0


@pytest.mark.slow
def test_chains_come_to_the_parameters_of_the_best_start_before_these_change() -> None:
    """One step of draws from chains that have just begun would take bars away."""
    bars = linear_bars(300, 4, mean_active=1.6, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = MaxSpikeSlabSparseCoding(16, 8)
    model.weight, model.scale, model.prior = bars.components.clamp(min=1e-3), torch.tensor(2.0), torch.tensor(0.2)
    finish(Trainer(profile_model(model, bars.data.clamp(min=0.0), GPSelect(4, kernel="linear"))), 1, -math.inf)
    assert matched_bars(model.weight, bars.components, 0.98) == 8


def test_what_a_start_still_rises_by_is_no_noise() -> None:
    reached = estimate_on_trend([float(value) for value in range(10)])
    assert (reached.free_energy, reached.noise) == (4.5, pytest.approx(0.0, abs=1e-9))
    assert not energies_agree(reached, reached._replace(free_energy=2.0), 0.05)
    rising = [value + (-1) ** value for value in range(10)]
    # What alternates is hardly a curve: the residuals have a deviation of one, but for the degrees of freedom, of a cubic and of a line.
    assert estimate_on_trend(rising).noise == pytest.approx(3 * 6**-0.5, rel=0.1)
    assert estimate_on_trend(rising[:8]).noise == pytest.approx(3 * 6**-0.5, rel=0.1)
    assert [estimate_on_trend([1.0, 3.0][:number]).noise for number in (1, 2)] == [0.0, 0.0]


@pytest.mark.parametrize("bend", [1.0, 3.0, 6.0])
def test_the_bend_of_a_rise_is_no_noise(bend: float) -> None:
    """Residuals of a line through it hang together; three errors of independent ones would be this large, and more if that counted."""
    rise = -torch.exp(-bend * torch.arange(10, dtype=torch.float64) / 10)
    line = torch.linalg.qr(torch.stack([torch.ones(10).double(), torch.arange(10).double()], 1)).Q
    around_a_line = 3 * float((rise - line @ (line.mT @ rise)).norm()) / (8 * 10) ** 0.5
    assert estimate_on_trend(rise.tolist()).noise < 0.7 * around_a_line
    parabola = estimate_on_trend([-1.8 * (1 - step / 10) ** 2 for step in range(10)])
    assert parabola.noise == pytest.approx(0.0, abs=1e-9)
    assert not energies_agree(parabola, parabola._replace(free_energy=parabola.free_energy - 1.8), 0.05)


def test_errors_of_values_that_hang_together_are_larger() -> None:
    """Of series whose neighbours correlate by 0.6 nine in ten means are within three errors: with those of independent values eight."""
    generator = torch.Generator().manual_seed(0)
    series = torch.randn(400, 60, generator=generator)
    for step in range(1, 60):
        series[:, step] += 0.6 * series[:, step - 1]
    reached = [estimate_on_trend(one[40:].tolist()) for one in series]
    assert sum(abs(one.free_energy) <= one.noise for one in reached) >= 360


def test_another_start_pays_unless_its_expected_gain_is_less_than_chance_or_more_steps_make() -> None:
    # The free energies of 400 data points differ with a deviation of two: their mean by a standard error of 0.1.
    apart = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    apart = 2 * (apart - apart.mean()) / apart.std()

    def start(free_energy: float, sign: int, rise: float = 0.0) -> FreeEnergyEstimate:
        return FreeEnergyEstimate(free_energy, each=free_energy + sign * apart / 2, rise=rise)

    third = start(-9.0, 1)
    assert is_gain_below_error([start(0.0, 1), start(-0.25, -1), third])
    assert not is_gain_below_error([start(0.0, 1), start(-0.35, -1), third])
    # Two may have missed something else each, unless both still rise.
    assert not is_gain_below_error([start(0.0, 1), start(-0.1, -1)])
    assert is_gain_below_error([start(0.0, 1, 0.6), start(-1.0, -1, 0.6)])
    assert not is_gain_below_error([start(0.0, 1, 0.6), start(-1.0, -1, 0.1)])
    assert not is_gain_below_error([start(0.0, 1, 9.0)])
