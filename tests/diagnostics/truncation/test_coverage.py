"""Covered mass, growth and effective states against brute force; the certificate is an upper bound whatever the posterior."""

from __future__ import annotations

import itertools

import pyro
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyro.infer import SVI

from pyro_truncated import AutoTruncated, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.diagnostics import covered_mass, effective_states, population_growth
from pyro_truncated.diagnostics.truncation.coverage import MOST_MOVES
from pyro_truncated.search import Preselection, RegressionAffinity
from pyro_truncated.search.conditional import Moves
from pyro_truncated.states import StateSpace
from tests import zoo
from tests.diagnostics.tables import table_guide


def random_case(num_latents: int, cardinality: int, num_states: int, spread: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log joints ``(3, T)`` and the positions of populations."""
    generator = torch.Generator().manual_seed(seed)
    table = spread * torch.randn(3, cardinality**num_latents, generator=generator, dtype=torch.float64)
    population = torch.stack([torch.randperm(table.shape[1], generator=generator)[:num_states] for _ in range(3)])
    return table, population


def neighbours(position: int, num_latents: int, cardinality: int) -> set[int]:
    result = set()
    for latent, value in itertools.product(range(num_latents), range(cardinality)):
        old = position // cardinality**latent % cardinality
        result.add(position + (value - old) * cardinality**latent)
    return result


def brute_force(table: torch.Tensor, population: torch.Tensor, num_latents: int, cardinality: int) -> torch.Tensor:
    bounds = []
    for row, states in zip(table.exp(), population.tolist(), strict=True):
        reached = set(states).union(*(neighbours(state, num_latents, cardinality) for state in states))
        bounds.append(row[states].sum() / row[sorted(reached)].sum())
    return torch.stack(bounds)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    shape=st.sampled_from([(1, 2), (2, 2), (4, 2), (6, 2), (1, 5), (3, 3)]),
    share=st.floats(0, 1),
    spread=st.sampled_from([0.0, 1.0, 5.0, 40.0]),
    seed=st.integers(0, 2**31),
)
def test_certificate_is_never_below_the_covered_mass_and_equals_brute_force(shape, share, spread, seed):
    num_latents, cardinality = shape
    size = cardinality**num_latents
    num_states = max(1, round(share * size))
    table, population = random_case(num_latents, cardinality, num_states, spread, seed)
    guide = table_guide(table, population, num_latents, cardinality)
    bound = covered_mass(guide)
    covered = table.softmax(1).gather(1, population).sum(1)
    assert bool((bound >= covered * (1 - 1e-12)).all())
    assert bool((bound <= 1).all())
    torch.testing.assert_close(bound, brute_force(table, population, num_latents, cardinality), rtol=1e-9, atol=0)
    # Fewer parents see fewer neighbours.
    assert bool((covered_mass(guide, num_parents=1) >= bound * (1 - 1e-12)).all())


def test_certificate_is_tight_when_the_population_is_good(generator):
    table = 4 * torch.randn(3, 64, generator=generator, dtype=torch.float64)
    # States that differ in few latents have similar log joints, as in most models.
    bits = torch.arange(64).unsqueeze(-1) // 2 ** torch.arange(6) % 2
    table = 0.2 * table + bits.double() @ (3 * torch.randn(3, 6, generator=generator, dtype=torch.float64)).mT.reshape(6, 3).sum(1) * 0.5
    population = table.topk(16).indices
    covered = table.softmax(1).gather(1, population).sum(1)
    assert bool((covered > 0.9).all())
    torch.testing.assert_close(covered_mass(table_guide(table, population, 6)), covered, rtol=0, atol=0.02)


@pytest.mark.parametrize("case", zoo.CASES, ids=lambda case: case.__name__)
def test_certificate_bounds_the_covered_mass_of_models(case):
    case = case()
    guide = AutoTruncated(case.model, max(1, case.num_states // 5), max_count=case.max_count, whole_states=True)
    bound = covered_mass(guide, *case.args)
    evidence = case.table().detach().logsumexp(0)
    covered = (guide.posterior(*case.args).free_energy() - evidence).exp()
    assert bool((bound >= covered * (1 - 1e-9)).all())
    if guide.space.num_latents == 1:
        # All other values of a single latent are neighbours.
        torch.testing.assert_close(bound, covered, rtol=1e-9, atol=0)


@pytest.mark.parametrize("cardinalities", [[2] * 70, [3, 2, 1, 40], [2]])
def test_moves_reach_every_neighbour_once(cardinalities, generator):
    space = StateSpace(cardinalities)
    levels = (torch.rand(2, 3, len(cardinalities), generator=generator) * space.cardinality).long()
    moves = Moves(space, torch.device("cpu"), MOST_MOVES)
    reached = space.unpack(moves.neighbours(space.pack(levels)), torch.int64)
    assert moves.count == sum(min(cardinality - 1, 32) for cardinality in cardinalities)
    reached = reached.view(2, 3, moves.count, len(cardinalities))
    for point, parent in itertools.product(range(2), range(3)):
        states = {tuple(state) for state in reached[point, parent].tolist()}
        assert len(states) == moves.count
        own = levels[point, parent]
        assert all(int((torch.tensor(state) != own).sum()) == 1 for state in states)
        assert bool((torch.tensor(sorted(states)) < space.cardinality).all())


def test_growth_leaves_what_a_search_has_learned(generator):
    affinity = RegressionAffinity(kernel="linear")
    search = Preselection(affinity, 3)
    case = zoo.binary()
    guide = AutoTruncated(case.model, 4)
    svi = SVI(case.model, guide, pyro.optim.Adam({"lr": 0.01}), Truncated_ELBO(search))
    svi.step(*case.args)
    learned = affinity.regression
    assert learned is not None
    population_growth(guide, *case.args, search=search, steps=2)
    assert affinity.regression is learned


def test_growth_is_that_of_the_best_states(generator):
    table, population = random_case(5, 2, 4, 3.0, 1)
    guide = table_guide(table, population, 5)
    before = guide.setup() or guide.words.clone()
    growth = population_growth(guide, search=ExhaustiveSearch(), steps=1)
    start = table.gather(1, population).logsumexp(1)
    best, twice = (table.topk(count).values.logsumexp(1) for count in (4, 8))
    torch.testing.assert_close(growth.free_energy, start)
    torch.testing.assert_close(growth.by_search, best - start)
    torch.testing.assert_close(growth.by_size, twice - best)
    assert torch.equal(guide.words, before)
    # A search of its own finds them too, in a space this small; a single state has no parents to choose from.
    torch.testing.assert_close(population_growth(guide, steps=30).doubled, twice)
    assert bool((population_growth(table_guide(table, population[:, :1], 5), steps=3).by_size >= 0).all())
    # There are no more states than there are.
    growth = population_growth(table_guide(table, table.topk(20).indices, 5), search=ExhaustiveSearch(), steps=1)
    torch.testing.assert_close(growth.doubled, table.logsumexp(1))


def test_effective_states():
    table = torch.full((2, 8), -100.0, dtype=torch.float64)
    table[0, :4], table[1, 0] = 0.0, 0.0
    population = torch.arange(8).expand(2, -1).contiguous()
    torch.testing.assert_close(effective_states(table_guide(table, population, 3)), torch.tensor([4.0, 1.0], dtype=torch.float64))


def test_memory_budget_changes_nothing(generator):
    case = zoo.binary()
    guides = [AutoTruncated(case.model, 6, init=None, memory_budget=budget) for budget in (2**20, 2**28)]
    state = torch.get_rng_state()
    bounds = []
    for guide in guides:
        torch.set_rng_state(state)
        guide.setup(*case.args)
        guide.memory_budget = 200 if guide is guides[0] else 2**28
        bounds.append(covered_mass(guide, *case.args))
    torch.testing.assert_close(*bounds)


def test_bad_arguments_are_refused():
    case = zoo.binary()
    guide = AutoTruncated(case.model, 2)
    with pytest.raises(ValueError, match="steps must be a positive integer; got 0"):
        population_growth(guide, *case.args, steps=0)
    with pytest.raises(TypeError, match="guide must be an AutoTruncated, or an AutoGuideList that holds one; got function"):
        covered_mass(case.model, *case.args)
