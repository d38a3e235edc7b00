"""Moves of components against brute force: what they lose and gain, that the free energy never falls, and that clusters get their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, ExhaustiveSearch, Population, Truncated_ELBO
from pyro_truncated.models import GaussianMixture
from pyro_truncated.models.covariances import Prior
from pyro_truncated.models.gaussians import Gaussians, MoveSearch, match_merges_with_splits
from pyro_truncated.search import NeighbourSearch
from tests.models.mixture import full_population, objective
from tests.pretended_device import DEVICE, PretendedDevice, here, there

D64 = torch.float64
D, K, N = 3, 5, 300
PRIOR = Prior(torch.tensor(1e-6, dtype=D64), 4.0, torch.diag(torch.tensor([1.0, 2.0, 0.5], dtype=D64)))
KINDS = ("full", "diag", "spherical", "tied", "low-rank", "shared noise")


def clusters(number: int = K, size: int = N, seed: int = 0, dtype: torch.dtype = D64, offset: float = 0.0) -> Tensor:
    """Data of well separated clusters."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.tensor(list(itertools.product([0.0, 20.0], repeat=D)))[:number]
    return (offset + corners[torch.arange(size) % number] + torch.randn(size, D, generator=generator)).to(dtype)


def crowd(seed: int = 0, dtype: torch.dtype = D64) -> Tensor:
    """Data whose clusters lie within each other."""
    return clusters(seed=seed, dtype=dtype) / torch.tensor([10.0, 20.0, 7.0], dtype=dtype)


def make(kind: str, number: int = K, dtype: torch.dtype = D64) -> GaussianMixture:
    rank: Any = {"rank": 1, "shared_noise": kind == "shared noise"} if kind in ("low-rank", "shared noise") else {}
    return GaussianMixture(D, number, covariance="low-rank" if rank else kind, dtype=dtype, **rank)


def badly_started(kind: str, y: Tensor, number: int = K) -> GaussianMixture:
    """A mixture of components alike, two of which begin in the first cluster, and one far from all data."""
    model = make(kind, number, y.dtype).initialize(y, torch.Generator().manual_seed(1))
    for name, value in model._kind.start(torch.eye(D, dtype=y.dtype), number).items():
        setattr(model, name, value)
    model.weights = torch.full_like(model.weights, 1 / number)
    loc = y[:number].clone()
    loc[1] = loc[0] + 0.1
    loc[-1] = loc[-1] + 1e4
    model.loc = loc
    return model


def trained(model: GaussianMixture, y: Tensor, num_states: int, steps: int = 20, batch_size: int | None = None, **options: Any) -> Any:
    guide = AutoTruncated(model, num_states=num_states, init=model.likeliest_components(y, num_states))
    svi = SVI(model, guide, ClosedForm(model, **options), Truncated_ELBO(NeighbourSearch(2, parents=2)))
    for _ in range(steps):
        svi.step(y, batch_size)
    return guide, svi


def evidence(model: GaussianMixture, y: Tensor) -> float:
    return objective(model, full_population(model, y))


def search_for(model: GaussianMixture, y: Tensor, population: Population) -> MoveSearch:
    """Moves of a mixture whose center is the origin, so that its parameters are what they seem to be."""
    spreads = {name: getattr(model, name).detach() for name in ("scale", "factor") if hasattr(model, name)}
    components = Gaussians(model._kind, model.weights.detach(), model.loc.detach(), spreads)
    return MoveSearch(components, population, y, model.sufficient_statistics(population, y), PRIOR)


def expected_log_joint(components: Gaussians, y: Tensor, shares: Tensor) -> Tensor:
    everyone = torch.arange(len(components)).expand(len(y), -1)
    return (shares * components.log_joint(y, everyone)).sum() + torch.special.entr(shares).sum()


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_two_that_become_one_are_those_of_the_free_energy(kind: str) -> None:
    y = crowd()
    model = badly_started(kind, y)
    model.center.zero_()
    population = full_population(model, y)
    search = search_for(model, y, population)
    shares = population.weights()[:, population.states()[0, :, 0].argsort()]
    pairs = search.pairs()
    assert len(pairs) >= 3
    before = expected_log_joint(search.components, y, shares) + search.components.log_prior(PRIOR).sum()
    merged, losses = search.merge_pairs(pairs), search.losses(pairs)
    for i, (one, other) in enumerate(pairs.tolist()):
        together = shares.clone()
        together[:, one] += together[:, other]
        together[:, other] = 0.0
        after = search.components.with_others(pairs[i, :1], merged.select(torch.tensor([i])))
        log_prior = after.log_prior(PRIOR).sum() - after.log_prior(PRIOR)[other]
        torch.testing.assert_close(before - expected_log_joint(after, y, together) - log_prior, losses[i], rtol=1e-6, atol=1e-5)
        assert after.weights[one] == search.components.weights[[one, other]].sum()


@pytest.mark.parametrize("kind", KINDS)
def test_gains_of_two_in_the_place_of_one_are_those_on_its_data(kind: str) -> None:
    y = crowd()
    model = badly_started(kind, y)
    model.center.zero_()
    population = full_population(model, y)
    search = search_for(model, y, population)
    gains, halves = search.halves(torch.Generator().manual_seed(0))
    component, shares = population.states()[:, :, 0].long(), population.weights()
    everyone = torch.arange(2 * K).expand(N, -1)
    whole, half = search.components.log_joint(y, everyone[:, :K]), halves.log_joint(y, everyone)
    torch.testing.assert_close(halves.weights.reshape(-1, 2).sum(1), search.components.weights)
    assert int(gains.isfinite().sum()) >= 3
    for k in gains.isfinite().nonzero().squeeze(-1).tolist():
        best = component.gather(1, shares.argmax(1, keepdim=True)).squeeze(1) == k
        share = shares[best].max(1).values
        ratio = (half[best, 2 * k : 2 * k + 2].logsumexp(1) - whole[best, k]).exp()
        log_prior = halves.log_prior(PRIOR)[2 * k : 2 * k + 2].sum() - search.components.log_prior(PRIOR)[k]
        torch.testing.assert_close(gains[k], (1 - share + share * ratio).log().sum() + log_prior)


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("num_states", [2, K])
@pytest.mark.parametrize("kind", KINDS)
def test_the_free_energy_never_falls_and_every_cluster_gets_a_component(kind: str, num_states: int) -> None:
    y = clusters()
    model = badly_started(kind, y)
    guide, _ = trained(model, y, num_states)
    moved = 0
    for _ in range(4):
        before, all_before = objective(model, guide.refresh_(y)), evidence(model, y)
        found = model.split_and_merge(guide, y, torch.Generator().manual_seed(moved))
        moved += found
        assert objective(model, guide.refresh_(y)) >= before - 1e-9 * abs(before)
        if num_states == K:
            assert evidence(model, y) >= all_before - 1e-9 * abs(before)
        guide.populations.population().assert_distinct()
    assert moved >= 1
    nearest = torch.cdist(y[:K].round(decimals=0), model.loc.detach()).min(1).values
    assert bool((nearest < 4).all())
    assert sorted(model.weights.tolist()) == pytest.approx([1 / K] * K, abs=1e-3)


@pytest.mark.nightly(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_is_gained_nothing_changes(kind: str) -> None:
    y = clusters()
    model = make(kind)
    model.loc = y[:K].clone()
    guide, svi = trained(model, y, 2, steps=30)
    before, statistics = {name: value.clone() for name, value in model.named_parameters()}, svi.optim.statistics
    assert model.split_and_merge(guide, y, torch.Generator().manual_seed(0)) == 0
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert svi.optim.statistics is statistics


@pytest.mark.slow
def test_single_precision_far_from_the_origin() -> None:
    y = clusters(dtype=torch.float32, offset=1000.0)
    model = badly_started("full", y)
    guide, _ = trained(model, y, 2)
    before = evidence(model, y)
    assert model.split_and_merge(guide, y, torch.Generator().manual_seed(0)) >= 1
    assert evidence(model, y) > before + 100
    assert model.loc.dtype == torch.float32


@pytest.mark.slow
def test_seeds_reproduce_and_others_do_not_matter() -> None:
    y = crowd()
    found = []
    for seed in (0, 1):
        pyro.set_rng_seed(0)
        model = badly_started("diag", y)
        guide, _ = trained(model, y, 2)
        torch.manual_seed(seed)
        model.split_and_merge(guide, y, torch.Generator().manual_seed(5))
        found.append(model.loc.detach().clone())
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("minibatch", ["incremental", "online"])
def test_training_goes_on_in_minibatches(minibatch: str) -> None:
    y = clusters()
    pyro.set_rng_seed(0)
    model = badly_started("spherical", y)
    guide, svi = trained(model, y, 2, batch_size=60, minibatch=minibatch)
    stuck = evidence(model, y)
    assert model.split_and_merge(guide, y) >= 1
    moved = evidence(model, y)
    for _ in range(20):
        svi.step(y, 60)
    assert moved > stuck + 100
    assert evidence(model, y) > moved - 20


@pytest.mark.parametrize(("number", "num_states"), [(1, 1), (2, 1)])
def test_few_components_or_states(number: int, num_states: int) -> None:
    y = clusters(2)
    model = badly_started("spherical", y, number) if number > 1 else make("spherical", 1).initialize(y)
    guide, _ = trained(model, y, num_states, steps=5)
    before = evidence(model, y)
    assert model.split_and_merge(guide, y) == (0 if number == 1 else 1)
    assert evidence(model, y) >= before


@pytest.mark.parametrize("seed", range(5))
def test_matches_are_disjoint_gain_and_leave_nothing(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(12, (30, 2), generator=generator)
    losses, gains = torch.rand(30, generator=generator), torch.rand(12, generator=generator)
    chosen, split = match_merges_with_splits(pairs, losses, gains)
    touched = [set(pairs[i].tolist()) | {k} for i, k in zip(chosen.tolist(), split.tolist(), strict=True)]
    assert all(one.isdisjoint(other) for one, other in itertools.combinations(touched, 2))
    assert all(k not in pairs[i].tolist() for i, k in zip(chosen.tolist(), split.tolist(), strict=True))
    assert bool((gains[split] > losses[chosen]).all())
    free = set(range(12)).difference(*touched)
    left = [(i, k) for i in range(30) for k in free if set(pairs[i].tolist()) <= free - {k}]
    assert all(gains[k] <= losses[i] for i, k in left)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["diag", "low-rank"])
def test_moves_are_the_same_on_a_device(kind: str) -> None:
    def moved(move: Callable[[Any], Any]) -> tuple[int, Tensor]:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        y = clusters(4, 60)
        model, y = move(badly_started(kind, y, 4)), move(y)
        guide = AutoTruncated(model, num_states=2)
        svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))
        svi.step(y)
        number = model.split_and_merge(guide, y, torch.Generator().manual_seed(0))
        return number, model.loc.detach()

    number, expected = moved(lambda thing: thing)
    with PretendedDevice():
        there_number, found = moved(there)
        assert found.device == DEVICE
    assert there_number == number >= 1
    torch.testing.assert_close(here(found), expected)


def test_refuses_guides_of_other_models_and_other_data() -> None:
    y = clusters()
    model, other = badly_started("diag", y), badly_started("diag", y)
    guide, _ = trained(other, y, 2, steps=1)
    with pytest.raises(ValueError, match="guide must be the AutoTruncated of this very mixture"):
        model.split_and_merge(guide, y)
    with pytest.raises(ValueError, match=r"y must have shape \(N, 3\)"):
        other.split_and_merge(guide, y[:, :2])


@pytest.mark.slow
def test_an_error_leaves_the_parameters_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    y = clusters()
    model = badly_started("diag", y)
    guide, _ = trained(model, y, 3)
    before = [value.clone() for value in model.parameters()]
    take = model._take

    def taken(components: Gaussians) -> None:
        take(components)
        raise MemoryError("in the middle")

    monkeypatch.setattr(model, "_take", taken)
    with pytest.raises(MemoryError):
        model.split_and_merge(guide, y, torch.Generator().manual_seed(0))
    assert all(torch.equal(value, old) for value, old in zip(model.parameters(), before, strict=True))
