"""What is missing is predicted from covariances by distance, as loops over pairs and conditional normal distributions say."""

import itertools
import math

import pytest
import torch
from sklearn.datasets import load_sample_image

from pyro_truncated.restoration import Patches, denoise, inpaint, nonlocal_groups
from pyro_truncated.restoration.noise import fill_missing, nearly_no_noise, smooth_image
from pyro_truncated.restoration.nonlocal_groups import predict_missing


def generator(seed):
    return torch.Generator().manual_seed(seed)


def waves(side):
    steps = torch.linspace(0.0, 3.0, side)
    return (2.0 * steps.unsqueeze(1)).sin() + (5.0 * steps).cos()


def with_holes(image, share, seed):
    return torch.where(torch.rand(image.shape, generator=generator(seed), dtype=image.dtype) < share, math.nan, image)


def covariances_by_loops(known, side, places, spread, pairs_of_all):
    """Covariances of windows at each place, by the formula of the docstring, from all pairs of entries that are seen."""
    height, width, channels = known.shape
    entries = list(itertools.product(range(side), range(side), range(channels)))

    def sums(first, second, place):
        down, right = second[0] - first[0], second[1] - first[1]
        total, number = 0.0, 0.0
        for i, j in itertools.product(range(max(0, -down), height - max(0, down)), range(max(0, -right), width - max(0, right))):
            product = float(known[i, j, first[2]] * known[i + down, j + right, second[2]])
            if not math.isnan(product):
                weight = math.exp(-((i + 0.5 - place[0]) ** 2 + (j + 0.5 - place[1]) ** 2) / (2 * spread**2))
                total, number = total + weight * product, number + weight
        return total, number

    found = torch.zeros(len(places), len(entries), len(entries), dtype=known.dtype)
    for (a, first), (b, second) in itertools.product(enumerate(entries), repeat=2):
        ordered = (first, second) if second[:2] >= first[:2] else (second, first)
        local = [sums(*ordered, place) for place in places]
        of_all = sum(total for total, _ in local) / max(sum(number for _, number in local), 1e-9)
        for place, (total, number) in enumerate(local):
            found[place, a, b] = (total + pairs_of_all * of_all) / (number + pairs_of_all)
    return found


def conditional_mean(rest, covariance, noise):
    """Of all entries given those that are seen, without directions of little variance."""
    values, vectors = torch.linalg.eigh(covariance)
    covariance = (vectors * values.where(values > 0.05 * noise**2, 0.0)) @ vectors.mT
    flat = rest.flatten()
    seen = ~flat.isnan()
    within = covariance[seen][:, seen] + noise**2 * torch.eye(int(seen.sum()), dtype=rest.dtype)
    return (covariance[:, seen] @ torch.linalg.solve(within, flat[seen])).reshape(rest.shape)


@pytest.mark.slow
def test_a_window_is_the_conditional_mean_given_covariances_of_all_pairs(monkeypatch):
    monkeypatch.setattr(nonlocal_groups, "_MAX_WINDOW_SHARE", 1)
    image = with_holes(torch.randn(4, 4, 2, generator=generator(1), dtype=torch.float64).cumsum(0), 0.4, 2)
    smooth = smooth_image(fill_missing(image, 2), 2)
    known = rest = image - smooth
    for _ in range(3):
        (covariance,) = covariances_by_loops(known, 4, [(2.0, 2.0)], math.sqrt(628 / (2 * math.pi)), 30)
        known = conditional_mean(rest, covariance, 0.2)
    torch.testing.assert_close(predict_missing(image, 2, 0.2), smooth + known)


@pytest.mark.slow
def test_covariances_are_those_of_pairs_near_places(monkeypatch):
    monkeypatch.setattr(nonlocal_groups, "_NEIGHBOURS", 20)
    array = with_holes(torch.randn(9, 7, 2, generator=generator(12), dtype=torch.float64), 0.3, 13)
    spread = math.sqrt(20 / (2 * math.pi))
    # Of a side of nine three places 1.6 spreads apart, of seven two.
    places = list(itertools.product([1.5, 4.5, 7.5], [1.75, 5.25]))
    expected = covariances_by_loops(array, 2, places, spread, 30)
    patches = Patches((9, 7), 2, channels=2)
    torch.testing.assert_close(nonlocal_groups._covariances(array, patches), expected)
    middles = patches.places().double() + 1
    nearest = torch.cdist(middles, torch.tensor(places, dtype=torch.float64)).argmin(1)
    differ = nonlocal_groups._nearest_place(patches) != nearest
    # Of two that are equally far either will do.
    distances = torch.cdist(middles[differ], torch.tensor(places, dtype=torch.float64)).topk(2, largest=False).values
    torch.testing.assert_close(distances[:, 0], distances[:, 1])


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "most"), [((40,), 0.02), ((12, 12), 0.005)])
def test_windows_of_small_arrays_are_small(shape, most):
    # Of windows of 32 entries, and of 8 by 8, covariances are mostly chance: these errors are 0.038 and 0.066, of small ones 0.009 and
    # 0.0004.
    image = waves(24)[:12, :12] if len(shape) == 2 else (0.3 * torch.arange(40.0)).sin()
    errors = []
    for seed in range(10):
        damaged = with_holes(image, 0.2, seed)
        errors.append((predict_missing(damaged, len(shape), 0.04) - image)[damaged.isnan()].square().mean() / image.var())
    assert float(torch.stack(errors).mean()) < most


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_what_is_nearly_whole_is_predicted_from_what_is_near(seed, monkeypatch):
    photograph = torch.from_numpy(load_sample_image("china.jpg")[60 + 90 * seed : 110 + 90 * seed, 200:250, 1].copy()).float()
    damaged = with_holes(photograph, 0.1, 30 + seed)
    errors = []
    for limit in (2 / 3, 1.0):
        monkeypatch.setattr(nonlocal_groups, "_MIN_OBSERVED_SHARE", limit)
        errors.append(float((predict_missing(damaged, 2, 1.0) - photograph)[damaged.isnan()].square().mean()))
    assert errors[0] < 0.9 * errors[1]  # 0.85, 0.54 and 0.50


@pytest.mark.nightly
def test_a_long_signal_has_few_places():
    # Of 50 000 entries there would be 125, each of which weighs all entries.
    signal = (0.3 * torch.arange(50_000.0)).sin()
    assert int(nonlocal_groups._nearest_place(Patches(signal.shape, 32)).max()) == 63
    errors = (predict_missing(with_holes(signal, 0.5, 15), 1, 0.03) - signal).square()
    assert float(errors.mean()) < 0.01 * float(signal.square().mean())


@pytest.mark.slow
def test_textures_that_differ_by_place_are_predicted_by_their_own_covariances(monkeypatch):
    image, places = torch.zeros(64, 64), torch.arange(64.0)
    for quarter, (angle, period) in enumerate([(0.0, 4.0), (0.8, 5.0), (1.6, 4.5), (2.4, 6.0)]):
        row, column = divmod(quarter, 2)
        within = slice(32 * row, 32 * row + 32), slice(32 * column, 32 * column + 32)
        stripes = (2 * math.pi / period * (math.cos(angle) * places + math.sin(angle) * places.unsqueeze(1))).sin()
        image[within] = stripes[within]
    damaged = with_holes(image, 0.85, 14)
    missing = damaged.isnan()
    errors = []
    for neighbours in (628, 1e8):
        monkeypatch.setattr(nonlocal_groups, "_NEIGHBOURS", neighbours)
        errors.append(float((predict_missing(damaged, 2, 0.03) - image)[missing].square().mean()))
    assert errors[0] < 0.25 * float(image.square().mean())
    # Of three other masks 0.57 to 0.63.
    assert errors[0] < 0.75 * errors[1]


@pytest.mark.slow
def test_channels_tell_what_others_are():
    # Three channels of the same texture: of each three in five entries are missing.
    texture = torch.randn(48, 48, 1, generator=generator(3)).repeat(1, 1, 3)
    damaged = with_holes(texture, 0.6, 4)
    seen_in_one = ~damaged.isnan().all(-1, keepdim=True).expand_as(damaged)
    missing = damaged.isnan() & seen_in_one
    errors = [float((guess - texture)[missing].square().mean()) for guess in (predict_missing(damaged, 2, 0.05), fill_missing(damaged, 2))]
    assert errors[0] < 0.1
    assert errors[1] > 0.5  # the mean of neighbours knows nothing of white noise


@pytest.mark.parametrize(
    ("shape", "num_dims"), [((50,), 1), ((60, 2), 1), ((9, 12), 2), ((6, 7, 5), 3), ((5, 6, 4, 3), 3), ((1, 9), 2), ((9, 8, 70), 2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_arrays_of_any_dimensions_have_finite_predictions(shape, num_dims, dtype):
    array = with_holes(torch.randn(shape, generator=generator(5), dtype=dtype), 0.5, 6)
    found = predict_missing(array, num_dims, 1e-3)
    assert found.shape == shape
    assert found.dtype == dtype
    assert bool(found.isfinite().all())
    seen = ~array.isnan()
    assert float((found - array)[seen].square().mean()) < 0.01


@pytest.mark.slow
def test_large_holes_and_single_entries_are_no_obstacle():
    array = torch.full((30, 30), math.nan)
    array[3, 4] = 2.0
    torch.testing.assert_close(predict_missing(array, 2, 0.1), torch.full((30, 30), 2.0))
    image = waves(30)
    image[8:22, 8:22] = math.nan
    assert bool(predict_missing(image, 2, 0.1).isfinite().all())


def test_without_missing_entries_nothing_is_done():
    image = torch.randn(8, 8, generator=generator(7))
    assert predict_missing(image, 2, 0.5) is image


@pytest.mark.nightly
def test_colours_that_are_missing_by_themselves_come_back_in_painting():
    texture = waves(32).unsqueeze(-1) * torch.tensor([1.0, -0.5, 0.8])
    damaged = with_holes(texture, 0.7, 8)
    missing = damaged.isnan()
    restored = inpaint(damaged, generator=generator(9), progress=False).image
    ratio = float((restored - texture)[missing].square().mean() / (fill_missing(damaged, 2) - texture)[missing].square().mean())
    assert ratio < 0.1


def test_of_very_many_channels_neighbours_are_the_guess():
    image = with_holes(torch.randn(6, 6, 109, generator=generator(10)), 0.3, 11)
    assert torch.equal(predict_missing(image, 2, 0.1), fill_missing(image, 2))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["channels apart", "trend", "step", "a channel in another unit"])
def test_texture_beside_large_differences_is_no_noise(kind):
    steps = torch.arange(32.0)
    texture = (0.9 * steps.unsqueeze(1)).sin() * (0.8 * steps).cos()
    image = torch.stack([texture, texture.mT, texture + texture.mT], -1)
    if kind == "channels apart":
        image = image + torch.tensor([0.0, 100.0, -100.0])
    elif kind == "trend":
        image = image + steps.view(-1, 1, 1)
    elif kind == "step":
        image = image + 50 * (steps > 15).view(-1, 1, 1)
    else:
        image = image * torch.tensor([1.0, 1.0, 100.0])
    damaged = with_holes(image, 0.3, 12)
    assert nearly_no_noise(damaged, 2) < 0.04 * damaged[~damaged.isnan()].std()
    missing = damaged[..., 0].isnan()
    restored = inpaint(damaged, generator=generator(13), progress=False).image
    assert (restored - image)[..., 0][missing].square().mean().sqrt() < 0.4 * texture.std()


def test_channels_without_any_entry_are_refused():
    image = torch.randn(8, 8, 3, generator=generator(14))
    image[..., 1] = math.nan
    with pytest.raises(ValueError, match=r"channels \[1\] have no observed entry"):
        inpaint(image)


@pytest.mark.parametrize("share", [0.1, 0.4])
def test_noise_that_single_precision_loses_is_restored_in_double(share):
    image = 1e4 * waves(16)
    damaged = with_holes(image, share, 15)
    restored = denoise(damaged, noise=0.01, side=4, rounds=1, generator=generator(16), progress=False).image
    assert float((restored - image)[~damaged.isnan()].abs().max()) < 0.1
