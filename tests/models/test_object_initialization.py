"""Where learning of objects starts from: backgrounds, comparisons at all shifts, the choice of objects, and starts in noise."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from pyro_truncated import learn
from pyro_truncated.distributions import Canvas
from pyro_truncated.models import OcclusiveComponents
from pyro_truncated.models.occlusive_components import (
    Clusters,
    Windows,
    estimate_background,
    isolated_windows,
    missing_energy,
    prune_objects,
)
from pyro_truncated.multistart.config import LearnConfig
from pyro_truncated.multistart.trainer import restart_schedule, train
from pyro_truncated.scenes import Objects, generated_objects, match_objects, occluded_scenes


def test_background_is_the_narrow_part_of_the_pixels() -> None:
    generator = torch.Generator().manual_seed(0)
    colour, deviation = torch.tensor([0.2, -0.1, 0.4]).double(), 0.15
    pixels = colour + deviation * torch.randn(12_000, 3, generator=generator, dtype=torch.float64)
    pixels[:4000] += torch.rand(4000, 3, generator=generator, dtype=torch.float64) * 3 - 1
    found, variance = estimate_background(pixels, generator)
    # Of 8000 pixels means have a standard error of 0.0017; the median of all lies 0.05 off.
    torch.testing.assert_close(found, colour, rtol=0, atol=0.015)
    assert float(variance.sqrt()) == pytest.approx(deviation, rel=0.05)


@pytest.mark.parametrize("value", [0.0, 0.7])
def test_background_of_one_colour_without_noise(value: float) -> None:
    found, variance = estimate_background(torch.full((50, 2), value), None)
    torch.testing.assert_close(found, torch.full((2,), value))
    assert 0 < float(variance) < 1e-5


def test_missing_energy_is_that_of_the_best_shift() -> None:
    reach, (height, width) = (1, 2), (3, 4)
    pixels = torch.rand(5, 2, height + 4 * reach[0], width + 4 * reach[1])
    windows = Windows(pixels, torch.rand(5) + 1, reach, torch.tensor(0.01))
    objects = torch.rand(3, 2, height, width)
    found = Clusters(objects, torch.ones(3, dtype=torch.int64), torch.rand(3) + 1)
    missing, shift = missing_energy(windows, found)
    for n, k in itertools.product(range(5), range(3)):
        best = {}
        for down, right in itertools.product(range(2 * reach[0] + 1), range(2 * reach[1] + 1)):
            top, left = reach[0] + down, reach[1] + right
            part = pixels[n, :, top : top + height, left : left + width]
            best[down * (2 * reach[1] + 1) + right] = float((part * objects[k]).sum())
        assert int(shift[n, k]) == max(best, key=best.__getitem__)
        left_over = float(windows.energy[n] + found.energy[k]) - 2 * max(best.values())
        assert float(missing[n, k]) == pytest.approx(max(0.0, left_over) / float(windows.energy[n]), abs=1e-5)


def test_objects_that_stay_are_those_that_the_others_do_not_make_up_for() -> None:
    # The error of a window counts in full up to 0.3 of its energy.
    missing = torch.rand(30, 7, dtype=torch.float64)
    kept = list(range(7))

    def error(objects: list[int]) -> float:
        return float(missing[:, objects].min(1).values.clamp(max=0.3).sum())

    for number in range(6, 0, -1):
        kept = min((kept[:i] + kept[i + 1 :] for i in range(len(kept))), key=error)
        assert prune_objects(missing, number).tolist() == kept
    assert sorted(prune_objects(missing, 9).tolist()) == [0, 0, 1, 1, 2, 3, 4, 5, 6]


def test_a_blend_of_two_objects_goes_before_either() -> None:
    # Each of the two explains ten windows; a blend explains all twenty by half, more than one object alone, but nothing that both do not.
    missing = torch.ones(20, 3)
    missing[:10, 1], missing[10:, 2], missing[:, 0] = 0.0, 0.0, 0.14
    assert prune_objects(missing, 2).tolist() == [1, 2]


@pytest.mark.parametrize("wrap", [True, False])
def test_lone_windows_are_cut_around_objects_that_nothing_touches(wrap: bool) -> None:
    canvas = Canvas(12, 14, 3, 3, wrap)
    images = torch.zeros(2, 12, 14, 1, dtype=torch.float64)
    images[0, 1:4, 8:11] = 2.0  # alone
    images[0, 6:9, 2:5] = images[0, 7:10, 4:7] = 2.0  # two that touch
    images[1, 9:12, 11:14] = 3.0  # alone, in the corner
    windows = isolated_windows(images, torch.tensor(1e-6).double(), canvas, 1)
    assert sorted(windows.energy[:2].tolist()) == pytest.approx([9 * 4.0, 9 * 9.0], rel=1e-4)
    for window, energy in zip(windows.pixels[:2], windows.energy[:2], strict=True):
        value = float((energy / 9).sqrt())
        assert torch.equal(window[0, 2:5, 2:5], torch.full((3, 3), round(value)))
        assert float(window.square().sum()) == pytest.approx(9 * round(value) ** 2)


def scenes_in_noise(noise: float, seed: int = 0) -> tuple[torch.Tensor, Objects]:
    generator = torch.Generator().manual_seed(seed)
    objects = generated_objects(6, 5, generator)
    return occluded_scenes(objects, 400, (14, 14), presence=0.3, noise=noise, generator=generator).data, objects


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.05, 0.15, 0.25])
def test_all_objects_are_there_at_the_start(noise: float) -> None:
    y, objects = scenes_in_noise(noise)
    model = OcclusiveComponents(6, (14, 14), (5, 5)).initialize(y, torch.Generator().manual_seed(1))
    assert bool(match_objects(model.features, model.masks, objects).is_recovered().all())
    assert model.background_scale.item() == pytest.approx(max(noise, 0.15 * float(y.square().mean().sqrt())), rel=0.05)


@pytest.mark.slow
def test_learn_finds_all_objects_in_noise_without_spare_ones() -> None:
    y, objects = scenes_in_noise(0.15)
    model = OcclusiveComponents(6, (14, 14), (5, 5))
    learn(
        model,
        y[:200],
        num_states=16,
        steps=2,
        config=LearnConfig(restart_steps=3),
        restarts=1,
        generator=torch.Generator().manual_seed(1),
        progress=False,
    )
    assert bool(match_objects(model.features, model.masks, objects).is_recovered().all())
    # Nothing but the noise is left to explain.
    assert model.scale.item() == pytest.approx(0.15, rel=0.1)


@pytest.mark.slow
def test_the_search_of_learn_fits_small_populations_and_few_objects() -> None:
    y, _ = scenes_in_noise(0.15)
    model = OcclusiveComponents(2, (14, 14), (5, 5), order="depth", wrap=False)
    guide = learn(model, y[:20], num_states=2, steps=1, config=LearnConfig(restart_steps=1), restarts=1, progress=False)
    assert bool(guide.population().log_joint.isfinite().all())


@pytest.mark.nightly
def test_learn_ends_where_two_starts_agree_and_little_rises() -> None:
    objects = generated_objects(4, 5, torch.Generator().manual_seed(0))
    y = occluded_scenes(objects, 100, (10, 10), presence=0.3, noise=0.15, wrap=True, generator=torch.Generator().manual_seed(1)).data
    model = OcclusiveComponents(4, (10, 10), (5, 5))
    guide = learn(model, y, num_states=12, generator=torch.Generator().manual_seed(2), progress=False)
    assert len(guide.starts) == 2
    assert bool(match_objects(model.features, model.masks, objects).is_recovered().all())


def test_more_objects_than_windows_are_not_copies_of_each_other() -> None:
    objects = generated_objects(2, 3, torch.Generator().manual_seed(0))
    y = occluded_scenes(objects, 1, (8, 8), presence=1.0, noise=0.02, wrap=True, generator=torch.Generator().manual_seed(1)).data
    model = OcclusiveComponents(6, (8, 8), (3, 3)).initialize(y, torch.Generator().manual_seed(2))
    apart = torch.cdist(model.features.detach().flatten(1), model.features.detach().flatten(1)) + torch.eye(6)
    assert float(apart.min()) > 0.01


class Rising:
    """A run whose free energies are given."""

    def __init__(self, values: list[float]) -> None:
        self.values, self.taken = values, 0
        self.profile = SimpleNamespace(
            is_informed=True, has_companion=False, is_conditional=False, is_product=False, config=LearnConfig(), tolerance=0.05
        )
        self.guide = self.truncated_guide = SimpleNamespace(population=lambda: SimpleNamespace(free_energy=lambda: torch.zeros(1)))

    def step(self) -> float:
        self.taken += 1
        return self.values[self.taken - 1]

    def relocate(self) -> bool:
        return False

    def end(self) -> None:
        pass


@pytest.mark.parametrize(("most", "taken", "noise"), [(60, 22, 0.7), (10, 10, 0.0), (3, 3, 0.0)])
def test_a_start_ends_where_five_steps_raise_little_of_what_all_have(most: int, taken: int, noise: float) -> None:
    """It rises by 200 at first, by 20 in a step until the sixteenth, and then by 0.14: five steps of these are less than 0.3 % of all."""
    run = Rising([0.0, 200.0, *(200.0 + 20.0 * step for step in range(1, 16)), *(500.0 + 0.14 * step for step in range(1, 60))])
    reached = train(run, restart_schedule(run.profile, 1.0, most))
    assert run.taken == taken
    assert reached.noise == pytest.approx(noise)
    assert reached.free_energy == run.values[taken - 1]
