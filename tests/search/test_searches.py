"""All searches: invariants, exactness where it can be had, and what they find on problems whose answer is known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from pyro_truncated import EvolutionarySearch, ExhaustiveSearch, Population, SampledSearch, Search, StateSpace, ops
from pyro_truncated.search import ConditionalSearch, Preselection, SearchBatch, Singletons
from pyro_truncated.search.conditional import IteratedLocalSearch
from pyro_truncated.states.population import initial_population
from pyro_truncated.utils.budget import memory_budget

EVOLUTIONARY = {
    "fitparents-randflips": {},
    "randparents-randflips": {"selection": "randparents"},
    "fitparents-sparseflips": {"mutation": "sparseflips"},
    "fitparents-cross-randflips": {"crossover": True},
    "fitparents-cross-sparseflips": {"crossover": True, "mutation": "sparseflips"},
    "overlapping": {"overlapping": True},
}
SEARCHES: dict[str, Callable[[], Search]] = {
    **{name: (lambda options=options: EvolutionarySearch(4, 3, 2, **options)) for name, options in EVOLUTIONARY.items()},
    "sampled": lambda: SampledSearch(100),
    "conditional": lambda: ConditionalSearch(40),
    "iterated": lambda: IteratedLocalSearch(4),
    "combined": lambda: SampledSearch(10, prior_share=0.2) + EvolutionarySearch(3, 2, 1) + EvolutionarySearch(2, crossover=True),
}


@pytest.fixture(params=["compiled", "vectorised"], autouse=True)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test runs on both implementations of the packed operations."""
    with ops.use_backend(request.param):
        yield request.param


class Toy:
    """Log joints that add up over latents, different for each data point, so that the best states are known."""

    def __init__(self, space: StateSpace, num_data: int) -> None:
        self.space = space
        self.field = 2 * torch.randn(num_data, space.num_latents, max(space.cardinalities), dtype=torch.float64)
        self.calls = 0

    def rows(self, rows: slice) -> Callable[[Tensor], Tensor]:
        def score(words: Tensor) -> Tensor:
            self.calls += 1
            values = self.space.unpack(words, torch.int64)
            field = self.field[rows].unsqueeze(1).expand(-1, values.shape[1], -1, -1)
            return field.gather(3, values.unsqueeze(-1)).squeeze(-1).sum(-1)

        return score

    def batch(self, num_states: int, rows: slice = slice(None)) -> SearchBatch:
        words = initial_population(self.space, len(self.field), num_states, torch.Generator().manual_seed(0))[rows]
        score = self.rows(rows)
        return SearchBatch(Population(self.space, words, score(words)), score)

    def best(self, num_states: int) -> Tensor:
        everything = self.space.enumerate().expand(len(self.field), -1, -1)
        return self.rows(slice(None))(everything).topk(num_states, 1).values


@pytest.fixture(params=["binary", "mixed"])
def toy(request: pytest.FixtureRequest) -> Toy:
    """A binary space and one of latents with one to five values."""
    return Toy(StateSpace([2] * 8 if request.param == "binary" else [2, 3, 2, 1, 5, 2]), num_data=30)


@pytest.mark.parametrize("name", SEARCHES)
def test_free_energy_never_falls_and_states_stay_distinct(name: str, toy: Toy) -> None:
    search, batch = SEARCHES[name](), toy.batch(10)
    for _ in range(8):
        improved = search.step(batch)
        assert (improved.free_energy() >= batch.population.free_energy()).all()
        improved.assert_distinct()
        assert torch.equal(improved.log_joint, batch.score(improved.words))
        batch = dataclasses.replace(batch, population=improved)


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHES)
def test_finds_the_best_states(name: str, toy: Toy) -> None:
    search, batch = SEARCHES[name](), toy.batch(12)
    for _ in range(150):
        batch = dataclasses.replace(batch, population=search.step(batch))
    torch.testing.assert_close(batch.population.log_joint.sort(1, descending=True).values, toy.best(12))


@pytest.mark.parametrize("name", SEARCHES)
def test_seeds_reproduce(name: str, toy: Toy) -> None:
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(SEARCHES[name]().propose(toy.batch(12)).words)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_own_generators_leave_the_global_one_alone(toy: Toy) -> None:
    searches: list[Callable[[torch.Generator], Search]] = [
        lambda g: EvolutionarySearch(3, 2, 2, generator=g),
        lambda g: SampledSearch(5, generator=g),
    ]
    batch = toy.batch(12)
    for make in searches:
        before = torch.get_rng_state()
        first, second = (make(torch.Generator().manual_seed(4)).propose(batch).words for _ in range(2))
        assert torch.equal(first, second)
        assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", SEARCHES)
def test_impossible_states(name: str) -> None:
    # Only the states with latent 0 on have positive probability, and there are fewer of them at the start than parents.
    space = StateSpace([2] * 6)

    def score(words: Tensor) -> Tensor:
        values = space.unpack(words, torch.float64)
        return torch.where(values[..., 0] == 1, values.sum(-1), -math.inf)

    words = initial_population(space, 5, 6)
    population = Population(space, words, score(words))
    for _ in range(20):
        improved = SEARCHES[name]().step(SearchBatch(population, score))
        improved.assert_distinct()
        assert (improved.free_energy() >= population.free_energy()).all()
        population = improved
    assert (population.log_joint > -math.inf).all()


@pytest.mark.parametrize("options", EVOLUTIONARY.values(), ids=EVOLUTIONARY)
def test_number_of_children_and_of_evaluations(options: dict[str, bool]) -> None:
    toy = Toy(StateSpace([2] * 10), num_data=4)
    batch = toy.batch(20)
    toy.calls = 0
    proposals = EvolutionarySearch(generations=3, **options).propose(batch)
    assert proposals.words.shape == (4, 3 * 56, 1)
    assert toy.calls == 3
    assert torch.equal(proposals.log_joint, batch.score(proposals.words))


def test_first_generation_differs_in_one_latent_from_a_parent() -> None:
    toy = Toy(StateSpace([2] * 10), num_data=4)
    batch = toy.batch(20)
    children = EvolutionarySearch(5, 4, 1).propose(batch).states(torch.int64)
    distance = (children.unsqueeze(2) != batch.population.states(torch.int64).unsqueeze(1)).sum(-1)
    assert (distance == 1).any(-1).all()


@pytest.mark.slow
def test_parents_of_the_second_generation_are_children() -> None:
    # From the zero state alone, two generations of single flips lead to states with zero or two active latents.
    space = StateSpace([2] * 10)
    words = torch.zeros(50, 1, 1, dtype=torch.long)
    batch = SearchBatch(Population(space, words, torch.zeros(50, 1)), lambda w: -space.unpack(w, torch.float32).sum(-1))
    active = EvolutionarySearch(1, 6, 2).propose(batch).states(torch.int64).sum(-1)
    assert (active[:, :6] == 1).all()
    assert active[:, 6:].unique().tolist() == [0, 2]


def test_equal_children_are_one_parent() -> None:
    # With two latents, four single flips of the zero state repeat; two parents of the next generation must still differ.
    space = StateSpace([2] * 2)
    words = torch.tensor([[[0], [3]]]).expand(200, -1, -1)
    batch = SearchBatch(Population(space, words, torch.zeros(200, 2)), lambda w: torch.zeros(w.shape[:2]) - 1)
    proposals = EvolutionarySearch(2, 10, 2).propose(batch).words.squeeze(-1)
    assert (proposals[:, :20].sort(1).values[:, 0] == 1).all()
    # Parents 1 and 2 have children 0 and 3 alike; each parent's ten copies come one after the other.
    assert ((proposals[:, 20:] == 0) | (proposals[:, 20:] == 3)).all()


def test_target_activity_is_learned_from_the_posterior() -> None:
    space = StateSpace([2, 2, 2, 7])
    search = EvolutionarySearch(2, mutation="sparseflips")
    words = space.pack(torch.tensor([[[1, 1, 1, 6], [0, 0, 0, 6]], [[1, 0, 0, 0], [0, 0, 1, 3]]]))
    population = Population(space, words, torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log())
    batch = SearchBatch(population, lambda words: torch.zeros(words.shape[:2]))
    assert search._target(batch) == pytest.approx((2.25 + 1) / 2)


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("options", [{"parents": 8}, {"crossover": True}, {"mutation": "sparseflips"}])
@pytest.mark.parametrize("space", [StateSpace([5]), StateSpace([2, 2, 3])], ids=str)
def test_few_states_or_latents(space: StateSpace, options: dict) -> None:
    for num_states in (1, 4):
        toy = Toy(space, num_data=2)
        batch, search = toy.batch(num_states), EvolutionarySearch(**options)
        for _ in range(80):
            batch = dataclasses.replace(batch, population=search.step(batch))
        torch.testing.assert_close(batch.population.log_joint.sort(1, descending=True).values, toy.best(num_states))


def test_complete_populations_are_left_alone(toy: Toy) -> None:
    batch = toy.batch(toy.space.size)
    toy.calls = 0
    for make in (*SEARCHES.values(), lambda: ExhaustiveSearch(max_states=2), lambda: Preselection(Singletons(), 9, merge=False)):
        assert make().improve(batch, 3) is batch.population
    assert toy.calls == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selection": "best"}, "selection must be 'fitparents' or 'randparents'; got 'best'"),
        ({"mutation": "none"}, "mutation must be 'randflips' or 'sparseflips'; got 'none'"),
        ({"parents": 1, "crossover": True}, "at least 2 parents; got 1"),
        ({"flip_probability": 1.5}, r"flip_probability must lie in \(0, 1\]; got 1.5"),
        ({"target_activity": -1.0}, "target_activity must not be negative; got -1.0"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvolutionarySearch(**options)


class TestExhaustive:
    def test_one_step_is_exact(self, toy: Toy) -> None:
        batch = toy.batch(12)
        toy.calls = 0
        with memory_budget(64 * len(batch.population) * 7):
            population = ExhaustiveSearch().step(batch)
        assert toy.calls == math.ceil(toy.space.size / 7)  # blocks of seven states
        torch.testing.assert_close(population.log_joint.sort(1, descending=True).values, toy.best(12))
        population.assert_distinct()
        assert ExhaustiveSearch().propose(toy.batch(12)).num_states == toy.space.size

    def test_the_whole_space_gives_the_evidence(self, toy: Toy) -> None:
        population = ExhaustiveSearch().step(toy.batch(toy.space.size))
        # The log joint adds up over latents, so the evidence is a product of sums.
        allowed = torch.arange(toy.field.shape[-1]) < toy.space.cardinality.unsqueeze(-1)
        evidence = toy.field.masked_fill(~allowed, -math.inf).logsumexp(-1).sum(-1)
        torch.testing.assert_close(population.free_energy(), evidence)
        torch.testing.assert_close(population.value_probabilities(), toy.field.masked_fill(~allowed, -math.inf).softmax(-1))

    def test_the_batch_does_not_matter(self, toy: Toy) -> None:
        whole = ExhaustiveSearch().step(toy.batch(12))
        parts = [ExhaustiveSearch().step(toy.batch(12, rows)) for rows in (slice(0, 7), slice(7, 30))]
        assert torch.equal(whole.words, torch.cat([part.words for part in parts]))
        torch.testing.assert_close(whole.log_joint, torch.cat([part.log_joint for part in parts]))

    def test_large_spaces_are_refused(self) -> None:
        toy = Toy(StateSpace([2] * 40), num_data=2)
        with pytest.raises(ValueError, match=r"would score 2\^40.0 states for each data point, more than max_states=1048576"):
            ExhaustiveSearch().step(toy.batch(12))


class TestSampled:
    def test_shares_follow_marginals_and_prior(self) -> None:
        space = StateSpace([2, 3, 1])
        words = space.pack(torch.tensor([[[0, 0, 0], [1, 2, 0]], [[1, 1, 0], [0, 2, 0]]]))
        population = Population(space, words, torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log())
        batch = SearchBatch(population, lambda w: torch.zeros(w.shape[:2]))
        values = SampledSearch(80000, prior_share=0.25).propose(batch).states(torch.int64)
        frequency = torch.nn.functional.one_hot(values, 3).double()
        q = population.value_probabilities().double()
        uniform = torch.tensor([[1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3], [1, 0, 0]])
        prior = (q.sum(0) + uniform) / 3
        # Thirty-six frequencies at 5.2 standard deviations of at most 0.5 / sqrt(number): a false alarm in 1e-5.
        assert (frequency[:, :20000].mean(1) - prior).abs().max() < 5.2 * 0.5 / 20000**0.5
        assert (frequency[:, 20000:].mean(1) - q).abs().max() < 5.2 * 0.5 / 60000**0.5
        # Values of probability zero never appear, and latents are independent of each other.
        assert (frequency[:, 20000:].sum(1)[q == 0] == 0).all()
        both = (frequency[0, 20000:, 0, 1] * frequency[0, 20000:, 1, 2]).mean()
        assert (both - 0.75**2).abs() < 5.2 * 0.5 / 60000**0.5

    def test_all_from_one_source(self, toy: Toy) -> None:
        for share in (0.0, 1.0):
            assert SampledSearch(7, prior_share=share).propose(toy.batch(10)).num_states == 7

    def test_bad_options(self) -> None:
        with pytest.raises(ValueError, match=r"prior_share must lie in \[0, 1\]; got 2"):
            SampledSearch(3, prior_share=2)


def test_combined_searches_propose_side_by_side(toy: Toy) -> None:
    search = SampledSearch(5) + EvolutionarySearch(3, 2, 1) + SampledSearch(4)
    assert search.propose(toy.batch(10)).num_states == 5 + 6 + 4
