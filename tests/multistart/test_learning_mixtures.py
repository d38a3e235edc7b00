"""learn and mixtures: the best optimum that is known, without a temperature."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import ClippedAdam
from sklearn.datasets import load_iris
from sklearn.mixture import GaussianMixture as Reference

from pyro_truncated import AutoTruncated, ClosedForm, LearnConfig, Truncated_ELBO, learn
from pyro_truncated.models import BinarySparseCoding, GaussianMixture, PoissonMixture
from pyro_truncated.multistart.profile import profile_model
from pyro_truncated.multistart.solution import FreeEnergyEstimate, Solution
from tests.multistart.scripted import disagreement, ended, scripted_restarts


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_iris_is_learned_as_well_as_by_scikit_learn_with_many_starts(seed: int) -> None:
    y = torch.from_numpy(load_iris().data)
    best = Reference(3, n_init=5, random_state=0, tol=1e-6, max_iter=500).fit(y).score(y)
    model = GaussianMixture(4, 3, pseudo_data=0, dtype=torch.float64)
    guide = learn(model, y, progress=False, generator=torch.Generator().manual_seed(seed))
    assert float(guide.population().free_energy().mean()) == pytest.approx(best, abs=1e-3)


@pytest.mark.slow
def test_training_of_a_mixture_ends_when_it_is_at_rest() -> None:
    y = torch.cat([torch.randn(100, 2), torch.randn(100, 2) + 6])
    model = GaussianMixture(2, 2, covariance="diag")
    guide = learn(model, y, restarts=1, config=LearnConfig(restart_steps=5), steps=1_000_000, num_states=2, progress=False)
    before = float(guide.population().free_energy().mean())
    model.maximize(model.sufficient_statistics(guide.population(), y))
    assert 0.0 <= float(guide.refresh_(y).free_energy().mean()) - before + 1e-6 < 1e-3


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("types", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
@pytest.mark.parametrize("covariance", ["full", "tied", "low-rank"])
def test_data_may_be_of_another_type_than_the_mixture(covariance: str, types: tuple[torch.dtype, torch.dtype]) -> None:
    y = torch.cat([torch.randn(40, 3, dtype=types[1]), torch.randn(40, 3, dtype=types[1]) + 6])
    model = GaussianMixture(3, 2, covariance=covariance, rank=1 if covariance == "low-rank" else None, dtype=types[0])
    guide = learn(model, y, restarts=1, config=LearnConfig(restart_steps=2), steps=2, progress=False)
    assert model.loc.dtype == types[0]
    assert guide.population().free_energy().mean() > -7.5
    for optim in (ClosedForm(model), ClippedAdam({"lr": 1e-3})):
        guide = AutoTruncated(model, num_states=2)
        assert math.isfinite(SVI(model, guide, optim, Truncated_ELBO(model.default_search(2))).step(y))


@pytest.mark.slow
def ends_at(heights: Iterator[float]) -> Callable[..., Solution]:
    return lambda profile, *_: ended(profile, FreeEnergyEstimate(next(heights)))


@pytest.mark.slow
def test_starts_of_a_mixture_end_when_another_one_promises_little() -> None:
    """Half the tolerance is what the last start may have gained on average over all orders: the lead of the best over their number."""
    heights = [1.0, 1.9, 2.0, 1.7, 1.2]
    y = torch.randn(10_000, 3)  # small mixtures have eight starts at least
    for tolerance, number, is_sure in ((0.95, 2, True), (0.07, 3, True), (0.051, 4, True), (0.045, 5, True), (0.035, 5, False)):
        found = scripted_restarts(GaussianMixture(3, 2), y, ends_at(iter(heights)), max_restarts=5, tolerance=tolerance)
        assert found.pool.energies == heights[:number]
        assert is_sure or "another one may reach more" in (disagreement(found) or "")
        assert (disagreement(found) is None) == is_sure


@pytest.mark.parametrize(("rows", "starts", "number"), [(1250, None, 8), (1250, 3, 3), (1251, None, 2)])
def test_a_small_mixture_has_eight_starts_even_if_two_agree(rows: int, starts: int | None, number: int) -> None:
    """Small: values of the data times components are at most 50 000."""
    y = torch.randn(rows, 10)
    model = GaussianMixture(10, 4, covariance="spherical")
    found = scripted_restarts(model, y, ends_at(itertools.repeat(0.0)), max_restarts=starts)
    assert len(found.pool.energies) == number


@pytest.mark.slow
@pytest.mark.parametrize(("number", "num_states"), [(64, 64), (65, 16)])
def test_populations_of_very_many_components_are_small(number: int, num_states: int) -> None:
    guide = learn(
        GaussianMixture(1, number, covariance="spherical"),
        torch.randn(200, 1),
        restarts=1,
        config=LearnConfig(restart_steps=1),
        steps=1,
        progress=False,
    )
    assert guide.population().num_states == num_states


@pytest.mark.parametrize(("shape", "number", "rows"), [((10_500, 1), 2, 10_000), ((10_500, 20), 13, 10_500)])
def test_starts_have_data_for_what_they_learn(shape: tuple[int, int], number: int, rows: int) -> None:
    """Ten thousand, or two for each number that the mixture holds, if there are as many."""
    assert len(profile_model(GaussianMixture(shape[1], number), torch.randn(shape)).for_restarts().y) == rows


def test_a_single_cause_is_no_mixture() -> None:
    """No lead over other starts that grows with their number, and no early end."""
    y = torch.rand(20, 4).round()
    for model, expected in ((GaussianMixture(4, 2), True), (PoissonMixture(4, 2), True), (BinarySparseCoding(4, 1), False)):
        assert profile_model(model, y).is_mixture == expected


def test_restarts_read_a_program_once() -> None:
    """What a program is, some fifteen runs tell; guides of further restarts take it from the first one."""
    runs = itertools.count()

    def model(y: torch.Tensor) -> None:
        next(runs)
        loc = pyro.param("loc", torch.randn(3, 2))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(3)))
            pyro.sample("y", dist.Normal(loc[z], 1.0).to_event(1), obs=y)

    profile = profile_model(model, torch.randn(50, 2))
    first, before = profile.set_up_guide(), next(runs)
    second = profile.set_up_guide()
    assert next(runs) == before + 1
    assert second.space == first.space
    assert Truncated_ELBO().loss(model, second, profile.y) == pytest.approx(Truncated_ELBO().loss(model, first, profile.y), rel=1e-6)


def test_guides_of_restarts_look_themselves_at_a_structure_that_another_has_met() -> None:
    """Python looks at values once a parameter is positive, so that the states of every guide are scored one by one."""

    def model(y: torch.Tensor) -> None:
        loc, extra = pyro.param("loc", torch.tensor([0.0, 1.0, 2.0])), pyro.param("extra", torch.tensor(-1.0))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(3)))
            pyro.sample("y", dist.Normal(loc[z].unsqueeze(-1), 1.0).expand([*z.shape, 2]).to_event(1), obs=y)
            if extra > 0:
                levels = torch.tensor([float(level) for level in z.flatten()][: len(y)])
                pyro.sample("bonus", dist.Normal(levels, 1.0), obs=torch.arange(len(y)) % 3.0)

    profile = profile_model(model, torch.randn(6, 2))
    guides = [profile.set_up_guide() for _ in range(3)]
    Truncated_ELBO().loss(model, guides[0], profile.y)
    pyro.get_param_store()["extra"] = torch.tensor(1.0)
    with warnings.catch_warnings(action="ignore"):
        apart = AutoTruncated(model, num_states=3)
        losses = [Truncated_ELBO().loss(model, guide, profile.y) for guide in (apart, *guides)]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)
