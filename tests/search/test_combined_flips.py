"""Flips of the best state, combined: what is proposed, and what that finds among many latents."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_truncated import AutoTruncated, EvolutionarySearch, Population, StateSpace, ops
from pyro_truncated.distributions import LinearSuperposition
from pyro_truncated.models import BinarySparseCoding, NoisyOr
from pyro_truncated.program.log_joint import RowScorer
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
    with ops.use_backend(kind):
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


@pytest.mark.parametrize("missing", [False, True])
def test_sums_of_causes_know_the_gains_of_flips(missing: bool) -> None:
    y = 3 * torch.randn(30, 12, dtype=torch.float64)
    y[0, 0] = math.nan if missing else y[0, 0]
    model = BinarySparseCoding(12, 70, dtype=torch.float64).initialize(y)
    seen: list[SearchBatch] = []

    class Watched(CombinedFlips):
        def propose(self, batch: SearchBatch) -> Population:
            seen.append(batch)
            return super().propose(batch)

    AutoTruncated(model, num_states=8).infer(y, Watched(3), steps=2)
    batch = seen[-1]
    best = batch.population.mode()
    gains = batch.score.flip_gains(best)
    assert (gains is None) == missing
    if gains is not None:
        flips = batch.space.pack(torch.eye(70, dtype=torch.int64))
        expected = batch.score(best.unsqueeze(1) ^ flips) - batch.score(best.unsqueeze(1))
        torch.testing.assert_close(gains, expected, rtol=1e-9, atol=1e-9)
    scored = CombinedFlips(3).propose(dataclasses.replace(batch, score=lambda words: batch.score(words)))
    assert torch.equal(CombinedFlips(3).propose(batch).words, scored.words)


class AtMostTwo(LinearSuperposition):
    """Scores states in another way than the distribution that it inherits from."""

    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value) - 1e4 * (self.states.sum(-1) > 2)

    def packed_log_prob(self, words: Tensor, value: Tensor, state_logits: Tensor | None = None) -> Tensor:
        active = StateSpace([2] * self.weight.shape[-1]).unpack(words).sum(-1)
        return super().packed_log_prob(words, value, state_logits) - 1e4 * (active > 2)


def test_who_scores_in_another_way_has_no_gains_of_flips() -> None:
    weight, y = torch.randn(12, 70), torch.randn(30, 12)

    def program(y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((70,), 0.1)).to_event(1))
            pyro.sample("y", AtMostTwo(s, weight, 1.0), obs=y)

    guide = AutoTruncated(program, num_states=8).infer(y, CombinedFlips(3, rounds=1), steps=6)
    seen = RowScorer(guide.make_scorer(y), slice(0, 30))
    assert seen.flip_gains(guide.population().mode()) is None
    assert (guide.population().log_joint.amax(1) > -1e4).all()


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
    names = {(64, True): "ConditionalSearch", (65, True): "CombinedSearch", (257, True): "CombinedFlips"}
    names |= {(256, False): "ConditionalSearch", (257, False): "CombinedSearch"}
    for (number, is_linear), name in names.items():
        search = AutomaticSearch()
        search.step(dataclasses.replace(_batch(torch.randn(2, number, dtype=torch.float64)), is_linear=is_linear))
        assert type(search.chosen).__name__ == name
        restored = pickle.loads(pickle.dumps(search))
        restored.step(_batch(torch.randn(2, number, dtype=torch.float64)))


def test_of_what_is_no_sum_of_causes_full_conditionals_are_searched_too() -> None:
    y = torch.ones(4, 3)
    for model, chosen in ((BinarySparseCoding(3, 300), "CombinedFlips"), (NoisyOr(3, 300), "CombinedSearch")):
        search = AutomaticSearch()
        AutoTruncated(model.initialize(y), num_states=4).infer(y, search, steps=1)
        assert type(search.chosen).__name__ == chosen


def _sticky(length: int) -> Callable[[Tensor], None]:
    """A binary chain whose neighbours agree, seen in noise."""

    def model(y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((length,), 0.5)).to_event(1))
            number = (s[..., 1:] == s[..., :-1]).sum(-1)
            pyro.sample("agree", dist.Delta(torch.zeros_like(number, dtype=y.dtype), log_density=3.0 * number), obs=torch.zeros(len(y)))
            pyro.sample("y", dist.Normal(s, 1.0).to_event(1), obs=y)

    return model


def _likeliest(y: Tensor) -> Tensor:
    """The log joints ``(N,)`` of the likeliest states of the chain, by Viterbi's recursion."""
    emission = dist.Normal(torch.tensor([0.0, 1.0]), 1.0).log_prob(y.unsqueeze(-1)) + math.log(0.5)
    best = emission[:, 0]
    for site in emission.unbind(1)[1:]:
        best = (best.unsqueeze(2) + 3.0 * torch.eye(2)).amax(1) + site
    return best.amax(1)


@pytest.mark.nightly
def test_a_sticky_chain_of_many_latents_is_searched_by_full_conditionals_too() -> None:
    generator = torch.Generator().manual_seed(0)
    y = (torch.rand(6, 300, generator=generator) < 0.05).cumsum(1) % 2 + torch.randn(6, 300, generator=generator)
    torch.manual_seed(0)
    population = AutoTruncated(_sticky(300), num_states=64).infer(y, AutomaticSearch(), steps=40).population()
    gap = (_likeliest(y) - population.log_joint.amax(1)).mean()
    assert -0.01 < gap < 4.0  # by flips alone: some fifty


def test_latents_of_other_kinds_are_refused() -> None:
    space = StateSpace([2, 3])
    with pytest.raises(ValueError, match="CombinedFlips is for binary latents"):
        CombinedFlips().check_space(space)
    with pytest.raises(ValueError, match="num_selected"):
        CombinedFlips(0)
    with pytest.raises(ValueError, match="rounds"):
        CombinedFlips(rounds=0)
