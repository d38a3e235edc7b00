"""Noise that is given in another unit, or is not normal, is warned of."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest

from pyro_truncated.restoration import denoise, inpaint

ROWS, COLUMNS = np.mgrid[:48, :48]
QUICK = {"side": 4, "rounds": 1, "stride": 2, "progress": False}
IMAGE = 125 + 40 * np.sin(ROWS / 6) + 30 * np.cos(COLUMNS / 8)


def noisy(seed: int = 0) -> np.ndarray:
    return IMAGE + 10 * np.random.default_rng(seed).normal(size=IMAGE.shape)


def said(image: np.ndarray, *noise: float) -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        denoise(image, *noise, **QUICK)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("noise", "advice"),
    [(100.0, "far above .*is it a variance"), (10 / 255, "far below .*unit of the array"), (20000.0, "far above .*unit of the array")],
)
def test_levels_in_another_unit_are_named(noise, advice):
    with pytest.warns(UserWarning, match=advice):
        denoise(noisy(), noise, **QUICK)


@pytest.mark.parametrize(("noise", "advice"), [(10.0, "is it one of 255"), (10 / 255 * 5, "give it in the unit of the array")])
def test_roots_are_no_advice_where_they_are_farther(noise, advice):
    """Of a level below one the root is larger, and of one of 255 still far too large."""
    with pytest.warns(UserWarning, match=f"far above .*: {advice}"):
        denoise(noisy() / 255, noise, **QUICK)


def test_generators_of_other_libraries_are_told_apart():
    with pytest.raises(TypeError, match=r"generator must be a torch.Generator or None; got Generator\(PCG64\)"):
        denoise(noisy(), generator=np.random.default_rng(0))


@pytest.mark.parametrize("noise", [(), (10.0,), (20.0,), (5.0,)])
def test_likely_levels_pass_without_a_word(noise):
    assert said(noisy(), *noise) == []


def test_each_channel_is_compared_with_its_own_level():
    levels = np.array([5.0, 10.0, 40.0])
    image = IMAGE[..., np.newaxis] + levels * np.random.default_rng(0).normal(size=(*IMAGE.shape, 3))
    assert said(image, levels) == said(np.moveaxis(image, -1, 0), levels.reshape(3, 1, 1)) == []
    (text,) = said(image, levels[::-1].copy())
    assert text.startswith("noise=40 of channel 0 is far above what neighbours show, about 5")


def test_a_smooth_image_has_no_noise_to_compare_with():
    assert said(IMAGE, 5.0) == []


@pytest.mark.parametrize("low", [0, None])
def test_salt_and_pepper_are_told_and_filled_in_where_missing(low):
    damaged, random = np.clip(noisy(), 1, 254).round(), np.random.default_rng(1).random(IMAGE.shape)
    damaged[random > 0.97] = 255
    if low is not None:
        damaged[random < 0.03] = low
    stands = "255" if low is None else "0 or 255"
    with pytest.warns(UserWarning, match=rf"[2-6]\.\d% of the entries stand alone at {stands},.*make them NaN"):
        denoise(damaged, **QUICK)
    holes = np.where((damaged == 0) | (damaged == 255), np.nan, damaged)
    restored = denoise(holes, **QUICK)
    assert float(np.sqrt(np.mean((restored - IMAGE) ** 2))) < 4


@pytest.mark.parametrize("kind", ["any number", "cosmic rays", "colour"])
def test_impulses_of_any_number_are_told_and_filled_in_where_missing(kind):
    damaged, random = noisy(), np.random.default_rng(1)
    is_hit = random.random(IMAGE.shape) < 0.03
    damaged[is_hit] = random.uniform(0, 255, IMAGE.shape)[is_hit] if kind != "cosmic rays" else damaged[is_hit] + 200
    damaged = np.stack([noisy(2), damaged, noisy(3)], -1) if kind == "colour" else damaged
    (text,) = said(damaged)
    assert "of the entries stand alone by" in text
    assert "cosmic rays make them NaN" in text
    if kind != "colour":
        restored = denoise(np.where(is_hit, np.nan, damaged), **QUICK)
        assert float(np.sqrt(np.mean((restored - IMAGE) ** 2))) < 4


@pytest.mark.parametrize("mean", [0.02, 1.0, 3.0, 5.0, 20.0])
def test_photon_counts_are_no_salt_and_pepper(mean):
    counts = np.random.default_rng(0).poisson(mean, IMAGE.shape)
    assert not [text for text in said(counts) if "stand alone" in text]


def test_lines_of_a_drawing_are_no_salt_and_pepper():
    drawing = np.full(IMAGE.shape, 255.0)
    drawing[::6], drawing[:, ::9], drawing[ROWS == COLUMNS] = 0.0, 0.0, 0.0
    assert said(drawing) == []


@pytest.mark.parametrize("shape", [(1, 1, 32, 32), (1, 32, 32, 3), (1, 3, 32, 32)])
def test_one_picture_of_a_batch_is_restored_like_the_picture(shape):
    batch = np.empty(shape)
    axis = shape.index(3) if 3 in shape else None
    planes = [noisy(seed)[:32, :32] for seed in range(3 if axis else 1)]
    batch[:] = np.stack(planes, -1).reshape(shape) if axis == 3 else np.stack(planes).reshape(shape)
    for restore, image in ((denoise, batch), (inpaint, np.where(batch > 190, np.nan, batch))):
        found, alone = (restore(some, **QUICK) for some in (image, image.squeeze()))
        assert found.image.shape == shape
        assert float(np.sqrt(np.mean((np.asarray(found).squeeze() - np.asarray(alone)) ** 2))) < 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64, bool])
def test_images_nearly_all_of_one_number_are_restored(dtype):
    image = np.ones((48, 48), dtype)
    image[5, 7] = image[30, 2] = image[40, 41] = 0
    restored = denoise(image, **QUICK)
    assert bool(restored.image.isfinite().all())
    np.testing.assert_allclose(np.asarray(restored)[10:28, 10:28], 1.0, atol=0.05)


@pytest.mark.parametrize("far", [1e6, 1e10])
def test_few_entries_far_away_leave_the_noise_elsewhere_as_it_is(far):
    damaged = noisy()
    damaged[20:22, 20:22] = far
    restored = denoise(damaged, rounds=1, stride=2, progress=False)
    elsewhere = np.ones(IMAGE.shape, bool)
    elsewhere[12:30, 12:30] = False
    assert restored.noise == pytest.approx(10, rel=0.2)
    assert float(np.sqrt(np.mean((np.asarray(restored) - IMAGE)[elsewhere] ** 2))) < 5


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", [1e20, -3.4028235e38])
def test_fill_values_beside_which_digits_are_lost_are_refused(value, dtype):
    damaged = noisy().astype(dtype)
    damaged[20:22, 20:22] = value
    named = rf"entries of {re.escape(f'{value:g}')}, beside which others lose their digits: half .*make these NaN"
    for options in ({}, {"noise": 10.0}):
        with pytest.raises(ValueError, match=named):
            denoise(damaged, progress=False, **options)
    with pytest.warns(UserWarning, match="nothing is missing"), pytest.raises(ValueError, match=named):
        inpaint(damaged, progress=False)


def test_tails_of_bright_spots_are_no_fill_values():
    spot = np.exp(-((ROWS - 24) ** 2 + (COLUMNS - 24) ** 2) / 8.0)
    restored = denoise(spot, rounds=1, stride=2, progress=False)
    np.testing.assert_allclose(np.asarray(restored), spot, atol=0.02)


def test_saturated_pixels_in_single_precision_are_no_fill_values():
    scene = 0.2 + 0.1 * np.sin(ROWS / 6) * np.cos(COLUMNS / 8)
    damaged = (scene + 0.002 * (noisy() - IMAGE)).astype(np.float32)
    # The largest number of half precision.
    damaged[20:22, 20:22] = 65504.0
    elsewhere = np.ones(IMAGE.shape, bool)
    elsewhere[12:30, 12:30] = False
    restored = np.asarray(denoise(damaged, 0.02, **QUICK))
    assert float(np.sqrt(np.mean((restored - scene)[elsewhere] ** 2))) < 0.01


def test_a_hole_in_an_image_without_noise_is_filled_in_beside_rounding_errors():
    disc = np.where((ROWS - 24) ** 2 + (COLUMNS - 24) ** 2 < 150, 1 + 0.2 * np.sin(ROWS / 3), 0.0)
    seen = disc + 1e-17 * (noisy() - IMAGE)
    seen[22:26, 20:24] = np.nan
    restored = np.asarray(inpaint(seen, progress=False, rounds=2, stride=2))
    assert float(np.abs(restored - disc).max()) < 0.15


@pytest.mark.parametrize(("far", "dtype"), [(1e6, np.float32), (1e6, np.float64), (-1e12, np.float64)])
@pytest.mark.parametrize("kind", ["single", "colour"])
def test_what_is_filled_in_does_not_follow_few_entries_far_away(far, dtype, kind):
    damaged, hidden = noisy(), np.random.default_rng(1).random(IMAGE.shape) < 0.1
    damaged[20, 20], damaged[40, 8], hidden[20, 20], hidden[40, 8] = far, 2 * far, False, False
    damaged = (np.stack([noisy(2), damaged, noisy(3)], -1) if kind == "colour" else damaged).astype(dtype)
    filled = np.asarray(inpaint(damaged, ~hidden, **QUICK))
    np.testing.assert_array_equal(filled[~hidden], damaged[~hidden])
    # Of the noise, 10, neighbours know nothing.
    assert float(np.sqrt(np.mean((filled.reshape(48, 48, -1) - IMAGE[..., np.newaxis])[hidden] ** 2))) < 8


@pytest.mark.parametrize("far", [1e6, 1e12, 1e20])
@pytest.mark.parametrize("is_holed", [False, True])
def test_noise_is_taken_off_beside_few_entries_of_unlike_size(far, is_holed):
    damaged, is_far = noisy(), np.zeros(IMAGE.shape, bool)
    damaged[20, 20], damaged[40, 8], is_far[20, 20], is_far[40, 8] = far, -2 * far, True, True
    holed = np.where((np.random.default_rng(1).random(IMAGE.shape) < 0.1 * is_holed) & ~is_far, np.nan, damaged)
    restored = denoise(holed, **QUICK)
    np.testing.assert_array_equal(np.asarray(restored)[is_far], damaged[is_far])
    assert restored.noise == pytest.approx(10, rel=0.1)
    assert float(np.sqrt(np.mean((np.asarray(restored) - IMAGE)[~is_far] ** 2))) < 5


def test_entries_beside_which_all_becomes_nan_are_refused():
    damaged = noisy()
    damaged[20:22, 20:22] = [[1e20, 2e20], [3e20, 4e20]]
    with pytest.raises(ValueError, match=r"entries so far from others, up to 4e\+20, that squares lose these: make such entries NaN"):
        denoise(damaged, **QUICK)


def test_what_is_filled_in_follows_bright_discs():
    disc = np.where((ROWS - 24) ** 2 + (COLUMNS - 24) ** 2 < 50, 1e4, 0.0) + noisy() - IMAGE
    holed = disc.copy()
    holed[23:26, 23:26] = np.nan
    assert float(np.asarray(inpaint(holed, **QUICK))[23:26, 23:26].min()) > 8e3


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_thin_lines_and_lone_photons_are_no_entries_far_from_all_others(noise):
    """The first go on in holes, and of the others noise is taken off."""
    line = np.zeros((96, 96))
    line[50, 40:50] = 200.0
    damaged = line + noise * np.random.default_rng(0).normal(size=line.shape)
    damaged[46:54, 44:46] = np.nan
    filled = np.asarray(inpaint(damaged, noise=noise, **QUICK))
    assert abs(filled[50, 44:46] - 200).max() < 150
    photons = np.random.default_rng(1).poisson(np.full((48, 48), 0.005)).astype(float)
    assert photons.sum() > 3
    assert np.asarray(denoise(photons, "poisson", **QUICK)).max() < 0.5
