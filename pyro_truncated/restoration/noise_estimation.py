"""First estimates for a damaged array: noise, missing entries, size of patches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Normal
from torch.nn import functional as F

from pyro_truncated.utils.arrays import as_data

# Entries of a window of which noise is estimated, about; and the windows for each of them from which the estimate is sure.
_ENTRIES, _WINDOWS_PER_ENTRY = 36, 100
# Windows of nothing but noise that are taken for such, as a quantile of the normal distribution: 99 %.
_ALMOST_ALL = 2.33
_MAX_NOISE_STEPS = 8
# Of larger arrays every second window or less is looked at, along all dimensions.
_MOST_WINDOWS = 2**19
# What arrays without noise have for mixtures, see :func:`nearly_no_noise`; of photographs the first is the least. Less than the last is
# no texture, but rounding.
_NO_NOISE, _PART_OF_TEXTURE, _TIMES_LEVEL, _LEAST_TEXTURE = 0.04, 0.25, 2.25, 1e-4
_SMOOTHING = 16
_MEAN_ABSOLUTE_VALUE = math.sqrt(2 / math.pi)  # of standard normal numbers
# Differences of which the median says something, and windows that are left beside constant ones.
_ENOUGH = 100


def checked(image: Any) -> Tensor:
    """Returns a damaged array in single precision or more.

    Raises:
        ValueError: if it is a single number, has no observed entry, infinite ones, or such whose squares are.
    """
    array = floating(as_data("image", image))
    observed = array[~array.isnan()]
    if array.dim() == 0:
        raise ValueError("the image is a single number; it must have one dimension or more")
    if not len(observed):
        raise ValueError("the image has no observed entry: all are NaN")
    if not bool(observed.isfinite().all()):
        raise ValueError("the image has infinite entries; mark what is missing by NaN")
    if not bool(observed.square().sum().isfinite()):
        raise ValueError(f"the image has entries whose squares are too large for {array.dtype}: give it in another unit")
    return array


def floating(image: Tensor) -> Tensor:
    """Returns the array in floating point numbers.

    Half precision becomes the default precision, as linear algebra does not have it.
    """
    has_precision = image.is_floating_point() and torch.finfo(image.dtype).bits >= 32
    return image if has_precision else image.to(torch.get_default_dtype())


def noise_level(image: Tensor, num_dims: int) -> float:
    """Estimates the noise from windows without texture, see :func:`_level_of_windows`.

    Of an array that is small, or of which few windows are whole, the guess is that of its differences, see :func:`_level_of_differences`.
    Those of a photograph are several percent above the noise, as fine texture counts for them. What is constant - a border, what a mask
    hides - says nothing of the noise elsewhere, see :func:`_without_constant_windows`.
    """
    least = 1e-3 * float(deviation(image)) or 1.0  # of a constant array any level is right but zero
    image = _without_constant_windows(image, num_dims)
    differences = _level_of_differences(image, num_dims)
    windows = whole_windows(image, num_dims)
    if len(windows) < _WINDOWS_PER_ENTRY * windows.shape[1:].numel():
        return max(differences, least)
    return max(_level_of_windows(windows, differences), least)


def windows_are_enough(image: Tensor, num_dims: int) -> bool:
    """Whether an array without channels has enough whole windows for :func:`_level_of_windows`."""
    windows = whole_windows(image, num_dims)
    return len(windows) >= _WINDOWS_PER_ENTRY * windows.shape[1:].numel()


def whole_windows(image: Tensor, num_dims: int) -> Tensor:
    """Returns complete windows of each channel, ``(N, *sides)``.

    They have no missing entry. If there are too many, some are drawn.
    """
    planes = image.unsqueeze(-1) if image.dim() == num_dims else image
    side, stride = _side(num_dims), math.ceil((image.numel() / _MOST_WINDOWS) ** (1 / num_dims))
    windows = planes.movedim(-1, 0)
    for dim in range(1, num_dims + 1):
        windows = windows.unfold(dim, min(side, windows.shape[dim]), stride)
    windows = windows.flatten(0, num_dims)
    return windows[~windows.flatten(1).isnan().any(1)]


def _side(num_dims: int) -> int:
    """Of a window."""
    side: int = round(_ENTRIES ** (1 / num_dims))
    return side


def _without_constant_windows(image: Tensor, num_dims: int) -> Tensor:
    """Returns the array with NaN in windows that are exactly constant.

    It is returned as it is if hardly anything else would be left, or mostly neighbours that are the same: drawings without noise.
    """
    is_constant = _is_in_constant_window(image, num_dims)
    if not bool(is_constant.any()):
        return image
    left = torch.where(is_constant, math.nan, image)
    differences = torch.cat([left.diff(dim=dim).flatten() for dim in range(num_dims)])
    seen = differences[~differences.isnan()]
    is_enough = len(whole_windows(left, num_dims)) >= _ENOUGH and float((seen != 0).double().mean()) > 0.5
    return left if is_enough else image


def _is_in_constant_window(image: Tensor, num_dims: int) -> Tensor:
    """Whether entries lie in a constant window of their channel."""
    sides = [min(_side(num_dims), size) for size in image.shape[:num_dims]]
    highest, lowest = image, image
    for dim, side in enumerate(sides):
        highest, lowest = highest.unfold(dim, side, 1).amax(-1), lowest.unfold(dim, side, 1).amin(-1)
    covered = (highest == lowest).to(torch.uint8)
    for dim, side in enumerate(sides):
        moved = F.pad(covered.movedim(dim, -1), (side - 1, side - 1))
        covered = moved.unfold(-1, side, 1).amax(-1).movedim(-1, dim)
    return covered.bool()


def _level_of_windows(windows: Tensor, level: float) -> float:
    r"""Returns the noise level of windows without texture.

    It is the root of the mean of the lower half of their principal variances.

    A window has no texture if its sum of squared differences of neighbours :math:`z^\top A z` is
    below the 99 % quantile for nothing but noise. The quantile is that of the gamma distribution
    with the same mean and variance (by Wilson's and Hilferty's formula).

    Args:
        windows: ``(N, *sides)``, more than a few.
        level: where to start.

    Reference:
        Liu, Tanaka and Okutomi, "Single-image noise level estimation for blind denoising", IEEE Transactions on Image Processing 22, 2013.
    """
    points = windows.flatten(1).double()
    texture, limit = texture_of(windows).double(), _limit(windows)
    for _ in range(_MAX_NOISE_STEPS):
        flat = points[texture < limit * level**2]
        if len(flat) < _WINDOWS_PER_ENTRY * points.shape[1]:
            break
        variances = torch.linalg.eigvalsh(flat.mT.cov())
        level = math.sqrt(max(0.0, float(variances[: len(variances) // 2].mean())))
    return level


def texture_of(windows: Tensor) -> Tensor:
    """The squared differences of neighbours in windows ``(N, *sides)``, added up."""
    differences = (windows.diff(dim=dim).square().flatten(1).sum(1) for dim in range(1, windows.dim()))
    return torch.stack(list(differences)).sum(0)


def _limit(windows: Tensor) -> float:
    """What 99 % of windows of standard normal numbers have less texture than."""
    units = torch.eye(windows[0].numel(), dtype=torch.float64).unflatten(1, windows.shape[1:])
    gradients = torch.cat([units.diff(dim=dim).flatten(1) for dim in range(1, windows.dim())], 1)
    mean, variance = gradients.square().sum(), 2 * (gradients @ gradients.mT).square().sum()
    part = variance / (9 * mean**2)
    return float(mean * (1 - part + _ALMOST_ALL * part.sqrt()) ** 3)


def _level_of_differences(image: Tensor, num_dims: int) -> float:
    """Estimates the noise by the median of third differences along all dimensions.

    Edges affect it little, and slopes not at all.

    Where few entries have all the neighbours that this takes, differences of lower order are taken.
    """
    for order in (3, 2, 1):
        left = image
        for dim in range(num_dims):
            left = left.diff(order, dim)
        seen = left[~left.isnan()]
        if len(seen) >= _ENOUGH:
            # The squares of binomial coefficients add up to a central one.
            return _level(seen) / math.sqrt(math.comb(2 * order, order) ** num_dims)
    left = torch.cat([image.diff(dim=dim).flatten() for dim in range(num_dims)])
    seen = left[~left.isnan()]
    return _level(seen) / 2**0.5 if len(seen) else 0.1 * float(deviation(image))


def _level(differences: Tensor) -> float:
    """The standard deviation of normal numbers of which most of these are."""
    return float(differences.abs().median() / Normal(0.0, 1.0).icdf(torch.tensor(0.75)))


def deviation(image: Tensor) -> Tensor:
    """The standard deviation of the observed entries."""
    return (image - image.nanmean()).square().nanmean().sqrt()


def nearly_no_noise(image: Tensor, num_dims: int) -> float:
    """Returns the noise that mixtures assume for arrays without noise.

    It is so small that it hides little.

    It is the least of three levels:

    * 4 % of the deviation of the entries that are seen;
    * where trends or steps exceed the texture, a quarter of what differs from a smooth array;
    * 2.25 times :func:`noise_level`.
    """
    rest = (image - smoothed(filled(image, num_dims), num_dims)).abs()
    # Of absolute values, which single bright spots change little.
    texture = float(rest.nanmean()) / _MEAN_ABSOLUTE_VALUE
    all_of_it = float(deviation(image))
    if texture <= _LEAST_TEXTURE * all_of_it:
        return _NO_NOISE * all_of_it or 1.0  # of a constant array any level is right but zero
    return min(_NO_NOISE * all_of_it, _PART_OF_TEXTURE * texture, _TIMES_LEVEL * noise_level(image, num_dims))


def smoothed(image: Tensor, num_dims: int) -> Tensor:
    """Smooths an array by repeated means over windows of side three."""
    numbers = _neighbours(torch.ones_like(image), num_dims)
    for _ in range(_SMOOTHING):
        image = _neighbours(image, num_dims) / numbers
    return image


def filled(image: Tensor, num_dims: int) -> Tensor:
    """Fills in missing entries by means of observed neighbours.

    Entries near to observed ones are filled in first.
    """
    missing = image.isnan()
    if not bool(missing.any()):
        return image
    value, known = image.nan_to_num(0.0), (~missing).to(image.dtype)
    while bool((known == 0).any()):
        total, share = (_neighbours(array, num_dims) for array in (value * known, known))
        value = torch.where(known > 0, value, total / share.clamp(min=1e-9))
        known = torch.where(known > 0, known, (share > 0).to(known.dtype))
    return value


def _neighbours(array: Tensor, num_dims: int) -> Tensor:
    """Sums over the windows of side three around every entry."""
    for dim in range(num_dims):
        moved = array.movedim(dim, -1)
        rows = F.pad(moved.reshape(-1, moved.shape[-1]), (1, 1))
        array = rows.unfold(-1, 3, 1).sum(-1).reshape(moved.shape).movedim(-1, dim)
    return array
