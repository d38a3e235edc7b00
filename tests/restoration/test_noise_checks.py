"""Noise that one level does not stand for is told: it follows the brightness or the place, or neighbours share it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F

from pyro_truncated.restoration import VaryingNoiseWarning, denoise
from pyro_truncated.restoration.channels import noise_levels
from pyro_truncated.restoration.noise_checks import warn_about_noise
from tests.restoration.test_photon_counts import QUICK, generator, spots


@pytest.mark.parametrize("kind", ["counts", "many", "scaled", "speckle", "colour"])
def test_noise_that_grows_with_brightness_is_told(kind):
    truth = spots(64)
    counts = torch.poisson(truth, generator=generator())
    speckle = truth * (1 + 0.2 * torch.randn(truth.shape, generator=generator(), dtype=truth.dtype))
    colour = torch.stack([counts, counts.mT, counts.flip(0)], -1)
    many = torch.poisson(200 * truth, generator=generator())  # noise of 2 % of the signal's deviation
    noisy = {"counts": counts, "many": many, "scaled": 0.1 * counts, "speckle": speckle, "colour": colour}
    with pytest.warns(VaryingNoiseWarning, match="grows with the brightness"):
        warn_about_noise(noisy[kind], 2, noise_levels(noisy[kind], 2))


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
        warn_about_noise(noisy, 2, noise_levels(noisy, 2))


@pytest.mark.parametrize("kind", ["edges", "texture"])
@pytest.mark.parametrize("level", [0.0, 5.0, 12.0])
@pytest.mark.parametrize("is_rounded", [False, True])
def test_equal_noise_of_scenes_with_edges_and_texture_is_not_told(kind, level, is_rounded):
    noisy = 20 + scene(kind) + level * torch.randn(96, 96, generator=generator(), dtype=torch.float64)
    noisy = noisy.round().clamp(min=0) if is_rounded else noisy
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_about_noise(noisy, 2, noise_levels(noisy, 2))


@pytest.mark.parametrize("level", [2.0, 10.0])
def test_equal_noise_is_not_told(level):
    noise = level * torch.randn(64, 64, generator=generator(), dtype=torch.float64)
    texture = torch.arange(64) % 2 * spots(64) / 4  # finer where it is bright
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for noisy in (spots(64), spots(64) + noise, spots(64) + texture + noise):
            warn_about_noise(noisy, 2, noise_levels(noisy, 2))


def ramp(*sides: int) -> torch.Tensor:
    """Noise levels that rise from 0.2 to 2 along the last dimension."""
    return torch.linspace(0.2, 2.0, sides[-1], dtype=torch.float64).expand(sides)


@pytest.mark.parametrize("sides", [(3000,), (108, 108), (42, 42, 42)])
def test_noise_that_differs_from_place_to_place_is_told(sides):
    clean = sum(torch.sin(torch.arange(side).double() / 4).view(-1, *[1] * dim) for dim, side in enumerate(reversed(sides)))
    noise = torch.randn(sides, generator=generator(), dtype=torch.float64)
    with pytest.warns(VaryingNoiseWarning, match=r"from place to place: in image\[.*\] it is \d\.\d times that of image\["):
        warn_about_noise(clean + ramp(*sides) * noise, len(sides), noise_levels(clean + ramp(*sides) * noise, len(sides)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_about_noise(clean + noise, len(sides), noise_levels(clean + noise, len(sides)))


@pytest.mark.nightly
@pytest.mark.slow
def test_levels_of_places_are_divided_by_as_the_warning_says():
    clean = 5 * spots(108, peak=1.0)
    image, levels = clean + ramp(108, 108) * torch.randn(108, 108, generator=generator(), dtype=torch.float64), ramp(108, 108)
    with pytest.warns(VaryingNoiseWarning, match="restore image / s with noise=1, and multiply what is restored by s"):
        plain = denoise(image, **QUICK).image
    restored = denoise(image / levels, 1.0, **QUICK).image * levels
    assert float((restored - clean).square().mean()) < 0.5 * float((plain - clean).square().mean())


def blurred(noise: torch.Tensor, spread: float) -> torch.Tensor:
    """Noise of deviation one whose neighbours correlate by ``exp(-1 / (4 spread^2))``."""
    place = torch.arange(-4, 5, dtype=torch.float64)
    kernel = (-place.square() / (2 * spread**2)).exp()
    for axis in (0, 1):
        noise = F.conv1d(noise.movedim(axis, -1).unsqueeze(1), kernel.view(1, 1, -1), padding=4).squeeze(1).movedim(-1, axis)
    return noise / noise.std()


@pytest.mark.parametrize(("channels", "border"), [(1, 0), (3, 0), (1, 8)])
def test_noise_that_neighbours_share_is_told(channels, border):
    clean = 40 * spots(108, peak=1.0)
    noise = torch.stack(
        [blurred(torch.randn(108, 108, generator=generator(seed), dtype=torch.float64), 0.7) for seed in range(channels)], -1
    )
    image = (clean.unsqueeze(-1) + 5 * noise).squeeze(-1)
    image[:border] = 0.0
    with pytest.warns(UserWarning, match="alike in neighbouring pixels, as after demosaicing or resizing"):
        warn_about_noise(image, 2, noise_levels(image, 2))


@pytest.mark.parametrize("kind", ["white", "texture", "smooth"])
def test_independent_noise_and_texture_are_not_taken_for_shared_noise(kind):
    clean, noise = 40 * spots(108, peak=1.0), torch.randn(108, 108, generator=generator(), dtype=torch.float64)
    texture = 5 * blurred(noise, 0.7) * (torch.arange(108) > 80)  # as leaves at one side of the picture
    image = clean + {"white": 5 * noise, "texture": texture + 0.5 * noise.flip(0), "smooth": 0 * noise}[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=VaryingNoiseWarning)
        warn_about_noise(image, 2, noise_levels(image, 2))
