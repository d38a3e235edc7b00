"""Importance sampling around the populations: the density is right, the estimate unbiased, and it brackets the truth."""

from __future__ import annotations

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats

from pyro_truncated import AutoTruncated, EvolutionarySearch, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.diagnostics import TruncationWarning, estimate_evidence
from pyro_truncated.diagnostics.truncation.evidence import Proposal, summarize
from tests import zoo
from tests.diagnostics.tables import table_guide

NUM_DATA, NUM_LATENTS, NUM_OBSERVED = 100, 7, 4
ALL = slice(None)


@pytest.fixture
def sparse(generator):
    """A linear Gaussian model, data drawn from it with their states, and its exact log evidence."""
    weight = torch.randn(NUM_OBSERVED, NUM_LATENTS, generator=generator, dtype=torch.float64)
    prior = torch.full((NUM_LATENTS,), 0.3, dtype=torch.float64)
    states = (torch.rand(NUM_DATA, NUM_LATENTS, generator=generator) < 0.3).double()
    y = states @ weight.mT + 0.7 * torch.randn(NUM_DATA, NUM_OBSERVED, generator=generator, dtype=torch.float64)

    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(prior).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight.mT, 0.7).to_event(1), obs=y)

    every = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * NUM_LATENTS)
    scores = dist.Bernoulli(prior).log_prob(every).sum(1) + dist.Normal(every @ weight.mT, 0.7).log_prob(y[:, None]).sum(-1)
    return model, y, states, scores.logsumexp(1)


def found(sparse, num_states):
    model, y, _, _ = sparse
    return AutoTruncated(model, num_states).infer(y, ExhaustiveSearch(), steps=1)


@pytest.mark.parametrize("case", zoo.CASES, ids=lambda case: case.__name__)
def test_proposal_is_a_distribution_over_the_whole_space(case):
    case = case()
    guide = AutoTruncated(case.model, max(1, case.num_states // 4), max_count=case.max_count, whole_states=True)
    proposal = Proposal(guide.posterior(*case.args), None)
    words = guide.space.enumerate().expand(len(guide.words), -1, -1).contiguous()
    density, is_inside = proposal.log_density(words, ALL)
    torch.testing.assert_close(density.exp().sum(1), torch.ones(len(words), dtype=torch.float64))
    assert is_inside.sum(1).tolist() == [guide.num_states] * len(words)


def test_draws_follow_the_density(generator):
    table = torch.randn(1, 27, generator=generator, dtype=torch.float64)
    guide = table_guide(table, torch.tensor([[3, 11, 26]]), 3, 3)
    proposal = Proposal(guide.posterior(), generator)
    every = guide.space.enumerate().unsqueeze(0)
    expected = proposal.log_density(every, ALL)[0].exp().squeeze(0)
    drawn = proposal.sample(20_000, ALL).squeeze(0)
    counts = (drawn.unsqueeze(1) == every.squeeze(0)).all(-1).sum(0)
    # Goodness of fit at a false-alarm rate of 2e-5; every state is expected more than five times.
    assert float(expected.min()) * 20_000 > 5
    assert stats.chisquare(counts.numpy(), (expected / expected.sum()).numpy() * 20_000).pvalue > 2e-5


@pytest.mark.slow
def test_estimates_are_unbiased_and_intervals_bracket_the_truth(sparse, generator):
    _, y, _, evidence = sparse
    result = estimate_evidence(found(sparse, 5), y, num_samples=4000, generator=generator)
    assert bool((result.log_evidence >= result.free_energy).all())
    assert float((evidence - result.free_energy).mean()) > 0.1
    # A hundred independent t-ratios of means of 4000: one beyond 5.5 is a false alarm at a rate below 1e-5, their mean beyond 0.45 too.
    ratios = ((result.log_evidence - evidence).exp() - 1) / (result.standard_error * (result.log_evidence - evidence).exp())
    assert float(ratios.abs().max()) < 5.5
    assert abs(float(ratios.mean())) < 0.45
    # Of 100 intervals at 95 % fewer than 83 hold the truth with probability 3e-6, if the coverage is what it says.
    assert int(((result.lower <= evidence) & (evidence <= result.upper)).sum()) >= 83
    total, lower, upper = result.total()
    # All data points together: the interval at 95 % widened to 4.5 standard errors.
    assert abs(total - float(evidence.sum())) < 4.5 * (upper - total) / 1.96
    assert lower >= float(result.free_energy.sum())


@pytest.mark.nightly
@pytest.mark.parametrize(("spread", "widest"), [(0.7, 1.35), (1.5, math.inf)])
def test_the_interval_of_the_total_holds_what_it_says(spread, widest, generator):
    """Log-normal weights, half of them zero where they are skewed, whose mean is twice the population's mass: 150 sets of 100 data points.

    By the normal approximation, the interval holds the truth in 94 and 69 of 100 sets. Below 5 standard errors of the share under 95 %
    is a false alarm at a rate of 2e-6.
    """
    num_sets, num_data, share = 150, 100, 0.5 if spread > 1 else 1.0
    truth, hits, widths = num_data * math.log(3.0), [], []
    for _ in range(num_sets):
        log_weights = spread * torch.randn(num_data, 100, generator=generator, dtype=torch.float64) - spread**2 / 2 + math.log(2.0 / share)
        is_none = torch.rand(log_weights.shape, generator=generator, dtype=torch.float64) >= share
        found = summarize(torch.zeros(num_data, dtype=torch.float64), log_weights.masked_fill(is_none, -math.inf), None, 0.95)
        _, lower, upper = found.total()
        hits.append(lower <= truth <= upper)
        widths.append((upper - lower) / (2 * 1.96 * float(found.standard_error.square().sum().sqrt())))
    assert sum(hits) / num_sets > 0.95 - 5 * (0.95 * 0.05 / num_sets) ** 0.5
    assert sum(widths) / num_sets < widest


@pytest.mark.slow
def test_stochastic_bounds_sandwich_the_truth(sparse, generator):
    _, y, states, evidence = sparse
    guide = found(sparse, 3)
    lower, upper = [], []
    for _ in range(10):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TruncationWarning)
            result = estimate_evidence(guide, y, num_samples=25, generator=generator, exact_states={"s": states})
        lower.append(result.log_evidence - evidence)
        upper.append(result.stochastic_upper - evidence)
    lower, upper = torch.stack(lower), torch.stack(upper)
    assert float(lower.mean()) < 0 < float(upper.mean())
    # E[p^ / p] = 1 under the draws, E[p / p^] = 1 under the draws with the exact one in place. Data points are independent, their repeats
    # are not (they share the exact state): five standard errors of the means over data points.
    for ratio in (lower.exp(), (-upper).exp()):
        means = ratio.mean(0)
        assert abs(float(means.mean()) - 1) < 5 * float(means.std()) / NUM_DATA**0.5


def test_nothing_is_missing_from_a_complete_population(generator):
    table = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    guide = table_guide(table, torch.arange(8).expand(2, -1).contiguous(), 3)
    result = estimate_evidence(guide, num_samples=50, exact_states={"s": torch.zeros(2, 3)})
    for value in (result.log_evidence, result.lower, result.upper, result.stochastic_upper):
        torch.testing.assert_close(value, table.logsumexp(1))
    torch.testing.assert_close(result.covered_mass, torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("scale", [-1e4, 1e4])
def test_extreme_log_joints_neither_overflow_nor_vanish(scale, generator):
    table = scale + 5 * torch.randn(3, 16, generator=generator, dtype=torch.float64)
    # The populations hold the worst states: nearly everything is missing.
    worst = (-table).topk(2).indices
    result = estimate_evidence(table_guide(table, worst, 4), num_samples=5000, generator=generator)
    truth = table.logsumexp(1)
    assert bool(((result.log_evidence - truth).abs() < 6 * result.standard_error + 1e-6).all())
    assert bool((result.log_evidence > result.free_energy + 1).all())


def test_impossible_states_carry_no_mass(generator):
    table = torch.randn(2, 16, generator=generator, dtype=torch.float64)
    table[:, 8:] = -math.inf
    result = estimate_evidence(table_guide(table, torch.tensor([[0, 1], [2, 3]]), 4), num_samples=4000, generator=generator)
    assert bool(((result.log_evidence - table.logsumexp(1)).abs() < 6 * result.standard_error).all())


def test_estimates_that_rest_on_few_draws_warn(generator):
    # One state far from the population holds nearly everything: it is hardly ever drawn, and weighs much when it is.
    table = torch.full((4, 2**10), -30.0, dtype=torch.float64)
    table[:, 0], table[:, 15] = 0.0, 8.0
    guide = table_guide(table, torch.zeros(4, 1, dtype=torch.int64), 10)
    with pytest.warns(TruncationWarning, match=r"rests on few draws of large weight.* Estimate with more samples, or keep more states"):
        result = estimate_evidence(guide, num_samples=3000, generator=generator)
    assert not bool(result.is_reliable.all())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimate_evidence(table_guide(table, torch.tensor([[0, 15]] * 4), 10), num_samples=300, generator=generator)


def test_tails_of_large_spaces_are_fitted(generator):
    weight = torch.randn(20, 40, generator=generator, dtype=torch.float64)
    y = torch.randn(5, 20, generator=generator, dtype=torch.float64)

    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((40,), 0.1, dtype=torch.float64)).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight.mT, 2.0).to_event(1), obs=y)

    guide = AutoTruncated(model, 20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruncationWarning)
        result = estimate_evidence(guide, y, num_samples=500, generator=generator)
    assert bool(result.pareto_k.isfinite().all())


def test_bad_arguments_are_refused():
    case = zoo.binary()
    guide = AutoTruncated(case.model, 2)
    with pytest.raises(ValueError, match="num_samples must be an integer of at least 25"):
        estimate_evidence(guide, *case.args, num_samples=10)
    with pytest.raises(ValueError, match="confidence must lie between 0 and 1; got 1"):
        estimate_evidence(guide, *case.args, confidence=1)
    with pytest.raises(ValueError, match="exact_states must hold one state for each of 6 data points"):
        estimate_evidence(guide, *case.args, exact_states={"s": torch.zeros(3, 5)})


@pytest.mark.nightly
def test_intervals_hold_what_they_say():
    # Six random models of sixty data points each; an interval of the normal approximation holds 86 % here, this one 95 %.
    hits = []
    for seed in range(6):
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        weight = torch.randn(4, 8, dtype=torch.float64)

        def model(y, weight=weight):
            with pyro.plate("data", len(y)):
                s = pyro.sample("s", dist.Bernoulli(torch.full((8,), 0.25, dtype=torch.float64)).to_event(1))
                pyro.sample("y", dist.Normal(s @ weight.mT, 0.6).to_event(1), obs=y)

        y = torch.bernoulli(torch.full((60, 8), 0.25, dtype=torch.float64)) @ weight.mT + 0.6 * torch.randn(60, 4, dtype=torch.float64)
        guide, everything = AutoTruncated(model, 8), AutoTruncated(model, 256)
        for _ in range(2):
            Truncated_ELBO(EvolutionarySearch(4, 3, 1)).loss_and_grads(model, guide, y)
        Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model, everything, y)
        truth = everything.population().free_energy()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TruncationWarning)
            found = estimate_evidence(guide, y, num_samples=400)
        hits.append((truth >= found.lower - 1e-9) & (truth <= found.upper + 1e-9))
    coverage = float(torch.cat(hits).double().mean())
    # Four standard errors below 0.95: a false alarm has a probability of 3e-5.
    assert coverage > 0.95 - 4 * (0.95 * 0.05 / 360) ** 0.5
