"""Channels of arrays: which axis holds them, and the noise of each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from pyro_truncated.restoration.noise_estimation import deviation, noise_level, windows_are_enough
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
# Noise below this share of a slice's deviation is not told from a smooth slice.
MIN_SHARE_OF_NOISE = 0.01


def channel_axis(image: Tensor, channels: Channels) -> int | None:
    """Returns the axis of channels: the first (0), the last (-1), or none.

    By default:

    * two dimensions are a signal with channels if there are at most 32 of these and at least their square of entries in time;
    * of more dimensions the last or the first holds channels if it has one, three or four entries. Four that vary, and are the
      less alike the further they are apart, are slices of a volume.
    * up to 32 planes with noise of unlike strength are bands.

    Args:
        image: the damaged array.
        channels: ``True`` or ``"last"``, ``"first"``, ``False`` for none, or ``None`` for the default.

    Raises:
        ValueError: for another value, a single dimension of channels, and channels without entries.
    """
    if not isinstance(channels, (bool, str, type(None))) or channels not in (None, True, False, "first", "last"):
        raise ValueError(f"channels must be True or 'last', 'first', False or None; got {channels!r}")
    if channels and image.dim() < 2:
        raise ValueError(f"channels must be one of several dimensions; channels={channels!r} for an array of shape {tuple(image.shape)}")
    axis = _default_axis(image) if channels is None else {True: -1, "last": -1, "first": 0, False: None}[channels]
    if axis is not None:
        unseen = image.movedim(axis, 0).flatten(1).isnan().all(1).nonzero().flatten().tolist()
        if unseen:
            raise ValueError(f"of channels {unseen} no entry is observed: all are NaN; leave them out")
    return axis


def _default_axis(image: Tensor) -> int | None:
    if image.dim() < 2:
        return None
    axes = (-1, 0)
    if image.dim() == 2:
        few = (axis for axis in axes if image.shape[axis] <= MAX_CHANNELS_OF_SIGNAL)
        return next((axis for axis in few if image.shape[axis] ** 2 <= image.shape[-1 - axis]), None)
    few = (axis for axis in axes if image.shape[axis] in (1, 3, 4) and min(_others(image, axis)) > 4)
    found = next((axis for axis in few if image.shape[axis] < 4 or not _are_slices(image.movedim(axis, 0))), None)
    if found is None and image.dim() == 3:
        return next((axis for axis in axes if _are_bands(image.movedim(axis, 0))), None)
    return found


def _others(image: Tensor, axis: int) -> list[int]:
    """Sizes of the other dimensions."""
    sizes = list(image.shape)
    del sizes[axis]
    return sizes


def _are_slices(planes: Tensor) -> bool:
    """Whether four planes vary, and are less alike if further apart."""
    above = planes - planes.flatten(1).nanmean(1).reshape(-1, *(1,) * (planes.dim() - 1))
    flat = above.nan_to_num(0.0).flatten(1).double()
    if not all(_varying(planes.flatten(1))):
        return False
    distance = torch.cdist(flat, flat)
    rings = [distance.diagonal(offset) for offset in range(1, len(planes))]
    return all(bool(near.max() < far.min()) for near, far in itertools.pairwise(rings))


def _are_bands(planes: Tensor) -> bool:
    """Whether planes have noise of unlike strength."""
    if not 1 < len(planes) <= min(MAX_BANDS, *(size // 2 for size in planes.shape[1:])):
        return False
    seen = [plane for plane in planes if not bool(plane.isnan().all())]
    levels = torch.tensor([noise_level(plane, 2) for plane in seen])
    is_noisy = levels > MIN_SHARE_OF_NOISE * torch.stack([deviation(plane) for plane in seen])
    return bool(is_noisy.all()) and float(levels.max() / levels.min()) > MIN_RATIO_OF_BANDS


def check_noise(noise: Noise, image: Tensor, *, has_channels: bool) -> float | Tensor:
    """Checks a noise level, one number or one for each channel.

    Returns:
        The number, or ``(C,)`` in the type of the image.

    Raises:
        ValueError: if it is not positive and finite, or there are more or fewer numbers than channels.
    """
    levels = torch.as_tensor(as_tensors(noise), dtype=torch.float64)
    if not bool(((levels > 0) & levels.isfinite()).all()):
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

    It is that of :func:`.noise_level`. Channels too small for the estimate by windows share their windows, each divided by its first
    estimate.
    """
    levels = per_channel(noise_level, image, num_dims)
    if not isinstance(levels, Tensor) or windows_are_enough(image[..., 0], num_dims):
        return levels
    return levels * noise_level(image / levels, num_dims)


def related_channels(image: Tensor, num_dims: int, levels: float | Tensor) -> list[list[int]]:
    """Returns groups of channels that say something of each other.

    Constant channels, as of an image that is opaque everywhere, are in none. Channels of a signal, ``(N, C)``, are alone if their
    correlations with all others are low at all small lags, or as by chance. Bands of images are never parted otherwise: edges lie
    at the same places.

    Args:
        image: the array, channels last; what is missing is NaN.
        num_dims: dimensions without channels.
        levels: the noise, which is left out of variances.

    Reference:
        Bartlett, "Some aspects of the time-correlation problem in regard to tests of significance", Journal of the Royal Statistical
        Society 98, 1935.
    """
    rows = image.flatten(0, -2).double()
    varies = _varying(rows.mT)
    above = (rows - rows.nanmean(0)).nan_to_num(0.0)
    is_related = torch.eye(len(varies), dtype=torch.bool)
    both = torch.tensor(varies).unsqueeze(0) & torch.tensor(varies).unsqueeze(1)
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


def _varying(rows: Tensor) -> list[bool]:
    """Returns which rows have different entries."""
    return [bool(row[~row.isnan()].diff().any()) for row in rows]


def root_mean_square(levels: float | Tensor) -> float:
    """Returns one level for all channels."""
    return math.sqrt(torch.as_tensor(levels).double().square().mean())
