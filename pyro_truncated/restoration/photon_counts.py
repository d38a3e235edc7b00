"""Photon counts, whose variance is their mean."""

from __future__ import annotations

import functools
import itertools
import math
import warnings

import numpy as np
import torch
from torch import Tensor

from pyro_truncated.restoration.channels import noisy_mask, root_mean_square
from pyro_truncated.restoration.noise import deviation, noise_level, texture_energy, whole_windows

# The offset of Anscombe's transform, and what is below the transformed zero.
OFFSET = 3 / 8
# Means up to this number are inverted by a table, larger ones by the limit for many photons.
MAX_MEAN_IN_TABLE, TABLE_SIZE = 1000.0, 4001
# Largest relative distance of values from multiples of one number, the gain.
GAIN_RTOL = 1e-3
# Whole numbers of which fewer differ may be multiples of one number by chance.
FEW_LEVELS = 5
# Noise of stabilised counts is one; outside of these the values are no counts.
MIN_STABLE, MAX_STABLE = 0.7, 1.5
# Counts from which their stabilised noise is one to a few percent.
MANY_PHOTONS = 4.0
OF_CAMERAS = (
    "Of a camera with gain g, offset o and read noise r restore z = 2 * sqrt(max((y - o) / g + 3 / 8 + (r / g)**2, 0)) with noise=1: "
    "then y is o + g * (z**2 / 4 - 1 / 8 - (r / g)**2)"
)
# Classes of brightness between which noise is compared, and the share of all windows in each, at least that many.
NUM_CLASSES, SHARE_OF_CLASS, MIN_WINDOWS, QUANTILE, QUANTILE_OF_TEXTURE = 4, 0.02, 150, 0.01, 0.1
# Noise that grows by these ratios, from the first and from the second class on, follows the brightness; of clipped noise the second
# stays near one.
MIN_GROWTH, MIN_GROWTH_FROM_SECOND = 1.5, 1.2
# Counts are recognised by two ratios. The brightest class has at least so many times the mean of the darkest. Their stabilised noise
# differs by at most this ratio; equal noise would fall to 0.58.
MIN_RATIO_OF_BRIGHTNESS, MIN_RATIO_OF_STABLE = 3.0, 0.75
# Noise below this share of the signal's deviation is not told from fine texture.
MIN_SHARE_OF_SIGNAL = 0.05
# Parts of each dimension between which noise is compared, and the windows that each needs. Fine texture passes for noise. It is above
# both the ratio and the share of the signal's deviation in one of 170 photographs with equal noise.
NUM_PARTS, MIN_RATIO_OF_PARTS, MIN_SHARE_OF_PART, MIN_WINDOWS_OF_PART = 3, 1.8, 0.25, 900


class VaryingNoiseWarning(UserWarning):
    """Noise is not equal everywhere, and one level was taken off.

    Example:
        >>> counts = torch.poisson(torch.linspace(2.0, 200.0, 64).expand(64, 64))
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     restored = denoise(counts, rounds=1, progress=False)
        >>> any(warning.category is VaryingNoiseWarning for warning in caught)
        True
    """


def stabilise(counts: Tensor) -> Tensor:
    r"""Returns Anscombe's transform :math:`2 \sqrt{n + 3/8}`: the noise of Poisson counts becomes one.

    Reference:
        Anscombe, "The transformation of Poisson, binomial and negative-binomial data", Biometrika 35, 1948.
    """
    return 2 * (counts + OFFSET).clamp(min=0.0).sqrt()


def unbiased_inverse(values: Tensor) -> Tensor:
    r"""Returns the exact unbiased inverse of :func:`stabilise`.

    The mean count :math:`\lambda` solves :math:`\mathbb E[2 \sqrt{n + 3/8} \mid n \sim \mathrm{Poisson}(\lambda)] = v`. It is zero for
    values below the transform of zero.

    Reference:
        Mäkitalo and Foi, "Optimal inversion of the Anscombe transformation in low-count Poisson image denoising",
        IEEE Transactions on Image Processing 20, 2011.
    """
    means, expected = _table()
    targets = values.double().cpu().numpy()
    small = torch.from_numpy(np.asarray(np.interp(targets, expected, means))).to(values)
    return torch.where(values < float(expected[-1]), small, values.square() / 4 - 1 / 8)


@functools.cache
def _table() -> tuple[np.ndarray, np.ndarray]:
    """Means, and the expected transforms of counts with these means."""
    means = torch.linspace(0, math.sqrt(MAX_MEAN_IN_TABLE), TABLE_SIZE, dtype=torch.float64).square()
    counts = torch.arange(int(MAX_MEAN_IN_TABLE + 12 * math.sqrt(MAX_MEAN_IN_TABLE)), dtype=torch.float64)
    transforms = stabilise(counts)
    expected = [
        torch.special.xlogy(counts, some.unsqueeze(-1)).sub(some.unsqueeze(-1)).sub(torch.lgamma(counts + 1)).exp() @ transforms
        for some in means.split(256)
    ]
    return means.numpy(), torch.cat(expected).numpy()


def estimate_gain(counts: Tensor) -> float:
    """Returns what counts were multiplied with: the least distance, or one.

    All values are its multiples. Raises ``ValueError`` for negative values.
    """
    values = counts[~counts.isnan()].double()
    if float(values.min()) < 0:
        raise ValueError(
            f"noise='poisson' needs photon counts of at least 0; got {float(values.min()):g}: subtract no background. {OF_CAMERAS}"
        )
    return _gain(counts) or 1.0


def _gain(counts: Tensor) -> float | None:
    """Returns the least distance of values if all are multiples.

    Else it is ``None``. Of other whole numbers, or of few different ones, it is one.
    """
    values = counts[~counts.isnan()].double()
    is_whole = bool((values == values.round()).all())
    levels = torch.cat([values.new_zeros(1), values]).unique()
    if is_whole and len(levels) < FEW_LEVELS:
        return 1.0
    gain = float(levels.diff().min())
    multiples = levels / gain
    if bool(((multiples - multiples.round()).abs() <= GAIN_RTOL).all()):
        return gain
    return 1.0 if is_whole else None


def check_stabilised_counts(stable: Tensor, num_dims: int, gain: float) -> None:
    """Warns if stabilised counts have other noise than one."""
    level = noise_level(stable, num_dims)
    is_low = level < MIN_STABLE and float(stable.square().nanmean()) / 4 > MANY_PHOTONS
    is_large, growth = _noise_growth(stable, num_dims, 1.0)
    # The noise of fewer photons also grows when it is stabilised.
    grows = is_large and growth > 0 and float(stable.nan_to_num(math.inf).min()) ** 2 / 4 > MANY_PHOTONS
    found = f"it is about {level**2:.3g} times the mean"
    advice = f"Divide the image by {gain * level**2:.3g} before, and multiply what is restored."
    if is_low or grows:
        advice = OF_CAMERAS
    if grows:
        found = (
            f"it grows faster: of stabilised values, the noise is {growth:.1f} times as strong in the brightest windows as in the darkest"
        )
    if level > MAX_STABLE or is_low or grows:
        warnings.warn(
            f"noise='poisson' expects photon counts, whose variance is their mean; here {found}. {advice}",
            VaryingNoiseWarning,
            stacklevel=6,
        )


def warn_if_noise_varies(image: Tensor, num_dims: int, levels: float | Tensor) -> None:
    """Warns if the noise follows the brightness or the place.

    Four classes of equally many windows lie around evenly spaced brightnesses. The noise of a class has two estimates: the root of the
    mean of the lower quarter of its principal variances, and the lowest tenth of its texture. Fine texture raises the second estimate.
    Single edges in few windows raise the first.

    It warns if both estimates are half as much again in the brightest class as in the darkest, and a fifth more than in the second. Or if
    the values are multiples of one number, and have the noise of counts, however little that is.
    """
    if isinstance(levels, Tensor):
        # Flags and drawings beside sensors have no noise that could vary.
        is_noisy = noisy_mask(image, levels)
        if not bool(is_noisy.any()):
            return
        image, levels = image[..., is_noisy], levels[is_noisy]
    is_large, growth = _noise_growth(image, num_dims, levels)
    if not (is_large and growth) and not _is_poisson_noise(image, num_dims):
        _warn_if_places_differ(image, num_dims, levels)
        return
    found, advice = "it is that of photon counts", "Pass noise='poisson'."
    if growth:
        found = f"in the brightest windows it is {growth:.1f} times that of the darkest" if growth < math.inf else "dark windows have none"
        advice = f"For photon counts pass noise='poisson'; for noise that is a share of the numbers restore their logarithm. {OF_CAMERAS}"
    warnings.warn(
        f"the noise grows with the brightness: {found}, and one level is removed everywhere. {advice}", VaryingNoiseWarning, stacklevel=5
    )


def _warn_if_places_differ(image: Tensor, num_dims: int, levels: float | Tensor) -> None:
    """Warns if some part is much noisier than another."""
    spans = [[(size * i // NUM_PARTS, size * (i + 1) // NUM_PARTS) for i in range(NUM_PARTS)] for size in image.shape[:num_dims]]
    noise = {}
    for place in itertools.product(*spans):
        part = (image / levels)[tuple(slice(*span) for span in place)]
        windows = whole_windows(part, num_dims).flatten(1)
        if len(windows) and int((windows.amax(1) > windows.amin(1)).sum()) >= MIN_WINDOWS_OF_PART:
            noise[place] = noise_level(part, num_dims)
    if not noise:
        return
    most, least = max(noise, key=noise.__getitem__), min(noise, key=noise.__getitem__)
    ratio, is_large = noise[most] / noise[least], noise[most] * root_mean_square(levels) > MIN_SHARE_OF_PART * float(deviation(image))
    if ratio > MIN_RATIO_OF_PARTS and is_large:
        where = [", ".join(f"{start}:{stop}" for start, stop in place) for place in (most, least)]
        warnings.warn(
            f"the noise differs from place to place: in image[{where[0]}] it is {ratio:.1f} times that of image[{where[1]}], unless that "
            "is fine texture, and one level is removed everywhere. Where it is s, an array of the image's shape, restore image / s with "
            "noise=1, and multiply what is restored by s.",
            VaryingNoiseWarning,
            stacklevel=6,
        )


def _noise_growth(image: Tensor, num_dims: int, levels: float | Tensor) -> tuple[bool, float]:
    """Returns whether bright windows have much noise, and growth beyond chance."""
    classes = _brightness_classes(image / levels, num_dims)
    if classes is None:
        return False, 0.0
    noise = torch.stack([_principal_noise(part) for part in classes])
    texture = torch.stack([texture_energy(part).quantile(QUANTILE_OF_TEXTURE).sqrt() for part in classes])
    is_large = float(noise[-1]) * root_mean_square(levels) >= MIN_SHARE_OF_SIGNAL * float(deviation(image))
    grows = all(
        bool(level[-1] > MIN_GROWTH * level[0]) and bool(level[-1] > MIN_GROWTH_FROM_SECOND * level[1]) for level in (noise, texture)
    )
    return is_large, float(noise[-1] / noise[0]) if grows else 0.0


def _brightness_classes(image: Tensor, num_dims: int) -> list[Tensor] | None:
    """Returns windows ``(N, *sides)`` by brightness, darkest first, or ``None``."""
    windows = whole_windows(image, num_dims)
    number = max(MIN_WINDOWS, round(SHARE_OF_CLASS * len(windows)))
    if len(windows) < NUM_CLASSES * number:
        return None
    brightness, order = windows.flatten(1).mean(1).double().sort()
    low, high = brightness[[round(QUANTILE * len(order)), round((1 - QUANTILE) * len(order)) - 1]].tolist()
    middles = torch.searchsorted(brightness, torch.linspace(low, high, NUM_CLASSES).to(brightness))
    starts = (middles - number // 2).clamp(0, len(order) - number).tolist()
    return [windows[order[start : start + number]].double() for start in starts]


def _principal_noise(windows: Tensor) -> Tensor:
    """Returns the root mean of the lower quarter of principal variances."""
    points = windows.flatten(1)
    noise: Tensor = torch.linalg.eigvalsh(points.mT.cov())[: points.shape[1] // 4].mean().clamp(min=0.0).sqrt()
    return noise


def _is_poisson_noise(image: Tensor, num_dims: int) -> bool:
    """Whether values are counts, up to a gain, with stable noise."""
    gain = _gain(image)
    if gain is None or float(image.nan_to_num(0.0).min()) < 0:
        return False
    counts = image / gain
    classes = _brightness_classes(counts, num_dims)
    if classes is None or not MIN_STABLE < noise_level(stabilise(counts), num_dims) < MAX_STABLE:
        return False
    dark, bright = classes[0], classes[-1]
    is_wide = float(bright.mean()) > MIN_RATIO_OF_BRIGHTNESS * float(dark.mean())
    return is_wide and bool(_principal_noise(stabilise(bright)) > MIN_RATIO_OF_STABLE * _principal_noise(stabilise(dark)))
