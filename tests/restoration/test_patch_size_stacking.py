"""Sides of patches that suit an image: what the split of the noise says, and when it is asked."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from scipy.optimize import minimize
from torch.nn import functional as F

from pyro_truncated.restoration import Patches, denoise, nonlocal_groups, patch_size_stacking, restore
from pyro_truncated.restoration.patch_size_stacking import (
    array_weights,
    first_noise,
    noise_in_flat_places,
    oversmoothing_share,
    plausible_share,
    restore_with_stacked_sides,
    split,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_two_arrays_have_independent_noise_of_known_variances():
    y = 3 * torch.randn(40_000, dtype=torch.float64, generator=generator())
    first, second = split(y, 3.0, generator(1))
    # Four standard errors, of variances and of a covariance of normal numbers.
    for found, deviation in ((first, first_noise(3.0)), (second, 3 * 5**0.5)):
        assert float(found.square().mean()) == pytest.approx(deviation**2, rel=4 * (2 / len(y)) ** 0.5)
    assert abs(float((first * second).mean())) < 4 * first_noise(3.0) * 3 * 5**0.5 / len(y) ** 0.5
    torch.testing.assert_close(first + second / 4, 1.25 * y)


def test_noise_of_the_same_seed_is_other_noise():
    noise = torch.randn(40_000, dtype=torch.float64, generator=generator(1))
    first, _ = split(noise, 1.0, generator(1))
    # The correlation of independent numbers has the standard error 0.005.
    assert abs(float((noise * (first - noise)).mean())) < 4 * 0.5 * 0.005


class Elsewhere:
    """Stands for a generator on a device, which draws nowhere else."""

    device = torch.device("meta")


def test_generators_on_devices_draw_there(monkeypatch):
    def drawing(draw, *args, generator=None, device=None, **options):
        if isinstance(generator, Elsewhere):
            assert device == generator.device
            generator, device = None, "cpu"
        return draw(*args, generator=generator, device=device, **options)

    for name in ("randint", "randperm"):
        monkeypatch.setattr(torch, name, functools.partial(drawing, getattr(torch, name)))
    image = torch.arange(144.0).view(12, 12)
    assert split(image, 1.0, Elsewhere())[0].shape == image.shape
    assert denoise(image, 5.0, side=4, num_components=3, rounds=1, generator=Elsewhere(), progress=False).image.shape == image.shape


def test_the_distance_from_the_second_array_is_the_error_and_a_constant():
    truth = 10 * torch.sin(torch.arange(500, dtype=torch.float64) / 4)
    differences = []
    for seed in range(100):
        first, second = split(truth + 2 * torch.randn(500, dtype=torch.float64, generator=generator(seed)), 2.0, generator(1000 + seed))
        restored = first.unfold(0, 5, 1).mean(1)
        distance, error = ((restored - other[2:-2]).square().mean() for other in (second, truth))
        differences.append(distance - error - 5 * 2**2)
    difference = torch.stack(differences)
    assert abs(float(difference.mean())) < 4 * float(difference.std()) / 10


def objective(weights, arrays, held_out, noise):
    distance = (held_out - torch.tensordot(weights, arrays, 1)).square().sum() / (5 * noise**2)
    return float(distance + (weights - 1 / len(weights)).square().sum() / 0.2**2)


@pytest.mark.parametrize("seed", range(3))
def test_no_weights_are_more_probable(seed):
    arrays = torch.randn(4, 30, dtype=torch.float64, generator=generator(seed))
    held_out = arrays[0] + 0.7 * torch.randn(30, dtype=torch.float64, generator=generator(10 + seed))
    weights = array_weights(arrays, held_out, 0.3)
    assert float(weights.min()) >= 0
    assert float(weights.sum()) == pytest.approx(1)
    least = minimize(
        lambda w: objective(torch.as_tensor(w), arrays, held_out, 0.3),
        [0.25] * 4,
        bounds=[(0, 1)] * 4,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-12},
    )
    assert objective(weights, arrays, held_out, 0.3) <= least.fun + 1e-9


def test_few_data_leave_the_weights_equal_and_many_find_the_right_array():
    truth, wrong = torch.zeros(20_000, dtype=torch.float64), torch.ones(20_000, dtype=torch.float64)
    held_out = 5 * torch.randn(20_000, dtype=torch.float64, generator=generator())
    arrays = torch.stack([truth, wrong])
    few = array_weights(arrays[:, :10], held_out[:10], 5.0)
    torch.testing.assert_close(few, torch.full_like(few, 0.5), atol=0.05, rtol=0)
    # The standard deviation of the weight is 5**0.5 * 5 / 20000**0.5 = 0.08, of what the data alone say.
    assert float(array_weights(arrays, held_out, 5.0)[0]) > 0.7


def chosen(image, noise=10.0):
    """How large the patches are of those of sides 3 and 10 that an image is restored with, from the largest weight on."""
    weights, function = [], patch_size_stacking.array_weights

    def recording(*arguments):
        weights.append(function(*arguments))
        return weights[-1]

    options = {"num_components": 12, "generator": generator(6), "progress": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patch_size_stacking, "array_weights", recording)
        noisy = image + noise * torch.randn(image.shape, generator=generator(5))
        usual, candidates = [Patches(image.shape, 6)], [Patches(image.shape, 3), Patches(image.shape, 10)]
        learned, _ = restore_with_stacked_sides(noisy - 60, noise, usual, candidates, 2, is_noise_known=False, **options)
    assert [of_side.patches for of_side in learned] == [side for side, weight in zip(candidates, weights[0], strict=True) if weight >= 0.05]
    return weights[0].tolist()


@pytest.mark.nightly
def test_dots_want_small_patches_and_waves_large_ones():
    dots = 60 + 80 * (torch.rand(48, 48, generator=generator(3)) < 0.06).float()
    place = torch.arange(48)
    waves = 60 + 12 * (torch.sin(0.7 * place).unsqueeze(0) + torch.cos(0.5 * place).unsqueeze(1))
    small, large = chosen(dots)
    assert small > 0.6 > large
    small, large = chosen(waves)
    assert large > 0.6 > small


@pytest.mark.slow
def test_sides_are_chosen_for_large_grey_images_with_little_noise_alone(monkeypatch):
    asked = []

    class StoppedError(Exception):
        pass

    def stopping(*arguments, **options):
        raise StoppedError

    def asking(*arguments, **options):
        asked.append((arguments, options["is_noise_known"]))
        raise StoppedError

    monkeypatch.setattr(restore, "restore_with_stacked_sides", asking)
    monkeypatch.setattr(restore, "run_rounds", stopping)
    ramp = torch.linspace(0, 100, 104).expand(104, 104)
    holes = ramp.clone()
    holes[3, 4] = math.nan
    refused = [
        (ramp[:, :99], {}),
        (holes, {}),
        (ramp, {"noise": 20.0}),
        (ramp, {"rounds": 1}),
        (ramp, {"side": 6}),
        (torch.stack([ramp, ramp.mT, ramp], -1), {}),
    ]
    for image, options in [*refused, (ramp, {}), (ramp, {"stride": 5}), (ramp, {"noise": None})]:
        with pytest.raises(StoppedError):
            denoise(image, **{"noise": 5.0, **options}, progress=False)
    sides = [[windows.size[0] for windows in arguments[3]] for arguments, _ in asked]
    assert sides == [[4, 5, 6, 8, 10, 12], [5, 6, 8, 10, 12], [4, 5, 6, 8, 10, 12]]
    assert [is_noise_known for _, is_noise_known in asked] == [True, True, False]


@pytest.mark.nightly
def test_seeds_reproduce_the_choice(monkeypatch):
    monkeypatch.setattr(restore, "allows_stacking", lambda *arguments: True)
    monkeypatch.setattr(restore, "_CANDIDATES", (4, 6))
    image = torch.linspace(0, 100, 20).expand(20, 20) + 5 * torch.randn(20, 20, generator=generator())
    images = [denoise(image, 5.0, num_components=3, rounds=2, generator=generator(1), progress=False).image for _ in range(2)]
    assert torch.equal(*images)


@pytest.mark.parametrize("kept", [0.0, 0.1])
def test_the_share_given_back_brings_smoothed_waves_nearest_to_the_truth(kept):
    # The best share is 0.07 for the mean of seven neighbours, and -0.03 if a tenth of the noisy array is kept. It is found with a standard
    # deviation of 0.005 in ten draws; four of them are allowed for.
    truth = 30 * torch.sin(torch.arange(100_000, dtype=torch.float64) / 4)
    noisy = truth + 10 * torch.randn(len(truth), dtype=torch.float64, generator=generator())
    noisier, _ = split(noisy, 10.0, generator(1))
    smooth, from_noisier = (torch.lerp(F.pad(array, (3, 3)).unfold(0, 7, 1).mean(1), array, kept) for array in (noisy, noisier))
    rest = noisy - smooth
    best = float(((truth - smooth) * rest).mean() / rest.square().mean())
    assert oversmoothing_share(noisy, smooth, noisier, from_noisier, 10.0) == pytest.approx(best, abs=0.02)
    assert best < 0 if kept else best > 0.05


@pytest.mark.parametrize(("noise", "share"), [(0.1, 0.0), (0.9, 0.0), (0.98, 1 - 0.98**2), (1.05, 1 - 1.05**2), (1.1, 0.0), (5.0, 0.0)])
def test_a_wrong_noise_gives_nothing_back(noise, share):
    # What was taken off has a mean square of 0.9, and a tenth of the noise is followed: of noise of variance one nothing was taken too
    # much.
    image = torch.randn(200, dtype=torch.float64, generator=generator())
    image /= image.square().mean().sqrt()
    restored, more = (1 - 0.9**0.5) * image, torch.randn(200, dtype=torch.float64, generator=generator(1))
    assert oversmoothing_share(image, restored, image + more, restored + 0.1 * more, noise) == pytest.approx(share, abs=1e-6)
    assert oversmoothing_share(image, image, image + more, image + more, noise) == 0.0  # nothing was taken off


def test_the_noise_is_read_off_where_the_image_is_flat():
    # Rows of one value each, averaged over 100 entries: errors of 0.01 of the noise's variance. Four standard errors of the level are 0.02
    # of it, and 0.045 of a fifth of the entries.
    noisy = 50 * torch.randn(200, 1, generator=generator(1)) + 10 * torch.randn(200, 100, generator=generator())
    rest, errors = noisy - noisy.mean(1, keepdim=True), torch.full(noisy.shape, 1.0)
    assert noise_in_flat_places(rest, errors, 12.0) == pytest.approx(10, rel=0.02)
    errors[40:] = 9.0
    assert noise_in_flat_places(rest, errors, 12.0) == pytest.approx(10, rel=0.045)
    errors[39] = 9.0
    assert noise_in_flat_places(rest, errors, 12.0) is None


def test_no_more_is_given_back_than_is_expected_to_be_wrong():
    errors = torch.tensor([2.0, 6.0])  # 4 of 100 in the mean: 0.03 can be plausible_share
    assert [plausible_share(share, errors, 10.0) for share in (-0.1, 0.0, 0.029, 0.031)] == [-0.1, 0.0, 0.029, 0.0]


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "flat", "most"),
    [(5.0, None, 0.0), (None, 6.0, math.inf), (None, 6.0, 0.0), (None, None, math.inf)],
    ids=["told", "flat", "flat, too much", "neither"],
)
def test_if_the_noise_is_known_a_share_of_what_was_taken_off_is_given_back(monkeypatch, noise, flat, most):
    last, levels = [], []

    def giving(image, restored, *others):
        levels.append(others[-1])
        return 0.05

    def averaging(*arguments):
        last.append(nonlocal_groups.average_groups(*arguments))
        return last[-1]

    for module, name, value in [
        (restore, "allows_stacking", lambda *arguments: True),
        (restore, "_CANDIDATES", (4, 6)),
        (restore, "noise_levels", lambda *arguments: 5.0),
        (patch_size_stacking, "plausible_share", functools.partial(plausible_share, most=most)),
        (patch_size_stacking, "average_groups", averaging),
        (patch_size_stacking, "noise_in_flat_places", lambda *arguments: flat),
        (patch_size_stacking, "oversmoothing_share", giving),
    ]:
        monkeypatch.setattr(module, name, value)
    image = torch.linspace(0, 100, 20).expand(20, 20) + 5 * torch.randn(20, 20, generator=generator())
    restored = denoise(image, noise, num_components=3, rounds=2, generator=generator(1), progress=False).image
    share = 0.05 if noise or (flat and most) else 0.0
    torch.testing.assert_close(restored, (1 - share) * (last[-1] + image.mean()) + share * image)
    assert levels == [level for level in (noise or flat,) if level]
