"""Flips where states and predictions disagree: how they are drawn, and what they find where scores are few."""

from __future__ import annotations

import pyro
import pytest
import torch
from torch import Tensor

from pyro_truncated import AutoTruncated, EvolutionarySearch, Population, StateSpace
from pyro_truncated.datasets import linear_bars
from pyro_truncated.models import BinarySparseCoding, GaussianMixture
from pyro_truncated.search import LearnedFlips, Search, SearchBatch


def children(search: LearnedFlips, prediction: Tensor, state: Tensor) -> Tensor:
    """What differs in the children of many copies of a state, for a prediction of the marginals: ``(N, children, H)``."""
    space, num_data = StateSpace([2] * len(state)), 2000
    words = space.pack(state).expand(num_data, 1, -1).contiguous()
    search.affinity = lambda batch: prediction.expand(num_data, -1)  # type: ignore[assignment, return-value]
    batch = SearchBatch(Population(space, words, torch.zeros(num_data, 1)), lambda words: torch.zeros(words.shape[:2]))
    return space.unpack(search.propose(batch).words) != state


def test_latents_are_flipped_in_proportion_to_the_disagreement() -> None:
    state = torch.tensor([0, 1, 1, 0, 0])
    prediction = torch.tensor([0.6, 1.0, 0.7, 0.0, 0.1], dtype=torch.float64)
    search = LearnedFlips(6, mean_flips=1.0, generator=torch.Generator().manual_seed(0))
    found = children(search, prediction, state)
    flipped = found[:, 1:].flatten(0, 1)
    assert (flipped.sum(1) == 1).all()
    expected = torch.tensor([0.6, 0.02, 0.3, 0.02, 0.1], dtype=torch.float64)
    expected = expected / expected.sum()
    # Five standard errors of 10 000 draws, of five shares: false alarm rate 3e-6.
    assert ((flipped.double().mean(0) - expected).abs() < 5 * (expected * (1 - expected) / 10_000).sqrt()).all()
    # The first child is drawn from the prediction: of 2000 draws another such bound.
    drawn = (found[:, 0] ^ state.bool()).double().mean(0)
    assert ((drawn - prediction).abs() <= 5 * (prediction * (1 - prediction) / 2000).sqrt()).all()


def test_the_number_of_flips_is_geometric() -> None:
    search = LearnedFlips(6, mean_flips=2.0, generator=torch.Generator().manual_seed(0))
    number = children(search, torch.full((30,), 0.5, dtype=torch.float64), torch.zeros(30, dtype=torch.int64))[:, 1:].sum(-1)
    # Five standard errors of 10 000 draws, of five shares: false alarm rate 3e-6.
    for k in range(1, 6):
        share = 0.5**k
        assert abs(float((number == k).double().mean()) - share) < 5 * (share * (1 - share) / 10_000) ** 0.5
    assert int(number.max()) <= 8


class Counted(Search):
    """A search that counts the states it has scored, per data point."""

    def __init__(self, search: Search) -> None:
        self.search, self.number = search, 0

    def propose(self, batch: SearchBatch) -> Population:
        found = self.search.propose(batch)
        self.number += found.num_states
        return found


@pytest.mark.slow
def test_fewer_scores_are_needed_than_by_flips_at_random() -> None:
    pyro.set_rng_seed(0)
    y, components, _ = linear_bars(100, 10, mean_active=4.0, generator=torch.Generator().manual_seed(0))
    model = BinarySparseCoding(100, 20)
    with torch.no_grad():
        model.weight, model.scale = components.clone(), torch.tensor(1.0)
    reached = {}
    for name, search in (("learned", Counted(LearnedFlips(8))), ("evolution", Counted(EvolutionarySearch(4, 2, 1)))):
        guide = AutoTruncated(model, num_states=8).infer(y, search, steps=10)
        reached[name] = float(guide.population().free_energy().mean()), search.number
    assert reached["learned"][1] == reached["evolution"][1] == 80
    assert reached["learned"][0] > reached["evolution"][0] + 1.0


@pytest.mark.slow
def test_a_seed_reproduces_and_other_latents_are_refused() -> None:
    y = linear_bars(30, 4, mean_active=2.0).data
    model = BinarySparseCoding(16, 8).initialize(y)
    found = []
    for _ in range(2):
        pyro.set_rng_seed(3)
        found.append(AutoTruncated(model, num_states=6).infer(y, LearnedFlips(4), steps=4).words)
    assert torch.equal(*found)
    mixture = GaussianMixture(16, 9).initialize(y)
    with pytest.raises(ValueError, match="LearnedFlips is for binary latents"):
        AutoTruncated(mixture, num_states=3).infer(y, LearnedFlips(4))
    with pytest.raises(ValueError, match="mean_flips must be at least 1 and finite; got 0"):
        LearnedFlips(mean_flips=0.5)
