"""First estimates for a damaged array: its channels and its noise."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.distributions import Normal
from torch.nn import functional as F

from pyro_truncated.utils.arguments import describe
from pyro_truncated.utils.arrays import as_data, as_tensors

# Windows for each entry of a window from which the estimate of the noise is sure.
_WINDOWS_PER_ENTRY = 100
# Of larger arrays every second window or less is looked at, along all dimensions.
_MAX_WINDOWS = 2**19
# Differences of which the median says something, and windows that are left beside constant ones.
_MIN_SAMPLES = 100


def check_image(image: Any) -> Tensor:
    """Returns a damaged array, in double precision if squares need it.

    Raises:
        ValueError: if it is a single number, has no observed entry, infinite ones, or such whose squares are infinite or zero.
    """
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
    least = 1e-3 * float(deviation(image)) or 1.0  # of a constant array any level is right but zero
    image = _without_constant_windows(image, num_dims)
    differences = _difference_noise(image, num_dims)
    windows = whole_windows(image, num_dims)
    if len(windows) < _WINDOWS_PER_ENTRY * windows.shape[1:].numel():
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
    side: int = round(36 ** (1 / num_dims))
    return side


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
        if len(flat) < _WINDOWS_PER_ENTRY * points.shape[1]:
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


def nearly_no_noise(image: Tensor, num_dims: int) -> float:
    """Returns the noise, hiding little, that mixtures assume for arrays without noise.

    It is the least of three levels:

    * 4 % of the deviation of the entries that are seen, which of photographs is the least;
    * where trends or steps exceed the texture, a quarter of what differs from a smooth array;
    * 2.25 times :func:`noise_level`.
    """
    rest = (image - smooth_image(fill_missing(image, num_dims), num_dims)).abs()
    # Of absolute values, which single bright spots change little.
    # The mean absolute value of standard normal numbers.
    texture = float(rest.nanmean()) / math.sqrt(2 / math.pi)
    all_of_it = float(deviation(image))
    if texture <= 1e-4 * all_of_it:  # no texture, but rounding
        return 0.04 * all_of_it or 1.0  # of a constant array any level is right but zero
    return min(0.04 * all_of_it, 0.25 * texture, 2.25 * noise_level(image, num_dims))


def smooth_image(image: Tensor, num_dims: int) -> Tensor:
    """Smooths an array by repeated means over windows of side three."""
    numbers = _neighbours(torch.ones_like(image), num_dims)
    for _ in range(16):
        image = _neighbours(image, num_dims) / numbers
    return image


def fill_missing(image: Tensor, num_dims: int) -> Tensor:
    """Fills in missing entries by means of neighbours, near ones first."""
    missing = image.isnan()
    if not bool(missing.any()):
        return image
    value, weight = image.nan_to_num(0.0), (~missing).to(image.dtype)
    while bool((weight == 0).any()):
        total, share = (_neighbours(array, num_dims) for array in (value * weight, weight))
        value = torch.where(weight > 0, value, total / share.clamp(min=1e-9))
        weight = torch.where(weight > 0, weight, (share > 0).to(weight.dtype))
    return value


def _neighbours(array: Tensor, num_dims: int) -> Tensor:
    """Sums over the windows of side three around every entry."""
    for dim in range(num_dims):
        last = array.movedim(dim, -1)
        rows = F.pad(last.reshape(-1, last.shape[-1]), (1, 1))
        array = rows.unfold(-1, 3, 1).sum(-1).reshape(last.shape).movedim(-1, dim)
    return array


Channels = bool | Literal["first", "last"] | None
Noise = float | Sequence[float] | Tensor | None

# Most channels of a signal; a signal has at least their square of entries in time.
MAX_CHANNELS_OF_SIGNAL = 32
# Most bands of an image without a word; slices of a volume have equal noise, bands differ by more than this ratio.
MAX_BANDS, MIN_RATIO_OF_BANDS = 32, 2.0
# Channels of a signal are related if their correlation, at some lag up to that number of entries, exceeds this one.
# It must also exceed so many deviations of correlations by chance, but for correlations above the second.
MIN_CORRELATION, MAX_CORRELATION, NUM_DEVIATIONS, MAX_LAG = 0.5, 0.9, 3.0, 64
# Noise below this share of a channel's or slice's deviation is not told from a smooth one.
MIN_SHARE_OF_NOISE = 0.01


def channel_axis(image: Tensor, channels: Channels) -> int | None:
    """Returns the axis of channels: the first (0), the last (-1), or none.

    By default:

    * two dimensions are a signal with channels if there are at most 32 of these and at least their square of entries in time;
    * of more dimensions the last or the first, or the second of four, holds channels if it has one, three or four entries. Four
      that vary, and are the less alike the further they are apart, are slices of a volume.
    * up to 32 planes with noise of unlike strength are bands.

    Raises ``ValueError`` for another value, a single dimension of channels, and channels without entries.
    """
    if not isinstance(channels, (bool, str, type(None))) or channels not in (None, True, False, "first", "last"):
        raise ValueError(f"channels must be True or 'last', 'first', False or None; got {channels!r}")
    if channels and image.dim() < 2:
        raise ValueError(f"channels must be one of several dimensions; channels={channels!r} for an array of shape {tuple(image.shape)}")
    axis = _default_axis(image) if channels is None else {True: -1, "last": -1, "first": 0, False: None}[channels]
    if axis is not None:
        unseen = image.movedim(axis, 0).flatten(1).isnan().all(1).nonzero().flatten().tolist()
        if unseen:
            raise ValueError(f"channels {unseen} have no observed entry, only NaN; leave them out")
    return axis


def _default_axis(image: Tensor) -> int | None:
    if image.dim() < 2:
        return None
    axes = (-1, 0)
    if image.dim() == 2:
        few = (axis for axis in axes if image.shape[axis] <= MAX_CHANNELS_OF_SIGNAL)
        return next((axis for axis in few if image.shape[axis] ** 2 <= image.shape[-1 - axis]), None)
    # Movies of networks have channels beside time, and a few frames are no channels.
    each = (-1, 1, 0) if image.dim() == 4 else axes
    few = (axis for axis in each if image.shape[axis] in (1, 3, 4) and sorted(image.movedim(axis, 0).shape[1:])[-2] > 4)
    first = next((axis for axis in few if image.shape[axis] < 4 or not _are_slices(image.movedim(axis, 0))), None)
    if first is None and image.dim() == 3:
        return next((axis for axis in axes if _are_bands(image.movedim(axis, 0))), None)
    return first


def _are_slices(planes: Tensor) -> bool:
    """Whether four planes vary, and are less alike if further apart."""
    above = planes - planes.flatten(1).nanmean(1).reshape(-1, *(1,) * (planes.dim() - 1))
    flat = above.nan_to_num(0.0).flatten(1).double()
    if not all(_varying_mask(planes.flatten(1))):
        return False
    distance = torch.cdist(flat, flat)
    rings = [distance.diagonal(offset) for offset in range(1, len(planes))]
    return all(bool(near.max() < far.min()) for near, far in itertools.pairwise(rings))


def _noisy_mask(image: Tensor, levels: Tensor) -> Tensor:
    """Returns which channels have noise, ``(C,)``."""
    return levels > MIN_SHARE_OF_NOISE * torch.stack([deviation(plane) for plane in image.unbind(-1)])


def _are_bands(planes: Tensor) -> bool:
    """Whether planes have noise of unlike strength."""
    if not 1 < len(planes) <= min(MAX_BANDS, *(size // 2 for size in planes.shape[1:])):
        return False
    observed = planes[~planes.isnan().flatten(1).all(1)].movedim(0, -1)
    levels = torch.as_tensor(per_channel(noise_level, observed, 2))
    return bool(_noisy_mask(observed, levels).all()) and float(levels.max() / levels.min()) > MIN_RATIO_OF_BANDS


def warn_if_table(image: Tensor) -> None:
    """Warns if columns of an image ``(N, C)`` have noise of unlike strength."""
    columns = [column for column in image.unbind(-1) if not bool(column.isnan().all()) and bool((column != column[0]).any())]
    # Of fewer entries the noise is not sure.
    if not 2 <= len(columns) <= 2 * MAX_CHANNELS_OF_SIGNAL or len(image) < MAX_CHANNELS_OF_SIGNAL:
        return
    levels = torch.tensor([noise_level(column, 1) for column in columns])
    is_noisy = levels > MIN_SHARE_OF_NOISE * torch.stack([deviation(column) for column in columns]).cpu()
    if bool(is_noisy.all()) and float(levels.log().diff().abs().median()) > math.log(MIN_RATIO_OF_BANDS):
        warnings.warn(
            f"the columns have noise of unlike strength, from {float(levels.min()):.3g} to {float(levels.max()):.3g}, and are restored as "
            "an image. Pass channels=True if they are signals, or channels=False.",
            UserWarning,
            stacklevel=4,
        )


def check_noise(noise: Noise, image: Tensor, *, has_channels: bool) -> float | Tensor:
    """Returns a noise level, a number or ``(C,)``, if positive and finite."""
    levels = torch.as_tensor(as_tensors(noise), dtype=torch.float64).flatten()
    if isinstance(noise, bool) or not bool(((levels > 0) & levels.isfinite()).all()):
        raise ValueError(f"noise must be a positive standard deviation, or one for each channel; got {noise}")
    if levels.numel() == 1:
        return float(levels)
    if not has_channels or levels.shape != image.shape[-1:]:
        number = f"{image.shape[-1]} channels" if has_channels else "no channels"
        raise ValueError(f"noise must be one number or one for each channel; got {levels.numel()} for an array with {number}")
    return levels.to(image)


def per_channel(level: Callable[[Tensor, int], float], image: Tensor, num_dims: int) -> float | Tensor:
    """Returns a level of an array, or ``(C,)`` of its channels."""
    if image.dim() == num_dims:
        return level(image, num_dims)
    return image.new_tensor([level(plane, num_dims) for plane in image.unbind(-1)])


def noise_levels(image: Tensor, num_dims: int) -> float | Tensor:
    """Estimates the noise of an array, or ``(C,)`` of its channels.

    It is that of :func:`.noise_level`. Noisy channels too small for the estimate by windows share their windows, each divided by its
    first estimate.
    """
    levels = per_channel(noise_level, image, num_dims)
    if not isinstance(levels, Tensor):
        return levels
    windows = whole_windows(image[..., 0], num_dims)
    if len(windows) >= _WINDOWS_PER_ENTRY * windows.shape[1:].numel():
        return levels
    # Means of channels that lie far apart are no deviation.
    above, is_noisy = image - image.flatten(0, -2).nanmean(0), _noisy_mask(image, levels)
    return torch.where(is_noisy, levels * noise_level((above / levels)[..., is_noisy], num_dims), levels) if is_noisy.any() else levels


def related_channels(image: Tensor, num_dims: int, levels: float | Tensor, *, is_noise_known: bool = True) -> list[list[int]]:
    """Returns groups of channels that say something of each other.

    Constant channels, as of an image that is opaque everywhere, are in none. Estimated noise parts channels without noise, as a
    transparency, from noisy ones: in units of the noise they would outweigh all others. Channels of a signal, ``(N, C)``, are alone if
    their correlations with all others are low at all small lags, or as by chance. Bands of images are not parted by correlations: edges lie
    at the same places. Channels come last, and the noise is left out of variances.

    Reference:
        Bartlett, "Some aspects of the time-correlation problem in regard to tests of significance", Journal of the Royal Statistical
        Society 98, 1935.
    """
    rows = image.flatten(0, -2).double()
    varies = _varying_mask(rows.mT)
    above = (rows - rows.nanmean(0)).nan_to_num(0.0)
    is_related = torch.eye(len(varies), dtype=torch.bool)
    both = torch.tensor(varies).unsqueeze(0) & torch.tensor(varies).unsqueeze(1)
    if not is_noise_known:
        is_noisy = _noisy_mask(image, torch.as_tensor(levels)).cpu()
        both &= is_noisy.unsqueeze(0) == is_noisy.unsqueeze(1)
    if num_dims > 1:
        is_related |= both
    else:
        spectra = torch.fft.rfft(above, 2 * len(above), dim=0)
        lagged = torch.fft.irfft(spectra.unsqueeze(1).conj() * spectra.unsqueeze(2), dim=0)[: MAX_LAG + 1].abs().amax(0)
        noise = torch.as_tensor(levels).double().square() * (~rows.isnan()).sum(0)
        power = (above.square().sum(0) - noise).clamp(min=torch.finfo(torch.float64).tiny)
        # By chance (Bartlett): slow channels have few independent entries.
        own = torch.fft.irfft(spectra.abs().square(), 2 * len(above), dim=0)
        by_chance = (own.mT @ own).clamp(min=0.0) / (power.unsqueeze(0) * power.unsqueeze(1)) / len(above)
        least = (NUM_DEVIATIONS * by_chance.sqrt()).clamp(MIN_CORRELATION, MAX_CORRELATION)
        related = lagged.maximum(lagged.mT) > least * (power.unsqueeze(0) * power.unsqueeze(1)).sqrt()
        is_related |= both & related.cpu()
    group = connected_components(is_related.numpy(), directed=False)[1]
    groups = [np.flatnonzero(group == one).tolist() for one in range(group.max() + 1)]
    return [channels for channels in groups if varies[channels[0]]]


def _varying_mask(rows: Tensor) -> list[bool]:
    """Returns which rows have different entries."""
    return [bool(row[~row.isnan()].diff().any()) for row in rows]


def root_mean_square(levels: float | Tensor) -> float:
    """Returns one level for all channels."""
    return math.sqrt(torch.as_tensor(levels).double().square().mean())


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
    """Warns if the noise grows with the brightness.

    Four classes of equally many windows lie around evenly spaced brightnesses. The noise of a class has two estimates: the root of the
    mean of the lower quarter of its principal variances, and the lowest tenth of its texture. Fine texture raises the second estimate.
    Single edges in few windows raise the first.

    It warns if both estimates are half as much again in the brightest class as in the darkest, and a fifth more than in the second. Or if
    the values are multiples of one number, and have the noise of counts, however little that is.
    """
    if isinstance(levels, Tensor):
        # Flags and drawings beside sensors have no noise that could vary.
        is_noisy = _noisy_mask(image, levels)
        if not bool(is_noisy.any()):
            return
        image, levels = image[..., is_noisy], levels[is_noisy]
    is_large, growth = _noise_growth(image, num_dims, levels)
    if not (is_large and growth) and not _is_poisson_noise(image, num_dims):
        return
    found, advice = "it is that of photon counts", "Pass noise='poisson'."
    if growth:
        found = f"in the brightest windows it is {growth:.1f} times that of the darkest" if growth < math.inf else "dark windows have none"
        advice = f"For photon counts pass noise='poisson'; for noise that is a share of the numbers restore their logarithm. {OF_CAMERAS}"
    warnings.warn(
        f"the noise grows with the brightness: {found}, and one level is removed everywhere. {advice}", VaryingNoiseWarning, stacklevel=5
    )


# Impulses are so large a share of all entries, and half of those of their value, alone and this far from their neighbours in units of
# the range. Fewer than a fifth as many have the next value, or lie within the third share of the range.
MIN_IMPULSES, MIN_HEIGHT, GAP = 0.003, 0.25, 0.05


def warn_if_impulses(image: Tensor, num_dims: int) -> None:
    """Warns of single entries at the lowest or highest number."""
    observed = image[~image.isnan()]
    extent, found = float(observed.max() - observed.min()), []
    for value in {float(observed.min()), float(observed.max())}:
        distance = (image - value).abs()
        is_there, others = distance == 0, (distance > 0).to(image.dtype)
        like, unlike = _neighbours(is_there.to(image.dtype), num_dims), _neighbours(others, num_dims)
        height = _neighbours((distance * others).nan_to_num(0.0), num_dims) / unlike.clamp(min=1.0)
        is_alone = is_there & (like <= 1 + 3**num_dims // 8) & (height > MIN_HEIGHT * extent)
        number = int(is_alone.sum())
        gap = max(GAP * extent, float(distance[distance > 0].min())) if extent else 0.0
        is_apart = int((others.bool() & (distance <= gap)).sum()) < 0.2 * number
        if is_apart and number > MIN_IMPULSES * len(observed) and number > 0.5 * int(is_there.sum()):
            found.append((value, number / len(observed)))
    if found:
        values = " or ".join(f"{value:g}" for value, _ in sorted(found))
        warnings.warn(
            f"{sum(share for _, share in found):.1%} of the entries stand alone at {values}, "
            "far from their neighbours: no normal noise. Of salt and pepper or dead pixels make them NaN, and they are filled in.",
            UserWarning,
            stacklevel=5,
        )


# Given levels so far above or below what is estimated are in another unit; levels below the share of the deviation do no harm.
MAX_RATIO_OF_LEVELS, MIN_RATIO_OF_LEVELS, HARMLESS_SHARE, MIN_ENTRIES = 3.0, 0.01, 0.05, 500


def warn_if_unlikely(noise: float | Tensor, image: Tensor, num_dims: int) -> None:
    """Warns if a given noise level cannot be the array's."""
    if image.numel() < MIN_ENTRIES:
        return
    found = noise_levels(image, num_dims)
    parts: list[tuple[Any, Any, Tensor, str]] = [(noise, root_mean_square(found), image, "")]
    if isinstance(noise, Tensor) and isinstance(found, Tensor):
        # Of channels with levels of their own each is compared.
        parts = [(*part, f" of channel {number}") for number, part in enumerate(zip(noise, found, image.unbind(-1), strict=True))]
    for level, shown, part, name in parts:
        extent = float(deviation(part))
        # Arrays without noise have none to compare with.
        is_large = shown > MIN_SHARE_OF_NOISE * extent and level > max(MAX_RATIO_OF_LEVELS * shown, HARMLESS_SHARE * extent)
        if is_large or level < MIN_RATIO_OF_LEVELS * shown:
            advice = "is it a variance? Give its root" if is_large else "give it in the unit of the array"
            warnings.warn(
                f"noise={float(level):.3g}{name} is far {'above' if is_large else 'below'} what neighbours show, about {float(shown):.3g}: "
                f"{advice}.",
                UserWarning,
                stacklevel=5,
            )
            return


def _noise_growth(image: Tensor, num_dims: int, levels: float | Tensor) -> tuple[bool, float]:
    """Returns whether bright windows have much noise, and growth beyond chance."""
    classes = _brightness_classes(image / levels, num_dims)
    if classes is None:
        return False, 0.0
    noise, texture = (torch.stack([estimate(part) for part in classes]) for estimate in (_principal_noise, _lower_texture))
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


def _lower_texture(windows: Tensor) -> Tensor:
    """Returns the root of the lowest tenth of squared differences."""
    return texture_energy(windows).quantile(QUANTILE_OF_TEXTURE).sqrt()


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
