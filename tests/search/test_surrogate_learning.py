"""What a surrogate search learns and keeps: of other data, beside other searches, where states are impossible, within little memory."""

from __future__ import annotations

import dataclasses

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_truncated import AutoTruncated, EvolutionarySearch, StateSpace
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.search import SearchBatch, SurrogateSearch
from pyro_truncated.search.surrogate.log_joint_regression import EffectsPosterior, LogJointRegression, ScoredBatch
from pyro_truncated.search.surrogate.moment_regression import MomentRegression
from pyro_truncated.search.surrogate.surrogate_search import ScoredStates
from pyro_truncated.states.population import Moments, Population
from pyro_truncated.utils.budget import memory_budget

H, D, N = 12, 30, 24


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


WEIGHT = torch.randn(H, D, generator=generator(3))
STATES = (torch.rand(N, H, generator=generator(4)) < 0.2).float()
Y = torch.tanh(STATES @ WEIGHT) + 0.1 * torch.randn(N, D, generator=generator(5))


def model(y: Tensor, cost: float = 0.0) -> None:
    """Of neighbouring latents the second costs so much where the first is on."""
    with pyro.plate("data", len(y)):
        first = pyro.sample("first", dist.Bernoulli(torch.full((H // 2,), 0.2)).to_event(1))
        other = pyro.sample("other", dist.Bernoulli(logits=-1.4 - cost * first).to_event(1))
        s = torch.cat([first.expand(torch.broadcast_shapes(first.shape, other.shape)), other], -1)
        is_known = ~y.isnan()
        observed = dist.Normal(torch.tanh(s @ WEIGHT), 0.1)
        observed = observed if bool(is_known.all()) else observed.mask(is_known)
        pyro.sample("y", observed.to_event(1), obs=y.nan_to_num(nan=0.0))


@pytest.fixture
def deviations(monkeypatch) -> list[Tensor | None]:
    """The least deviations of own effects of each step."""
    seen: list[Tensor | None] = []

    init = EffectsPosterior.__init__

    def counted(self: EffectsPosterior, samples: ScoredBatch, regression: LogJointRegression, *least: Tensor | None) -> None:
        seen.extend(least)
        init(self, samples, regression, *least)

    monkeypatch.setattr(EffectsPosterior, "__init__", counted)
    return seen


def searched(search, y: Tensor = Y, steps: int = 4, **arguments):
    pyro.set_rng_seed(0)
    guide = AutoTruncated(model, num_states=8)
    guide.make_batch(y, **arguments).search_(search, steps)
    return guide


# --- how far likelihoods were wrong ---


@pytest.mark.slow
def test_own_effects_deviate_by_what_likelihoods_were_wrong_and_impossible_states_do_not_count(deviations) -> None:
    searched(SurrogateSearch(4))
    assert deviations[0] is None
    assert all(least is not None and float(least.max()) > 0 for least in deviations[1:])
    deviations.clear()
    searched(SurrogateSearch(4), cost=1e5)
    assert all(float(least.max()) < 1e3 for least in deviations[1:])


def test_likelihoods_that_mislead_later_are_forgotten(deviations, monkeypatch) -> None:
    votes = iter([True, True, False])
    monkeypatch.setattr(ScoredBatch, "baseline_fits", lambda self: next(votes))
    search = SurrogateSearch(4)
    searched(search)
    assert [least is None for least in deviations] == [True, False, True, True]
    assert not search.takes_moments


def test_data_points_without_possible_states_have_no_vote() -> None:
    states = torch.eye(3).double().expand(4, -1, -1)
    log_joint = torch.full((4, 3), -1e30, dtype=torch.float64)
    log_joint[0] = torch.tensor([0.0, -5.0, -1e30])
    baseline = torch.tensor([0.0, -4.0, 7.0], dtype=torch.float64).expand(4, -1)
    samples = ScoredBatch(states, log_joint, torch.ones(4, 1).double(), baseline)
    assert samples.baseline_fits()
    assert not dataclasses.replace(samples, baseline=-3 * baseline).baseline_fits()


# --- other data, and other searches ---


def test_new_data_do_not_vote_on_likelihoods(monkeypatch) -> None:
    search = SurrogateSearch(4)
    guide = searched(search, Y[:16])
    monkeypatch.setattr(ScoredBatch, "baseline_fits", lambda self: False)
    guide.infer(Y[16:], search, steps=2)
    assert search.takes_moments


@pytest.mark.slow
def test_new_data_of_which_likelihoods_are_not_known_are_searched_with_what_was_learned_and_nothing_is_lost() -> None:
    search = SurrogateSearch(4)
    guide = searched(search, Y[:16], 6)
    before = {name: (known, known.effects) for name, known in search.regressions.items()}
    assert before.keys() == {"log joints", "rest"}
    masked = Y[16:].clone()
    masked[0, 0] = torch.nan
    guide.infer(masked, search, steps=2)
    assert all(search.regressions[name] is known and known.effects is effects for name, (known, effects) in before.items())


def test_scores_are_known_to_be_the_same_whatever_other_searches_find() -> None:
    space = StateSpace([2] * 4)
    words = space.enumerate()
    population = Population(space, words[:3].repeat(2, 1, 1), torch.tensor([[-1.0, -2.0, -3.0]]).repeat(2, 1))
    batch = SearchBatch(population, lambda words: torch.zeros(words.shape[:2]))
    scored = ScoredStates.from_batch(batch, None)
    log_joint = torch.tensor([[0.0, -1.0, -2.0]]).repeat(2, 1)
    better = dataclasses.replace(population, words=words[[5, 0, 1]].repeat(2, 1, 1), log_joint=log_joint)
    later = dataclasses.replace(batch, population=better)
    assert scored.holds(later)
    assert ScoredStates.from_batch(later, scored).words.shape[1] == 4
    changed = dataclasses.replace(better, log_joint=torch.tensor([[0.0, -1.0, -2.0], [0.0, -1.1, -2.0]]))
    assert not scored.holds(dataclasses.replace(batch, population=changed))
    # Nothing tells whether they are the same.
    others = dataclasses.replace(better, words=words[5:8].repeat(2, 1, 1))
    assert not scored.holds(dataclasses.replace(batch, population=others))


def test_what_was_learned_does_not_fade_because_another_search_finds_better_states(monkeypatch) -> None:
    faded = []
    monkeypatch.setattr(MomentRegression, "fade", lambda self: faded.append(1))
    searched(EvolutionarySearch(4, 3, 1) + SurrogateSearch(4))
    assert len(faded) == 1


# --- memory ---


def test_moments_are_asked_for_only_where_they_are_used(monkeypatch) -> None:
    asked, with_moments = [], LogJoint.score_with_moments
    monkeypatch.setattr(LogJoint, "score_with_moments", lambda self, words: (asked.append(1), with_moments(self, words))[1])
    monkeypatch.setattr(SurrogateSearch, "MAX_LATENTS", H - 1)
    search = SurrogateSearch(4)
    guide = searched(search)
    # Only now the search has seen how many latents there are.
    assert len(asked) == 1
    assert not search.takes_moments
    guide.make_batch(Y).search_(search, 2)
    assert len(asked) == 1


def some_moments(offset: float) -> tuple[StateSpace, Moments]:
    space = StateSpace([2] * H)
    words = space.enumerate()
    mean = torch.tanh(space.unpack(words).double() @ WEIGHT.double()) + offset
    return space, Moments(words, mean, torch.full_like(mean, 0.01))


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_likelihoods_are_the_same_in_blocks_and_for_observations_of_any_offset(offset: float) -> None:
    found = []
    for shift, budget in ((0.0, None), (offset, 10_000)):
        space, moments = some_moments(shift)
        expected = MomentRegression(H, D, D)
        with memory_budget(budget):
            expected.take(moments, space)
            states = space.unpack(space.enumerate()[:50]).double().expand(N, -1, -1)
            values = expected.likelihoods(Y.double() + shift)(states)
        found.append(values - values[:, :1])
    # In single precision, of values up to thousands.
    torch.testing.assert_close(*found, rtol=1e-3, atol=0.05)
