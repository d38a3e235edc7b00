"""Photon counts: Anscombe's transform and its exact unbiased inverse."""

from __future__ import annotations

import math
import re

import pytest
import torch

from pyro_truncated.restoration import VaryingNoiseWarning, denoise, inpaint
from pyro_truncated.restoration.photon_counts import estimate_gain, stabilise, unbiased_inverse

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
