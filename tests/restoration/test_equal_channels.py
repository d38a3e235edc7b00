"""Grey images in files of colours: the noise of all channels is one."""

from __future__ import annotations

import math

import torch

from pyro_truncated.restoration import denoise, inpaint


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_channels_that_are_all_the_same_are_restored_as_one():
    stripes = 60 * (torch.arange(16) % 8 < 4).float()
    one = stripes + 20 * torch.randn(16, 16, generator=generator(1))
    one[2:4, 3] = math.nan
    quick = {"side": 4, "rounds": 1, "progress": False}
    expected = denoise(one, generator=generator(2), **quick)
    found = denoise(one.unsqueeze(-1).expand(16, 16, 3), generator=generator(2), **quick)
    torch.testing.assert_close(found.image, expected.image.unsqueeze(-1).expand(16, 16, 3), rtol=0, atol=0)
    assert (found.noise, found.patches.channels) == (expected.noise, None)


def test_each_of_equal_channels_has_its_noise():
    one = 10 * torch.randn(16, 16, generator=generator(1))
    quick = {"side": 4, "rounds": 1, "progress": False}
    found = denoise(torch.stack([one] * 3), noise=[10.0] * 3, generator=generator(2), **quick)
    assert found.channel_noise.shape == (3,)
    torch.testing.assert_close(found.channel_noise.square().mean().sqrt().item(), found.noise)
    one[2:4, 3] = math.nan
    filled_in = inpaint(torch.stack([one] * 3), generator=generator(2), **quick)
    assert filled_in.channel_noise.shape == (3,)
