"""Photon counts: their noise made equal everywhere, and the unbiased way back."""

from __future__ import annotations

import functools
import math
import warnings

import numpy as np
import torch
from torch import Tensor

from pyro_truncated.restoration.channels import root_mean_square
from pyro_truncated.restoration.noise_estimation import deviation, noise_level, whole_windows

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
NUM_CLASSES, SHARE_OF_CLASS, MIN_WINDOWS, QUANTILE = 4, 0.02, 150, 0.01
# Noise that grows by these ratios, from the first and from the second class on, follows the brightness; of clipped noise the second
# stays near one.
MIN_GROWTH, MIN_GROWTH_FROM_SECOND = 1.5, 1.2
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
            f"noise='poisson' takes photon counts, none below zero; got {float(values.min()):g}: subtract nothing first, or give a level"
        )
    if bool((values == values.round()).all()):
        return 1.0
    levels = torch.cat([values.new_zeros(1), values]).unique()
    gain = float(levels.diff().min())
    multiples = levels / gain
    return gain if bool(((multiples - multiples.round()).abs() <= GAIN_RTOL).all()) else 1.0


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
            stacklevel=4,
        )


def warn_of_varying_noise(image: Tensor, num_dims: int, levels: float | Tensor) -> None:
    """Warns if the noise grows with the brightness.

    Four classes of equally many windows lie around evenly spaced brightnesses. The noise of a class is the root of the mean of the
    lower quarter of its principal variances.

    Warns: VaryingNoiseWarning: if the brightest class has at least 1.5 times the noise of the
        darkest, and 1.2 times that of the second.
    """
    windows = whole_windows(image / levels, num_dims).flatten(1)
    number = max(MIN_WINDOWS, round(SHARE_OF_CLASS * len(windows)))
    if len(windows) < NUM_CLASSES * number:
        return
    brightness, order = windows.mean(1).double().sort()
    low, high = brightness[[round(QUANTILE * len(order)), round((1 - QUANTILE) * len(order)) - 1]].tolist()
    middles = torch.searchsorted(brightness, torch.linspace(low, high, NUM_CLASSES).to(brightness))
    starts = (middles - number // 2).clamp(0, len(order) - number).tolist()
    parts = [windows[order[start : start + number]].double() for start in starts]
    variances = [torch.linalg.eigvalsh(part.mT.cov())[: windows.shape[1] // 4].mean().clamp(min=0.0) for part in parts]
    noise = torch.stack(variances).sqrt()
    if float(noise[-1]) * root_mean_square(levels) < MIN_SHARE_OF_SIGNAL * float(deviation(image)):
        return
    if bool(noise[-1] > MIN_GROWTH * noise[0]) and bool(noise[-1] > MIN_GROWTH_FROM_SECOND * noise[1]):
        warnings.warn(
            f"the noise grows with the brightness, to {float(noise[-1] / noise[0]):.1f} times that of the darkest windows, but one level "
            "is removed everywhere. For photon counts pass noise='poisson'; otherwise transform the image first, as by a logarithm.",
            VaryingNoiseWarning,
            stacklevel=4,
        )
