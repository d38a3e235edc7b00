"""Channels: which dimension holds them, and noise and units of their own."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from pyro_truncated.restoration import denoise, inpaint
from pyro_truncated.restoration.channels import channel_axis, noise_levels, related_channels

QUICK = {"side": 4, "rounds": 1, "progress": False}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def waves(*shape: int) -> torch.Tensor:
    """Smooth planes, each of its own frequencies, in the last dimension."""
    rows, columns, channels = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    return 10 * ((rows / (3 + channels)).sin() + (columns / (4 + channels)).cos()).double()


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((20, 20, 3), -1),
        ((3, 20, 20), 0),
        ((20, 20, 1), -1),
        ((20, 20), None),
        ((20, 20, 20), None),
        ((1500, 2), -1),
        ((2, 1500), 0),
        ((1500, 6), -1),
        ((400, 12), -1),
        ((12, 40), None),
        ((50,), None),
        ((12, 20, 20, 3), -1),
        ((3, 20, 20, 3), -1),
        ((12, 3, 20, 20), 1),
        ((3, 3, 20, 20), 1),
        ((3, 12, 20, 20), 0),
        ((12, 20, 20, 20), None),
    ],
)
def test_shapes_say_which_dimension_holds_channels(shape, axis):
    image = torch.randn(shape, generator=generator())
    assert channel_axis(image, None) == axis
    assert channel_axis(image, False) is None
    if image.dim() > 1:
        assert (channel_axis(image, True), channel_axis(image, "first")) == (-1, 0)


@pytest.mark.parametrize("axis", [0, 2])
def test_four_slices_of_a_volume_are_no_channels_and_four_bands_are(axis):
    random = np.random.default_rng(0)
    volume = gaussian_filter(random.normal(size=(40, 40, 40)), 3)[:, :, 10:14]
    noisy = 50 * volume / volume.std() + 20 * random.normal(size=volume.shape)
    assert channel_axis(torch.from_numpy(np.moveaxis(noisy, 2, axis)), None) is None
    bands = waves(40, 40, 4) + torch.randn(40, 40, 4, generator=generator())
    assert channel_axis(bands.movedim(2, axis), None) == {0: 0, 2: -1}[axis]


@pytest.mark.parametrize("axis", [0, 2])
def test_planes_with_unlike_noise_are_bands(axis):
    noise = torch.randn(32, 32, 8, generator=generator())
    equal, unlike = waves(32, 32, 8) + noise, waves(32, 32, 8) + noise * torch.linspace(1, 6, 8)
    assert channel_axis(equal.movedim(2, axis), None) is None
    assert channel_axis(unlike.movedim(2, axis), None) == {0: 0, 2: -1}[axis]


@pytest.mark.parametrize("shape", [(64, 64, 3), (2000, 3)])
def test_the_noise_of_every_channel_is_estimated(shape):
    levels = torch.tensor([1e-3, 1.0, 400.0])
    # The relative deviation of a median of 2000 differences is about 0.03; of windows less.
    found = noise_levels(levels * torch.randn(shape, generator=generator()), len(shape) - 1)
    torch.testing.assert_close(found, levels, rtol=0.1, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [None, [1.0, 1e3, 1e-3]], ids=["estimated", "told"])
def test_channels_of_other_units_are_restored_alike(noise):
    units = torch.tensor([1.0, 1e3, 1e-3]).double()
    truth = waves(24, 24, 3)
    noisy = truth + torch.randn(24, 24, 3, generator=generator()).double()
    found = denoise(units * noisy, noise, generator=generator(1), **QUICK)
    plain = denoise(noisy, None if noise is None else [1.0, 1.0, 1.0], generator=generator(1), **QUICK)
    torch.testing.assert_close(found.image / units, plain.image, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.channel_noise / units, plain.channel_noise, rtol=1e-6, atol=0)
    assert found.noise == pytest.approx(float(found.channel_noise.square().mean().sqrt()))
    first = denoise((units * noisy).movedim(2, 0), noise, generator=generator(1), **QUICK)
    torch.testing.assert_close(first.image.movedim(0, 2), found.image)


@pytest.mark.parametrize("offset", [1e4, 1e6, 1e8])
def test_channels_far_from_each_other_are_restored_alike(offset):
    clean = 30 * waves(20, 22, 3).double()
    noisy = clean + 3 * torch.randn(clean.shape, generator=generator(), dtype=torch.float64)
    offsets = torch.tensor([0.0, offset, -offset], dtype=torch.float64)
    options = {"side": 4, "rounds": 1, "passes": 3, "num_components": 4, "progress": False}
    found = [denoise(noisy + shift, generator=generator(), **options) for shift in (0.0, offsets)]
    torch.testing.assert_close(found[1].channel_noise, found[0].channel_noise, rtol=1e-3, atol=0.0)
    errors = [(one.image - shift - clean).square().mean().sqrt() for one, shift in zip(found, (0.0, offsets), strict=True)]
    assert errors[1] < 1.1 * errors[0] < 2.0


@pytest.mark.nightly
def test_channels_of_unlike_noise_are_all_restored():
    levels = torch.tensor([0.5, 2.0, 8.0]).double()
    truth = waves(32, 32, 3)
    noisy = truth + levels * torch.randn(32, 32, 3, generator=generator()).double()
    found = denoise(noisy, generator=generator(1), progress=False)
    errors = (found.image - truth).square().mean((0, 1)).sqrt() / levels
    assert bool((errors < 0.5).all())
    torch.testing.assert_close(found.channel_noise, levels, rtol=0.2, atol=0)


@pytest.mark.slow
def test_unrelated_sensors_are_restored_as_each_alone():
    time = torch.arange(400).double()
    noise = torch.randn(400, 3, generator=generator()).double()
    table = torch.stack([10 * (time / 9).sin(), 10 * (time / 14).cos(), 8 * (time / 9 + 1).sin()], -1) + noise
    assert related_channels(table, 1, 1.0) == [[0, 2], [1]]
    units = torch.tensor([1.0, 1e4, 1.0])
    found = denoise(units * table, units, generator=generator(1), **QUICK)
    # In the order of their sizes, so that the sensor alone takes what the generator has next.
    shared = generator(1)
    both = denoise(table[:, [0, 2]], [1.0, 1.0], generator=shared, **QUICK)
    alone = denoise(table[:, 1], 1.0, generator=shared, **QUICK)
    torch.testing.assert_close(found.image[:, [0, 2]], both.image)
    torch.testing.assert_close(found.image[:, 1] / 1e4, alone.image)


@pytest.mark.slow
def test_a_transparency_without_noise_leaves_colours_as_without_it():
    rows, columns = torch.meshgrid(*2 * (torch.arange(32.0),), indexing="ij")
    colours = 10 * waves(32, 32, 3)
    noisy = colours + 10 * torch.randn(32, 32, 3, generator=generator())
    alone = (denoise(noisy, generator=generator(), **QUICK).image - colours).square().mean()
    disc = 255.0 * ((rows - 16).square() + (columns - 16).square() < 200)
    for transparency in (disc, (4 * (rows + columns)).round()):
        picture = torch.cat([noisy, transparency.unsqueeze(-1)], -1)
        restored = denoise(picture, channels=True, generator=generator(), **QUICK).image
        assert (restored[..., :3] - colours).square().mean() < 1.1 * alone
        assert (restored[..., 3] - transparency).abs().max() < 1


def test_a_constant_channel_is_returned_as_it_is():
    image = torch.cat([waves(16, 16, 3), torch.full((16, 16, 1), 255.0).double()], -1)
    image[..., :3] += torch.randn(16, 16, 3, generator=generator())
    found = denoise(image, generator=generator(), **QUICK)
    assert bool((found.image[..., 3] == 255).all())
    assert found.image.shape == image.shape
    assert found.channel_noise.shape == (4,)


def test_a_flag_beside_a_sensor_is_no_noise_that_varies():
    sensor = 10 + 5 * (torch.arange(500) / 4).sin() + 0.5 * torch.randn(500, generator=generator())
    table = torch.stack([sensor, (sensor > 10).float()], -1)
    with warnings.catch_warnings(action="error"):
        denoise(table, generator=generator(), **QUICK)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("frames", [2, 3])
def test_movies_of_a_few_frames_are_restored_as_well_as_frames(frames):
    movie = 10 * waves(28, 28, frames + 4).movedim(2, 0)[3 : 3 + frames]
    noisy = movie + 15 * torch.randn(movie.shape, generator=generator())
    alone = torch.stack([denoise(frame, generator=generator(), rounds=1, progress=False).image for frame in noisy])
    found = denoise(noisy, generator=generator(), rounds=1, progress=False).image
    assert (found - movie).square().mean() < 1.1 * (alone - movie).square().mean()


def test_movies_of_networks_are_restored_as_others():
    movie = torch.randn(5, 12, 12, 3, generator=generator())
    mask = torch.rand(5, 12, 12, generator=generator()) > 0.1
    found = [inpaint(movie.movedim(-1, axis), mask, generator=generator(), **QUICK).image.movedim(axis, -1) for axis in (-1, 1)]
    torch.testing.assert_close(*found)


@pytest.mark.slow
def test_gaps_of_channels_in_other_units_are_filled_alike():
    units = torch.tensor([1.0, 1e4]).double()
    sound = torch.stack([(torch.arange(300) / 5).sin(), (torch.arange(300) / 6.1).sin()], -1).double()
    sound[100:106] = math.nan
    plain, found = (inpaint(some, generator=generator(), rounds=1, progress=False).image for some in (sound, units * sound))
    torch.testing.assert_close(found / units, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "noise", "named"),
    [
        ((8, 8), [1.0, 2.0], "no channels"),
        ((8, 8, 3), [1.0, 2.0], "3 channels"),
        ((8, 8, 3), [1.0, 2.0, 0.0], "positive"),
        ((8, 8, 3), math.nan, "positive"),
        ((8, 8), "gauss", "poisson"),
    ],
)
def test_noise_of_other_channels_is_refused(shape, noise, named):
    with pytest.raises(ValueError, match=named):
        denoise(torch.randn(shape), noise)


@pytest.mark.parametrize("seed", range(4))
def test_slow_channels_that_are_alike_by_chance_are_unrelated(seed):
    generator = torch.Generator().manual_seed(seed)
    steps, noise = torch.randn(2, 700, 3, generator=generator, dtype=torch.float64)
    walks = steps.cumsum(0) + noise
    assert sorted(related_channels(walks, 1, torch.ones(3))) == [[0], [1], [2]]
    walks[:, 1] = walks[:, 0].roll(5) + noise[:, 2]
    assert sorted(related_channels(walks, 1, torch.ones(3))) == [[0, 1], [2]]


@pytest.mark.parametrize(("is_table", "number"), [(True, 1), (False, 0)])
def test_tables_of_many_columns_in_units_of_their_own_are_told(is_table, number):
    units = 10 ** (4 * torch.rand(40, generator=generator()).double() - 2) if is_table else torch.ones(40).double()
    table = torch.arange(100).unsqueeze(1).div(torch.linspace(5, 30, 40)).sin() + 0.2 * torch.randn(100, 40, generator=generator())
    with warnings.catch_warnings(record=True, action="always") as caught:
        denoise(table * units, stride=4, **QUICK)
    assert sum("columns have noise of unlike strength" in str(warning.message) for warning in caught) == number
    assert {warning.filename for warning in caught} <= {__file__}
