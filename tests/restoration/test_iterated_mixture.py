"""Rounds of restoration: how many components each has, and what is averaged."""

from __future__ import annotations

import math

import pytest
import torch

from pyro_truncated.restoration import denoise, inpaint, patch_mixture, restore
from pyro_truncated.restoration.noise import nearly_no_noise
from pyro_truncated.utils.console import ProgressBar


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.nightly(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "number", "expected"),
    [
        ((20, 20), 1, math.ceil(17**2 / 120)),
        ((20, 20), 2, math.ceil(2 * 17**2 / 120)),
        ((20, 20), 3, math.ceil(2 * 17**2 / 120)),
        ((12, 12, 3), 1, math.ceil(9**2 / (20 * 48**0.5))),
        ((12, 12, 3), 3, math.ceil(4 * 9**2 / (20 * 48**0.5))),
        ((12, 12, 3), 4, math.ceil(4 * 9**2 / (20 * 48**0.5))),
    ],
)
def test_components_double_once_and_with_channels_twice(shape, number, expected):
    image = 20 * torch.randn(shape, generator=generator())
    assert denoise(image, side=4, rounds=number, generator=generator(1), progress=False).model.num_components == expected


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize(("number", "share"), [(1, 0.4), (2, 0.4), (3, 1.2), (4, 1.2), (5, 3.0), (6, 3.0)])
@pytest.mark.parametrize(("shape", "first"), [((20, 20), 17**2 / 120), ((12, 12, 3), 9**2 / (20 * 48**0.5))])
def test_in_painting_has_few_components_first(shape, first, number, share):
    image = 20 * torch.randn(shape, generator=generator())
    image[2, 3] = math.nan
    assert inpaint(image, side=4, rounds=number, generator=generator(1), progress=False).model.num_components == math.ceil(share * first)


@pytest.mark.slow
def test_noise_stays_as_it_is_told_if_there_is_hardly_any(monkeypatch):
    learned = recorded(monkeypatch, "_fit_mixture")
    image = noisy((16, 16), 8.0)
    image[3:5, 6] = math.nan
    little = nearly_no_noise(image, 2)
    assert little == pytest.approx(0.04 * image[~image.isnan()].std(correction=0).item())
    for noise in (little, 8.0, None):
        denoise(image, noise=noise, rounds=2, side=4, generator=generator(1), progress=False)
    rounds_of = [learned[start : start + 2] for start in (0, 2, 4)]
    (first, then), *others = [[arguments[4] for arguments, _ in found] for found in rounds_of]
    assert first == then == little
    for (first, then), found in zip(others, rounds_of[1:], strict=True):
        assert then == 0.5 * (first + found[0][1].noise)


def recorded(monkeypatch, name):
    """What a function of the rounds is called with and what it returns."""
    calls, function = [], getattr(patch_mixture, name)

    def recording(*arguments):
        calls.append((arguments, function(*arguments)))
        return calls[-1][1]

    monkeypatch.setattr(patch_mixture, name, recording)
    return calls


def noisy(shape, scale=20.0):
    ramp = torch.linspace(0, 100, shape[1], dtype=torch.float64).unsqueeze(1).expand(*shape[:2], shape[2] if len(shape) == 3 else 1)
    return ramp.reshape(shape) + scale * torch.randn(shape, generator=generator())


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "options", "averaged"),
    [(1, {}, 1), (2, {}, 1), (3, {}, 2), (3, {"num_components": 3}, 2), (1, {"num_components": 3}, 1)],
)
def test_where_entries_are_missing_rounds_are_averaged_if_the_last_two_have_as_many_components(monkeypatch, number, options, averaged):
    learned = recorded(monkeypatch, "_fit_mixture")
    image = noisy((16, 16), 8.0)
    image[3:5, 6] = math.nan
    restored = denoise(image, noise=8.0, rounds=number, generator=generator(1), progress=False, **options)
    sides = len(learned) // number
    assert sides > 1
    arrays = [found.array for _, found in learned]
    torch.testing.assert_close(restored.image, torch.stack(arrays[-averaged * sides :]).mean(0) + image.nanmean())


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "scale", "number"), [((16, 16), 20.0, 1), ((16, 16), 8.0, 2), ((10, 10, 3), 8.0, 1)], ids=["one round", "two", "channels"]
)
def test_patches_of_the_last_round_agree_on_an_array(monkeypatch, shape, scale, number):
    monkeypatch.setattr(restore, "average_groups", lambda image, estimate, *others: estimate)
    learned, steps = recorded(monkeypatch, "_fit_mixture"), recorded(monkeypatch, "_apply_mixture")
    image = noisy(shape, scale)
    mean = image.mean((0, 1)) if image.dim() == 3 else image.mean()
    restored = denoise(image, noise=scale, rounds=number, generator=generator(1), progress=False)
    sides = len(learned) // number
    assert sides > 1
    assert len(steps) == 2 * sides
    estimate = torch.stack([found.array for _, found in learned[-sides:]]).mean(0)
    for step in (steps[:sides], steps[sides:]):
        for (arguments, _), (_, of_side) in zip(step, learned[-sides:], strict=True):
            torch.testing.assert_close(arguments[0], 0.7 * estimate + 0.3 * (image - mean))
            assert arguments[1] is of_side
        estimate = torch.stack([array for _, array in step]).mean(0)
    torch.testing.assert_close(restored.image, estimate + mean)


@pytest.mark.slow
def test_agreement_takes_posterior_means_at_half_the_noise(monkeypatch):
    steps = recorded(monkeypatch, "_apply_mixture")
    image = noisy((14, 14))
    restored = denoise(image, noise=20.0, side=4, num_components=5, rounds=1, generator=generator(1), progress=False)
    (cut, (patches, _, expected, _, mixture, guide), sharper), array = steps[-1]
    assert mixture is restored.model
    assert guide is restored.guide
    y, places, scale = patches.extract(cut), patches.places().double(), 0.5 * mixture.scale
    assert sharper.scale == scale
    log_joints, means, variances = [], [], []
    for k in range(5):
        prior = mixture.factor[k] @ mixture.factor[k].mT
        noisy_part = prior + scale**2 * torch.eye(16, dtype=torch.float64)
        gain = torch.linalg.solve(noisy_part, prior).mT
        place = torch.distributions.Normal(mixture.places[k], mixture.spreads[k]).log_prob(places).sum(1)
        of_patch = torch.distributions.MultivariateNormal(mixture.loc[k], noisy_part).log_prob(y)
        log_joints.append(mixture.weights[k].log() + of_patch + 0.5 * place)
        means.append(mixture.loc[k] + (y - mixture.loc[k]) @ gain.mT)
        variances.append((prior - gain @ prior).diagonal().expand_as(y))
    best, kept = torch.stack(log_joints, 1).topk(3, 1)
    shares = torch.zeros(len(y), 5, dtype=torch.float64).scatter(1, kept, best.softmax(1)).mT.unsqueeze(-1)
    mean = (shares * torch.stack(means)).sum(0)
    errors = (shares * (torch.stack(variances) + (torch.stack(means) - mean).square())).sum(0)
    torch.testing.assert_close(array, patches.assemble(mean, 1 / (errors + 0.03 * scale**2)))
    _, errors = mixture.posterior_means(guide.population(), patches.extract(image - image.mean()))
    torch.testing.assert_close(expected, patches.assemble(errors, 1 / (errors + 0.03 * mixture.scale**2)))


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize(("shape", "descriptions"), [((12, 13), ["restoring"]), ((104, 104), ["choosing sides", "restoring"])])
def test_bars_are_full_when_the_work_is_done(monkeypatch, shape, descriptions):
    bars = []

    class CountingBar(ProgressBar):
        """A bar that is not shown, which would not count."""

        def update(self, number):
            self.n += number

    def counting(progress, **options):
        bars.append(CountingBar(disable=True, **options))
        bars[-1].planned = (options["desc"], options["total"])
        return bars[-1]

    monkeypatch.setattr(patch_mixture, "progress_bar", counting)
    ramp = torch.arange(float(shape[1])).expand(shape)
    denoise(ramp + torch.randn(shape, generator=generator()), rounds=2, stride=4, generator=generator(1))
    assert [bar.planned for bar in bars] == [(description, bar.n) for description, bar in zip(descriptions, bars, strict=True)]
