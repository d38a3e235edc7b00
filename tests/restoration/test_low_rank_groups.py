"""Groups of similar windows that fill in what is missing: against singular values taken one by one, and what they add."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pyro_truncated.restoration import inpaint, restore
from pyro_truncated.restoration import nonlocal_groups as groups
from pyro_truncated.restoration.windows import Patches


def stripes(size: int, channels: int | None = None) -> Tensor:
    """Slanted stripes under a slope: similar windows are everywhere, and smoothness says little."""
    rows, columns = torch.meshgrid(torch.arange(size).double(), torch.arange(size).double(), indexing="ij")
    grey = 100 + 40 * (1.7 * rows + 1.1 * columns).sin() + rows / 4
    return grey if channels is None else torch.stack([grey * (1 + number / 4) for number in range(channels)], -1)


def holed(image: Tensor, share: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.where(
        torch.rand(image.shape[:2], generator=generator).reshape(*image.shape[:2], *[1] * (image.dim() - 2)) < share, torch.nan, image
    )


@pytest.mark.parametrize("channels", [None, 3])
def test_a_step_drops_small_singular_values_of_every_group(channels: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_GROUPS_PER_BLOCK", 5)
    image = torch.randn(13, 12, *([channels] if channels else []), generator=torch.Generator().manual_seed(1)).double() + 3
    side, noise = 8, 0.4
    corners = [(i, j) for i in range(13 - side + 1) for j in range(12 - side + 1)]
    windows = torch.stack([image[i : i + side, j : j + side].flatten() for i, j in corners])
    total, share = torch.zeros_like(image), torch.zeros_like(image)
    for i in (0, 4, 5) if channels is None else (0, 5):
        for j in (0, 4):
            own = windows[corners.index((i, j))]
            near = (windows - own).square().sum(1).argsort()[:9]
            left, values, right = torch.linalg.svd(windows[near], full_matrices=False)
            values = values.where(values > noise * (math.sqrt(9) + math.sqrt(windows.shape[1])), 0.0)
            for number, window in zip(near.tolist(), (left * values) @ right, strict=True):
                a, b = corners[number]
                total[a : a + side, b : b + side] += window.view(side, side, *image.shape[2:])
                share[a : a + side, b : b + side] += 1
    patches = Patches(image.shape[:2], side, channels=channels)
    found = groups._low_rank_mean(image, patches, groups._groups(image, patches, 1, 9), noise)
    is_covered = share > 0
    torch.testing.assert_close(found[is_covered], (total / share)[is_covered], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [None, 3])
def test_what_repeats_is_filled_in(channels: int | None) -> None:
    image = stripes(48, channels)
    y = holed(image, 0.6)
    errors = 15 * torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=y.dtype)
    estimate = image + torch.where(y.isnan(), errors, 0.1 * errors)
    found = groups.average_low_rank_groups(y, estimate, 3.0, channels)
    is_seen = ~y.isnan()
    assert torch.equal(found[is_seen], estimate[is_seen])
    assert ((found - image)[~is_seen].square().mean() < 0.6 * (estimate - image)[~is_seen].square().mean()).item()


@pytest.mark.slow
def test_channels_without_texture_stay_as_they_are() -> None:
    image = torch.cat([stripes(40, 3), torch.full((40, 40, 1), 255.0)], -1)
    y = holed(image, 0.8)
    estimate = image + torch.randn(image.shape, generator=torch.Generator().manual_seed(1)).double()
    found = groups.average_low_rank_groups(y, estimate, 1.0, 4)
    assert torch.equal(found[..., 3], estimate[..., 3])
    assert not torch.equal(found[..., :3], estimate[..., :3])


def test_signals_volumes_and_small_images_stay_as_they_are() -> None:
    for image in (torch.full((40,), math.nan), torch.full((8, 40, 40), math.nan), torch.full((31, 60), math.nan)):
        estimate = torch.randn(image.shape)
        assert groups.average_low_rank_groups(image, estimate, 1.0) is estimate


@pytest.mark.nightly
def test_restored_images_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    image = stripes(40).float()
    y, errors = holed(image, 0.5), []
    for averaged in (groups.average_low_rank_groups, lambda image, estimate, *options: estimate):
        monkeypatch.setattr(restore, "average_low_rank_groups", averaged)
        restored = inpaint(y, generator=torch.Generator().manual_seed(0), progress=False).image
        assert torch.equal(restored[~y.isnan()], y[~y.isnan()])
        errors.append(float((restored - image).square().mean()))
    assert errors[0] < errors[1]
