"""Likelihoods from what a model expects to observe: exact where means are quadratic and noise is normal, searched in few scores."""

from __future__ import annotations

import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_truncated import AutoTruncated, StateSpace
from pyro_truncated.search import SurrogateSearch
from pyro_truncated.search.surrogate.moment_regression import ApproximateLikelihoods, MomentRegression
from pyro_truncated.search.surrogate.quadratic_functions import QuadraticFunctions
from pyro_truncated.states.population import Moments

H, D = 5, 8


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def quadratic_means(states: Tensor) -> Tensor:
    random = generator(5)
    constant, linear = torch.randn(D, generator=random), torch.randn(H, D, generator=random)
    pairs = torch.randn(H, H, D, generator=random).double()
    means = constant.double() + states @ linear.double()
    return means + sum(states[..., h, None] * states[..., k, None] * pairs[h, k] for h, k in itertools.combinations(range(H), 2))


def everything(space: StateSpace, variance: Tensor, repeats: int = 1000) -> Moments:
    words = space.enumerate()
    mean = quadratic_means(space.unpack(words).double())
    return Moments(words.repeat(repeats, 1), mean.repeat(repeats, 1), variance.expand(repeats * 2**H, D))


def some_likelihoods() -> ApproximateLikelihoods:
    random = generator(1)
    pairs = torch.randn(H, H, D, generator=random)
    pairs = pairs + pairs.transpose(0, 1)
    pairs[range(H), range(H)] = 0.0
    return ApproximateLikelihoods(torch.randn(3, D, generator=random), torch.randn(H, D, generator=random), pairs)


def test_likelihoods_are_those_of_normal_noise_where_means_are_quadratic() -> None:
    space, variance = StateSpace([2] * H), torch.rand(D, generator=generator(2)) + 0.5
    expected = MomentRegression(H, D, D)
    expected.take(everything(space, variance), space)
    y = 3 * torch.randn(4, D, generator=generator(3), dtype=torch.float64)
    states = space.unpack(space.enumerate()).double().expand(4, -1, -1)
    truth = dist.Normal(quadratic_means(states), variance.sqrt().double()).log_prob(y.unsqueeze(1)).sum(-1)
    found = expected.likelihoods(y)(states)
    # In single precision, of values up to hundreds.
    torch.testing.assert_close(found - found[:, :1], truth - truth[:, :1], rtol=1e-3, atol=0.05)
    again = MomentRegression.from_state(expected.state_dict()).likelihoods(y)(states)
    assert torch.equal(again, found)


def test_what_was_learned_under_other_parameters_counts_half() -> None:
    space = StateSpace([2] * H)
    expected = MomentRegression(H, D, D)
    moments = everything(space, torch.ones(D))
    expected.take(moments, space)
    expected.fade()
    expected.take(moments._replace(mean=moments.mean + 3.0, variance=4 * moments.variance), space)
    torch.testing.assert_close(expected.scale, torch.full((D,), 3.0, dtype=torch.float64).sqrt())
    state = torch.zeros(1, 1, H, dtype=torch.float64)
    # The constant of the means is where the likelihood of no latents is largest: a third of the former, two thirds of the latter.
    residual = expected.likelihoods(quadratic_means(state[0]) + 2.0).observed
    assert float(residual.abs().max()) < 0.1


def test_a_second_order_is_exact_for_one_flip_and_up_to_third_order_for_two() -> None:
    likelihoods, random = some_likelihoods(), generator(4)
    states = (torch.rand(3, 2, H, generator=random) < 0.5).float()
    beside = QuadraticFunctions(torch.randn(3, 2, H, generator=random), torch.zeros(H, H))
    near = likelihoods.second_order(states, beside)
    value = likelihoods(states) + (states * beside.effects).sum(-1)
    for h in range(H):
        flipped = states.clone()
        flipped[..., h] = 1 - flipped[..., h]
        gain = likelihoods(flipped) + (flipped * beside.effects).sum(-1) - value
        torch.testing.assert_close(near.gains(states)[..., h].double(), gain, rtol=1e-3, atol=1e-3)
    linear = likelihoods._replace(pairs=torch.zeros_like(likelihoods.pairs))
    near, other = linear.second_order(states, beside), 1 - states
    value = linear(states) + (states * beside.effects).sum(-1)

    def of(s: Tensor) -> Tensor:
        return (s * near.effects).sum(-1) + 0.5 * torch.einsum("nch,nchk,nck->nc", s, near.pairs, s)

    # Of linear means the likelihood is quadratic: its second order is all of it.
    gain = linear(other) + (other * beside.effects).sum(-1) - value
    torch.testing.assert_close((of(other) - of(states)).double(), gain, rtol=1e-3, atol=1e-3)


def test_climbs_by_pairs_end_where_neither_one_flip_nor_two_raise_a_function() -> None:
    random = generator(6)
    pairs = torch.randn(4, 2, H, H, generator=random)
    pairs = (pairs + pairs.mT) * (1 - torch.eye(H))
    functions = QuadraticFunctions(torch.randn(4, 2, H, generator=random), pairs)
    found = functions.ascend_by_pairs(torch.zeros(4, 2, H), 20)

    def of(s: Tensor) -> Tensor:
        return (s * functions.effects).sum(-1) + 0.5 * torch.einsum("nch,nchk,nck->nc", s, pairs, s)

    best = of(found)
    for number in (1, 2):
        for flips in itertools.combinations(range(H), number):
            other = found.clone()
            other[..., list(flips)] = 1 - other[..., list(flips)]
            assert bool((of(other) <= best + 1e-5).all())


# --- searched ---


def hiding_discs(kind: str, num_latents: int = 16, size: int = 60):
    """Objects of which the first hides the others, a model of plain Pyro, and data of it."""
    random = generator(7)
    opacity = 0.8 * (torch.rand(num_latents, size, generator=random) < 0.25)
    shade = torch.rand(num_latents, generator=random)

    def seen(s: Tensor) -> Tensor:
        passed, image = torch.ones(*s.shape[:-1], size), torch.zeros(*s.shape[:-1], size)
        for on, cover, value in zip(s.unbind(-1), opacity, shade, strict=True):
            hidden = on.unsqueeze(-1) * cover * passed
            image, passed = image + value * hidden, passed - hidden
        return image + 0.5 * passed

    def observed(s: Tensor):
        return (dist.StudentT(2.1, seen(s), 0.002) if kind == "heavy tails" else dist.Normal(seen(s), 0.05)).to_event(1)

    def model(y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((num_latents,), 0.2)).to_event(1))
            pyro.sample("y", observed(s), obs=y)

    states = (torch.rand(40, num_latents, generator=random) < 0.2).float()
    return model, seen(states) + 0.05 * torch.randn(40, size, generator=random)


class Blind(SurrogateSearch):
    """Sees log joints alone."""

    takes_moments = False


def reached(search: SurrogateSearch, model, y: Tensor, steps: int) -> Tensor:
    pyro.set_rng_seed(0)
    guide = AutoTruncated(model, num_states=8)
    return guide.make_batch(y).search_(search, steps).free_energy()


@pytest.mark.slow
def test_what_is_expected_to_be_observed_saves_scores() -> None:
    model, y = hiding_discs("normal")
    assert float(reached(SurrogateSearch(4), model, y, 5).mean()) > float(reached(Blind(4), model, y, 10).mean())


@pytest.mark.slow
def test_new_data_are_searched_with_what_was_learned_and_teach_nothing() -> None:
    model, y = hiding_discs("normal", 10)
    search = SurrogateSearch(4)
    pyro.set_rng_seed(0)
    guide = AutoTruncated(model, num_states=8)
    guide.make_batch(y[:30]).search_(search, 8)
    again = SurrogateSearch(4)
    again.load_state_dict(search.state_dict())
    before, found = search.expected.state_dict(), []
    for one in (search, again):
        pyro.set_rng_seed(1)
        found.append(guide.infer(y[30:], one, steps=5).population().free_energy())
    assert torch.equal(*found)
    assert all(torch.equal(before[name], value) for name, value in search.expected.state_dict().items() if torch.is_tensor(value))
    # Ten latents have 1024 states: all are known.
    pyro.set_rng_seed(1)
    best = AutoTruncated(model, num_states=2**10).posterior(y[30:]).log_joint.logsumexp(1)
    assert float((best - found[0].double()).mean()) < 1.0


@pytest.mark.slow
def test_likelihoods_that_mislead_are_not_followed() -> None:
    model, y = hiding_discs("heavy tails")
    search = SurrogateSearch(4)
    assert torch.equal(reached(search, model, y, 4), reached(Blind(4), model, y, 4))
    assert not search.takes_moments
    search.forget()
    assert search.takes_moments


@pytest.mark.parametrize("num_latents", [10, 70])
def test_no_state_is_scored_twice_and_many_latents_are_regressed_on_by_log_joints_alone(num_latents: int) -> None:
    model, y = hiding_discs("normal", num_latents)
    search, seen = SurrogateSearch(5), []
    propose = search.propose
    search.propose = lambda batch: (seen.append(found := propose(batch)), found)[1]
    reached(search, model, y[:6], 6)
    words = torch.cat([found.words for found in seen], 1)
    assert all(len(row.unique(dim=0)) == 30 for row in words)
    assert (search.expected is None) == (num_latents == 70)
