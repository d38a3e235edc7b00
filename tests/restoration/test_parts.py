"""Large pictures in overlapping parts: every entry is covered, parts fade into each other, and what is asked for is done in each."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from pyro_truncated.restoration import __main__ as command
from pyro_truncated.restoration.parts import restored_in_parts, spans


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
        return SimpleNamespace(image=part, noise=float(len(seen)))

    found, noise = restored_in_parts(image, kept, most=60 * 60 * image[0, 0].numel())
    torch.testing.assert_close(found, image)
    # Two and four stretches: 60, and 60 + 28 twice or more.
    assert seen == [(torch.Size([60, 60]), False)] * 12
    assert noise == pytest.approx(math.sqrt(sum(number**2 for number in range(1, 13)) / 12))


def test_a_hole_as_large_as_a_part_is_refused_before_any_work():
    image = torch.zeros(60, 140)
    image[:, :72] = torch.nan
    with pytest.raises(ValueError, match="parts of 60 x 60 pixels, and all of rows 0 to 59 and columns 0 to 59 is missing"):
        restored_in_parts(image, lambda part, bar: pytest.fail("work was done"), most=60 * 60)


def test_one_part_fades_into_the_next():
    levels = iter([0.0, 1.0])
    found, _ = restored_in_parts(torch.zeros(46, 60), lambda part, bar: SimpleNamespace(image=part + next(levels), noise=1.0), most=46 * 46)
    row = found[7]
    assert (row[:14] == 0).all()
    assert (row[46:] == 1).all()
    torch.testing.assert_close(row, 1 - row.flip(0))
    assert (row[14:46].diff() > 0).all()


def test_the_command_line_restores_large_pictures_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "restored_in_parts", lambda image, restore: restored_in_parts(image, restore, most=36 * 36))
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
