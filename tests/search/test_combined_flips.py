"""Flips of the best state, combined: what is proposed, and what that finds among many latents."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from pyro_truncated import EvolutionarySearch, Population, StateSpace, ops
from pyro_truncated.search import AutomaticSearch, CombinedFlips, SearchBatch


def _batch(gain: Tensor) -> SearchBatch:
    """Latents that do not interact: those with gains above zero are on in the best states; populations of the empty state alone."""
    space = StateSpace([2] * gain.shape[1])

    def score(words: Tensor) -> Tensor:
        return (space.unpack(words).double() * gain.unsqueeze(1)).sum(-1)

    words = torch.zeros(len(gain), 1, space.num_words, dtype=torch.int64)
    return SearchBatch(Population(space, words, score(words)), score)


@pytest.mark.parametrize("kind", ["compiled", "vectorised"])
def test_the_likeliest_flips_of_the_best_state_are_combined(kind: str) -> None:
    with ops.use(kind):
        batch = _batch(torch.randn(7, 70, dtype=torch.float64))
        found = CombinedFlips(3, rounds=1).propose(batch)
        best, space = batch.population.states()[:, 0], batch.space
        flips = torch.eye(70).expand(7, -1, -1)
        chosen = batch.score(space.pack((best.unsqueeze(1) - flips).abs())).topk(3).indices
        for states, own, at in zip(found.states(), best, chosen.tolist(), strict=True):
            subsets = [subset for number in range(4) for subset in itertools.combinations(at, number)]
            expected = own.repeat(8, 1)
            for row, subset in enumerate(subsets):
                expected[row, list(subset)] = 1 - expected[row, list(subset)]
            assert {tuple(row) for row in states.tolist()} == {tuple(row) for row in expected.tolist()}


def test_of_many_latents_that_do_not_interact_each_step_puts_so_many_right() -> None:
    gain = -torch.rand(20, 500, dtype=torch.float64) - 1
    on = torch.rand(20, 500).topk(12).indices
    gain.scatter_(1, on, 2.0)
    batch = _batch(gain)
    population = CombinedFlips(6, rounds=1).improve(batch, 2)
    torch.testing.assert_close(population.log_joint.amax(1), torch.full((20,), 24.0, dtype=torch.float64))
    assert torch.equal(CombinedFlips(6, rounds=2).propose(batch).log_joint.amax(1), population.log_joint.amax(1))
    by_chance = EvolutionarySearch(8, 7, 2, crossover=True).improve(batch, 10)
    assert (by_chance.log_joint.amax(1) < 12).all()


def test_many_binary_latents_are_searched_by_flips_where_no_search_is_named() -> None:
    for number, name in ((256, "ConditionalSearch"), (257, "CombinedFlips")):
        search = AutomaticSearch()
        search.step(_batch(torch.randn(2, number, dtype=torch.float64)))
        assert type(search.chosen).__name__ == name


def test_latents_of_other_kinds_are_refused() -> None:
    space = StateSpace([2, 3])
    with pytest.raises(ValueError, match="CombinedFlips is for binary latents"):
        CombinedFlips().check_space(space)
    with pytest.raises(ValueError, match="num_selected"):
        CombinedFlips(0)
    with pytest.raises(ValueError, match="rounds"):
        CombinedFlips(rounds=0)
