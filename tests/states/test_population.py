"""Populations against sums over their states, and where they start."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyro_truncated import Population, StateSpace, ops
from pyro_truncated.states.population import initial_population, join


@pytest.fixture(params=["compiled", "vectorised"], autouse=True)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test runs on both implementations of the packed operations."""
    with ops.use_backend(request.param):
        yield request.param


@pytest.fixture(params=["binary", "two words", "categorical", "mixed"])
def space(request: pytest.FixtureRequest) -> StateSpace:
    """Spaces of one and of several words, of latents with one, two and more values."""
    return {
        "binary": StateSpace([2] * 6),
        "two words": StateSpace([2] * 70),
        "categorical": StateSpace([3, 5, 4, 7]),
        "mixed": StateSpace([2, 3, 1, 2, 17] * 8),
    }[request.param]


def draw(space: StateSpace, num_data: int = 5, num_states: int = 9, dtype: torch.dtype = torch.float64) -> Population:
    words = initial_population(space, num_data, num_states)
    return Population(space, words, 3 * torch.randn(num_data, num_states, dtype=dtype) - 20)


def test_weights_and_free_energy() -> None:
    population = draw(StateSpace([2] * 5), dtype=torch.float32)
    joint = population.log_joint.double().exp()
    torch.testing.assert_close(population.weights().double(), joint / joint.sum(1, keepdim=True), rtol=1e-5, atol=1e-6)
    tempered = joint ** (1 / 2.5)
    torch.testing.assert_close(population.weights(2.5).double(), tempered / tempered.sum(1, keepdim=True), rtol=1e-5, atol=1e-6)
    assert population.free_energy().dtype == torch.float64
    torch.testing.assert_close(population.free_energy(), joint.sum(1).log())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_marginals_are_sums_over_states(space: StateSpace, dtype: torch.dtype) -> None:
    population = draw(space, dtype=dtype)
    values, weights = population.states(torch.int64), population.weights()
    active = torch.einsum("ns,nsl->nl", weights, (values != 0).to(dtype))
    assert population.marginals().dtype == dtype
    torch.testing.assert_close(population.marginals(), active)
    torch.testing.assert_close(population.activity(), active.sum(1))
    each = torch.stack([torch.einsum("ns,nsl->nl", weights, (values == v).to(dtype)) for v in range(max(space.cardinalities))], -1)
    torch.testing.assert_close(population.value_probabilities(), each)


def test_a_data_point_without_posterior_has_equal_weights() -> None:
    space = StateSpace([2] * 4)
    words = initial_population(space, 3, 2)
    log_joint = torch.tensor([[-math.inf, -math.inf], [-math.inf, -3.0], [math.nan, -1.0]])
    weights = Population(space, words[:2], log_joint[:2]).weights()
    assert weights.tolist() == [[0.5, 0.5], [0.0, 1.0]]
    with pytest.raises(RuntimeError, match=r"1 of 3 data points \(first: 2\) have never been scored"):
        Population(space, words, log_joint).weights()


def test_effective_states() -> None:
    space = StateSpace([2] * 4)
    words = initial_population(space, 2, 4)
    log_joint = torch.tensor([[0.0, 0.0, 0.0, -math.inf], [0.0, -math.inf, -math.inf, -math.inf]])
    torch.testing.assert_close(Population(space, words, log_joint).effective_states(), torch.tensor([3.0, 1.0]))


def test_mode() -> None:
    population = draw(StateSpace([2] * 6))
    best = population.log_joint.argmax(1)
    assert torch.equal(population.mode(), torch.stack([population.words[n, s] for n, s in enumerate(best.tolist())]))


def test_sample_frequencies() -> None:
    population = draw(StateSpace([2] * 3), num_data=3, num_states=5)
    draws = population.sample(20000, torch.Generator().manual_seed(0))
    assert draws.shape == (20000, 3, 1)
    frequency = (draws.unsqueeze(2) == population.words).all(-1).double().mean(0)
    weights = population.weights()
    # Fifteen frequencies at five standard deviations: a false alarm in 1e-5.
    assert ((frequency - weights).abs() <= 5 * (weights * (1 - weights) / 20000).sqrt() + 1e-4).all()
    assert torch.equal(draws, population.sample(20000, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("memory_budget", [1, 2**10, 2**27])
def test_expectation(space: StateSpace, memory_budget: int) -> None:
    population = draw(space)
    weights, values = population.weights(), population.states(torch.float64)
    mapping = torch.randn(space.num_latents, 3, dtype=torch.float64)
    result = population.expectation(lambda s: (s.double() @ mapping).exp(), memory_budget)
    torch.testing.assert_close(result, torch.einsum("ns,nsd->nd", weights, (values @ mapping).exp()))
    # Truth values and results without further dimensions.
    torch.testing.assert_close(population.expectation(lambda s: s[..., 0] == 1), (weights * (values[..., 0] == 1)).sum(1))


def test_expectation_over_no_data() -> None:
    space = StateSpace([2] * 3)
    empty = Population(space, torch.zeros(0, 4, 1, dtype=torch.long), torch.zeros(0, 4))
    assert empty.expectation(lambda s: s.float()).shape == (0, 3)
    assert empty.marginals().shape == (0, 3)


def test_duplicates_are_found() -> None:
    population = draw(StateSpace([2] * 70), num_data=200)
    population.assert_distinct()
    assert len(population.find_duplicates()) == 0
    words = population.words.clone()
    words[17, 3], words[50, 8] = words[17, 6], words[50, 0]
    broken = dataclasses.replace(population, words=words)
    assert broken.find_duplicates().tolist() == [17, 50]
    with pytest.raises(ValueError, match=r"states repeat within 2 of 200 data points \(first: 17\)"):
        broken.assert_distinct()


def test_join_keeps_repetitions() -> None:
    population = draw(StateSpace([2] * 6))
    both = join([population, population])
    assert both.num_states == 18
    assert len(both.find_duplicates()) == 5


def test_order_of_states_does_not_matter() -> None:
    population = draw(StateSpace([2] * 20), num_states=30)
    candidates = draw(StateSpace([2] * 20), num_states=30)
    shuffled = [torch.randperm(30), torch.randperm(30)]
    first = population.merge(candidates)
    second = dataclasses.replace(population, words=population.words[:, shuffled[0]], log_joint=population.log_joint[:, shuffled[0]]).merge(
        dataclasses.replace(candidates, words=candidates.words[:, shuffled[1]], log_joint=candidates.log_joint[:, shuffled[1]])
    )
    # The two sides share states whose log joints differ by side, and the population's count in both orders.
    torch.testing.assert_close(first.log_joint.sort(1).values, second.log_joint.sort(1).values, rtol=0, atol=0)
    torch.testing.assert_close(first.free_energy(), second.free_energy())
    torch.testing.assert_close(first.marginals(), second.marginals())


@pytest.mark.nightly
@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.sampled_from([(2,) * 5, (2,) * 70, (3, 4, 2), (2, 300, 1, 5) * 12]), st.integers(1, 12), st.integers(0, 2**31))
def test_thousands_of_merges_keep_states_distinct_and_free_energies_up(cardinalities: tuple[int, ...], num_states: int, seed: int) -> None:
    space = StateSpace(cardinalities)
    torch.manual_seed(seed)
    field = torch.randn(space.num_words, dtype=torch.float64)

    def score(words: Tensor) -> Tensor:
        # Any function of the state; -inf for a quarter of them.
        value = ((words % 10007).double() * field).sum(-1).sin() * 10
        return value.masked_fill(words.sum(-1) % 4 == 3, -math.inf)

    words = initial_population(space, 40, num_states)
    population = Population(space, words, score(words))
    for _ in range(40):
        candidates = space.random((40, 15), float(torch.rand(())))
        before = population.free_energy()
        population = population.merge(dataclasses.replace(population, words=candidates, log_joint=score(candidates)))
        population.assert_distinct()
        assert (population.free_energy() >= before).all()
        assert torch.equal(population.log_joint, score(population.words))


def test_merge_to_another_size() -> None:
    space = StateSpace([2] * 4)
    population, rest = draw(space, num_states=6), draw(space, num_states=16)
    assert population.merge(rest, 3).num_states == 3
    larger = population.merge(rest, 16)
    larger.assert_distinct()
    assert larger.num_states == 16
    with pytest.raises(ValueError, match="cannot keep 17 distinct states"):
        population.merge(rest, 17)


class TestInitialPopulation:
    def test_zero_singletons_and_distinct_rest(self, space: StateSpace) -> None:
        singletons = sum(v - 1 for v in space.cardinalities)
        num_states = min(space.size, singletons + 40)
        words = initial_population(space, 80, num_states)
        assert words.shape == (80, num_states, space.num_words)
        Population(space, words, torch.zeros(80, num_states)).assert_distinct()
        values = space.unpack(words, torch.int64)
        assert (values < space.cardinality).all()
        assert torch.equal(space.pack(values), words)
        active = (values != 0).sum(-1)
        assert (active[:, 0] == 0).all()
        assert (active[:, 1 : 1 + singletons] == 1).all()
        assert (active[:, 1 + singletons :] >= 2).all()
        assert len(words[:, 1 + singletons :].flatten(1).unique(dim=0)) == 80

    def test_random_subsets_of_singletons(self) -> None:
        space = StateSpace([2] * 100)
        active = space.unpack(initial_population(space, 500, 41), torch.float64)
        assert (active.sum(-1) == (torch.arange(41) > 0)).all()
        # Each latent is in a subset of 40 of 100; hundred frequencies at 5.3 standard deviations: a false alarm in 1e-5.
        assert (active.sum(1).mean(0) - 0.4).abs().max() < 5.3 * (0.24 / 500) ** 0.5

    @pytest.mark.parametrize("cardinalities", [(2,) * 6, (3, 4, 5), (7,), (4096,), (1, 1)])
    def test_the_whole_space(self, cardinalities: tuple[int, ...]) -> None:
        space = StateSpace(cardinalities)
        words = initial_population(space, 3, space.size)
        for row in words:
            assert torch.equal(row.sort(0).values, space.enumerate().sort(0).values)

    def test_subsets_of_small_spaces_are_uniform(self) -> None:
        space = StateSpace([2] * 4)  # one zero state, four singletons, eleven others
        words = initial_population(space, 11000, 8).squeeze(-1)
        counts = torch.bincount(words[:, 5:].flatten(), minlength=16).double()
        others = counts[counts > 0]
        assert len(others) == 11
        # Probability 3 / 11 for each; eleven frequencies at 4.9 standard deviations: a false alarm in 1e-5.
        assert (others - 3000).abs().max() < 4.9 * (11000 * 3 / 11 * 8 / 11) ** 0.5

    @pytest.mark.slow
    def test_large_spaces_get_sparse_states_of_varied_activity(self) -> None:
        space = StateSpace([2] * 300)
        active = space.unpack(initial_population(space, 200, 400), torch.float64).sum(-1)[:, 301:]
        assert 2.5 < active.mean() < 3.5
        # Means per data point spread from 2 to 4 uniformly (standard deviation 0.58), not just by chance (0.1).
        assert active.mean(1).std() > 0.4

    @pytest.mark.slow
    def test_nearly_full_sparse_levels_are_left_behind(self) -> None:
        # 8192 states, 2000 wanted: not enumerated, and far more than there are sparse ones.
        space = StateSpace([2] * 13)
        words = initial_population(space, 20, 2000)
        Population(space, words, torch.zeros(20, 2000)).assert_distinct()

    def test_seeds(self) -> None:
        space = StateSpace([2] * 40)
        first, second = (initial_population(space, 5, 60, torch.Generator().manual_seed(2)) for _ in range(2))
        assert torch.equal(first, second)
        assert not torch.equal(first, initial_population(space, 5, 60, torch.Generator().manual_seed(3)))

    def test_more_states_than_there_are(self) -> None:
        with pytest.raises(ValueError, match="at most the number of states in the space, 8; got 9"):
            initial_population(StateSpace([2] * 3), 5, 9)
