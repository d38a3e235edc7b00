"""Groups of similar windows: which they are, how their noise is taken off, and where they count."""

from __future__ import annotations

import math

import pytest
import torch

from pyro_truncated.restoration import denoise, nonlocal_groups, restore
from pyro_truncated.restoration.nonlocal_groups import average_groups, denoise_groups, shrink_singular_values, similar


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_most_similar_windows_near_by_are_found():
    windows, centres = torch.randn(6 * 7, 4, generator=generator()), torch.tensor([[0, 0], [3, 4], [5, 2]])
    for found, (row, column) in zip(similar(windows, centres, [6, 7], members=5, radius=2).tolist(), centres.tolist(), strict=True):
        near = [i for i in range(42) if abs(i // 7 - row) <= 2 and abs(i % 7 - column) <= 2]
        own = windows[7 * row + column]
        assert found == sorted(near, key=lambda i, own=own: float((windows[i] - own).square().sum()))[:5]


def test_a_window_is_of_its_own_group_where_all_are_alike():
    assert similar(torch.zeros(900, 4), torch.tensor([[20, 20]]), [30, 30])[0, 0] == 20 * 30 + 20


@pytest.mark.parametrize("shape", [(20, 60), (60, 20), (30, 30)])
def test_singular_values_are_shrunk_as_far_as_the_error_is_least(shape):
    # Matrices of rank two: directions that are found can be given no better factors than those of the truth on them.
    draws = torch.randn(2, 200, 60, 60, dtype=torch.float64, generator=generator())
    left, right = (torch.linalg.qr(draws[0, :, :n, :2])[0] for n in shape)
    size = 3 * math.sqrt(max(shape)) * torch.tensor([3.0, 2.0], dtype=torch.float64)
    truth = (left * size) @ right.mT
    noisy = truth + 3 * draws[1, :, : shape[0], : shape[1]]
    restored, errors = shrink_singular_values(noisy, 3.0)
    found = (restored - truth).square().mean()
    assert float(errors.mean()) == pytest.approx(float(found), rel=0.1)
    u, _, v = torch.linalg.svd(noisy, full_matrices=False)
    best = (u.mT @ truth @ v.mT).diagonal(dim1=1, dim2=2)[:, :2]
    least = ((u[:, :, :2] * best.mean(0)) @ v[:, :2] - truth).square().mean()
    assert float(found) < 1.05 * float(least)


def test_of_noise_alone_hardly_anything_is_left():
    restored, errors = shrink_singular_values(2 * torch.randn(500, 24, 16, generator=generator()), 2.0)
    assert float(restored.square().mean()) < 0.1 * 2**2
    assert float(errors.min()) >= 0
    assert torch.equal(shrink_singular_values(torch.zeros(2, 24, 16), 2.0)[0], torch.zeros(2, 24, 16))


@pytest.mark.parametrize("channels", [None, 3])
def test_stripes_are_restored_by_what_is_like_them(channels):
    stripes = 50 * torch.sin(0.8 * torch.arange(40.0)).expand(40, 40)
    truth = stripes if channels is None else torch.stack([stripes, 0.5 * stripes, -stripes], -1)
    noisy = truth + 10 * torch.randn(truth.shape, generator=generator())
    found, errors = denoise_groups(noisy, truth, 10.0, channels=channels)
    error = float((found - truth).square().mean())
    # The mean over 24 windows leaves a part of 0.04 of the noise, and rank one as much again.
    assert error < 0.12 * 10**2
    # Groups overlap, and their mean is better than each of them.
    assert error < float(errors.mean()) < 4 * error
    assert errors.shape == truth.shape


@pytest.mark.parametrize("shape", [(3, 5), (4, 4), (1, 9)])
def test_images_may_be_small(shape):
    found, _ = denoise_groups(torch.ones(shape), torch.ones(shape), 1.0)
    torch.testing.assert_close(found, torch.ones(shape))


def test_groups_count_by_what_their_errors_are_but_a_fifth_at_most(monkeypatch):
    monkeypatch.setattr(nonlocal_groups, "denoise_groups", lambda image, *others, **options: (image, torch.full_like(image, 0.9)))
    for errors, weight in [(0.9, 0.2), (0.3, 0.1), (0.0, 0.0)]:
        for shape, channels in [((9, 9), None), ((9, 9, 3), 3)]:
            image = torch.ones(shape)
            torch.testing.assert_close(average_groups(image, 0 * image, errors * image, 1.0, channels), weight * image)


@pytest.mark.parametrize(("shape", "channels"), [((9, 9, 3), None), ((9, 3), 3), ((9,), None), ((9, 9), "missing")])
def test_signals_volumes_and_incomplete_images_have_no_groups(shape, channels):
    image = torch.randn(shape, generator=generator())
    if channels == "missing":
        image[0, 0], channels = math.nan, None
    estimate = torch.zeros(shape)
    assert average_groups(image, estimate, estimate, 1.0, channels) is estimate


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(12, 12), (10, 10, 3)])
def test_groups_are_asked_in_the_end(monkeypatch, shape):
    asked = []
    monkeypatch.setattr(restore, "average_groups", lambda *arguments: asked.append(arguments) or 0 * arguments[0])
    image = torch.randn(shape, generator=generator())
    mean = image.mean((0, 1)) if image.dim() == 3 else image.mean()
    restored = denoise(image, 2.0, side=4, num_components=2, rounds=1, generator=generator(1), progress=False)
    torch.testing.assert_close(restored.image, torch.zeros(shape) + mean)
    ((above, estimate, errors, *rest),) = asked
    torch.testing.assert_close(above, image - mean)
    assert estimate.shape == errors.shape == shape
    assert float(errors.min()) > 0
    assert rest == [2.0, 3 if len(shape) == 3 else None]
