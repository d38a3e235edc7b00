"""Fits of Gabor functions find those that made the fields, and none where there is none."""

from __future__ import annotations

import math

import pytest
import torch

from tests.papers.experiments.gabor import GaborFits, fit_gabors


@pytest.mark.nightly
def test_fields_that_are_gabor_functions_are_explained_and_noise_is_not() -> None:
    n, side = 12, 16
    uniform = torch.rand(n, 8, dtype=torch.float64)
    low = torch.tensor([3.0, 3.0, math.log(1.2), math.log(1.2), 0.0, 0.08, 0.5, -1.0], dtype=torch.float64)
    high = torch.tensor([12.0, 12.0, math.log(3.0), math.log(3.0), math.pi, 0.3, 2.0, 1.0], dtype=torch.float64)
    fields = GaborFits(low + (high - low) * uniform, torch.ones(n)).fields(side)
    noise = torch.randn(n, side**2, dtype=torch.float64)
    # A constant field is explained not at all, and no unit matters.
    all_fields = torch.cat([fields, fields + fields.std(1, keepdim=True) * noise, noise, 1e6 * fields, torch.zeros(1, side**2)])
    alone, noisy, without, large, nothing = fit_gabors(all_fields).r_squared.split([n, n, n, n, 1])
    assert (alone > 0.99).double().mean() >= 0.9
    # With as much noise as signal half of the variance can be explained, and by eight numbers hardly more.
    assert 0.35 < noisy.mean() < 0.65
    assert without.max() < 0.4
    assert nothing.item() == 0.0
    torch.testing.assert_close(large, alone, rtol=1e-6, atol=1e-6)
