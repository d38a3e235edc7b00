"""Means and variances of observations that a run on candidate states tells: those of the model's distributions, or none."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch

from pyro_truncated import AutoTruncated, EvolutionarySearch, StateSpace
from pyro_truncated.models import BinarySparseCoding
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.search import Search, SearchBatch, SurrogateSearch

H, D, N = 5, 3, 7
WEIGHT = torch.linspace(-1.0, 1.0, H * D).reshape(H, D)


def mean_of(s: torch.Tensor) -> torch.Tensor:
    return (s @ WEIGHT).exp()


def with_moments(mean, variance) -> type[dist.Normal]:
    """Normal distributions that say something else of their moments."""
    return type("Odd", (dist.Normal,), {"mean": property(mean), "variance": property(variance)})


def refuse(fn):
    raise ValueError("there is none for these parameters")


LIKELIHOODS = {
    "normal": lambda s: dist.Normal(mean_of(s), 0.5).to_event(1),
    "poisson": lambda s: dist.Poisson(mean_of(s)).to_event(1),
    "own scales": lambda s: dist.Normal(mean_of(s), torch.arange(1.0, N + 1).unsqueeze(-1)).to_event(1),
    "cauchy": lambda s: dist.Cauchy(mean_of(s), 0.5).to_event(1),
    "one number": lambda s: dist.Normal(mean_of(s)[..., 0], 0.5),
    "masked": lambda s: dist.Normal(mean_of(s), 0.5).mask(torch.arange(D) > 0).to_event(1),
    "categorical": lambda s: dist.Categorical(logits=mean_of(s)),
    "broadcast": lambda s: dist.Normal(mean_of(s), 0.5).to_event(1),
    "mean of another shape": lambda s: with_moments(lambda fn: fn.loc[..., :2], lambda fn: fn.scale**2)(mean_of(s), 0.5).to_event(1),
    "variance is a number": lambda s: with_moments(lambda fn: fn.loc, lambda fn: 0.25)(mean_of(s), 0.5).to_event(1),
    "mean fails": lambda s: with_moments(lambda fn: torch.zeros(2).reshape(3), lambda fn: fn.scale**2)(mean_of(s), 0.5).to_event(1),
    "no mean for its parameters": lambda s: with_moments(refuse, lambda fn: fn.scale**2)(mean_of(s), 0.5).to_event(1),
}
UNKNOWN = ["cauchy", "masked", "categorical", *list(LIKELIHOODS)[-5:]]


class Looking(Search):
    """Keeps the moments of the population, and those of states that it scores."""

    takes_moments = True

    def propose(self, batch: SearchBatch):
        self.batch, self.words = batch, batch.population.words.clone()
        found, self.moments = batch.evaluate_with_moments(batch.space.enumerate()[:6].expand(N, -1, -1))
        torch.testing.assert_close(found.log_joint, batch.score(found.words))
        return found


def looked_at(likelihood: str, wrapped=lambda obs: obs) -> Looking:
    def model(y):
        with pyro.plate("data", N):
            s = pyro.sample("s", dist.Bernoulli(torch.full((H,), 0.3)).to_event(1))
            with wrapped(poutine.scale(scale=1.0)):
                pyro.sample("y", LIKELIHOODS[likelihood](s), obs=y)

    sizes = {"categorical": (N,), "one number": (N,), "broadcast": (N, 1)}
    y = torch.ones(sizes.get(likelihood, (N, D)))
    search = Looking()
    guide = AutoTruncated(model, num_states=4)
    guide.make_batch(y).search_(search)
    return search


@pytest.mark.parametrize("likelihood", ["normal", "poisson", "own scales", "one number"])
def test_moments_are_those_of_the_distributions_in_each_state(likelihood: str) -> None:
    search = looked_at(likelihood)
    for moments in (search.batch.moments, search.moments):
        assert moments is not None
        s = search.batch.space.unpack(moments.words).float().unflatten(0, (-1, N))
        fn = LIKELIHOODS[likelihood](s)
        mean, variance = (moment.reshape(moments.mean.shape) for moment in (fn.mean, fn.variance))
        torch.testing.assert_close(moments.mean, mean)
        torch.testing.assert_close(moments.variance, variance)
    assert torch.equal(search.batch.moments.words, search.words.transpose(0, 1).flatten(0, 1))


def test_where_runs_are_many_moments_are_those_of_some_of_the_data_points_in_each(monkeypatch) -> None:
    monkeypatch.setattr(LogJoint, "candidates_per_run", lambda self: 1)
    moments = looked_at("own scales").batch.moments
    assert moments is not None
    assert moments.mean.shape == (N, D)
    expected = mean_of(StateSpace([2] * H).unpack(moments.words).float())
    torch.testing.assert_close(moments.mean, expected)
    # The first run has shown data points 0 and 4, the others 1 and 5, 2 and 6, 3.
    numbers = torch.tensor([1.0, 5.0, 2.0, 6.0, 3.0, 7.0, 4.0])
    torch.testing.assert_close(moments.variance, numbers.square().unsqueeze(1).expand(-1, D))
    assert moments.mean.untyped_storage().nbytes() == moments.mean.nbytes


@pytest.mark.parametrize("likelihood", UNKNOWN)
def test_there_are_none_of_distributions_that_do_not_tell_and_of_masked_ones(likelihood: str) -> None:
    search = looked_at(likelihood)
    assert search.batch.moments is None
    assert search.moments is None


def test_there_are_none_of_sites_that_are_masked_or_scaled() -> None:
    for handler in (poutine.mask(mask=torch.arange(N) > 2), poutine.scale(scale=2.0)):
        assert looked_at("normal", lambda _, handler=handler: handler).moments is None


def test_models_that_score_packed_states_are_not_run_for_moments() -> None:
    y = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
    search = Looking()
    AutoTruncated(BinarySparseCoding(4, H).initialize(y), num_states=4).make_batch(y).search_(search)
    assert search.moments is None


def test_a_sum_takes_moments_where_one_of_its_searches_does() -> None:
    assert (EvolutionarySearch(3, 2) + SurrogateSearch(4)).takes_moments
    assert not (EvolutionarySearch(3, 2) + EvolutionarySearch(3, 2)).takes_moments
