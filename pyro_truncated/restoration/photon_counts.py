"""Photon counts: their noise made equal everywhere, and the unbiased way back."""

from __future__ import annotations

import functools
import math
import warnings

import numpy as np
import torch
from torch import Tensor

from pyro_truncated.restoration.channels import root_mean_square
from pyro_truncated.restoration.first_guesses import deviation, noise_level, texture_of, whole_windows

# The offset of Anscombe's transform, and what is below the transformed zero.
OFFSET = 3 / 8
# Means up to this number are inverted by a table, larger ones by the limit for many photons.
MAX_MEAN_IN_TABLE, TABLE_SIZE = 1000.0, 4001
# Largest relative distance of values from multiples of one number, the gain.
GAIN_RTOL = 1e-3
# Noise of stabilised counts is one; outside of these the values are no counts.
MIN_STABLE, MAX_STABLE = 0.7, 1.5
# Counts from which their stabilised noise is one to a few percent.
MANY_PHOTONS = 4.0

# Classes of brightness between which noise is compared, and the share of all windows in each, at least that many.
NUM_CLASSES, SHARE_OF_CLASS, MIN_WINDOWS, QUANTILE, QUANTILE_OF_TEXTURE = 4, 0.02, 150, 0.01, 0.1
# Noise that grows by these ratios, from the first and from the second class on, follows the brightness; of clipped noise the second
# stays near one.
MIN_GROWTH, MIN_GROWTH_FROM_SECOND = 1.5, 1.2
# Of counts the brightest class has this many times the mean of the darkest at least, and their stabilised noise differs by this ratio
# at most; equal noise would fall to 0.58.
MIN_RATIO_OF_BRIGHTNESS, MIN_RATIO_OF_STABLE = 3.0, 0.75
# Noise below this share of the signal's deviation is not told from fine texture.
MIN_SHARE_OF_SIGNAL = 0.05


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


def mean_of_stabilised(values: Tensor) -> Tensor:
    r"""Returns the exact unbiased inverse of :func:`stabilise`.

    The mean count :math:`\lambda` solves :math:`\mathbb E[2 \sqrt{n + 3/8} \mid n \sim \mathrm{Poisson}(\lambda)] = v`. It is zero for
    values below the transform of zero.

    Reference:
        Mäkitalo and Foi, "Optimal inversion of the Anscombe transformation in low-count Poisson image denoising",
        IEEE Transactions on Image Processing 20, 2011.
    """
    means, expected = _table()
    wanted = values.double().cpu().numpy()
    small = torch.from_numpy(np.asarray(np.interp(wanted, expected, means))).to(values)
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


def gain_of(counts: Tensor) -> float:
    """Returns the number that counts were multiplied with.

    It is one of whole numbers; else the least distance of values that are all its multiples, or one.

    Raises:
        ValueError: for negative values.
    """
    values = counts[~counts.isnan()].double()
    if float(values.min()) < 0:
        raise ValueError(
            f"noise='poisson' takes photon counts, none below zero; got {float(values.min()):g}: take nothing off before, or give a level"
        )
    return _gain(counts) or 1.0


def _gain(counts: Tensor) -> float | None:
    """Returns one for whole numbers, else the least distance of values that are all its multiples, or ``None``."""
    values = counts[~counts.isnan()].double()
    if bool((values == values.round()).all()):
        return 1.0
    levels = torch.cat([values.new_zeros(1), values]).unique()
    gain = float(levels.diff().min())
    multiples = levels / gain
    return gain if bool(((multiples - multiples.round()).abs() <= GAIN_RTOL).all()) else None


def check_stabilised(stable: Tensor, num_dims: int, gain: float) -> None:
    """Warns if stabilised counts have other noise than one.

    Warns:
        VaryingNoiseWarning: with the gain that the values seem to have.
    """
    level = noise_level(stable, num_dims)
    is_low = level < MIN_STABLE and float(stable.square().nanmean()) / 4 > MANY_PHOTONS
    if level > MAX_STABLE or is_low:
        warnings.warn(
            f"noise='poisson' expects photon counts, whose variance is their mean; here it is about {level**2:.3g} times the mean. "
            f"Divide the image by {gain * level**2:.3g} before, and multiply what is restored.",
            VaryingNoiseWarning,
            stacklevel=6,
        )


def warn_of_varying_noise(image: Tensor, num_dims: int, levels: float | Tensor) -> None:
    """Warns if the noise grows with the brightness.

    Four classes of equally many windows lie around evenly spaced brightnesses. The noise of a class has two estimates: the root of the
    mean of the lower quarter of its principal variances, and the lowest tenth of its texture. Fine texture raises the second, single
    edges in few windows the first.

    Warns:
        VaryingNoiseWarning: if both estimates are half as much again in the brightest class as in the darkest, and a fifth more than in
            the second; or if the values are multiples of one number, and have the noise of counts.
    """
    found = _classes_of_brightness(image / levels, num_dims)
    if found is None:
        return
    noise, texture = (torch.stack([estimate(part) for part in found]) for estimate in (_principal_noise, _lower_texture))
    is_large = float(noise[-1]) * root_mean_square(levels) >= MIN_SHARE_OF_SIGNAL * float(deviation(image))
    if is_large and all(
        bool(level[-1] > MIN_GROWTH * level[0]) and bool(level[-1] > MIN_GROWTH_FROM_SECOND * level[1]) for level in (noise, texture)
    ):
        growth = f"in the brightest windows it is {float(noise[-1] / noise[0]):.1f} times that of the darkest"
        advice = "Of photon counts say noise='poisson'; else make the noise equal first, as by a logarithm."
    elif is_large and _have_noise_of_counts(image, num_dims):
        growth, advice = "it is that of photon counts", "Say noise='poisson'."
    else:
        return
    warnings.warn(
        f"the noise grows with the brightness: {growth}, and one level is taken off everywhere. {advice}", VaryingNoiseWarning, stacklevel=5
    )


def _classes_of_brightness(image: Tensor, num_dims: int) -> list[Tensor] | None:
    """Returns windows ``(N, *sides)`` of evenly spaced brightnesses, the darkest first; ``None`` if there are too few."""
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
    """Returns the root of the mean of the lower quarter of principal variances."""
    points = windows.flatten(1)
    variances: Tensor = torch.linalg.eigvalsh(points.mT.cov())
    return variances[: points.shape[1] // 4].mean().clamp(min=0.0).sqrt()


def _lower_texture(windows: Tensor) -> Tensor:
    """Returns the root of the lowest tenth of the squared differences in windows."""
    return texture_of(windows).quantile(QUANTILE_OF_TEXTURE).sqrt()


def _have_noise_of_counts(image: Tensor, num_dims: int) -> bool:
    """Returns whether values are counts, but for a gain, whose stabilised noise is one where it is dark and where it is bright."""
    gain = _gain(image)
    if gain is None or float(image.nan_to_num(0.0).min()) < 0:
        return False
    counts = image / gain
    classes = _classes_of_brightness(counts, num_dims)
    if classes is None or not MIN_STABLE < noise_level(stabilise(counts), num_dims) < MAX_STABLE:
        return False
    dark, bright = classes[0], classes[-1]
    is_wide = float(bright.mean()) > MIN_RATIO_OF_BRIGHTNESS * float(dark.mean())
    return is_wide and bool(_principal_noise(stabilise(bright)) > MIN_RATIO_OF_STABLE * _principal_noise(stabilise(dark)))
