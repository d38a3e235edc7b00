"""Noise of arrays of which a part is constant: borders, what a mask hides, drawings."""

from __future__ import annotations

import pytest
import torch

from pyro_truncated.restoration.noise import noise_level


@pytest.mark.parametrize(("value", "side", "tolerance"), [(0.0, 104, 0.08), (0.3, 104, 0.08), (0.3, 40, 0.3)])
def test_what_is_constant_says_nothing_of_the_noise_elsewhere(value, side, tolerance):
    # Of ten draws the mean is 9.5 and the standard deviation 0.1 (side 104), and 10 and 0.9 (side 40, where differences say it).
    noisy = 0.2 * torch.arange(side) + 10 * torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    half = noisy.masked_fill(torch.arange(side) < side // 2, value)
    assert noise_level(half, 2) == pytest.approx(10, rel=tolerance)
    assert noise_level(torch.stack([half, half.mT, noisy], -1), 2) == pytest.approx(10, rel=tolerance)
    framed = torch.full((side + 20, side + 20), value)
    framed[10:-10, 10:-10] = noisy
    assert noise_level(framed, 2) == pytest.approx(noise_level(noisy, 2), rel=0.05)


def test_drawings_without_noise_have_none():
    place = torch.arange(104.0) - 52
    disc = 50 * (place.unsqueeze(0).square() + place.unsqueeze(1).square() < 900).float()
    assert noise_level(disc, 2) < 0.1
    assert noise_level(torch.full((104, 104), 0.3), 2) > 0
