"""Searches of a user's own: whatever they propose, a bound stays a bound, or they hear what is wrong."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_truncated import AutoTruncated, GPSelect, Population, Preselection, Search, Truncated_ELBO
from pyro_truncated.distributions import BinaryChains
from pyro_truncated.search import SampledSearch, SearchBatch

WEIGHT, Y = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.3, 0.1]]), torch.tensor([[1.0, 0.0], [0.2, 2.0], [-1.0, 0.7]])


def binary() -> None:
    with pyro.plate("data", 3):
        s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.3)).to_event(1))
        pyro.sample("y", dist.Laplace(s @ WEIGHT.mT, 1.0).to_event(1), obs=Y)


def linear() -> None:
    with pyro.plate("data", 3):
        s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.3)).to_event(1))
        pyro.sample("y", dist.Normal(s @ WEIGHT.mT, 1.0).to_event(1), obs=Y)


def counts() -> None:
    with pyro.plate("data", 3):
        s = pyro.sample("s", dist.Categorical(torch.ones(3, 5)).to_event(1))
        pyro.sample("y", dist.Laplace(s.to(Y.dtype) @ WEIGHT.mT, 1.0).to_event(1), obs=Y)


def steps() -> None:
    z = torch.tensor(0)
    for t in range(3):
        z = pyro.sample(f"z_{t}", dist.Categorical(torch.ones(5, 5)[z]))
        pyro.sample(f"y_{t}", dist.Normal(z.to(Y.dtype), 0.5), obs=Y[t, 0])


def chains() -> None:
    s = pyro.sample("s", BinaryChains(torch.full((3,), 0.3), torch.tensor([[[0.8, 0.2], [0.3, 0.7]]] * 3), num_steps=2))
    pyro.sample("y", dist.Laplace(s @ WEIGHT.mT, 1.0).to_event(2), obs=Y[:2])


class Own(Search):
    """Proposes what a function makes of the states that are there."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        self.change = change

    def propose(self, batch: SearchBatch) -> Any:
        words = self.change(batch.population.words)
        return batch.evaluate(words) if isinstance(words, Tensor) else words


class Stepping(Search):
    """Returns the best state many times, as nobody merges what a step returns."""

    def propose(self, batch: SearchBatch) -> Population:
        return batch.population

    def step(self, batch: SearchBatch) -> Population:
        return batch.evaluate(batch.population.words[:, :1].expand_as(batch.population.words).contiguous())


def train(model: Callable[[], None], search: Search, steps: int = 8) -> float:
    pyro.set_rng_seed(0)
    guide, elbo = AutoTruncated(model, num_states=3), Truncated_ELBO(search)
    return min(elbo.loss_and_grads(model, guide) for _ in range(steps))


PROGRAMS = pytest.mark.parametrize("model", [binary, linear, counts, steps, chains], ids=lambda model: model.__name__)


@PROGRAMS
@pytest.mark.parametrize("beside", [False, True])
def test_words_that_are_no_states_are_refused(model: Callable[[], None], beside: bool) -> None:
    """Bits that no latent reads would make two states of one, and count it twice."""
    for change in (torch.bitwise_not, lambda words: words << 2):
        search = Own(change) if not beside else SampledSearch(2) + Own(change)
        with pytest.raises(ValueError, match=r"another state space|values must lie in 0 \.\. cardinality - 1"):
            train(model, search)


@PROGRAMS
def test_other_states_leave_the_bound_below_the_evidence(model: Callable[[], None]) -> None:
    pyro.set_rng_seed(0)
    evidence = -Truncated_ELBO().loss(model, AutoTruncated(model, num_states=10**4))
    mask = 0 if model in (counts, steps) else 7
    assert -train(model, Own(lambda words: words ^ (mask & words.roll(1, 1)))) <= evidence + 1e-4


@PROGRAMS
def test_a_search_may_write_into_what_it_gets(model: Callable[[], None]) -> None:
    expected = train(model, Own(lambda words: words[:, :1].expand_as(words)))
    assert train(model, Own(lambda words: words.copy_(words[:, :1].clone()))) == expected


def writing_affinity(batch: SearchBatch) -> Tensor:
    batch.population.words.zero_()
    return torch.rand(len(batch.population), batch.space.num_latents)


def writing_inputs(batch: SearchBatch) -> Tensor:
    batch.population.words.zero_()
    return torch.rand(len(batch.population), 2).double()


@pytest.mark.parametrize("search", [Preselection(writing_affinity, 2), GPSelect(2, inputs=writing_inputs)], ids=["affinity", "inputs"])
def test_functions_of_a_batch_may_write_into_what_they_get(search: Search) -> None:
    pyro.set_rng_seed(0)
    evidence = -Truncated_ELBO().loss(binary, AutoTruncated(binary, num_states=10**4))
    assert -train(binary, search) <= evidence + 1e-4


@pytest.mark.parametrize("model", [binary, linear, counts])
def test_steps_that_repeat_states_are_refused(model: Callable[[], None]) -> None:
    with pytest.raises(ValueError, match="states repeat within 3 of 3 data points"):
        train(model, Stepping())


@PROGRAMS
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda words: None, TypeError, r"Own\.propose must return a Population, such as batch\.evaluate\(words\); got a NoneType"),
        (lambda words: (words,), TypeError, "must return a Population.*got a tuple"),
        (lambda words: words[:, 0], ValueError, r"states that Own proposes must be packed states \(N, C, W\)"),
        (lambda words: words.int(), ValueError, "states that Own proposes must be packed states .* of type torch.int32"),
        (lambda words: torch.cat([words, words]), ValueError, r"states that Own proposes must have the shape \(\d+, C, 1\)"),
    ],
)
def test_what_is_no_population_is_named(model: Callable[[], None], change: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        train(model, Own(change))


def test_log_joints_are_those_of_the_states() -> None:
    class Halved(Own):
        def propose(self, batch: SearchBatch) -> Any:
            found = batch.evaluate(batch.population.words)
            return dataclasses.replace(found, log_joint=found.log_joint[:, :1])

    with pytest.raises(ValueError, match=r"Halved\.propose must return a log joint for each state"):
        train(binary, Halved(torch.clone))


@PROGRAMS
@pytest.mark.parametrize("change", [lambda scores: scores + 100, lambda scores: scores * torch.nan])
def test_log_joints_that_are_not_the_models_are_refused(model: Callable[[], None], change: Callable[[Tensor], Tensor]) -> None:
    """The loss would be what the search says: 100 nats less for each data point."""

    class WrongScores(Own):
        def propose(self, batch: SearchBatch) -> Any:
            found = batch.evaluate(batch.population.words)
            return dataclasses.replace(found, log_joint=change(found.log_joint))

    class WrongStep(WrongScores):
        def step(self, batch: SearchBatch) -> Population:
            return self.propose(batch)

    for search in (WrongScores(torch.clone), SampledSearch(2) + WrongScores(torch.clone), WrongStep(torch.clone)):
        with pytest.raises(ValueError, match=r"must be those of the model, batch\.score\(words\); got .* for data point 0"):
            train(model, search)


@pytest.mark.parametrize("change", [lambda scores: scores.bfloat16(), lambda scores: scores - math.inf])
def test_log_joints_may_be_rounded_or_impossible(change: Callable[[Tensor], Tensor]) -> None:
    class ChangedScores(Own):
        def propose(self, batch: SearchBatch) -> Any:
            found = batch.evaluate(batch.population.words)
            return dataclasses.replace(found, log_joint=change(found.log_joint))

    assert math.isfinite(train(binary, SampledSearch(2) + ChangedScores(torch.clone)))


def test_log_joints_given_draws_of_a_conditional_may_differ() -> None:
    def shifted() -> None:
        with pyro.plate("data", len(Y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.3)).to_event(1))
            shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(s @ WEIGHT.mT + shift.unsqueeze(-1), 1.0).to_event(1), obs=Y)

    def conditional(states: dict[str, Tensor]) -> None:
        pyro.sample("shift", dist.Normal((Y - states["s"] @ WEIGHT.mT).mean(-1), 1.0))

    guide = AutoTruncated(shifted, num_states=3, conditional=conditional)
    assert math.isfinite(Truncated_ELBO(Own(torch.clone)).loss_and_grads(shifted, guide))


@pytest.mark.parametrize("model", [binary, linear, counts, steps])
def test_a_search_may_propose_nothing(model: Callable[[], None]) -> None:
    nothing, same = (train(model, Own(change)) for change in (lambda words: words[:, :0], torch.clone))
    assert nothing == pytest.approx(same)


def test_a_search_of_code_without_a_module_is_a_users_own() -> None:
    """As in doctests and ``exec``, whose functions have none."""
    names: dict[str, Any] = {"Search": Search}
    exec("class Same(Search):\n    def propose(self, batch):\n        return batch.evaluate(batch.population.words << 2)", names)
    with pytest.raises(ValueError, match="another state space"):
        train(binary, names["Same"]())
