from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from pyro_truncated import datasets


def test_load_reads_the_named_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "toy.npz", a=np.arange(3))
    monkeypatch.setenv(datasets.DATA_VARIABLE, str(tmp_path))
    np.testing.assert_array_equal(datasets.load("toy")["a"], [0, 1, 2])


def test_missing_data_set_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(datasets.DATA_VARIABLE, str(tmp_path))
    with pytest.raises(datasets.DatasetNotFoundError, match=r"'toy' not found at .*toy\.npz; set PYRO_TRUNCATED_DATA"):
        datasets.load("toy")
    assert issubclass(datasets.DatasetNotFoundError, FileNotFoundError)


@pytest.mark.parametrize("source", datasets.IMAGE_SOURCES)
def test_natural_images_are_grey_in_the_unit_interval(source: str, real_data: Callable[[str], dict[str, np.ndarray]]) -> None:
    stored = {"hyvarinen": "natural_images_hyvarinen", "vanhateren": "vanhateren_one"}
    if source in stored:
        real_data(stored[source])
    images = datasets.natural_images(source)
    for image in images:
        assert image.dtype == torch.float32
        assert image.ndim == 2
        assert 0 <= image.min() < image.max() <= 1


@pytest.mark.slow
def test_natural_images_fall_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(datasets.DATA_VARIABLE, str(tmp_path))
    for image, expected in zip(datasets.natural_images(), datasets.natural_images("sklearn"), strict=True):
        torch.testing.assert_close(image, expected)


def test_natural_images_unknown_source() -> None:
    with pytest.raises(ValueError, match="source must be one of"):
        datasets.natural_images("moon")


def test_generated_images_have_a_falling_spectrum(generator: torch.Generator) -> None:
    image = datasets.generated_images(1, 128, generator)[0]
    power = torch.fft.fft2(image - image.mean()).abs().square()
    frequency = torch.fft.fftfreq(128).square()
    radius = (frequency[:, None] + frequency).sqrt()
    octaves = [power[(radius >= low) & (radius < 2 * low)].mean() for low in (1 / 64, 1 / 32, 1 / 16, 1 / 8)]
    assert all(later < earlier / 2 for earlier, later in itertools.pairwise(octaves))


@pytest.mark.slow
def test_image_patches_are_windows_of_the_images(generator: torch.Generator) -> None:
    images = [torch.arange(30.0).reshape(5, 6), 100 + torch.arange(12.0).reshape(3, 4)]
    patches = datasets.image_patches(images, 3, 500, generator)
    corners = patches[:, 0]
    strides = torch.where(corners < 100, 6.0, 4.0)
    steps = torch.arange(3.0)
    expected = corners[:, None, None] + strides[:, None, None] * steps[:, None] + steps
    torch.testing.assert_close(patches, expected.flatten(1))
    # 3 x 4 positions in the first image and 1 x 2 in the second: all occur (missing one of 14 in 500 draws: probability 1e-15).
    assert len(corners.unique()) == 14


@pytest.mark.parametrize("draw", [datasets.image_patches, datasets.binary_patches, lambda *args: datasets.whitened_patches(*args)[0]])
@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_patches_of_whole_numbers_are_those_of_tensors(draw: Callable[..., torch.Tensor], kind: type) -> None:
    images = [(255 * image).to(torch.uint8) for image in datasets.generated_images(2, 32, torch.Generator().manual_seed(0), 50)]
    expected, found = (
        draw(given, 4, 40, torch.Generator().manual_seed(1))
        for given in ([image.float() for image in images], [image.numpy().astype(kind) for image in images])
    )
    torch.testing.assert_close(found, expected)


def test_arrays_and_lists_in_place_of_tensors() -> None:
    y = torch.randn(30, 4, dtype=torch.float64)
    expected = datasets.fit_whitening(y)
    for given in (y.numpy(), y.tolist()):
        found = datasets.fit_whitening(given)
        torch.testing.assert_close(found.apply(given), expected.apply(y))
        torch.testing.assert_close(found.invert(found.apply(given).numpy()), expected.invert(expected.apply(y)))
        assert set(datasets.binarize(given).unique().tolist()) == {0.0, 1.0}
        torch.testing.assert_close(datasets.clamp_brightest(given, 0.1), datasets.clamp_brightest(y, 0.1))
        assert datasets.matched_bars(given, y) == 4
    with pytest.raises(ValueError, match="data must be finite to be whitened; got 1 entries"):
        datasets.fit_whitening(y.index_fill(1, torch.tensor(2), math.nan)[:1])


def test_image_patches_refuse_other_images() -> None:
    with pytest.raises(ValueError, match=r"images must be grey, .*; got one of shape \(9, 9, 3\)"):
        datasets.image_patches([torch.zeros(9, 9, 3)], 5, 1)
    hidden = np.ma.masked_array(np.zeros((9, 9)), np.eye(9))
    with pytest.raises(ValueError, match="images must be complete"):
        datasets.image_patches([hidden], 5, 1)


def test_image_patches_refuse_small_images() -> None:
    with pytest.raises(ValueError, match="at least as large"):
        datasets.image_patches([torch.zeros(4, 9)], 5, 1)
    with pytest.raises(ValueError, match="at least as large"):
        datasets.image_patches([], 5, 1)


def test_whitening_decorrelates_and_inverts_on_the_components_kept(generator: torch.Generator) -> None:
    mixing = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    data = torch.randn(500, 6, generator=generator, dtype=torch.float64) @ mixing + 3
    full = datasets.fit_whitening(data, variance=1.0)
    white = full.apply(data)
    torch.testing.assert_close(white.mT @ white / 500, torch.eye(6, dtype=torch.float64), atol=1e-10, rtol=0)
    torch.testing.assert_close(white.mean(0), torch.zeros(6, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(full.invert(white), data, atol=1e-10, rtol=0)
    torch.testing.assert_close(full.whiten, full.whiten.mT)


def test_whitening_keeps_the_fewest_components(generator: torch.Generator) -> None:
    data = torch.randn(20_000, 4, generator=generator, dtype=torch.float64) * torch.tensor([10.0, 5.0, 1.0, 0.1])
    whitening = datasets.fit_whitening(data, variance=0.95)
    eigenvalues = torch.linalg.eigvalsh(torch.cov(data.mT, correction=0)).flip(0)
    assert eigenvalues[:1].sum() < 0.95 * eigenvalues.sum() <= eigenvalues[: whitening.num_components].sum()
    assert whitening.num_components == 2
    projector = whitening.whiten @ whitening.dewhiten
    torch.testing.assert_close(projector @ projector, projector, atol=1e-10, rtol=0)
    assert torch.trace(projector).item() == pytest.approx(2)


def test_whitening_leaves_out_empty_directions(generator: torch.Generator) -> None:
    data = torch.randn(100, 3, generator=generator)
    whitening = datasets.fit_whitening(torch.cat([data, data], 1), variance=1.0)
    assert whitening.num_components == 3
    assert whitening.apply(torch.cat([data, data], 1)).isfinite().all()


def test_whitening_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="variance must lie in"):
        datasets.fit_whitening(torch.rand(5, 2), variance=0)
    with pytest.raises(ValueError, match="data must vary to be whitened"):
        datasets.fit_whitening(torch.ones(5, 2))


def test_whitened_patches(generator: torch.Generator) -> None:
    images = datasets.generated_images(2, 96, generator)
    patches, whitening = datasets.whitened_patches(images, 8, 2000, generator)
    assert patches.shape == (2000, 64)
    eigenvalues = torch.linalg.eigvalsh(torch.cov(patches.double().mT, correction=0))
    kept = whitening.num_components
    torch.testing.assert_close(eigenvalues[-kept:], torch.ones(kept, dtype=torch.float64), atol=1e-4, rtol=0)
    assert eigenvalues[:-kept].abs().max() < 1e-4
    # Without its mean brightness, no patch lies along the constant direction.
    torch.testing.assert_close(whitening.invert(patches).mean(1), torch.zeros(2000), atol=1e-5, rtol=0)


def test_whitened_patches_in_a_file_are_those_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, (first, second) = datasets.generated_images(2, 64, torch.Generator().manual_seed(1)), (torch.Generator() for _ in range(2))
    expected, fitted = datasets.whitened_patches(images, 6, 300, first.manual_seed(5))
    whitening = datasets.save_whitened_patches(tmp_path / "y.npy", images, 6, 300, second.manual_seed(5))
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "y.npy")), expected, rtol=0, atol=0)
    # In parts: the whitening is that of the first one, and so is what is whitened with it later.
    monkeypatch.setattr("pyro_truncated.datasets._ROWS_PER_BLOCK", 300)
    datasets.save_whitened_patches(tmp_path / "y.npy", images, 6, 700, second.manual_seed(5))
    written = torch.from_numpy(np.load(tmp_path / "y.npy"))
    torch.testing.assert_close(written[:300], expected, rtol=0, atol=0)
    later, same = datasets.whitened_patches(images, 6, 300, first, whitening=whitening)
    assert same is whitening
    torch.testing.assert_close(written[300:600], later, rtol=0, atol=0)
    torch.testing.assert_close(whitening.whiten, fitted.whiten, rtol=0, atol=0)


def test_whitened_patches_need_structure(generator: torch.Generator) -> None:
    image = torch.zeros(64, 64)
    image[:8, :8] = torch.rand(8, 8, generator=generator)
    with pytest.raises(ValueError, match="lower `structure`"):
        datasets.whitened_patches([image], 4, 100, generator)


def test_clamp_brightest() -> None:
    values = torch.arange(1.0, 101.0)
    clamped = datasets.clamp_brightest(values, 0.02)
    torch.testing.assert_close(clamped, values.clamp(max=98))
    torch.testing.assert_close(datasets.clamp_brightest(values, 0.0), values)
    with pytest.raises(ValueError, match="share must lie in"):
        datasets.clamp_brightest(values, 1.0)


def test_binarize_draws_pixels_with_their_grey_value(generator: torch.Generator) -> None:
    patch = torch.tensor([[2.0, 3.0, 4.0, 6.0]])
    draws = datasets.binarize(patch.expand(40_000, 4), generator)
    assert set(draws.unique().tolist()) == {0.0, 1.0}
    assert draws[:, 0].sum() == 0
    assert draws[:, 3].min() == 1
    # Five standard deviations: false alarm at a rate of 6e-7 per pixel.
    for pixel, grey in ((1, 0.25), (2, 0.5)):
        assert abs(draws[:, pixel].mean().item() - grey) < 5 * math.sqrt(grey * (1 - grey) / 40_000)
    assert datasets.binarize(torch.full((2, 3), 0.7), generator).sum() == 0


def test_binary_patches(generator: torch.Generator) -> None:
    patches = datasets.binary_patches(datasets.generated_images(1, 64, generator), 6, 50, generator)
    assert patches.shape == (50, 36)
    assert set(patches.unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(("size", "width"), [(4, 1), (9, 2), (5, 5)])
def test_bar_components(size: int, width: int) -> None:
    components = datasets.bar_components(size, width)
    per_orientation = size - width + 1
    assert components.shape == (size * size, 2 * per_orientation)
    expected = []
    for start in range(per_orientation):
        image = torch.zeros(size, size)
        image[start : start + width] = 1
        expected.append(image)
    images = components.mT.reshape(-1, size, size)
    torch.testing.assert_close(images[:per_orientation], torch.stack(expected))
    torch.testing.assert_close(images[per_orientation:], torch.stack(expected).mT)


def test_overlapping_bars_share_half_with_their_neighbours() -> None:
    bars = datasets.overlapping_bars()
    assert bars.data.shape == (400, 81)
    assert bars.components.shape == (81, 16)
    mask = (bars.components > 0).float()
    overlap = mask.mT @ mask
    assert overlap.diagonal().unique().tolist() == [18]
    assert overlap[:8, :8].diagonal(1).unique().tolist() == [9]
    assert overlap[:8, 8:].unique().tolist() == [4]


def test_noisy_or_bars_follow_the_noisy_or(generator: torch.Generator) -> None:
    num, weight, background = 100_000, 0.7, 0.1
    bars = datasets.noisy_or_bars(num, 2, mean_active=1.0, weight=weight, background=background, generator=generator)
    rate = bars.states.double().mean(0)
    # All bounds are five standard deviations: false alarms at a rate of 6e-7 each.
    assert (rate - 0.25).abs().max() < 5 * math.sqrt(0.25 * 0.75 / num)
    code = bars.states.long() @ (2 ** torch.arange(4))
    for state in range(16):
        rows = code == state
        active = bars.states[rows][0].bool()
        expected = 1 - (1 - bars.components[:, active]).prod(1)
        deviation = (expected * (1 - expected) / rows.sum()).sqrt()
        assert ((bars.data[rows].mean(0) - expected).abs() <= 5 * deviation + 1e-6).all()


def test_linear_bars_are_sums_with_noise(generator: torch.Generator) -> None:
    bars = datasets.linear_bars(5000, generator=generator)
    assert bars.data.shape == (5000, 100)
    assert bars.states.shape == (5000, 20)
    # The standard deviation of the estimates is 2 / sqrt(2 * 500000) and sqrt(20 * 3 / 16 / 5000): six of them each, 2e-9.
    residual = bars.data - bars.states.float() @ bars.components.mT
    assert abs(residual.std().item() - 2) < 6 * 2 / math.sqrt(1e6)
    assert abs(bars.states.sum(1).double().mean().item() - 5) < 6 * math.sqrt(20 * 3 / 16 / 5000)
    assert bars.components.unique().tolist() == [0, 10]


def test_bars_are_reproducible() -> None:
    first, second = (datasets.linear_bars(10, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    torch.testing.assert_close(first.data, second.data, rtol=0, atol=0)


def test_bars_refuse_impossible_settings() -> None:
    with pytest.raises(ValueError, match="width must lie in 1"):
        datasets.bar_components(3, 4)
    with pytest.raises(ValueError, match="mean_active must lie in"):
        datasets.linear_bars(5, 2, mean_active=5.0)
    for noise in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="noise must be finite and at least 0"):
            datasets.linear_bars(5, 2, noise=noise)
    with pytest.raises(ValueError, match="weight and background"):
        datasets.noisy_or_bars(5, weight=1.0)


def test_matched_bars(generator: torch.Generator) -> None:
    truth = 10 * datasets.bar_components(4)
    shuffled = truth[:, torch.randperm(8, generator=generator)] + 0.1 * torch.randn(16, 8, generator=generator)
    assert datasets.matched_bars(shuffled, truth) == 8
    assert datasets.matched_bars(torch.cat([truth[:, :3], truth[:, :3]], 1), truth) == 3
    blend = truth[:, [0]] + truth[:, [1]]
    assert datasets.matched_bars(torch.cat([blend, truth[:, 2:]], 1), truth) == 6
    assert datasets.matched_bars(torch.zeros(16, 2), truth) == 0
    with pytest.raises(ValueError, match="same number of rows"):
        datasets.matched_bars(torch.zeros(15, 2), truth)


def test_matched_bars_tell_overlapping_bars_apart() -> None:
    truth = datasets.bar_components(9, 2)
    assert datasets.matched_bars(truth, truth) == 16
    assert datasets.matched_bars((truth[:, :-1] + truth[:, 1:]) / 2, truth) == 0
