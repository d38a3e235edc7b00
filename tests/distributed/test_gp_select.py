"""GP-select on several processes: one regression on the data of all, so that each selects what one process would."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, GPSelect, Truncated_ELBO, distributed, fit
from pyro_truncated.distributed.shards import collect_rows, with_rows, without_rows
from pyro_truncated.models import BinarySparseCoding, OcclusiveComponents
from pyro_truncated.scenes import PlacementSelection, PlaceRegression, colour_maps, generated_objects, occluded_scenes
from pyro_truncated.search import LearnedFlips, SearchBatch, gp_select
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace
from tests.distributed.test_together import data


def selected(
    rank: int | None, in_batches: bool, steps: int = 6, is_shard: bool = True, flips: bool = False
) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    pyro.clear_param_store()
    pyro.set_rng_seed(2)
    y = data(31)
    y[::6, 1] = torch.nan
    y = distributed.shard(y) if is_shard else y
    model = BinarySparseCoding(9, 6, dtype=torch.float64).initialize(y)
    learned = LearnedFlips(3, rank=rank, refit_every=2) if flips else GPSelect(3, rank=rank, refit_every=2, fit_steps=4)
    search = learned + EvolutionarySearch(2, 2)
    svi = SVI(model, AutoTruncated(model, num_states=6), ClosedForm(model), Truncated_ELBO(search))
    # Minibatches leave processes without any data point, and at first most data have not been met.
    batches = distributed.Batches(y, 4, block=2)
    losses = []
    for step in range(steps):
        if in_batches:
            with batches.at(step):
                losses.append(svi.step(y))
        else:
            losses.append(svi.step(y))
    # Whatever the model has drawn for its data points.
    pyro.set_rng_seed(8)
    new = svi.guide.infer(distributed.shard(data(40)[31:]) if is_shard else data(40)[31:], search, 1)
    return losses, svi.guide.words, new.words


@pytest.mark.parametrize(
    ("rank", "in_batches", "flips"), [(None, False, False), (None, True, False), (5, False, False), (5, True, False), (None, True, True)]
)
def test_selections_are_those_of_one_process(rank, in_batches, flips, crew):
    losses, words, new = selected(rank, in_batches, flips=flips)
    for number in (2, 3):
        found = crew.results(number, selected, rank, in_batches, flips=flips)
        for own, _, _ in found:
            assert own == pytest.approx(losses, rel=1e-12)
        assert torch.equal(torch.cat([own for _, own, _ in found]), words)
        assert torch.equal(torch.cat([own for _, _, own in found]), new)


@pytest.mark.slow
def test_whole_data_are_learned_from_as_a_shard_of_one_process():
    for expected, found in zip(selected(5, False, 3, is_shard=False), selected(5, False, 3), strict=True):
        assert expected == found if isinstance(expected, list) else torch.equal(expected, found)


def affinities(rank: int | None, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    y, log_joint = torch.randn(60, 4, generator=generator).double(), torch.randn(60, 8, generator=generator)
    space = StateSpace([2] * 3)
    y = distributed.shard(y)
    portion: Any = y.portion
    own = slice(portion.first, portion.first + portion.size)
    population = Population(space, space.enumerate().expand(portion.size, -1, -1), log_joint[own])
    shown = {"y": y.as_subclass(torch.Tensor)}
    batch = SearchBatch(
        population, lambda words: words.sum(-1), shown, first_position=portion.first, is_spread=portion.is_part, is_met=True
    )
    search = GPSelect(2, rank=rank, fit_steps=5, generator=torch.Generator().manual_seed(3))
    # Members of a crew go on to other tests.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gp_select, "MOST_ROWS", most)
        search.meet(batch)
    return search.affinity(batch), torch.tensor(float(len(search.affinity.regression.inputs)))


@pytest.mark.parametrize("rank", [None, 6])
def test_affinities_are_those_of_one_process(rank, crew):
    expected, _ = affinities(rank, 1000)
    found = crew.results(3, affinities, rank, 1000)
    torch.testing.assert_close(torch.cat([own for own, _ in found]), expected, rtol=1e-8, atol=1e-10)
    # Of more data than that, kernel and pivots are chosen from a part, the same for any number of processes.
    two, three = (crew.results(number, affinities, rank, 30) for number in (2, 3))
    assert (two[0][1] < 60) == (rank is not None)
    torch.testing.assert_close(torch.cat([own for own, _ in two]), torch.cat([own for own, _ in three]), rtol=1e-8, atol=1e-10)


def places(leave_out: bool, rank: int | None, is_shard: bool = True) -> tuple[SVI, torch.Tensor]:
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    generator = torch.Generator().manual_seed(0)
    objects = generated_objects(2, 3, generator=generator)
    y = occluded_scenes(objects, 11, (8, 8), presence=0.6, wrap=True, generator=generator).data.double()
    y = distributed.shard(y) if is_shard else y
    model = OcclusiveComponents(2, (8, 8), (3, 3), dtype=torch.float64).initialize(y)
    affinity = PlaceRegression(model.canvas, inputs=colour_maps(4), refit_every=2, fit_steps=3, max_fit=8, leave_out=leave_out, rank=rank)
    return SVI(model, AutoTruncated(model, num_states=8), ClosedForm(model), Truncated_ELBO(PlacementSelection(affinity, 2))), y


def scenes(leave_out: bool, rank: int | None, is_shard: bool = True) -> tuple[list[float], torch.Tensor]:
    svi, y = places(leave_out, rank, is_shard)
    return [svi.step(y) for _ in range(5)], svi.guide.words


@pytest.mark.parametrize(("leave_out", "rank"), [(True, None), (False, None), (True, 4)])
def test_places_are_predicted_as_by_one_process(leave_out, rank, crew):
    losses, words = scenes(leave_out, rank)
    for number in (2, 3):
        found = crew.results(number, scenes, leave_out, rank)
        assert all(own == pytest.approx(losses, rel=1e-12) for own, _ in found)
        assert torch.equal(torch.cat([own for _, own in found]), words)


@pytest.mark.slow
def test_places_of_whole_data_are_predicted_as_those_of_a_shard_of_one_process():
    assert scenes(True, None)[0] == scenes(True, None, is_shard=False)[0]


# --- checkpoints ---


def selection(kind: str) -> tuple[SVI, torch.Tensor]:
    pyro.clear_param_store()
    pyro.set_rng_seed(2)
    y = data(31)
    y[::6, 1] = torch.nan
    y = distributed.shard(y)
    model = BinarySparseCoding(9, 6, dtype=torch.float64).initialize(y)
    if kind == "flips":
        search = LearnedFlips(3, refit_every=2, generator=torch.Generator().manual_seed(4)) + EvolutionarySearch(2, 2)
    else:
        rank, pivots = (5, "targets") if kind == "of low rank" else (None, "variance")
        search = GPSelect(3, rank=rank, pivots=pivots, refit_every=3, fit_steps=4) + EvolutionarySearch(2, 2)
    return SVI(model, AutoTruncated(model, num_states=6), ClosedForm(model), Truncated_ELBO(search)), y


def resumed(folder: str | None, kind: str, steps: int) -> tuple[list[float], torch.Tensor]:
    """Trains, from a checkpoint if there is one; the free energies, and the states of this process's data points."""
    svi, y = places(True, 4) if kind == "places" else selection(kind)
    # Of minibatches, not all data have been met when the first checkpoint is written.
    batches = distributed.Batches(y, 6, block=2) if kind in ("minibatches", "flips") else None
    path = None if folder is None else Path(folder) / "run.pt"
    training = fit(svi, y, steps=steps, checkpoint=path, batches=batches, progress=False)
    return training.record["free_energy"], svi.guide.words


@pytest.mark.parametrize(
    ("kind", "saved", "numbers"),
    [("of low rank", 2, (1, 3)), ("minibatches", 2, (1, 3)), ("minibatches", 1, (2,)), ("flips", 2, (3,)), ("places", 2, (3,))],
)
def test_what_was_learned_goes_on_with_any_number_of_processes(kind, saved, numbers, crew, tmp_path):
    def run(number: int, folder: Path, steps: int) -> list[tuple[list[float], torch.Tensor]]:
        return [resumed(str(folder), kind, steps)] if number == 1 else crew.results(number, resumed, str(folder), kind, steps)

    expected, words = resumed(None, kind, 7)
    run(saved, tmp_path / "saved", 3)
    for number in numbers:
        found = run(number, shutil.copytree(tmp_path / "saved", tmp_path / str(number)), 7)
        assert all(record == pytest.approx(expected, rel=1e-12) for record, _ in found)
        assert torch.equal(torch.cat([states for _, states in found]), words)


def test_the_file_of_all_processes_holds_no_data_points(tmp_path):
    resumed(str(tmp_path), "exact", 2)
    state = torch.load(tmp_path / "run.pt", weights_only=True)["search"]
    rows = collect_rows(state)
    assert {len(values) for values in rows.values()} == {31}
    kept = without_rows(state)
    assert all(values.untyped_storage().nbytes() == 0 for values in collect_rows(kept).values())
    again = with_rows(kept, {name: values[20:] for name, values in rows.items()}, distributed.Portion(20, 11, 31))
    assert again["searches"][0]["affinity"]["memory"]["first_position"] == 20
    torch.testing.assert_close(collect_rows(again), {name: values[20:] for name, values in rows.items()}, rtol=0, atol=0, equal_nan=True)
