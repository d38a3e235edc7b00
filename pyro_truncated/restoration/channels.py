"""Channels of a damaged array, and the noise of each."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from pyro_truncated.restoration.noise import WINDOWS_PER_ENTRY, deviation, noise_level, whole_windows
from pyro_truncated.utils.arrays import as_tensors

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


def noisy_mask(image: Tensor, levels: Tensor) -> Tensor:
    """Returns which channels have noise, ``(C,)``."""
    return levels > MIN_SHARE_OF_NOISE * torch.stack([deviation(plane) for plane in image.unbind(-1)])


def _are_bands(planes: Tensor) -> bool:
    """Whether planes have noise of unlike strength."""
    if not 1 < len(planes) <= min(MAX_BANDS, *(size // 2 for size in planes.shape[1:])):
        return False
    observed = planes[~planes.isnan().flatten(1).all(1)].movedim(0, -1)
    levels = torch.as_tensor(per_channel(noise_level, observed, 2))
    return bool(noisy_mask(observed, levels).all()) and float(levels.max() / levels.min()) > MIN_RATIO_OF_BANDS


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
    if len(windows) >= WINDOWS_PER_ENTRY * windows.shape[1:].numel():
        return levels
    # Means of channels that lie far apart are no deviation.
    above, is_noisy = image - image.flatten(0, -2).nanmean(0), noisy_mask(image, levels)
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
        is_noisy = noisy_mask(image, torch.as_tensor(levels)).cpu()
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
            guesses = {"is it a variance? Give its root": float(level) ** 0.5, "is it one of 255? Divide it by that": float(level) / 255}
            # None is offered that the data do not show, either.
            advice, guess = min(guesses.items(), key=lambda guess: abs(math.log(guess[1] / float(shown))))
            if not (is_large and guess < MAX_RATIO_OF_LEVELS * shown and MAX_RATIO_OF_LEVELS * guess > shown):
                advice = "give it in the unit of the array"
            warnings.warn(
                f"noise={float(level):.3g}{name} is far {'above' if is_large else 'below'} what neighbours show, about {float(shown):.3g}: "
                f"{advice}.",
                UserWarning,
                stacklevel=5,
            )
            return
