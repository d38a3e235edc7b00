"""Defaults fit the space they meet, say what they chose in one line, and agree between saving and loading."""

from __future__ import annotations

import logging

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

from pyro_truncated import AutoTruncated, EvolutionarySearch, ExhaustiveSearch, SampledSearch, Truncated_ELBO, check_truncation
from pyro_truncated.search import GPSelect, Preselection, Singletons
from pyro_truncated.utils.console import note_once
from tests import zoo

Y = torch.tensor([-1.1, 0.2, 0.9, 2.1, 0.4])


@pytest.fixture(autouse=True)
def fresh_notes():
    note_once.cache_clear()
    yield
    note_once.cache_clear()


def mixture(y):
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])))
        pyro.sample("y", dist.Normal(z.to(y.dtype) - 0.5, 0.7), obs=y)


def evidence(y):
    weight, mean = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([-0.5, 0.5, 1.5])
    return (weight.log() + dist.Normal(mean, 0.7).log_prob(y.unsqueeze(-1))).logsumexp(-1).sum()


def step(guide, elbo, *args):
    return SVI(guide.model, guide, pyro.optim.Adam({"lr": 0.0}), elbo).step(*args)


@pytest.mark.parametrize(
    "search",
    [
        None,
        EvolutionarySearch(),
        EvolutionarySearch(parents=8, children=7, generations=2),
        EvolutionarySearch(crossover=True),
        ExhaustiveSearch(),
        SampledSearch(5),
        Preselection(Singletons(), 10),
        GPSelect(10),
        GPSelect(10, merge=False),
    ],
    ids=lambda search: "default" if search is None else type(search).__name__,
)
def test_any_search_is_exact_where_all_states_are_kept(search):
    guide = AutoTruncated(mixture)
    assert step(guide, Truncated_ELBO(search), Y) == pytest.approx(-float(evidence(Y)), rel=1e-5)
    assert guide.num_states == 3
    report = check_truncation(guide, Y, search=search)
    assert report.is_trusted
    assert "3 of 3 states" in str(report)


def test_one_line_tells_what_was_chosen(caplog):
    guide = AutoTruncated(mixture)
    with caplog.at_level(logging.INFO, logger="pyro_truncated"):
        for _ in range(3):
            step(guide, Truncated_ELBO(), Y)
    (record,) = caplog.records
    assert record.message == "AutoTruncated keeps all 3 joint states of ['z'] (fewer than num_states=64): nothing is truncated"


def test_the_line_tells_what_is_left_out(caplog):
    def counts(y):
        with pyro.plate("data", len(y)):
            n = pyro.sample("n", dist.Poisson(2.0))
            pyro.sample("y", dist.Normal(n, 1.0), obs=y)

    def centred(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(0.3))
            pyro.sample("y", dist.Normal(s - s.mean(-1, keepdim=True), 1.0), obs=y)

    with caplog.at_level(logging.INFO, logger="pyro_truncated"):
        AutoTruncated(counts, max_count=4).setup(Y)
        with pytest.warns(UserWarning, match="depends on the states of other data points"):
            AutoTruncated(centred).setup(Y)
    first, second = (record.message for record in caplog.records)
    assert first == "AutoTruncated keeps all 5 joint states of ['n'] (fewer than num_states=64): max_count leaves out 'n' beyond 4"
    assert second.endswith("(fewer than num_states=64): 'y' of a data point depends on the states of others")


def test_without_logging_it_goes_to_standard_error_once(capsys, monkeypatch):
    monkeypatch.setattr("pyro_truncated.utils.console._logger", logging.Logger("alone"))
    note_once("a line")
    note_once("a line")
    assert capsys.readouterr().err == "pyro_truncated: a line\n"


def test_the_elbo_shows_what_it_chose():
    case = zoo.binary()
    assert repr(Truncated_ELBO()) == "Truncated_ELBO(search=AutomaticSearch(chosen=None))"
    elbo = Truncated_ELBO()
    guide = AutoTruncated(case.model, num_states=4)
    step(guide, elbo, *case.args)
    assert isinstance(elbo.search.chosen, ExhaustiveSearch)
    assert repr(elbo).startswith("Truncated_ELBO(search=AutomaticSearch(chosen=ExhaustiveSearch(")
    # One step of it finds the best four of 32 states.
    other = AutoTruncated(case.model, num_states=4)
    torch.manual_seed(3)
    torch.testing.assert_close(
        guide.population().log_joint.sort(1).values, other.infer(case.args, ExhaustiveSearch(), 1).population().log_joint.sort(1).values
    )


def test_a_smaller_space_survives_saving_and_loading():
    guide = AutoTruncated(mixture)
    step(guide, Truncated_ELBO(), Y)
    for num_states in (64, 10, 3):
        fresh = AutoTruncated(mixture, num_states=num_states)
        fresh.load_state_dict(guide.state_dict())
        assert fresh.num_states == 3
        torch.testing.assert_close(step(fresh, Truncated_ELBO(), Y), -float(evidence(Y)), rtol=1e-5, atol=0)
    with pytest.raises(RuntimeError, match="the saved populations hold 3 states per data point, this guide num_states=2"):
        AutoTruncated(mixture, num_states=2).load_state_dict(guide.state_dict())


def test_no_more_states_are_advised_than_exist():
    def flat(y):
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(5)))
            pyro.sample("y", dist.Normal(0.01 * z.to(y.dtype), 1.0), obs=y)

    guide = AutoTruncated(flat, num_states=4)
    step(guide, Truncated_ELBO(), Y)
    report = check_truncation(guide, Y, warn=False)
    advice = " ".join(finding.advice for finding in report.findings)
    assert "num_states=5" in advice
    assert "num_states=8" not in advice


def test_a_space_of_one_state():
    def model(y):
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(1)))
            pyro.sample("y", dist.Normal(z.to(y.dtype), 1.0), obs=y)

    for search in (None, EvolutionarySearch(), EvolutionarySearch(8, 7, 2)):
        guide = AutoTruncated(model)
        exact = -float(dist.Normal(0.0, 1.0).log_prob(Y).sum())
        assert step(guide, Truncated_ELBO(search), Y) == pytest.approx(exact, rel=1e-5)
