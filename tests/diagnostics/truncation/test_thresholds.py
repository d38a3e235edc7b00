"""When a check objects: where mass is missing or nothing is known of it, and not where next to nothing lies outside."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.ops.indexing import Vindex

from pyro_truncated import AutoTruncated, check_truncation
from pyro_truncated.diagnostics import TruncationWarning, diagnose, estimate_evidence, to_arviz
from pyro_truncated.diagnostics.prediction import Calibration
from pyro_truncated.diagnostics.truncation.thresholds import judge_coverage, judge_growth, judge_guide
from tests.diagnostics.tables import table_guide

NUM_PLACES = 3
LEFT_TO_RIGHT = torch.tensor([[0.9, 0.1, 0.0], [0.0, 0.9, 0.1], [0.0, 0.0, 1.0]], dtype=torch.float64)
MIXING = torch.full((3, 3), 0.05, dtype=torch.float64) + 0.85 * torch.eye(3, dtype=torch.float64)


def chain(transition, emission, steps, generator):
    """A hidden Markov model of ten sequences, its data, and their exact log evidence by the forward algorithm."""
    initial = torch.eye(NUM_PLACES, dtype=torch.float64)[0]
    places = torch.zeros(10, steps, dtype=torch.long)
    for step in range(1, steps):
        places[:, step] = torch.multinomial(transition[places[:, step - 1]], 1, generator=generator).squeeze(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        y = emission(places).sample()

    def model(y):
        with pyro.plate("sequences", len(y)):
            for step in range(steps):
                place = pyro.sample(f"place{step}", dist.Categorical(initial if step == 0 else Vindex(transition)[place]))  # noqa: F821
                pyro.sample(f"y{step}", emission(place), obs=y[:, step])

    likelihood = emission(torch.arange(NUM_PLACES)).log_prob(y.unsqueeze(-1))
    forward = initial.log() + likelihood[:, 0]
    for step in range(1, steps):
        forward = (forward.unsqueeze(-1) + transition.log()).logsumexp(1) + likelihood[:, step]
    return model, y, forward.logsumexp(1)


def gaussian(place):
    return dist.Normal(place.double(), 0.25)


def counts(place):
    return dist.Poisson(0.5 + 20.0 * place.double())


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("transition", [LEFT_TO_RIGHT, MIXING], ids=["left to right", "mixing"])
@pytest.mark.parametrize("emission", [gaussian, counts])
def test_heavy_tails_are_no_matter_where_nothing_lies_outside(transition, emission, generator):
    model, y, evidence = chain(transition, emission, 12, generator)
    guide = AutoTruncated(model, 64, whole_states=True).infer(y, steps=30)
    gap = evidence - guide.population().free_energy()
    assert float(gap.max()) < 0.01
    with warnings.catch_warnings():
        warnings.simplefilter("error", TruncationWarning)
        report = check_truncation(guide, y, num_samples=200)
    assert report.is_trusted
    # From left to right few draws are possible, too few for a tail.
    assert transition is LEFT_TO_RIGHT or bool((report.evidence.pareto_k > 0.7).any())


@pytest.mark.slow
def test_heavy_tails_count_where_mass_is_missing(generator):
    model, y, evidence = chain(MIXING, lambda place: dist.Normal(place.double(), 1.0), 12, generator)
    guide = AutoTruncated(model, 4, whole_states=True).infer(y, steps=10)
    assert float((evidence - guide.population().free_energy()).mean()) > 0.2
    report = check_truncation(guide, y, num_samples=200, warn=False)
    assert any("rests on few draws" in str(finding) for finding in report.findings)


def test_draws_of_probability_zero_say_nothing():
    table = torch.full((3, 2**13), -math.inf, dtype=torch.float64)
    table[:, :2] = 0.0
    guide = table_guide(table, torch.tensor([[0, 1]] * 3), 13)
    report = check_truncation(guide, num_samples=100, warn=False)
    assert report.evidence.possible_draws.tolist() == [0, 0, 0]
    assert not bool(report.evidence.is_reliable.any())
    assert "not reliable: no draw outside their populations, nor from the prior, has positive probability" in str(report)
    with pytest.warns(TruncationWarning, match="nor from the prior, has positive probability"):
        estimate_evidence(guide, num_samples=100)
    idata = to_arviz(guide.model, guide, num_samples=5, num_predictive=0, checks=report)
    assert not diagnose(idata, warn=False).is_trusted


def test_populations_of_impossible_states_cover_nothing():
    """Of 0 / 0 the report made NaN, which no finding can be read from."""
    table = torch.full((2, 2**13), -math.inf, dtype=torch.float64)
    table[0, 4] = table[1, 2**12 + 2**11] = 0.0
    guide = table_guide(table, torch.tensor([[0, 1, 2], [0, 1, 2]]), 13)
    with pytest.warns(UserWarning, match="the loss is infinite"):
        report = check_truncation(guide, warn=False)
    assert report.covered_mass.tolist() == [0.0, 0.0]
    assert report.evidence.gap.tolist() == [math.inf, math.inf]
    assert report.growth.by_search[0] == math.inf
    assert "nan" not in str(report)


@pytest.mark.nightly
def test_draws_from_the_prior_keep_to_its_hard_constraints(generator):
    model, y, evidence = chain(LEFT_TO_RIGHT, gaussian, 12, generator)
    # All of the 78 paths that are possible, in a space of half a million.
    guide = AutoTruncated(model, 128, whole_states=True).infer(y, steps=60)
    torch.testing.assert_close(guide.population().free_energy(), evidence)
    report = check_truncation(guide, y, num_samples=100, warn=False)
    assert report.is_trusted
    assert float(report.evidence.gap.max()) < 1e-9


def test_nothing_lies_outside_of_all_states():
    table = torch.zeros(2, 8, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TruncationWarning)
        found = estimate_evidence(table_guide(table, torch.arange(8).expand(2, -1), 3), num_samples=50)
    assert bool(found.is_reliable.all())


def test_tiny_weights_are_positive(generator):
    table = torch.full((2, 2**10), -2000.0, dtype=torch.float64) + torch.rand(2, 2**10, generator=generator, dtype=torch.float64)
    table[:, 0] = 0.0
    found = estimate_evidence(table_guide(table, torch.zeros(2, 1, dtype=torch.int64), 10), num_samples=200, generator=generator)
    assert bool((found.effective_draws > 1).all())
    assert bool(found.is_reliable.all())
    torch.testing.assert_close(found.log_evidence, torch.zeros(2, dtype=torch.float64))


def test_a_full_population_is_no_matter_where_nothing_lies_outside():
    table = torch.full((4, 2**7), -50.0, dtype=torch.float64)
    table[:, :4] = 0.0
    report = check_truncation(table_guide(table, torch.arange(4).expand(4, -1), 7), num_samples=100, warn=False)
    torch.testing.assert_close(report.effective_states, torch.full((4,), 4.0, dtype=torch.float64))
    assert report.is_trusted
    table[:, 4:16] = 0.0
    report = check_truncation(table_guide(table, torch.arange(4).expand(4, -1), 7), num_samples=100, warn=False)
    assert any("spread their posterior" in str(finding) for finding in report.findings)


def test_what_is_not_a_number_passes_no_check():
    unknown = np.full(5, math.nan)
    assert judge_coverage(unknown, np.ones(5), 4)
    assert len(judge_growth(unknown, unknown, 4)) == 2
    assert judge_guide(math.nan, np.array([0.0, 5.0]))
    assert not Calibration({"s": torch.full((20,), math.nan)}).is_calibrated()


def test_weights_that_hardly_vary_have_no_tail():
    assert not judge_guide(1.5, np.array([0.0, 1e-3]))
    assert judge_guide(1.5, np.array([0.0, 10.0]))
