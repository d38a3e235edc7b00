"""Data points that no minibatch has visited, and states outside the support of an observation: an answer, or a refusal by name."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuideList
from pyro.poutine import block

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.models import BinarySparseCoding, BinaryVAE, MaximalCauses, SpikeSlabSparseCoding
from pyro_truncated.testing import check_guide, enumerate_log_joint

D64 = torch.float64


def visited_in_part(model, y):
    guide = AutoTruncated(model, 6)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(EvolutionarySearch(parents=2, children=2)))
    svi.step(y, 4)
    assert guide.log_joint.isnan().any(-1).sum() == len(y) - 4
    return guide


@pytest.mark.parametrize("family", [SpikeSlabSparseCoding, MaximalCauses])
def test_reconstructions_score_what_no_minibatch_has_visited(family):
    y = torch.rand(10, 3, dtype=D64) + 0.5
    y[3, 1] = torch.nan
    model = family(3, 4, dtype=D64).initialize(y)
    guide = visited_in_part(model, y)
    unvisited = guide.log_joint.isnan().any(-1).nonzero().squeeze(-1)
    population = guide.population()
    image = model.reconstruct(population, y)
    assert image.isfinite().all()
    assert population.log_joint.isnan().any()
    exact = guide.posterior(y)
    assert torch.allclose(image[unvisited], model.reconstruct(exact, y)[unvisited], rtol=1e-10)
    chosen = unvisited[[2, 0]]
    assert torch.allclose(model.reconstruct(guide.population(chosen), y), image[chosen], rtol=1e-10)


def test_what_has_never_been_scored_has_no_weights():
    y = torch.rand(10, 3, dtype=D64)
    guide = visited_in_part(BinarySparseCoding(3, 4, dtype=D64).initialize(y), y)
    first = int(guide.log_joint.isnan().any(-1).nonzero()[0])
    population = guide.population()
    for use in (population.weights, population.activity, population.marginals, population.effective_states, lambda: population.sample(2)):
        with pytest.raises(
            RuntimeError, match=rf"the states of 6 of 10 data points \(first: {first}\) have never been scored.*guide\.posterior"
        ):
            use()
    assert guide.posterior(y).activity().isfinite().all()


def test_reconstructions_that_see_no_data_refuse():
    model = BinaryVAE(3, 4, [5], dtype=D64)
    y = torch.rand(10, 3, dtype=D64)
    guide = AutoTruncated(model, 6)
    guide.setup(y)
    with pytest.raises(RuntimeError, match="have never been scored"):
        model.reconstruct(guide.population())
    assert model.reconstruct(guide.posterior(y)).isfinite().all()


def counts(y):
    with pyro.plate("sites", len(y)):
        n = pyro.sample("n", dist.Poisson(torch.tensor(3.0, dtype=D64)))
        pyro.sample("y", dist.Binomial(n.unsqueeze(-1), torch.tensor(0.5, dtype=D64)).to_event(1), obs=y)


def test_states_outside_the_support_of_an_observation_are_checked():
    y = torch.tensor([[1.0, 2.0], [0.0, 3.0], [2.0, 2.0]], dtype=D64)
    guide = AutoTruncated(counts, 8, max_count=12)
    Truncated_ELBO(EvolutionarySearch(parents=2, children=2)).loss_and_grads(counts, guide, y)
    check_guide(guide, y)
    exact = enumerate_log_joint(guide, y)
    n = torch.arange(13.0, dtype=D64)
    expected = dist.Poisson(torch.tensor(3.0, dtype=D64)).log_prob(n).repeat(3, 1)
    for row in range(3):
        for value in y[row].tolist():
            choose = torch.lgamma(n + 1) - torch.lgamma(torch.tensor(value + 1, dtype=D64)) - torch.lgamma((n - value).clamp(min=0) + 1)
            expected[row] += torch.where(n >= value, choose - n * torch.tensor(2.0, dtype=D64).log(), -torch.inf)
    assert torch.allclose(exact, expected, rtol=1e-10)


def test_a_wrong_score_of_such_states_is_found():
    y = torch.tensor([[1.0, 2.0]], dtype=D64)
    guide = AutoTruncated(counts, 13, max_count=12)
    Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(counts, guide, y)

    class Careless(AutoTruncated):
        def make_scorer(self, *args, values=None, **kwargs):
            log_joint = super().make_scorer(*args, values=values, **kwargs)
            score = log_joint.score
            log_joint.score = lambda words, rows=None: score(words, rows).nan_to_num(neginf=-1.0)
            return log_joint

    careless = Careless(counts, 13, max_count=12)
    careless.setup(y)
    with pytest.raises(AssertionError, match=r"log joints of 2 of 13 states differ"):
        check_guide(careless, y)


def clusters(y, batch_size=None):
    place = pyro.sample("place", dist.Normal(torch.tensor([-1.0, 2.0], dtype=D64), 1.0).to_event(1))
    with pyro.plate("data", len(y), subsample_size=batch_size) as i:
        k = pyro.sample("k", dist.Bernoulli(torch.tensor(0.3, dtype=D64)))
        pyro.sample("y", dist.Normal(place[..., 0] + k * place[..., 1], 1.0), obs=y[i])


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("mixed_guides", [False, True])
def test_what_a_stock_elbo_has_trained_is_read_under_the_model_as_it_is(mixed_guides, batch_size):
    """The stock ELBO stores no scores: what is read must be the exact posterior of now, of all data points."""
    y = 3 * torch.randn(10, dtype=D64)

    def model(y, batch_size=None):
        if mixed_guides:
            return clusters(y, batch_size)
        at = pyro.param("at", torch.tensor([-1.0, 2.0], dtype=D64))
        return pyro.condition(clusters, data={"place": at})(y, batch_size)

    truncated = AutoTruncated(model, 2)
    guide = truncated
    if mixed_guides:
        guide = AutoGuideList(model)
        guide.append(AutoDelta(block(model, hide=["k"])))
        guide.append(truncated)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), TraceEnum_ELBO(max_plate_nesting=1))
    for _ in range(3):
        svi.step(y, batch_size)
        place = (guide.median()["place"] if mixed_guides else pyro.param("at")).detach()
        log_odds = torch.tensor(0.3 / 0.7, dtype=D64).log() + ((y - place[0]).square() - (y - place.sum()).square()) / 2
        torch.testing.assert_close(truncated.marginals()["k"], log_odds.sigmoid(), rtol=1e-9, atol=1e-12)
    assert truncated.log_joint.isnan().all()
    torch.testing.assert_close(truncated.marginals(torch.tensor([7, 2]))["k"], log_odds.sigmoid()[[7, 2]], rtol=1e-9, atol=1e-12)
