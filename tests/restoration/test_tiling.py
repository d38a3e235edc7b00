"""Large pictures in overlapping parts: every entry is covered, parts fade into each other, and what is asked for is done in each."""

from __future__ import annotations

import itertools
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from pyro_truncated.restoration import __main__ as command
from pyro_truncated.restoration.__main__ import restore_in_tiles, spans


@pytest.mark.parametrize(("size", "side"), [(100, 100), (40, 100), (101, 100), (1000, 100), (724, 512), (165, 100)])
def test_stretches_cover_all_entries_and_neighbours_overlap(size, side):
    found = spans(size, side)
    assert (found[0].start, found[-1].stop) == (0, size)
    assert {one.stop - one.start for one in found} == {min(side, size)}
    for one, other in itertools.pairwise(found):
        assert one.stop - other.start >= 32
    # No more than are needed.
    assert (len(found) - 1) * (side - 32) + side < size + side - 32


@pytest.mark.parametrize("shape", [(90, 130), (90, 130, 3)])
def test_parts_that_are_kept_as_they_are_make_up_the_image(shape):
    image = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen = []

    def kept(part, bar):
        seen.append((part.shape[:2], bar))
        return SimpleNamespace(image=part, noise=float(len(seen)), channel_noise=None)

    found, noise = restore_in_tiles(image, kept, most=60 * 60 * image[0, 0].numel())
    torch.testing.assert_close(found, image)
    # Two and four stretches: 60, and 60 + 28 twice or more.
    assert seen == [(torch.Size([60, 60]), False)] * 12
    assert noise == pytest.approx(math.sqrt(sum(number**2 for number in range(1, 13)) / 12))


def test_a_hole_as_large_as_a_part_is_refused_before_any_work():
    image = torch.zeros(60, 140)
    image[:, :72] = torch.nan
    with pytest.raises(ValueError, match="tiles of 60 x 60 pixels, and all of rows 0 to 59 and columns 0 to 59 is missing"):
        restore_in_tiles(image, lambda part, bar: pytest.fail("work was done"), most=60 * 60)


def test_one_part_fades_into_the_next():
    levels = iter([0.0, 1.0])
    found, _ = restore_in_tiles(
        torch.zeros(46, 60), lambda part, bar: SimpleNamespace(image=part + next(levels), noise=1.0, channel_noise=None), most=46 * 46
    )
    row = found[7]
    assert (row[:14] == 0).all()
    assert (row[46:] == 1).all()
    torch.testing.assert_close(row, 1 - row.flip(0))
    assert (row[14:46].diff() > 0).all()


@pytest.mark.parametrize("shape", [(90, 130), (90, 130, 3)])
def test_parts_without_a_hole_are_kept_and_others_fade_into_each_other_as_ever(shape):
    image = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    # One hole where four parts overlap, one in a single part, and one entry on the edge between two of the others.
    for rows, columns in ((slice(40, 44), slice(40, 44)), (slice(0, 3), slice(0, 2)), (slice(89, 90), slice(55, 56))):
        image[rows, columns] = torch.nan
    restored = []

    def filled(part, bar):
        restored.append(part)
        return SimpleNamespace(image=torch.where(part.isnan(), part.nanmean(), part), noise=2.0, channel_noise=None)

    most = 60 * 60 * image[0, 0].numel()
    found, noise = restore_in_tiles(image, filled, most, keeps_observed=True)
    assert 0 < len(restored) < 12
    assert all(bool(part.isnan().any()) for part in restored)
    seen = ~image.isnan()
    assert torch.equal(found[seen], image[seen])
    assert noise == pytest.approx(2.0)
    torch.testing.assert_close(found, restore_in_tiles(image, filled, most)[0])


def test_noise_is_taken_off_parts_without_a_hole_too():
    image = torch.zeros(60, 140)
    image[3, 3] = torch.nan
    found, _ = restore_in_tiles(
        image, lambda part, bar: SimpleNamespace(image=torch.ones_like(part), noise=1.0, channel_noise=None), most=60 * 60
    )
    torch.testing.assert_close(found, torch.ones(60, 140))


@pytest.mark.parametrize("most", [60 * 60, 60 * 140])
def test_nothing_is_learned_where_nothing_is_missing(most):
    image = torch.rand(60, 140)
    found, noise = restore_in_tiles(image, lambda part, bar: pytest.fail("work was done"), most, keeps_observed=True)
    assert torch.equal(found, image)
    assert noise == 0.0


def test_the_command_line_learns_parts_with_holes_only_unless_noise_is_to_be_taken_off(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "restore_in_tiles", partial(restore_in_tiles, most=20 * 20))
    sizes = []

    def restored(part, **options):
        sizes.append(bool(part.isnan().any()))
        return SimpleNamespace(image=part.nan_to_num(7.0), noise=0.0, channel_noise=None)

    monkeypatch.setattr(command, "inpaint", restored)
    given, mask = np.full((20, 70), 100, dtype=np.uint8), np.full((20, 70), 255, dtype=np.uint8)
    mask[5, 5] = 0
    Image.fromarray(given).save(tmp_path / "given.png")
    Image.fromarray(mask).save(tmp_path / "mask.png")
    arguments = [str(tmp_path / "given.png"), "--output", str(tmp_path / "out.png"), "--mask", str(tmp_path / "mask.png")]
    assert command.main(arguments) == 0
    assert all(sizes)
    assert np.array_equal(np.array(Image.open(tmp_path / "out.png")), np.where(mask == 0, 7, given))
    sizes.clear()
    assert command.main([*arguments, "--noise", "3"]) == 0
    assert not all(sizes)


@pytest.mark.nightly
def test_the_command_line_restores_large_pictures_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "restore_in_tiles", partial(restore_in_tiles, most=36 * 36))
    rng = np.random.default_rng(0)
    given, mask = rng.integers(0, 255, (20, 70), dtype=np.uint8), (rng.random((20, 70)) < 0.7).astype(np.uint8)
    Image.fromarray(given).save(tmp_path / "given.png")
    Image.fromarray(mask).save(tmp_path / "mask.png")
    arguments = [str(tmp_path / "given.png"), "--output", str(tmp_path / "out.png"), "--side", "3", "--rounds", "1"]
    assert command.main(arguments) == 0
    denoised = np.array(Image.open(tmp_path / "out.png"))
    assert denoised.std() < given.std()
    assert command.main([*arguments, "--mask", str(tmp_path / "mask.png")]) == 0
    filled = np.array(Image.open(tmp_path / "out.png"))
    assert np.array_equal(filled[mask > 0], given[mask > 0])
    assert (filled[mask == 0] != given[mask == 0]).any()
