"""GP-select: the learned affinity is the leave-one-out prediction, however the data come, and EM with it works."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import (
    AutoTruncated,
    ClosedForm,
    EvolutionarySearch,
    ExhaustiveSearch,
    GPSelect,
    Population,
    Preselection,
    StateSpace,
    Truncated_ELBO,
    best_start,
)
from pyro_truncated.gp import LeaveOneOutRegression
from pyro_truncated.models import BinarySparseCoding
from pyro_truncated.search import RegressionAffinity, SearchBatch
from pyro_truncated.states.population import initial_population

N = 40


class Toy:
    """Latents that are active where a linear function of the observation is positive."""

    def __init__(self, space: StateSpace | None = None) -> None:
        self.space = StateSpace([2] * 6) if space is None else space
        self.y = torch.randn(N, 3)
        field = self.y @ torch.randn(3, self.space.num_latents * max(self.space.cardinalities))
        self.field = 2 * field.view(N, self.space.num_latents, -1).double()
        self.words = initial_population(self.space, N, 5, torch.Generator().manual_seed(0))

    def batch(self, rows: Tensor | None = None) -> SearchBatch:
        chosen = torch.arange(N) if rows is None else rows

        def score(words: Tensor) -> Tensor:
            values = self.space.unpack(words, torch.int64)
            field = self.field[chosen].unsqueeze(1).expand(-1, values.shape[1], -1, -1)
            return field.gather(3, values.unsqueeze(-1)).squeeze(-1).sum(-1)

        words = self.words[chosen]
        return SearchBatch(Population(self.space, words, score(words), rows), score, {"y": self.y[chosen]})


def refits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of data points of every fit from now on."""
    sizes: list[int] = []
    fit = LeaveOneOutRegression.fit

    def counted(self: LeaveOneOutRegression, targets: Tensor, steps: int = 20, rows: Tensor | None = None) -> float:
        sizes.append(len(targets))
        return fit(self, targets, steps, rows)

    monkeypatch.setattr(LeaveOneOutRegression, "fit", counted)
    return sizes


@pytest.mark.parametrize("cardinalities", [[2] * 6, [2, 3, 1, 2], [5]], ids=["binary", "mixed", "mixture"])
@pytest.mark.parametrize("options", [{}, {"rank": 4}, {"rank": 4, "pivots": "targets"}], ids=["exact", "low rank", "by targets"])
def test_the_affinity_is_the_leave_one_out_mean_of_the_marginals(cardinalities: list[int], options: dict[str, Any]) -> None:
    toy = Toy(StateSpace(cardinalities))
    batch = toy.batch()
    affinity = RegressionAffinity(**options, fit_steps=3)
    scores = affinity(batch)
    probabilities = batch.population.value_probabilities()
    first = 0 if toy.space.num_latents == 1 else 1
    columns = [probabilities[:, h, v] for h, c in enumerate(cardinalities) for v in range(first, c)]
    targets = torch.stack(columns, 1).double()
    assert affinity.regression is not None
    torch.testing.assert_close(scores, affinity.regression.loo(targets)[0])
    if "pivots" in options:
        # These are chosen at random in part.
        return
    own = LeaveOneOutRegression(toy.y, **options)
    own.fit(targets, 3)
    torch.testing.assert_close(scores, own.loo(targets)[0], rtol=0, atol=1e-6)


def test_batches_equal_all_data_once_all_are_known() -> None:
    toy = Toy()
    affinity = RegressionAffinity()
    whole = affinity(toy.batch())
    for rows in torch.randperm(N).split(15):
        torch.testing.assert_close(affinity(toy.batch(rows)), whole[rows], rtol=0, atol=1e-10)


@pytest.mark.slow
def test_data_that_come_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, sizes = Toy(), refits(monkeypatch)
    affinity = RegressionAffinity(refit_every=4)
    batches = torch.randperm(N).split(5)
    for rows in batches:
        assert affinity(toy.batch(rows)).shape == (5, 6)
    # Fits after 1, 2, 4 and 8 batches.
    assert sizes == [5, 10, 20, 40]
    for _ in range(4):
        for rows in batches:
            affinity(toy.batch(rows))
    assert sizes == [5, 10, 20, 40, 40]


@pytest.mark.slow
def test_fits_come_at_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, sizes = Toy(), refits(monkeypatch)
    affinity = RegressionAffinity(refit_every=3)
    numbers = []
    for _ in range(8):
        affinity(toy.batch())
        numbers.append(len(sizes))
    assert numbers == [1, 1, 1, 2, 2, 2, 3, 3]


def test_a_data_point_does_not_see_its_own_marginals() -> None:
    toy = Toy()
    affinity = RegressionAffinity()
    before = affinity(toy.batch())
    batch = toy.batch()
    log_joint = batch.population.log_joint.clone()
    log_joint[7] = log_joint[7].flip(0)
    after = affinity(dataclasses.replace(batch, population=dataclasses.replace(batch.population, log_joint=log_joint)))
    torch.testing.assert_close(after[7], before[7], rtol=0, atol=1e-8)
    assert (after[8] - before[8]).abs().max() > 1e-8


def test_new_data_are_predicted_and_not_remembered() -> None:
    toy = Toy()
    affinity = RegressionAffinity()
    known = affinity(toy.batch())
    for new_y in (torch.randn(N, 3), torch.randn(7, 3)):
        batch = toy.batch(torch.arange(len(new_y)))
        population = dataclasses.replace(batch.population, indices=None)
        scores = affinity(SearchBatch(population, batch.score, {"y": new_y}, is_new=True))
        assert affinity.regression is not None
        torch.testing.assert_close(scores, affinity.regression.predict(new_y)[0])
    torch.testing.assert_close(affinity(toy.batch()), known)


def make_batch(toy: Toy, num_data: int, indices: Tensor | None = None) -> SearchBatch:
    """Some of the first data points, as if they were all there are."""
    batch = toy.batch(torch.arange(num_data))
    return dataclasses.replace(batch, population=dataclasses.replace(batch.population, indices=indices))


@pytest.mark.parametrize("change", ["fewer", "others", "others in minibatches", "more", "other latents"])
def test_training_on_other_data_starts_anew(change: str) -> None:
    toy = Toy()
    other = Toy(StateSpace([2] * 4)) if change == "other latents" else Toy()
    affinity = RegressionAffinity(fit_steps=3)
    affinity(make_batch(toy, 30))
    num_data = {"fewer": 20, "more": N}.get(change, 30)
    batch = make_batch(other, num_data, torch.arange(num_data) if "minibatches" in change else None)
    scores = affinity(batch)
    torch.testing.assert_close(scores, RegressionAffinity(fit_steps=3)(batch), rtol=0, atol=1e-10)
    assert affinity.regression is not None
    assert len(affinity.regression.inputs) == num_data


def test_data_that_join_those_known_do_not_make_it_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, sizes = Toy(), refits(monkeypatch)
    affinity = RegressionAffinity(fit_steps=3)
    affinity(make_batch(toy, 30))
    affinity(toy.batch(torch.arange(25, N)))
    affinity(toy.batch())
    assert sizes == [30]


def test_new_data_are_learned_from_when_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, sizes = Toy(), refits(monkeypatch)
    batch, affinity = dataclasses.replace(toy.batch(), is_new=True), RegressionAffinity(fit_steps=3)
    for _ in range(2):
        torch.testing.assert_close(affinity(batch), RegressionAffinity(fit_steps=3)(batch), rtol=0, atol=1e-6)
    affinity(Toy().batch())
    affinity(batch)
    # One of its own and one of the fresh affinity, twice; then that of the training data.
    assert sizes == [N] * 4


def test_forgetting() -> None:
    toy, search = Toy(), GPSelect(3, fit_steps=3, explore=0.0)
    other = Toy()
    search.propose(other.batch())
    (search + EvolutionarySearch(2, 2)).forget()
    assert torch.equal(search.propose(toy.batch()).words, GPSelect(3, fit_steps=3, explore=0.0).propose(toy.batch()).words)
    Preselection(lambda batch: torch.zeros(N, 6), 3).forget()
    EvolutionarySearch().forget()


@pytest.mark.slow
def test_a_search_used_for_the_start_is_as_new_for_all_data() -> None:
    _, y = bars(120)
    results = []
    for search in (GPSelect(4, explore=0.0), GPSelect(4, explore=0.0)):
        torch.manual_seed(1)
        model = BinarySparseCoding(16, 8, dtype=torch.float64)
        best_start(model, y, search, num_starts=2, num_data=60, steps=2, num_states=16)
        used = search if not results else GPSelect(4, explore=0.0)
        svi = SVI(model, AutoTruncated(model, num_states=20), ClosedForm(model), Truncated_ELBO(used))
        torch.manual_seed(2)
        results.append([svi.step(y) for _ in range(3)])
        assert used.affinity.regression is not None
        assert len(used.affinity.regression.inputs) == 120
    assert results[0] == results[1]


def test_given_inputs() -> None:
    toy, inputs = Toy(), torch.randn(N, 2)
    affinity = RegressionAffinity(inputs=inputs)
    whole = affinity(toy.batch())
    rows = torch.tensor([3, 30, 5])
    torch.testing.assert_close(affinity(toy.batch(rows)), whole[rows], rtol=0, atol=1e-10)
    assert affinity.regression is not None
    assert affinity.regression.inputs.shape == (N, 2)
    with pytest.raises(ValueError, match="inputs hold the rows of the training data; for new data, make inputs a function"):
        affinity(dataclasses.replace(toy.batch(), is_new=True))
    with pytest.raises(ValueError, match="inputs hold 39 rows, but the batch is all data and has 40 data points"):
        RegressionAffinity(inputs=inputs[1:])(toy.batch())
    with pytest.raises(ValueError, match="there is no observed site with one value per data point to regress on; give inputs"):
        RegressionAffinity()(dataclasses.replace(toy.batch(), observations={}))


def test_inputs_made_by_a_function() -> None:
    toy = Toy()
    affinity = RegressionAffinity(inputs=lambda batch: batch.observations["y"].square())
    expected = RegressionAffinity(inputs=toy.y.square())
    rows = torch.tensor([3, 30, 5])
    torch.testing.assert_close(affinity(toy.batch()), expected(toy.batch()), rtol=0, atol=1e-8)
    new = dataclasses.replace(toy.batch(rows), observations={"y": torch.ones(3, 3)}, is_new=True)
    assert affinity.regression is not None
    torch.testing.assert_close(affinity(new), affinity.regression.predict(torch.ones(3, 3))[0])
    with pytest.raises(ValueError, match=r"inputs must return a matrix of 40 rows, one per data point of the batch; got \(1, 3\)"):
        RegressionAffinity(inputs=lambda batch: torch.zeros(1, 3))(toy.batch())


def test_missing_entries_become_the_mean_of_their_column() -> None:
    toy = Toy()
    y, missing = toy.y.double(), torch.rand(N, 3) < 0.2
    holes = y.masked_fill(missing, math.nan)
    filled = torch.where(missing, holes.nanmean(0), y)
    # More steps of the fit would make more of the rounding of means.
    affinity, other = RegressionAffinity(fit_steps=2), RegressionAffinity(fit_steps=2)
    scores, expected = (a(dataclasses.replace(toy.batch(), observations={"y": v})) for a, v in ((affinity, holes), (other, filled)))
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-8)
    torch.testing.assert_close(affinity(dataclasses.replace(toy.batch(), observations={"y": holes})), scores)


def test_merging_never_lowers_the_free_energy() -> None:
    toy = Toy()
    search, batch = GPSelect(3), toy.batch()
    for _ in range(6):
        improved = search.step(batch)
        assert (improved.free_energy() >= batch.population.free_energy()).all()
        improved.assert_distinct()
        batch = dataclasses.replace(batch, population=improved)


def test_selecting_everything_is_exact() -> None:
    toy = Toy()
    words = initial_population(toy.space, N, 64)
    batch = toy.batch()
    batch = dataclasses.replace(batch, population=dataclasses.replace(batch.population, words=words, log_joint=batch.score(words)))
    population = GPSelect(6, merge=False).step(batch)
    torch.testing.assert_close(population.free_energy(), toy.field.logsumexp(-1).sum(-1))


@pytest.mark.slow
def test_seeds_reproduce() -> None:
    toy, results = Toy(), []
    for seed in (1, 1, 2):
        search = GPSelect(3, explore=0.5, generator=torch.Generator().manual_seed(seed))
        before = torch.get_rng_state()
        results.append(torch.cat([search.propose(toy.batch()).words for _ in range(2)]))
        assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def bars(num_data: int = 200) -> tuple[Tensor, Tensor]:
    """Binary combinations of the eight bars of a 4 x 4 image, and the noisy data."""
    generator = torch.Generator().manual_seed(5)
    states = torch.rand(num_data, 8, generator=generator) < 0.2
    images = torch.zeros(8, 4, 4, dtype=torch.float64)
    for i in range(4):
        images[i, i], images[4 + i, :, i] = 5.0, 5.0
    return states, states.double() @ images.flatten(1) + torch.randn(num_data, 16, generator=generator, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [None, 30])
def test_em_climbs_and_selects_the_active_latents(rank: int | None) -> None:
    _, y = bars()
    model = BinarySparseCoding(16, 8, dtype=torch.float64).initialize(y, torch.Generator().manual_seed(3))
    search = GPSelect(4, rank=rank)
    guide = AutoTruncated(model, num_states=20)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(search))
    losses = [svi.step(y) for _ in range(25)]
    assert all(after <= before + 1e-8 * abs(before) for before, after in itertools.pairwise(losses))
    search.explore = 0.0
    population = guide.posterior(y)
    selected = search.select(SearchBatch(population, lambda words: torch.zeros(words.shape[:2]), {"y": y}))
    active = population.marginals() > 0.5
    recall = float(active.gather(1, selected).sum() / active.sum())
    # A random selection contains half of them.
    assert recall > 0.9


def test_it_combines_with_other_searches() -> None:
    _, y = bars(50)
    model = BinarySparseCoding(16, 8, dtype=torch.float64).initialize(y)
    svi = SVI(model, AutoTruncated(model, num_states=20), ClosedForm(model), Truncated_ELBO(GPSelect(3) + EvolutionarySearch(3, 2, 1)))
    losses = [svi.step(y) for _ in range(5)]
    assert all(after <= before + 1e-8 * abs(before) for before, after in itertools.pairwise(losses))


def test_inference_for_new_data() -> None:
    _, y = bars(100)
    model = BinarySparseCoding(16, 8, dtype=torch.float64).initialize(y[:60])
    guide, search = AutoTruncated(model, num_states=20), GPSelect(4)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(search))
    for _ in range(3):
        svi.step(y[:60])
    found = guide.infer(y[60:], search, 1).population()
    evidence = guide.infer(y[60:], ExhaustiveSearch(), 1, num_states=2**8).population().free_energy()
    assert found.words.shape == (40, 20, 1)
    assert bool((found.free_energy() <= evidence + 1e-9).all())
    svi.step(y[:60])


def test_inputs_are_a_matrix() -> None:
    with pytest.raises(ValueError, match=r"inputs must have shape \(N, D\), .*; got \(3,\)"):
        GPSelect(3, inputs=torch.zeros(3))
