"""Populations develop by the seed of the run and the positions of the data points: not by batches, memory, or what the model draws."""

from __future__ import annotations

import pyro
import pytest
import torch
from torch import Tensor

from pyro_truncated import AutoTruncated, EvolutionarySearch, Preselection
from pyro_truncated.models import BinarySparseCoding
from pyro_truncated.search import ConditionalSearch, SampledSearch, Search, Singletons

NUM_DATA = 12
SEARCHES = {
    "mutation": lambda: EvolutionarySearch(3, 2, 2),
    "crossover, sparse flips": lambda: EvolutionarySearch(4, generations=2, crossover=True, mutation="sparseflips", target_activity=2.0),
    "conditional": lambda: ConditionalSearch(40),
    "preselection": lambda: Preselection(Singletons(), 4, explore=0.5),
    "samples": lambda: SampledSearch(6, prior_share=0.0),
    "sum": lambda: EvolutionarySearch(3, 2, 2) + EvolutionarySearch(2, 3, 1, generator=torch.Generator().manual_seed(8)),
}


@pytest.fixture
def y() -> Tensor:
    return torch.randn(NUM_DATA, 6)


def model() -> BinarySparseCoding:
    torch.manual_seed(0)
    return BinarySparseCoding(6, 70).double()


def searched(y: Tensor, search: Search, first_position: int = 0, searches: int = 2, **options: int) -> AutoTruncated:
    """A guide of data, perhaps a part of all, whose populations were searched under one and the same model."""
    causes = model()
    pyro.set_rng_seed(3)
    guide = AutoTruncated(causes, 80, **options)
    guide.populations.first_position = first_position
    for _ in range(searches):
        guide.make_batch(y.double()).search_(search, 2)
    return guide


@pytest.mark.parametrize("name", SEARCHES)
def test_populations_of_a_part_are_those_of_all_data(name: str, y: Tensor) -> None:
    everything = searched(y, SEARCHES[name]()).words
    assert torch.equal(searched(y[:5], SEARCHES[name]()).words, everything[:5])
    assert torch.equal(searched(y[5:], SEARCHES[name](), first_position=5).words, everything[5:])
    # At other positions they are others.
    assert not torch.equal(searched(y[5:], SEARCHES[name]()).words, everything[5:])


@pytest.mark.parametrize("name", SEARCHES)
def test_populations_do_not_depend_on_the_memory_budget(name: str) -> None:
    data = torch.randn(150, 6)
    everything, little = searched(data, SEARCHES[name]()), searched(data, SEARCHES[name](), memory_budget=2**20)
    assert len(list(little.make_batch(data.double()).scorer.row_blocks(2 * 80))) > 1
    assert torch.equal(everything.words, little.words)


def test_runs_differ_by_their_seeds_and_searches_by_their_number(y: Tensor) -> None:
    one, two = searched(y, EvolutionarySearch(3, 2, 2)), searched(y, EvolutionarySearch(3, 2, 2))
    assert torch.equal(one.words, two.words)
    first = AutoTruncated(model(), 80)
    for guide in (first, AutoTruncated(first.model, 80)):
        guide.make_batch(y.double()).search_(EvolutionarySearch(3, 2, 2))
    assert guide.populations.seed != first.populations.seed
    assert not torch.equal(guide.words, first.words)


def test_a_run_goes_on_from_its_state_whatever_the_generator_does(y: Tensor) -> None:
    search = EvolutionarySearch(3, 2, 2)
    through = searched(y, search, searches=3)
    until, fresh = searched(y, search, searches=1), AutoTruncated(model(), 80)
    fresh.load_state_dict(until.state_dict())
    torch.manual_seed(99)
    for _ in range(2):
        fresh.make_batch(y.double()).search_(search, 2)
    assert torch.equal(fresh.words, through.words)


def test_an_older_state_has_no_seed(y: Tensor) -> None:
    guide, fresh = searched(y, EvolutionarySearch(3, 2, 2)), AutoTruncated(model(), 80)
    state = guide.state_dict()
    del state["populations.stream"]
    fresh.load_state_dict(state)
    assert torch.equal(fresh.words, guide.words)
