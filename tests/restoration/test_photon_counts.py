"""Photon counts: Anscombe's transform, its exact unbiased inverse, and noise that grows with the brightness."""

from __future__ import annotations

import math
import re
import warnings

import pytest
import torch

from pyro_truncated.restoration import VaryingNoiseWarning, denoise, inpaint
from pyro_truncated.restoration.channels import noise_levels
from pyro_truncated.restoration.photon_counts import estimate_gain, stabilise, unbiased_inverse, warn_if_noise_varies

QUICK = {"side": 4, "rounds": 1, "progress": False}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spots(side: int = 40, peak: float = 40.0) -> torch.Tensor:
    place = torch.arange(side).double()
    squares = [(place - a).square().unsqueeze(1) + (place - b).square() for a, b in ((12, 14), (30, 35), (38, 10))]
    return 1 + peak * sum((-square / 40).exp() for square in squares)


@pytest.mark.parametrize("mean", [0.0, 0.01, 0.5, 3.0, 70.0, 990.0, 5000.0])
def test_the_inverse_is_unbiased(mean):
    counts = torch.arange(8000, dtype=torch.float64)
    log_density = torch.special.xlogy(counts, torch.tensor(mean)) - mean - torch.lgamma(counts + 1)
    expected = (log_density.exp() * stabilise(counts)).sum()
    # Above the table the inverse is that for many photons, whose error is of the order of 1 / mean.
    torch.testing.assert_close(float(unbiased_inverse(expected)), mean, rtol=1e-6, atol=1e-4)


def test_what_no_count_reaches_becomes_zero():
    assert float(unbiased_inverse(torch.tensor(0.3))) == 0.0


@pytest.mark.parametrize("gain", [1.0, 7.0, 8.5, 0.01])
def test_the_gain_of_counts_is_found(gain):
    counts = torch.poisson(spots(), generator=generator())
    assert estimate_gain(gain * counts) == pytest.approx(gain)


@pytest.mark.parametrize("levels", [[0.0], [5.0], [0.0, 2.0], [4.0, 8.0], [3.0, 100.0, 211.0, 217.0, 240.0]])
def test_the_gain_of_few_or_unlike_whole_numbers_is_one(levels):
    assert estimate_gain(torch.tensor(levels).repeat(10)) == 1.0


@pytest.mark.nightly(keep=3)
@pytest.mark.slow
@pytest.mark.parametrize("shape", ["grey", "colour", "missing", "integers", "signal"])
def test_photon_counts_are_restored_in_their_unit(shape):
    truth = spots()
    truth = {"colour": torch.stack([truth, 2 * truth, 3 + truth], -1), "signal": truth.flatten()[:400]}.get(shape, truth)
    counts = torch.poisson(truth, generator=generator())
    given = counts.long() if shape == "integers" else counts
    if shape == "missing":
        given = torch.where(torch.rand(counts.shape, generator=generator(1)) < 0.1, math.nan, counts)
    quick = {**QUICK, "num_components": 8}
    found = denoise(given, "poisson", generator=generator(2), **quick).image
    assert found.shape == truth.shape
    assert float((found - truth).square().mean()) < 0.4 * float((counts - truth).square().mean())
    # Where many entries are averaged, a biased inverse would be a quarter off.
    assert float(found.mean()) == pytest.approx(float(counts.mean()), rel=0.03)
    if shape == "grey":
        scaled = denoise(8.5 * counts, "poisson", generator=generator(2), **quick).image
        torch.testing.assert_close(scaled / 8.5, found)
        filled = inpaint(counts, torch.rand(counts.shape, generator=generator(1)) < 0.9, "poisson", generator=generator(2), **quick).image
        assert bool((filled >= 0).all())


@pytest.mark.slow
def test_negative_counts_are_refused_and_others_than_counts_are_told():
    with pytest.raises(ValueError, match="needs photon counts of at least 0"):
        denoise(torch.randn(16, 16), "poisson")
    squeezed = 20 * torch.poisson(torch.full((32, 32), 30.0), generator=generator()) + torch.rand(32, 32, generator=generator(1))
    with pytest.warns(VaryingNoiseWarning, match="Of a camera with gain g, offset o and read noise r restore z"):
        denoise(2 * torch.poisson(spots(), generator=generator()) + 100, "poisson", **QUICK)
    with pytest.warns(VaryingNoiseWarning, match="Divide the image by"):
        denoise(squeezed, "poisson", generator=generator(), **QUICK)


def test_noise_of_a_camera_is_told_and_its_transform_restores_it():
    gain, offset, read = 2.0, 100.0, 3.0
    counts = torch.poisson(spots(48), generator=generator())
    y = gain * counts + offset + read * torch.randn(48, 48, generator=generator(1))
    with pytest.warns(VaryingNoiseWarning, match=re.escape("restore z = 2 * sqrt(max((y - o) / g + 3 / 8 + (r / g)**2, 0)) with noise=1")):
        plain = denoise(y, **QUICK).image
    with pytest.raises(ValueError, match="Of a camera with gain g, offset o and read noise r"):
        denoise(y - offset, "poisson")
    z = denoise(2 * ((y - offset) / gain + 3 / 8 + (read / gain) ** 2).clamp(min=0).sqrt(), 1.0, **QUICK).image
    restored = offset + gain * (z**2 / 4 - 1 / 8 - (read / gain) ** 2)
    truth = gain * spots(48) + offset
    assert float((restored - truth).square().mean()) < 0.5 * float((plain - truth).square().mean())
    assert float(restored.mean()) == pytest.approx(float(y.mean()), abs=0.5)


@pytest.mark.parametrize("kind", ["counts", "many", "scaled", "speckle", "colour"])
def test_noise_that_grows_with_brightness_is_told(kind):
    truth = spots(64)
    counts = torch.poisson(truth, generator=generator())
    speckle = truth * (1 + 0.2 * torch.randn(truth.shape, generator=generator(), dtype=truth.dtype))
    colour = torch.stack([counts, counts.mT, counts.flip(0)], -1)
    many = torch.poisson(200 * truth, generator=generator())  # noise of 2 % of the signal's deviation
    noisy = {"counts": counts, "many": many, "scaled": 0.1 * counts, "speckle": speckle, "colour": colour}
    with pytest.warns(VaryingNoiseWarning, match="grows with the brightness"):
        warn_if_noise_varies(noisy[kind], 2, noise_levels(noisy[kind], 2))


def scene(kind: str) -> torch.Tensor:
    """An image from 5 to 255: ``edges``, bright at one place only; ``texture``, leaves before a bright sky."""
    place = torch.arange(96).double() - 47.5
    rows, columns = place.unsqueeze(1), place
    if kind == "edges":
        image = torch.full((96, 96), 5.0).double()
        image[(rows / 42).square() + (columns / 36).square() < 1] = 65.0
        image[((rows - 15) / 8).square() + ((columns + 12) / 8).square() < 1] = 225.0
        return image
    image = torch.where(rows < 0, 240.0, 60 + 40 * torch.rand(96, 96, generator=generator(5), dtype=torch.float64)) + 0 * columns
    image[70:] = 14.0
    return image


@pytest.mark.parametrize("kind", ["edges", "texture"])
@pytest.mark.parametrize("photons", [10, 30])
def test_counts_of_scenes_with_edges_and_texture_are_told(kind, photons):
    noisy = torch.poisson(scene(kind) / 255 * photons, generator=generator()) * 255 / photons
    with pytest.warns(VaryingNoiseWarning, match="grows with the brightness"):
        warn_if_noise_varies(noisy, 2, noise_levels(noisy, 2))


@pytest.mark.parametrize("kind", ["edges", "texture"])
@pytest.mark.parametrize("level", [0.0, 5.0, 12.0])
@pytest.mark.parametrize("is_rounded", [False, True])
def test_equal_noise_of_scenes_with_edges_and_texture_is_not_told(kind, level, is_rounded):
    noisy = 20 + scene(kind) + level * torch.randn(96, 96, generator=generator(), dtype=torch.float64)
    noisy = noisy.round().clamp(min=0) if is_rounded else noisy
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_noise_varies(noisy, 2, noise_levels(noisy, 2))


@pytest.mark.parametrize("level", [2.0, 10.0])
def test_equal_noise_is_not_told(level):
    noise = level * torch.randn(64, 64, generator=generator(), dtype=torch.float64)
    texture = torch.arange(64) % 2 * spots(64) / 4  # finer where it is bright
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for noisy in (spots(64), spots(64) + noise, spots(64) + texture + noise):
            warn_if_noise_varies(noisy, 2, noise_levels(noisy, 2))


def ramp(*sides: int) -> torch.Tensor:
    """Noise levels that rise from 0.2 to 2 along the last dimension."""
    return torch.linspace(0.2, 2.0, sides[-1], dtype=torch.float64).expand(sides)


@pytest.mark.parametrize("sides", [(3000,), (108, 108), (42, 42, 42)])
def test_noise_that_differs_from_place_to_place_is_told(sides):
    clean = sum(torch.sin(torch.arange(side).double() / 4).view(-1, *[1] * dim) for dim, side in enumerate(reversed(sides)))
    noise = torch.randn(sides, generator=generator(), dtype=torch.float64)
    with pytest.warns(VaryingNoiseWarning, match=r"from place to place: in image\[.*\] it is \d\.\d times that of image\["):
        warn_if_noise_varies(clean + ramp(*sides) * noise, len(sides), noise_levels(clean + ramp(*sides) * noise, len(sides)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_noise_varies(clean + noise, len(sides), noise_levels(clean + noise, len(sides)))


@pytest.mark.nightly
@pytest.mark.slow
def test_levels_of_places_are_divided_by_as_the_warning_says():
    clean = 5 * spots(108, peak=1.0)
    image, levels = clean + ramp(108, 108) * torch.randn(108, 108, generator=generator(), dtype=torch.float64), ramp(108, 108)
    with pytest.warns(VaryingNoiseWarning, match="restore image / s with noise=1, and multiply what is restored by s"):
        plain = denoise(image, **QUICK).image
    restored = denoise(image / levels, 1.0, **QUICK).image * levels
    assert float((restored - clean).square().mean()) < 0.5 * float((plain - clean).square().mean())
