"""Searches for scenes: what they propose, and that the regression predicts places as Gaussian processes refitted without each image do."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pyro
import pytest
import torch
from torch import Tensor

from pyro_truncated import AutoTruncated, StateSpace
from pyro_truncated.models import OcclusiveComponents
from pyro_truncated.ops.canvas import Canvas, SceneParameters
from pyro_truncated.ops.scenes import scan_places
from pyro_truncated.scenes import (
    PlacementCompletion,
    PlacementMoves,
    PlacementSelection,
    PlaceRegression,
    PlaceScan,
    RefinedPlaces,
    colour_maps,
    generated_objects,
    occluded_scenes,
)
from pyro_truncated.scenes.occlusion import depth_code
from pyro_truncated.scenes.place_scan import Candidates, best_places, place_probabilities
from pyro_truncated.search import NeighbourSearch, SearchBatch
from pyro_truncated.states import Population
from pyro_truncated.utils.budget import memory_budget

NUM_OBJECTS, GRID = 4, (5, 6)
NUM_PLACES = GRID[0] * GRID[1]


def space_of(in_depth: bool = False) -> StateSpace:
    return StateSpace([2] * NUM_OBJECTS + [NUM_PLACES] * NUM_OBJECTS + [NUM_OBJECTS] * (NUM_OBJECTS if in_depth else 0))


def packed_scenes(space: StateSpace, places: Tensor) -> Tensor:
    """States of places ``(..., H)``, -1 for absent objects; in depth order every object lies before those of smaller index."""
    parts = [(places >= 0).long(), places.clamp(min=0)]
    if space.num_latents > 2 * NUM_OBJECTS:
        parts.append(torch.zeros_like(places))
    return space.pack(torch.cat(parts, -1))


def places_in(space: StateSpace, words: Tensor) -> Tensor:
    levels = space.unpack(words, torch.int64)
    return torch.where(levels[..., :NUM_OBJECTS] > 0, levels[..., NUM_OBJECTS : 2 * NUM_OBJECTS], -1)


def make_batch(num_data: int = 3, num_states: int = 6, in_depth: bool = False) -> SearchBatch:
    space = space_of(in_depth)
    places = torch.randint(NUM_PLACES, (num_data, num_states, NUM_OBJECTS))
    places[torch.rand(places.shape) < 0.4] = -1
    population = Population(space, packed_scenes(space, places), -torch.rand(num_data, num_states))
    return SearchBatch(population, lambda words: torch.zeros(words.shape[:2]))


def fixed(scores: Tensor, places: Tensor):
    return lambda batch: Candidates(scores, places)


def test_selection_proposes_every_scene_of_the_selected_objects_once() -> None:
    batch = make_batch()
    scores = torch.rand(3, NUM_OBJECTS, 2).sort(-1, descending=True).values
    places = torch.randint(NUM_PLACES, (3, NUM_OBJECTS, 2))
    places[..., 1] = (places[..., 0] + 1) % NUM_PLACES
    search = PlacementSelection(fixed(scores, places), 3, explore=0.0, explore_places=0.0, parents=0)
    proposed = places_in(batch.space, search.propose(batch).words)
    assert proposed.shape[1] == 27
    for n in range(3):
        best = scores[n, :, 0].topk(3).indices.tolist()
        options = [[-1, *places[n, h].tolist()] if h in best else [-1] for h in range(NUM_OBJECTS)]
        assert sorted(map(tuple, proposed[n].tolist())) == sorted(itertools.product(*options))


def test_selection_limits_the_number_of_objects() -> None:
    batch = make_batch()
    search = PlacementSelection(fixed(torch.rand(3, NUM_OBJECTS, 1), torch.zeros(3, NUM_OBJECTS, 1).long()), 4, max_active=2, parents=0)
    counts = (places_in(batch.space, search.propose(batch).words) >= 0).sum(-1)
    assert counts.shape[1] == 1 + 4 + 6
    assert int(counts.max()) == 2


@pytest.mark.parametrize("in_depth", [False, True])
def test_selection_puts_candidates_into_the_best_states(in_depth: bool) -> None:
    batch = make_batch(in_depth=in_depth)
    places = torch.randint(NUM_PLACES, (3, NUM_OBJECTS, 1))
    search = PlacementSelection(fixed(torch.rand(3, NUM_OBJECTS, 1), places), NUM_OBJECTS, parents=2, explore_places=0.0)
    proposed = places_in(batch.space, search.propose(batch).words)[:, 2**NUM_OBJECTS :]
    known = places_in(batch.space, batch.population.words)
    for n in range(3):
        expected = []
        for parent in batch.population.log_joint[n].topk(2).indices:
            for h in range(NUM_OBJECTS):
                child = known[n, parent].clone()
                child[h] = places[n, h, 0]
                expected.append(tuple(child.tolist()))
        assert sorted(map(tuple, proposed[n].tolist())) == sorted(expected)


def test_selection_gives_objects_and_places_to_chance() -> None:
    batch = make_batch(num_data=2000)
    scores = torch.arange(NUM_OBJECTS, 0, -1.0).reshape(1, -1, 1).expand(2000, -1, -1)
    search = PlacementSelection(fixed(scores, torch.zeros(2000, NUM_OBJECTS, 1).long()), 2, explore=0.5, explore_places=0.5)
    objects, places = search.select(batch)
    assert set(objects[:, 0].tolist()) == {0}
    counts = torch.bincount(objects[:, 1], minlength=NUM_OBJECTS)
    # Each of the three others with probability 1/3; five standard deviations: fails once in about 600 000 seeds.
    assert counts[0] == 0
    assert bool(((counts[1:] / 2000 - 1 / 3).abs() < 5 * (2 / 9 / 2000) ** 0.5).all())
    share = float((places != 0).double().mean())
    expected = 0.5 * (1 - 1 / NUM_PLACES)
    assert abs(share - expected) < 5 * (0.25 / 4000) ** 0.5


def test_chance_rounds_for_each_image_on_its_own() -> None:
    batch = make_batch(num_data=2000)
    scores = torch.arange(NUM_OBJECTS, 0, -1.0).reshape(1, -1, 1).expand(2000, -1, -1)
    search = PlacementSelection(fixed(scores, torch.zeros(2000, NUM_OBJECTS, 1).long()), 2, explore=0.15, explore_places=0.0)
    objects, _ = search.select(batch)
    assert bool((objects[:, 0] == 0).all())
    assert bool((objects[:, 1] != 0).all())
    # 0.3 of the images give one place to chance, which goes to one of three objects; five standard deviations: once in two million seeds.
    share = float((objects[:, 1] != 1).double().mean())
    assert abs(share - 0.2) < 5 * (0.16 / 2000) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("order", ["exclusive", "depth"])
def test_completion_finds_one_object_after_the_other(order: str) -> None:
    """Up to six objects in 16 x 16 pixels, many of them hidden in part: from nothing at all to what explains as much as the truth."""
    objects = generated_objects(6, 5, torch.Generator().manual_seed(0))
    scenes = occluded_scenes(objects, 40, (16, 16), presence=0.6, wrap=True, generator=torch.Generator().manual_seed(1))
    model = OcclusiveComponents(6, (16, 16), (5, 5), order=order, min_scale=0.01)
    model.features, model.masks = objects.features, objects.masks * 0.98 + 0.01
    model.scale = model.background_scale = torch.tensor(0.05)
    guide = AutoTruncated(model, num_states=24)
    guide.setup(scenes.data)
    rank = scenes.depth if order == "depth" else None
    true = packed_scenes_of(guide.space, scenes.presence.long(), scenes.position, rank)
    truth = guide.make_scorer(scenes.data).score(true.unsqueeze(1)).squeeze(1)
    search = PlacementCompletion(PlaceScan(model.scene_parameters, model.canvas), 3)
    guide = guide.infer(scenes.data, search, steps=20)
    # Hardly visible ones may be elsewhere, and orders that show the same are as good.
    best = guide.population().log_joint.max(1).values
    assert int((best > truth - 5.0).sum()) >= 36


def test_an_object_is_found_beside_a_scene_by_its_most_probable_entries() -> None:
    objects = generated_objects(3, 4, torch.Generator().manual_seed(0))
    scenes = occluded_scenes(objects, 5, (12, 12), presence=1.0, wrap=True, generator=torch.Generator().manual_seed(1))
    model = OcclusiveComponents(3, (12, 12), (4, 4), min_scale=0.01)
    model.features, model.masks = objects.features, objects.masks * 0.98 + 0.01
    model.scale = model.background_scale = torch.tensor(0.05)
    batch, nothing = SimpleNamespace(observations={"y": scenes.data}), torch.full((5, 3), -1)
    scores = [
        PlaceScan(model.scene_parameters, model.canvas, min_mask=least).propose_additions(batch, nothing).scores for least in (0.4, 0.6)
    ]
    assert bool((scores[1] != 0).all())
    torch.testing.assert_close(*scores)  # masks are 0.01 or 0.99


def packed_scenes_of(space: StateSpace, presence: Tensor, position: Tensor, rank: Tensor | None) -> Tensor:
    parts = [presence, position * presence]
    return space.pack(torch.cat(parts if rank is None else [*parts, depth_code(rank, presence)], -1))


@pytest.mark.parametrize("in_depth", [False, True])
def test_completion_leaves_out_one_object_at_most_and_adds_the_best_others_in_all_combinations(in_depth: bool) -> None:
    batch = make_batch(in_depth=in_depth)
    places = torch.randint(NUM_PLACES, (3, NUM_OBJECTS, 1))
    scan = SimpleNamespace(propose_additions=lambda batch, scene, rank: Candidates(torch.arange(4.0).expand(3, -1).unsqueeze(-1), places))
    proposed = PlacementCompletion(scan, 2).propose(batch)
    known, found = places_in(batch.space, batch.population.words), places_in(batch.space, proposed.words)
    for n in range(3):
        rest, full = found[n, 0], found[n, -1]
        assert any(bool(((rest == parent) | (rest < 0)).all()) and int((rest != parent).sum()) <= 1 for parent in known[n])
        absent = (rest < 0).nonzero().flatten().tolist()[-2:]
        assert (full != rest).nonzero().flatten().tolist() == absent
        assert all(int(full[h]) == int(places[n, h]) for h in absent)
        assert len({tuple(state) for state in found[n].tolist()}) == 2 ** len(absent)


@pytest.mark.nightly(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("in_depth", [False, True])
@pytest.mark.parametrize("wrap", [False, True])
def test_each_move_does_what_it_says(in_depth: bool, wrap: bool) -> None:
    batch = make_batch(num_data=40, num_states=2, in_depth=in_depth)
    for move in range(5):
        shares = tuple(float(other == move) for other in range(5))
        search = PlacementMoves(GRID, parents=1, children=30, wrap=wrap, shares=shares)
        children = places_in(batch.space, search.propose(batch).words)
        known = places_in(batch.space, batch.population.words)
        for n in range(40):
            for child in children[n]:
                assert any(is_move(move, parent, child, wrap) for parent in known[n]), (move, known[n], child)


def is_move(move: int, parent: Tensor, child: Tensor, wrap: bool) -> bool:
    before, after = parent >= 0, child >= 0
    changed = (parent != child).nonzero().flatten().tolist()
    count = int(before.sum())
    if count == 0 or (count == 1 and move == 1):
        move = 3
    if count == NUM_OBJECTS and move in (2, 3):
        move = 0
    if move == 0:
        if not changed:
            return not wrap
        (h,) = changed if len(changed) == 1 else (None,)
        if h is None or not (before[h] and after[h]):
            return False
        down, right = (abs(a - b) for a, b in zip(divmod(int(parent[h]), GRID[1]), divmod(int(child[h]), GRID[1]), strict=True))
        if wrap:
            down, right = min(down, GRID[0] - down), min(right, GRID[1] - right)
        return max(down, right) == 1
    if move == 1:
        return bool((before == after).all()) and sorted(parent.tolist()) == sorted(child.tolist()) and len(changed) in (0, 2)
    if move == 2:
        return len(changed) == 2 and sorted(parent.tolist()) == sorted(child.tolist()) and int(after.sum()) == count
    same = len(changed) == 1
    return same and (int(after.sum()) == count + 1 if move == 3 else int(after.sum()) == count - 1)


@pytest.mark.slow
def test_children_are_scenes_of_positive_probability_whatever_the_order() -> None:
    for order in ("exclusive", "depth"):
        pyro.clear_param_store()
        model = OcclusiveComponents(4, (5, 6), (2, 2), order=order)
        with torch.no_grad():
            y = model(num_data=10)
        pyro.clear_param_store()
        guide = AutoTruncated(model, num_states=12)
        search = PlacementSelection(PlaceScan(model.scene_parameters, model.canvas), 3) + PlacementMoves(GRID, parents=3, children=10)
        guide.search_(search, guide.make_scorer(y), steps=3)
        assert bool(guide.population().log_joint.isfinite().all())
        batch = SearchBatch(guide.population(), guide.make_scorer(y).score, {"y": y})
        assert bool(search.propose(batch).log_joint.isfinite().all())


def test_best_places_are_the_best_apart_from_their_neighbours() -> None:
    canvas = Canvas(5, 6, 2, 2)
    scores = torch.rand(3, 2, NUM_PLACES)
    found = best_places(scores.clone(), canvas, 3)
    for n, h in itertools.product(range(3), range(2)):
        left = scores[n, h].reshape(GRID).clone()
        for value, place in zip(found.scores[n, h], found.places[n, h], strict=True):
            assert value == left.max() == left.flatten()[place]
            row, column = divmod(int(place), GRID[1])
            for down, right in itertools.product((-1, 0, 1), repeat=2):
                left[(row + down) % GRID[0], (column + right) % GRID[1]] = -torch.inf


@pytest.mark.parametrize("wrap", [True, False])
def test_refined_places_are_the_best_of_the_neighbourhood(wrap: bool) -> None:
    images = torch.rand(3, 6, 7, 2)
    canvas = Canvas(6, 7, 2, 2, wrap)
    count = canvas.num_places
    masks = torch.rand(4, 4).clamp(0.1, 0.9)
    scene = SceneParameters(torch.rand(4, 4, 2), masks, torch.tensor(0.1), torch.zeros(2), torch.tensor(0.5))
    batch = SearchBatch(make_batch().population, lambda words: words, {"y": images})
    scan = PlaceScan(lambda: scene, canvas)
    scores, places = torch.rand(3, 4, 2).sort(-1, descending=True).values, torch.randint(count, (3, 4, 2))
    found = RefinedPlaces(fixed(scores, places), scan, 2)(batch)
    whole = scan_places(images.flatten(1, 2), scene, canvas, clutter=scan.clutter).reshape(3, 4, *canvas.grid)
    assert torch.equal(found.scores, scores)
    for n, h, c in itertools.product(range(3), range(4), range(2)):
        row, column = divmod(int(places[n, h, c]), canvas.grid[1])
        if h not in scores[n, :, 0].topk(2).indices:
            assert found.places[n, h, c] == places[n, h, c]
            continue
        near = [(row + down, column + right) for down, right in itertools.product((-1, 0, 1), repeat=2)]
        inside = [(r, k) for r, k in near if wrap or (0 <= r < canvas.grid[0] and 0 <= k < canvas.grid[1])]
        best = max(whole[n, h, r % canvas.grid[0], k % canvas.grid[1]] for r, k in inside)
        assert float(whole[n, h].flatten()[found.places[n, h, c]]) == pytest.approx(float(best), abs=2e-3)


def scene_batch(num_data: int = 60) -> tuple[SearchBatch, Canvas]:
    objects = generated_objects(NUM_OBJECTS, 3, torch.Generator().manual_seed(0))
    scenes = occluded_scenes(objects, num_data, (5, 6), presence=0.4, generator=torch.Generator().manual_seed(1))
    space = space_of()
    places = torch.where(scenes.presence > 0, scenes.position, -1)
    others = places.roll(1, 0)
    words = packed_scenes(space, torch.stack([places, others], 1))
    population = Population(space, words, torch.tensor([[-1.0, -2.0]]).expand(num_data, -1).contiguous())
    return SearchBatch(population, lambda w: torch.zeros(w.shape[:2]), {"y": scenes.data}), Canvas(5, 6, 3, 3)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [None, 20])
@pytest.mark.parametrize("smooth", [False, True])
def test_regression_predicts_each_image_from_the_others(rank: int | None, smooth: bool) -> None:
    batch, canvas = scene_batch()
    affinity = PlaceRegression(canvas, rank=rank, smooth=smooth, refit_every=100, generator=torch.Generator().manual_seed(0))
    with memory_budget(32 * NUM_OBJECTS * NUM_PLACES * 7):  # seven images at a time
        found = affinity(batch)
    entries, values = place_probabilities(batch.population)
    targets = torch.zeros(60, NUM_OBJECTS * NUM_PLACES, dtype=torch.float64)
    targets[entries[0], entries[1]] = values
    if smooth:
        image = torch.nn.functional.pad(targets.reshape(-1, 1, *GRID), (1, 1, 1, 1), mode="circular")
        kernel = torch.tensor([0.5, 1.0, 0.5], dtype=torch.float64)
        targets = torch.nn.functional.conv2d(image, (kernel[:, None] * kernel)[None, None]).reshape(60, -1)
    assert affinity.regression is not None
    expected = affinity.regression.loo(targets)[0].reshape(60, NUM_OBJECTS, NUM_PLACES)
    torch.testing.assert_close(found.scores[..., 0].double(), expected.max(-1).values, rtol=1e-3, atol=1e-4)
    at_best = expected.gather(-1, found.places)
    torch.testing.assert_close(at_best.squeeze(-1), expected.max(-1).values, rtol=1e-3, atol=1e-4)


def test_regression_serves_new_images_and_refuses_to_start_with_a_part() -> None:
    batch, canvas = scene_batch()
    fresh = PlaceRegression(canvas)
    part = SearchBatch(Population(batch.space, batch.population.words[:5], batch.population.log_joint[:5], torch.arange(5)), batch.score)
    with pytest.raises(ValueError, match="no observed site 'y'"):
        fresh(part)
    part = SearchBatch(part.population, batch.score, {"y": batch.observations["y"][:5]})
    with pytest.raises(ValueError, match="learns from a batch of all data in order"):
        fresh(part)
    fresh(batch)
    learned = fresh.state_dict()["memory"]["targets"]
    targets = torch.sparse_coo_tensor(learned["entries"], learned["values"], learned["shape"], check_invariants=True).to_dense().double()
    found = fresh(part)
    expected = fresh.regression.predict(batch.observations["y"][:5].flatten(1), targets)[0].reshape(5, NUM_OBJECTS, NUM_PLACES)
    torch.testing.assert_close(found.scores[..., 0].double(), expected.max(-1).values, rtol=1e-3, atol=1e-4)


def test_regression_starts_anew_with_other_images_and_never_learns_new_ones() -> None:
    batch, canvas = scene_batch()
    affinity = PlaceRegression(canvas, generator=torch.Generator().manual_seed(0))
    affinity(batch)
    learned = affinity.regression
    shuffled = {"y": batch.observations["y"].flip(0)}
    affinity(SearchBatch(batch.population, batch.score, shuffled, is_new=True))
    assert affinity.regression is learned
    affinity(SearchBatch(batch.population, batch.score, shuffled))
    assert affinity.regression is not learned
    assert torch.equal(affinity.state_dict()["memory"]["rows"]["images"], shuffled["y"])
    PlacementSelection(RefinedPlaces(affinity, PlaceScan(lambda: None, canvas), 2), 2).forget()
    assert affinity.regression is None


def test_what_is_refined_meets_shared_data_too() -> None:
    batch, canvas = scene_batch()
    affinity = PlaceRegression(canvas, generator=torch.Generator().manual_seed(0))
    search = PlacementSelection(RefinedPlaces(affinity, PlaceScan(lambda: None, canvas), 2), 2)
    assert search.learns
    search.meet(batch)
    assert affinity.regression is not None


@pytest.mark.slow
@pytest.mark.parametrize("rank", [None, 20])
def test_a_search_that_takes_back_what_another_has_learned_goes_on_to_the_same_proposals(rank: int | None, tmp_path: Path) -> None:
    batch, canvas = scene_batch()

    def make() -> PlacementSelection:
        generator = torch.Generator().manual_seed(0)
        affinity = PlaceRegression(canvas, rank=rank, refit_every=2, fit_steps=3, generator=generator)
        scan = PlaceScan(lambda: None, canvas)
        scan.scores_at = lambda batch, objects, places: -places.double()
        return PlacementSelection(RefinedPlaces(affinity, scan, 2), 2, generator=generator)

    known, fresh = make(), make()
    for _ in range(3):
        known.propose(batch)
    torch.save(known.state_dict(), tmp_path / "search.pt")
    fresh.load_state_dict(torch.load(tmp_path / "search.pt", weights_only=True))
    part = SearchBatch(batch.population, batch.score, {"y": batch.observations["y"].flip(0)}, is_new=True)
    for seen in (part, batch, batch, batch):
        assert torch.equal(fresh.propose(seen).words, known.propose(seen).words)


def test_regression_goes_on_learning_from_new_images_if_it_knows_no_others() -> None:
    batch, canvas = scene_batch()
    new = SearchBatch(batch.population, batch.score, batch.observations, is_new=True)
    affinity = PlaceRegression(canvas, generator=torch.Generator().manual_seed(0))
    affinity(new)
    emptied = Population(batch.space, torch.zeros_like(batch.population.words), batch.population.log_joint)
    affinity(SearchBatch(emptied, batch.score, batch.observations, is_new=True))
    assert not len(affinity.state_dict()["memory"]["targets"]["values"])


def test_in_sample_predictions_mostly_repeat_the_posteriors() -> None:
    batch, canvas = scene_batch()
    own = PlaceRegression(canvas, leave_out=False, smooth=False)
    found = own(batch)
    places = places_in(batch.space, batch.population.words[:, 0])
    present = places >= 0
    assert float((found.places[..., 0] == places)[present].double().mean()) > 0.9


def test_colour_maps_tell_colours_apart_and_forgive_a_pixel() -> None:
    images = torch.zeros(4, 8, 8, 3)
    images[0, 2:5, 2:5, 0] = images[1, 2:5, 3:6, 0] = images[2, 2:5, 2:5, 1] = 1.0
    images[3, 5:8, 5:8, 2] = 1.0
    inputs = colour_maps(3, stride=1)(images)
    products = inputs @ inputs.mT
    assert products[0, 1] > 0.5 * products[0, 0]
    assert products[0, 2] < 0.05 * products[0, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PlacementSelection(lambda b: b, 0), "num_selected"),
        (lambda: PlacementSelection(lambda b: b, 2, explore=2.0), "explore must lie"),
        (lambda: PlacementSelection(lambda b: b, 2.5), "num_selected must be a positive integer; got 2.5"),
        (lambda: PlacementSelection(lambda b: b, 2, parents=0.5), "parents must be an integer of at least 0; got 0.5"),
        (lambda: PlacementCompletion(None, 1.5), "num_added must be a positive integer; got 1.5"),
        (lambda: PlacementMoves(GRID, children=1.5), "children must be a positive integer; got 1.5"),
        (lambda: PlaceScan(lambda: None, Canvas(5, 6, 2, 2), num_candidates=1.5), "num_candidates must be a positive integer; got 1.5"),
        (lambda: PlacementMoves((0, 3)), "grid must be a positive integer; got 0"),
        (lambda: PlacementMoves(GRID, shares=(1.0, 0, 0, 0)), "shares must be 5 numbers"),
        (lambda: PlaceRegression(Canvas(5, 6, 2, 2), refit_every=0), "refit_every must be a positive integer"),
        (lambda: PlaceScan(lambda: None, Canvas(5, 6, 2, 2), clutter=1.0), "clutter must lie in"),
        (lambda: RefinedPlaces(fixed(None, None), None, 0), "num_objects must be a positive integer; got 0"),
        (
            lambda: PlacementMoves(GRID).propose(make_batch(num_states=2)),
            "states of a population, 2: cannot select 6",
        ),
        (lambda: PlacementMoves((3, 3), parents=1).propose(make_batch()), "as many places as positions have values, 30"),
        (lambda: place_probabilities(Population(StateSpace([2, 3, 4]), torch.zeros(1, 1, 1).long(), torch.zeros(1, 1))), "presence"),
    ],
)
def test_bad_settings_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: PlacementSelection(lambda b: b, 2, **options),
        lambda **options: PlacementCompletion(None, **options),
        lambda **options: PlacementMoves(GRID, **options),
        lambda **options: PlaceRegression(Canvas(5, 6, 2, 2), **options),
        NeighbourSearch,
    ],
)
def test_a_seed_is_no_generator(make) -> None:
    with pytest.raises(TypeError, match=r"generator must be a torch\.Generator or None; got 5"):
        make(generator=5)


def test_an_affinity_that_returns_scores_alone_is_refused() -> None:
    batch, _ = scene_batch()
    with pytest.raises(TypeError, match="affinity must return Candidates; got Tensor"):
        PlacementSelection(lambda batch: torch.zeros(len(batch.population), 2), 1).propose(batch)
