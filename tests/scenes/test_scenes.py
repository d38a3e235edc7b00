from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pyro_truncated.scenes import Objects, coil_objects, generated_objects, match_objects, occluded_scenes


def paint(objects: Objects, presence: list[int], position: list[int], depth: list[int], canvas: tuple[int, int]) -> torch.Tensor:
    """One scene, pixel by pixel, from back to front."""
    image = torch.zeros(*canvas, objects.features.shape[-1])
    for k in sorted(range(len(presence)), key=lambda k: -depth[k]):
        if presence[k]:
            top, left = divmod(position[k], canvas[1])
            for row, column in objects.masks[k].nonzero().tolist():
                image[(top + row) % canvas[0], (left + column) % canvas[1]] = objects.features[k, row, column]
    return image


@pytest.mark.parametrize("wrap", [False, True])
def test_scenes_are_painted_from_back_to_front(wrap: bool, generator: torch.Generator) -> None:
    objects = generated_objects(5, 4, generator)
    scenes = occluded_scenes(objects, 50, (7, 9), presence=0.6, noise=0.0, wrap=wrap, generator=generator)
    for n in range(50):
        expected = paint(objects, *(part[n].tolist() for part in scenes[1:]), (7, 9))
        torch.testing.assert_close(scenes.data[n], expected)
    rows, columns = scenes.position // 9, scenes.position % 9
    assert (int(rows.max()), int(columns.max())) == ((6, 8) if wrap else (3, 5))
    assert torch.equal(scenes.depth.sort(1).values, torch.arange(5).expand(50, -1))


def test_presence_and_noise_are_as_asked(generator: torch.Generator) -> None:
    objects = generated_objects(16, 10, generator)
    scenes = occluded_scenes(objects, 500, noise=0.05, generator=generator)
    # Five standard errors: fails once in about 1.7 million seeds.
    assert abs(float(scenes.presence.double().mean()) - 0.2) < 5 * (0.16 / 8000) ** 0.5
    clean = torch.stack([paint(objects, *(part[n].tolist() for part in scenes[1:]), (30, 30)) for n in range(20)])
    noise = (scenes.data[:20] - clean).flatten()
    assert abs(float(noise.std()) - 0.05) < 5 * 0.05 / (2 * len(noise)) ** 0.5


def test_coil_objects_are_cut_out(real_data: Callable[[str], dict[str, np.ndarray]]) -> None:
    real_data("coil100_17obj")
    objects = coil_objects()
    assert objects.features.shape == (16, 10, 10, 3)
    assert bool((objects.features[~objects.masks] == 0).all())
    assert 0 < float(objects.features[objects.masks].mean()) < float(objects.features.max()) <= 1
    with pytest.raises(ValueError, match=r"num must lie in 1 \.\. 17"):
        coil_objects(18)


def test_match_undoes_shifts(generator: torch.Generator) -> None:
    objects = generated_objects(4, 8, generator)
    small = Objects(objects.features.clone(), objects.masks.clone())
    small.features[:, :2], small.features[:, :, :1] = 0, 0
    # A template whose content lies two rows higher and one column further left, in another order, and one that is a blend.
    learned = torch.roll(small.features, (-2, -1), (1, 2))[[2, 0, 3, 1]]
    blend = (learned[:1] + learned[1:2]) / 2
    match = match_objects(torch.cat([learned, blend]), torch.ones(5, 8, 8), small)
    assert match.similarity.argmax(1).tolist() == [1, 3, 0, 2]
    assert match.similarity.max(1).values.tolist() == pytest.approx([1.0] * 4)
    assert match.shift[torch.arange(4), [1, 3, 0, 2]].tolist() == [[2, 1]] * 4
    assert match.is_recovered().tolist() == [True] * 4
    assert not bool(match_objects(blend, torch.ones(1, 8, 8), small).is_recovered(0.99).any())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"canvas": (5, 30)}, "do not fit"),
        ({"presence": 1.5}, "presence must lie"),
        ({"num_data": 0}, "num_data must be a positive integer; got 0"),
    ],
)
def test_bad_settings_are_refused(arguments: dict, message: str, generator: torch.Generator) -> None:
    with pytest.raises(ValueError, match=message):
        occluded_scenes(generated_objects(2, 6, generator), **{"num_data": 3, **arguments})
    with pytest.raises(ValueError, match="num must be a positive integer; got -1"):
        generated_objects(-1)
