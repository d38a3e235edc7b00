"""Restoration: first guesses, denoising and in-painting."""

from __future__ import annotations

import functools
import math

import numpy as np
import pandas as pd
import pyro
import pytest
import torch

from pyro_truncated import AutoTruncated
from pyro_truncated.models import BinarySparseCoding, BinaryVAE, MaximalCauses, MaxSpikeSlabSparseCoding, SpikeSlabSparseCoding
from pyro_truncated.restoration import Pursuit, denoise, inpaint, noise, patch_mixture, restore
from pyro_truncated.restoration.noise import fill_missing, nearly_no_noise, noise_level

QUICK = {"passes": 6, "num_states": 10, "batch_size": 300, "progress": False}


def spike_and_slab(num_observed: int) -> SpikeSlabSparseCoding:
    return SpikeSlabSparseCoding(num_observed, 32, offset=False)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def picture(side: int = 32) -> torch.Tensor:
    """Stripes across stripes: an image that repeats itself."""
    stripes = 60 * (torch.arange(side) % 8 < 4).float()
    return 60 + stripes.unsqueeze(0) + 0.5 * stripes.unsqueeze(1)


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).square().mean().sqrt())


# --- first guesses ---


def test_the_noise_of_a_smooth_image_is_estimated():
    # A relative deviation of 0.02 of the median of 8000 differences has a standard deviation of about 0.013.
    smooth = torch.linspace(0, 10, 64).expand(64, 64)
    assert noise_level(smooth + 3 * torch.randn(64, 64, generator=generator()), 2) == pytest.approx(3.0, rel=0.06)


@pytest.mark.slow
def test_texture_does_not_count_for_noise():
    # Of ten draws the mean is 9.7 and the standard deviation 0.1; the median of differences says 14.
    left = torch.arange(160).expand(160, 160) < 80
    image = torch.where(left, 40.0 * torch.randint(2, (160, 160), generator=generator()), 0.5 * torch.arange(160))
    noisy = image + 10 * torch.randn(160, 160, generator=generator(1))
    assert noise_level(noisy, 2) == pytest.approx(10, rel=0.08)
    coloured = torch.stack([noisy, noisy.mT, 20 + noisy], -1)
    assert noise_level(coloured, 2) == pytest.approx(10, rel=0.08)
    coloured[40:50] = math.nan
    assert noise_level(coloured, 2) == pytest.approx(10, rel=0.08)


@pytest.mark.slow
def test_of_a_large_image_some_windows_say_how_much_noise_there_is(monkeypatch):
    image = 0.2 * torch.arange(300) + 10 * torch.randn(300, 300, generator=generator())
    every = noise_level(image, 2)
    monkeypatch.setattr(noise, "_MAX_WINDOWS", 2**14)
    seen = noise.whole_windows(image, 2)
    assert 2**13 < len(seen) <= 2**14
    # Of ten draws it is 1.8 to 2.2 % below that of all windows.
    assert noise_level(image, 2) == pytest.approx(every, rel=0.04)


def test_missing_entries_are_filled_from_near_to_far():
    array = torch.tensor([1.0, math.nan, 3.0, math.nan, math.nan, math.nan])
    torch.testing.assert_close(fill_missing(array, 1), torch.tensor([1.0, 2.0, 3.0, 3.0, 3.0, 3.0]))


def test_pursuit_says_what_it_is_for():
    def two_sites(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", pyro.distributions.Bernoulli(0.5).expand([5]).to_event(1))
            for name in ("a", "b"):
                pyro.sample(name, pyro.distributions.Normal(s @ torch.ones(5, 6), 1.0).to_event(1), obs=y)

    y = torch.randn(4, 6, generator=generator())
    guide = AutoTruncated(two_sites, num_states=3)
    with pytest.raises(ValueError, match=r"is for one observed site .* got sites \{'a': \(4, 6\), 'b': \(4, 6\)\} and 5 latents"):
        guide.search_(Pursuit(BinarySparseCoding(6, 5)), guide.make_scorer(y))
    model = BinarySparseCoding(6, 5)
    guide = AutoTruncated(model, num_states=3)
    with pytest.raises(ValueError, match=r"by a dictionary \(6, 4\) is for .* and 5 latents"):
        guide.search_(Pursuit(BinarySparseCoding(6, 4)), guide.make_scorer(y))
    with pytest.raises(TypeError, match=r"model must have a dictionary, weight \(D, H\); got BinaryVAE"):
        Pursuit(BinaryVAE(6, 5))


def test_pursuit_proposes_the_path_of_a_loop():
    torch.manual_seed(0)
    model, y = BinarySparseCoding(6, 5), torch.randn(4, 6, generator=generator())
    proposed = []

    class Recording(Pursuit):
        def propose(self, batch):
            proposed.append(super().propose(batch))
            return proposed[-1]

    guide = AutoTruncated(model, num_states=3)
    guide.search_(Recording(model, 3), guide.make_scorer(y))
    directions = model.weight.detach() / model.weight.detach().norm(dim=0)
    for row, states in zip(y, proposed[0].states(), strict=True):
        residual, path = row.clone(), torch.zeros(5, dtype=states.dtype)
        for step in range(3):
            similarity = residual @ directions
            best = int(similarity.abs().argmax())
            path[best] = 1
            residual = residual - similarity[best] * directions[:, best]
            assert torch.equal(states[step], path)


# --- restoration ---


@pytest.mark.slow
def test_most_of_the_noise_goes_and_its_level_is_learned():
    truth = picture()
    damaged = truth.double() + 20 * torch.randn(truth.shape, generator=generator(1))
    restored = denoise(damaged, generator=generator(2), progress=False)
    assert error(restored.image, truth) < 0.4 * error(damaged, truth)
    assert restored.noise == pytest.approx(20, rel=0.2)
    assert len(restored.guide.population()) == len(restored.patches)
    # In another unit the same happens.
    small = denoise(damaged / 256, generator=generator(2), progress=False)
    torch.testing.assert_close(256 * small.image, restored.image, rtol=1e-6, atol=1e-6)
    assert 256 * small.noise == pytest.approx(restored.noise)


@pytest.mark.slow
@pytest.mark.parametrize("share_missing", [0.0, 0.1])
def test_entries_are_averaged_by_the_inverse_of_their_expected_squared_errors(monkeypatch, share_missing):
    monkeypatch.setattr(restore, "find_consensus", functools.partial(patch_mixture.find_consensus, steps=0))
    monkeypatch.setattr(restore, "average_groups", lambda image, estimate, *others: estimate)
    damaged = picture(24).double() + 20 * torch.randn(24, 24, generator=generator(1))
    damaged = torch.where(torch.rand(24, 24, generator=generator(2)) < share_missing, math.nan, damaged)
    restored = denoise(damaged, side=6, rounds=1, generator=generator(2), progress=False)
    mixture, patches, mean = restored.model, restored.patches, damaged.nanmean()
    y = patches.extract(damaged - mean)
    means, errors = mixture.posterior_means(restored.guide.population(), y)
    assert float(errors.std(1).mean()) > 0.1 * float(errors.mean())  # the entries of a patch differ
    weighed = errors.mean(1, keepdim=True) if share_missing else errors
    expected = patches.assemble(means, 1 / (weighed + 0.03 * mixture.scale.square())) + mean
    torch.testing.assert_close(restored.image, expected)
    seen = ~y.isnan()
    assert restored.noise**2 == pytest.approx(float(((y - means).square() + errors)[seen].mean()))


@pytest.mark.slow
def test_another_model_learns_the_noise_too():
    truth = picture()
    damaged = truth.double() + 20 * torch.randn(truth.shape, generator=generator(1))
    pyro.set_rng_seed(0)
    restored = denoise(damaged, model=lambda size: spike_and_slab(size).double(), side=6, generator=generator(2), **QUICK)
    assert error(restored.image, truth) < 0.75 * error(damaged, truth)
    assert restored.noise == pytest.approx(20, rel=0.2)
    assert restored.free_energies[-1] > restored.free_energies[0]
    assert len(restored.guide.population()) == len(restored.patches)


@pytest.mark.nightly(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "passes"),
    [
        (lambda size: MaximalCauses(size, 16), 8),
        (lambda size: BinarySparseCoding(size, 16), 8),
        (lambda size: BinaryVAE(size, 8, hidden=(16,)), 100),
        (SpikeSlabSparseCoding(16, 8, covariance="full"), 8),
    ],
    ids=["maximal", "binary", "network", "made already"],
)
def test_any_model_of_patches_restores(make, passes):
    truth = picture(16)
    damaged = truth + 20 * torch.randn(truth.shape, generator=generator(1))
    pyro.set_rng_seed(0)
    restored = denoise(damaged, model=make, side=4, generator=generator(2), **{**QUICK, "passes": passes, "batch_size": 60})
    assert error(restored.image, truth) < error(damaged, truth)


@pytest.mark.parametrize(("shape", "entries", "side"), [((9, 9), 16, 4), ((9, 8, 3), 27, 3), ((40,), 12, 12)])
def test_a_model_that_is_made_already_says_the_side_of_its_patches(shape, entries, side):
    damaged = torch.randn(shape, generator=generator(1))
    restored = denoise(damaged, model=BinarySparseCoding(entries, 4), passes=1, num_states=3, progress=False)
    assert set(restored.patches.size) == {side}
    with pytest.raises(ValueError, match="num_observed=11"):  # no window of equal sides has eleven entries: the side is that of any model
        denoise(damaged if len(shape) > 1 else damaged[:10], model=BinarySparseCoding(11, 4), passes=1, progress=False)


def test_models_of_other_patches_and_without_reconstructions_are_refused():
    with pytest.raises(ValueError, match="patches of 16 entries"):
        denoise(picture(), model=BinarySparseCoding(9, 4), side=4)
    with pytest.raises(TypeError, match="reconstruct"):
        denoise(picture(), model=torch.nn.Linear(16, 4), side=4)
    with pytest.raises(TypeError, match="draws"):
        denoise(picture(), model=MaxSpikeSlabSparseCoding(16, 4), side=4)


@pytest.mark.slow
@pytest.mark.parametrize("model", [None, spike_and_slab], ids=["mixtures", "spike and slab"])
def test_what_is_missing_is_filled_in_better_than_by_neighbours_and_masks_are_nan(model):
    truth = picture()
    damaged = truth + 2 * torch.randn(truth.shape, generator=generator(1))
    mask = torch.rand(truth.shape, generator=generator(2)) < 0.6
    results = []
    for arguments in ((damaged, mask), (torch.where(mask, damaged, math.nan),)):
        pyro.set_rng_seed(0)
        results.append(inpaint(*arguments, noise=2.0, model=model, side=6, generator=generator(2), **QUICK).image)
    torch.testing.assert_close(*results)
    smoothed = fill_missing(torch.where(mask, damaged, math.nan), 2)
    assert error(results[0][~mask], truth[~mask]) < error(smoothed[~mask], truth[~mask])


@pytest.mark.slow
def test_without_noise_what_is_seen_stays_and_its_type():
    image = picture(16).double() + 3 * torch.randn(16, 16, dtype=torch.float64, generator=generator(1))
    mask = torch.rand(16, 16, generator=generator(2)) < 0.7
    quick = {"side": 4, "rounds": 1, "generator": generator(2), "progress": False}
    little = nearly_no_noise(torch.where(mask, image, math.nan), 2)
    kept, estimated = inpaint(image, mask, **quick).image, inpaint(image, mask, little, **{**quick, "generator": generator(2)}).image
    assert torch.equal(kept[mask], image[mask])
    assert torch.equal(kept[~mask], estimated[~mask])
    assert not torch.equal(estimated[mask], image[mask])


@pytest.mark.slow
def test_half_precision_becomes_single():
    image = torch.randn(8, 8, generator=generator())
    found = denoise(image.half(), side=3, rounds=1, generator=generator(), progress=False).image
    torch.testing.assert_close(found, denoise(image.half().float(), side=3, rounds=1, generator=generator(), progress=False).image)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(40,), (16, 16, 3), (8, 8, 8)], ids=["signal", "colour", "volume"])
def test_signals_colours_and_volumes_keep_their_shape_and_type(shape):
    pyro.set_rng_seed(0)
    array = np.random.default_rng(0).normal(size=shape)
    restored = denoise(array, side=4, stride=2, progress=False)
    assert restored.image.shape == shape
    assert restored.image.dtype == torch.float64
    assert restored.patches.channels == (3 if shape[-1] == 3 else None)


@pytest.mark.parametrize(
    ("image", "options", "named"),
    [
        (torch.full((8, 8), math.nan), {}, "an observed entry; got float32 of shape .*64 NaN"),
        (torch.full((8, 8), math.inf), {}, "infinite"),
        (torch.tensor(3.0), {}, "single number"),
        (1e200 * torch.randn(8, 8, dtype=torch.float64), {}, "too large"),
        (1e-170 * torch.randn(8, 8, dtype=torch.float64), {}, "varies by so little"),
        (torch.randn(8, 8), {"channels": 3}, "channels"),
        (torch.randn(8), {"channels": True}, "channels"),
        (torch.randn(8, 8), {"noise": 0.0}, "noise"),
        (torch.randn(8, 8), {"noise": True}, "noise .* got True"),
        (torch.randn(8, 9), {"side": 9}, "side must be at most 8, the shortest side of the image; got 9"),
        (torch.randn(40, 2), {"side": 41}, "side must be at most 40"),
        (torch.randn(8, 8), {"passes": 0}, "passes"),
        (torch.randn(8, 8), {"rounds": 0}, "rounds"),
        (torch.randn(8, 8), {"num_components": 0}, "num_components"),
    ],
)
def test_what_cannot_be_restored_is_refused(image, options, named):
    with pytest.raises(ValueError, match=named):
        denoise(image, **options)
    with pytest.raises(ValueError, match="noise must be a positive"):
        inpaint(torch.randn(8, 8), noise=-1.0)
    with pytest.raises(ValueError, match="mask"):
        inpaint(torch.randn(8, 8), torch.ones(3, 3))


@pytest.mark.parametrize(
    ("shape", "mask_shape"),
    [((8, 9), (8, 9, 1)), ((8, 9), (1, 8, 9)), ((1, 3, 8, 9), (8, 9)), ((1, 3, 8, 9), (1, 1, 8, 9)), ((9,), (9, 1))],
)
def test_axes_of_one_entry_count_in_no_mask(shape, mask_shape):
    image, seen = torch.randn(shape), torch.ones(mask_shape, dtype=torch.bool)
    seen.flatten()[3] = False
    found = inpaint(image, seen, side=3, rounds=1, progress=False).image
    assert found.shape == shape
    assert int((found != image).sum()) == image.numel() // seen.numel()


def test_masks_that_fit_several_axes_are_refused_unless_channels_name_one():
    image, mask = torch.randn(6, 6, 6, generator=generator()), torch.ones(6, 6, dtype=torch.bool)
    mask[1] = False
    with pytest.raises(ValueError, match=r"along one axis: of this shape pixels lie along several; got \(6, 6\)"):
        inpaint(image, mask, side=2, rounds=1, progress=False)
    for channels, hidden in (("first", (slice(None), 1)), ("last", (1,))):
        restored = inpaint(image, mask, side=2, rounds=1, channels=channels, progress=False).image
        changed = restored != image
        assert bool(changed[hidden].all())
        assert int(changed.sum()) == changed[hidden].numel()


@pytest.mark.parametrize("mask", [None, torch.arange(64).reshape(8, 8) != 9])
def test_images_that_require_gradients_are_numbers(mask):
    image = torch.randn(8, 8)
    options = {"side": 3, "rounds": 1, "progress": False}
    found = [
        inpaint(one, mask, 0.5, generator=torch.Generator().manual_seed(0), **options) for one in (image, image.clone().requires_grad_())
    ]
    torch.testing.assert_close(found[0].image, found[1].image)


@pytest.mark.parametrize("unit", [1e-20, 1e-30, 1e25])
def test_units_beyond_single_precision_are_restored_in_double(unit):
    image = torch.randn(12, 12).double()
    options = {"side": 3, "rounds": 1, "progress": False}
    arrays = (image, (unit * image).float())
    found = [denoise(array, generator=torch.Generator().manual_seed(0), **options).image for array in arrays]
    torch.testing.assert_close(found[1] / unit, found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("mask", "named"),
    [
        (np.array([[0, 3, 252], [255, 255, 255], [255, 255, 255]], np.uint8), "4 numbers from 0 to 255. Compare them, as by mask > 127.5"),
        (np.array([[1, 2, 2]] * 3), "2 numbers from 1 to 2"),
        (np.array([[1.0, np.nan, 1.0]] * 3), "NaN"),
        (np.ma.masked_equal(np.array([[1, 0, 1]] * 3), 0), "NaN"),
    ],
)
def test_masks_that_do_not_say_what_is_seen_are_refused(mask, named):
    with pytest.raises(ValueError, match=named):
        inpaint(torch.randn(3, 3), mask)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(12, 14), (12, 14, 3), (60,)])
def test_constant_arrays_stay_what_they_are(shape):
    image = torch.full(shape, 128.1)
    torch.testing.assert_close(denoise(image, rounds=1).image, image)


def test_holes_in_constant_arrays_are_filled_in_though_means_of_these_are_rounded():
    image = torch.full((24, 24), 1e10 / 3)
    holed = image.masked_fill(torch.rand(24, 24, generator=generator()) < 0.1, math.nan)
    torch.testing.assert_close(inpaint(holed, side=4, rounds=1, progress=False).image, image)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32, torch.uint64])
def test_integers_keep_their_digits(dtype):
    small = (100 + 20 * torch.randn(12, 12, generator=torch.Generator().manual_seed(0))).round().long()
    found = [denoise((small + offset).to(dtype), side=4, rounds=1, progress=False).image.double() - offset for offset in (0, 2**31 - 1000)]
    torch.testing.assert_close(*found, rtol=0.0, atol=0.1)


def test_masks_that_mark_what_is_missing_are_named():
    image = torch.arange(64.0).view(8, 8)
    seen = torch.ones(8, 8, dtype=torch.bool)
    seen[2:4, 2:4] = False
    quick = {"side": 3, "rounds": 1, "passes": 1, "progress": False}
    with pytest.warns(UserWarning, match="hides 94% of the numbers.*pass mask == 0"):
        inpaint(image, ~seen, **quick)
    inpaint(image, seen, **quick)
    # Where the rest is not there, the mask is right.
    inpaint(image.where(~seen, math.nan), ~seen, **quick)


@pytest.mark.parametrize("mask", [None, torch.ones(12, 12, dtype=torch.bool)])
def test_what_has_no_hole_is_told(mask):
    image = torch.randn(12, 12, generator=torch.Generator().manual_seed(0))
    image[3] = -9999.0
    with pytest.warns(UserWarning, match="nothing is missing, so nothing is filled in"):
        assert torch.equal(inpaint(image, mask, side=4, rounds=1, progress=False).image, image)


def test_restored_arrays_are_tables_of_pandas():
    restored = denoise(torch.randn(12, 14, generator=torch.Generator().manual_seed(0)), side=4, rounds=1, progress=False)
    assert pd.DataFrame(restored).to_numpy().tolist() == restored.image.tolist()
    assert len(restored) == 12
