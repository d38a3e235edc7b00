"""First estimates for a damaged array: its noise, and its smooth part."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Normal
from torch.nn import functional as F

from pyro_truncated.utils.arguments import describe
from pyro_truncated.utils.arrays import as_data

# Windows for each entry of a window from which the estimate of the noise is sure.
WINDOWS_PER_ENTRY = 100
# Of larger arrays every second window or less is looked at, along all dimensions.
_MAX_WINDOWS = 2**19
# Differences of which the median says something, and windows that are left beside constant ones.
_MIN_SAMPLES = 100


def check_image(image: Any) -> Tensor:
    """Returns a damaged array, in double precision if squares need it."""
    array = as_floating(as_data("image", image).detach())
    observed = array[~array.isnan()]
    if array.dim() == 0:
        raise ValueError(f"the image must have one dimension or more; got a single number, {float(array)}")
    if not array.numel():
        raise ValueError(f"the image has no entries; got shape {tuple(array.shape)}")
    if not len(observed):
        raise ValueError(f"the image must have an observed entry; got {describe(array)}")
    if not bool(observed.isfinite().all()):
        raise ValueError(f"the image must be finite, or NaN where missing; got {describe(array)}")
    # Inverse squares must be numbers, too.
    small = torch.finfo(array.dtype).tiny / torch.finfo(array.dtype).eps
    is_large = not bool(observed.square().sum().isfinite())
    is_small = bool((observed != observed[0]).any()) and float((observed - observed.mean()).square().mean()) < small
    if (is_large or is_small) and array.dtype == torch.float32:
        return check_image(array.double())
    if is_large:
        raise ValueError(f"the image has entries whose squares are too large for {array.dtype}: rescale it")
    if is_small:
        raise ValueError(f"the image varies by so little that squares are zero in {array.dtype}: rescale it")
    return array


def keep_digits(image: Tensor, num_dims: int) -> Tensor:
    """Returns the array, in double precision where digits need it.

    A number beside which all others lose their digits even then is refused.
    """
    for plane in [image] if image.dim() == num_dims else image.unbind(-1):
        entries = plane[~plane.isnan()]
        median, distance, spread = float(entries.median()), (entries - entries.median()).abs(), median_deviation(entries)
        # Tails of bright spots are small, too, but fall from there through all numbers.
        far = entries[distance > 1e-3 * distance.max()].unique()
        if len(far) == 1 and torch.finfo(entries.dtype).eps * float(distance.max()) > 0.01 * spread > 0:
            if image.dtype == torch.float32:
                return keep_digits(image.double(), num_dims)
            raise ValueError(
                f"the image has entries of {float(far):g}, beside which others lose their digits: half of them lie within {spread:.3g} of "
                f"{median:.3g}. If it stands for missing entries, make these NaN"
            )
    return image


def outlying_entries(image: Tensor, num_dims: int) -> Tensor:
    """Returns where few entries that stand alone outweigh all others.

    The nearest to the median is farther from it than all nearer entries together, as a root of their sum of squares. Entries with such
    neighbours are features. Where most entries are equal, all others are.
    """
    if image.dim() > num_dims:
        return torch.stack([outlying_entries(plane, num_dims) for plane in image.unbind(-1)], -1)
    distance = (image.double() - image.nanmedian()).abs()
    ascending = distance[~distance.isnan()].sort().values
    if len(ascending) < _MIN_SAMPLES or not bool(ascending[len(ascending) // 2]):
        return torch.zeros_like(image, dtype=torch.bool)
    nearer = ascending.square().cumsum(0).roll(1)
    most = math.ceil(len(ascending) / (10 * _MIN_SAMPLES))
    outweigh = ascending[-most:][ascending[-most:] > nearer[-most:].sqrt()]
    is_far = distance >= (outweigh[0] if len(outweigh) else math.inf)
    return is_far & (neighbour_sums(is_far.double(), num_dims) == 1)


def as_floating(image: Tensor) -> Tensor:
    """Returns the array in floating point numbers.

    Half precision becomes the default precision, as linear algebra does not have it. So do integers, but for those that it would round.
    """
    if image.is_floating_point():
        return image if torch.finfo(image.dtype).bits >= 32 else image.to(torch.get_default_dtype())
    array = image.to(torch.get_default_dtype())
    # Compared as numbers: torch's wide unsigned integers cannot be.
    is_exact = image.dtype.itemsize <= 2 or bool((array.double() == image.double()).all())
    return array if is_exact else image.double()


def noise_level(image: Tensor, num_dims: int) -> float:
    """Estimates the noise from windows without texture, see :func:`_window_noise`.

    Of an array that is small, or of which few windows are whole, the guess is that of its differences, see :func:`_difference_noise`.
    Those of a photograph are several percent above the noise, as fine texture counts for them. What is constant - a border, what a mask
    hides - says nothing of the noise elsewhere, see :func:`_without_constant_windows`.
    """
    extent, spread = float(deviation(image)), median_deviation(image)
    # Few entries far from all others do not count. Of a constant array any level is right but zero.
    least = min(1e-3 * extent, max(0.1 * spread, 1e-9 * extent) if spread else math.inf) or 1.0
    image = _without_constant_windows(image, num_dims)
    differences = _difference_noise(image, num_dims)
    windows = whole_windows(image, num_dims)
    if len(windows) < WINDOWS_PER_ENTRY * windows.shape[1:].numel():
        return max(differences, least)
    return max(_window_noise(windows, differences), least)


def whole_windows(image: Tensor, num_dims: int) -> Tensor:
    """Returns complete windows of each channel, ``(N, *sides)``, or some of them."""
    planes = image.unsqueeze(-1) if image.dim() == num_dims else image
    side, stride = _side(num_dims), math.ceil((image.numel() / _MAX_WINDOWS) ** (1 / num_dims))
    windows = planes.movedim(-1, 0)
    for dim in range(1, num_dims + 1):
        windows = windows.unfold(dim, min(side, windows.shape[dim]), stride)
    windows = windows.flatten(0, num_dims)
    return windows[~windows.flatten(1).isnan().any(1)]


def _side(num_dims: int) -> int:
    """Of a window of about 36 entries."""
    return round(36 ** (1 / num_dims))


def _without_constant_windows(image: Tensor, num_dims: int) -> Tensor:
    """Returns the array with NaN in windows that are exactly constant.

    It is returned as it is if hardly anything else would be left, or mostly neighbours that are the same: drawings without noise.
    """
    is_constant = _constant_windows(image, num_dims)
    if not bool(is_constant.any()):
        return image
    varying = torch.where(is_constant, math.nan, image)
    differences = torch.cat([varying.diff(dim=dim).flatten() for dim in range(num_dims)])
    observed = differences[~differences.isnan()]
    is_enough = len(whole_windows(varying, num_dims)) >= _MIN_SAMPLES and float((observed != 0).double().mean()) > 0.5
    return varying if is_enough else image


def _constant_windows(image: Tensor, num_dims: int) -> Tensor:
    """Whether entries lie in a constant window of their channel."""
    sides = [min(_side(num_dims), size) for size in image.shape[:num_dims]]
    highest, lowest = image, image
    for dim, side in enumerate(sides):
        highest, lowest = highest.unfold(dim, side, 1).amax(-1), lowest.unfold(dim, side, 1).amin(-1)
    covered = (highest == lowest).to(torch.uint8)
    for dim, side in enumerate(sides):
        padded = F.pad(covered.movedim(dim, -1), (side - 1, side - 1))
        covered = padded.unfold(-1, side, 1).amax(-1).movedim(-1, dim)
    return covered.bool()


def _window_noise(windows: Tensor, level: float, *, max_noise_steps: int = 8) -> float:
    r"""Returns the noise level of windows ``(N, *sides)`` without texture.

    It is the root of the mean of the lower half of their principal variances. A window has no texture if its sum of squared differences of
    neighbours :math:`z^\top A z` is below the 99 % quantile for nothing but noise. That is the quantile of the gamma distribution with the
    same mean and variance (by Wilson's and Hilferty's formula).

    Reference:
        Liu, Tanaka and Okutomi, "Single-image noise level estimation for blind denoising", IEEE Transactions on Image Processing 22, 2013.
    """
    points = windows.flatten(1).double()
    texture, limit = texture_energy(windows).double(), _limit(windows)
    for _ in range(max_noise_steps):
        flat = points[texture < limit * level**2]
        if len(flat) < WINDOWS_PER_ENTRY * points.shape[1]:
            break
        variances = torch.linalg.eigvalsh(flat.mT.cov())
        level = math.sqrt(max(0.0, float(variances[: len(variances) // 2].mean())))
    return level


def texture_energy(windows: Tensor) -> Tensor:
    """The squared differences of neighbours in windows ``(N, *sides)``, added up."""
    differences = (windows.diff(dim=dim).square().flatten(1).sum(1) for dim in range(1, windows.dim()))
    return torch.stack(list(differences)).sum(0)


def _limit(windows: Tensor) -> float:
    """What 99 % of windows of standard normal numbers have less texture than."""
    units = torch.eye(windows[0].numel(), dtype=torch.float64).unflatten(1, windows.shape[1:])
    gradients = torch.cat([units.diff(dim=dim).flatten(1) for dim in range(1, windows.dim())], 1)
    mean, variance = gradients.square().sum(), 2 * (gradients @ gradients.mT).square().sum()
    part = variance / (9 * mean**2)
    # Windows of nothing but noise that are taken for such, as a quantile of the normal
    # distribution: 99 %.
    return float(mean * (1 - part + 2.33 * part.sqrt()) ** 3)


def _difference_noise(image: Tensor, num_dims: int) -> float:
    """Estimates the noise by the median of third differences along all dimensions.

    Edges affect it little, and slopes not at all. Where few entries have all the neighbours that this takes, the order is lower.
    """
    for order in (3, 2, 1):
        differences = image
        for dim in range(num_dims):
            differences = differences.diff(order, dim)
        observed = differences[~differences.isnan()]
        if len(observed) >= _MIN_SAMPLES:
            # The squares of binomial coefficients add up to a central one.
            return _level(observed) / math.sqrt(math.comb(2 * order, order) ** num_dims)
    differences = torch.cat([image.diff(dim=dim).flatten() for dim in range(num_dims)])
    observed = differences[~differences.isnan()]
    # Where no two neighbours are observed, a tenth of the deviation is taken for noise.
    return _level(observed) / 2**0.5 if len(observed) else 0.1 * float(deviation(image))


def _level(differences: Tensor) -> float:
    """The standard deviation of normal numbers of which most of these are."""
    return float(differences.abs().median() / Normal(0.0, 1.0).icdf(torch.tensor(0.75)))


def deviation(image: Tensor) -> Tensor:
    """The standard deviation of the observed entries."""
    return (image - image.nanmean()).square().nanmean().sqrt()


def median_deviation(image: Tensor) -> float:
    """The median distance of the observed entries from their median."""
    return float((image - image.nanmedian()).abs().nanmedian())


def nearly_no_noise(image: Tensor, num_dims: int) -> float:
    """Returns the noise, hiding little, that mixtures assume for arrays without noise.

    It is the least of three levels:

    * 4 % of the deviation of the entries that are seen, which of photographs is the least;
    * where trends or steps exceed the texture, a quarter of what differs from a smooth array;
    * 2.25 times :func:`noise_level`, which counts as a thousandth of the deviation at least.
    """
    rest = (image - smooth_image(fill_missing(image, num_dims), num_dims)).abs()
    # Of absolute values, which single bright spots change little.
    # The mean absolute value of standard normal numbers.
    texture = float(rest.nanmean()) / math.sqrt(2 / math.pi)
    all_of_it = float(deviation(image))
    if not all_of_it:
        return 1.0  # of a constant array any level is right but zero
    if texture <= 1e-4 * all_of_it:  # no texture, but rounding
        return 0.04 * all_of_it
    return min(0.04 * all_of_it, 0.25 * texture, 2.25 * max(noise_level(image, num_dims), 1e-3 * all_of_it))


def smooth_image(image: Tensor, num_dims: int) -> Tensor:
    """Smooths an array by repeated means over windows of side three."""
    numbers = neighbour_sums(torch.ones_like(image), num_dims)
    for _ in range(16):
        image = neighbour_sums(image, num_dims) / numbers
    return image


def fill_missing(image: Tensor, num_dims: int) -> Tensor:
    """Fills in missing entries by means of neighbours, near ones first."""
    missing = image.isnan()
    if not bool(missing.any()):
        return image
    value, weight = image.nan_to_num(0.0), (~missing).to(image.dtype)
    while bool((weight == 0).any()):
        total, share = (neighbour_sums(array, num_dims) for array in (value * weight, weight))
        value = torch.where(weight > 0, value, total / share.clamp(min=1e-9))
        weight = torch.where(weight > 0, weight, (share > 0).to(weight.dtype))
    return value


def neighbour_sums(array: Tensor, num_dims: int) -> Tensor:
    """Sums over the windows of side three around every entry."""
    for dim in range(num_dims):
        last = array.movedim(dim, -1)
        rows = F.pad(last.reshape(-1, last.shape[-1]), (1, 1))
        array = rows.unfold(-1, 3, 1).sum(-1).reshape(last.shape).movedim(-1, dim)
    return array
