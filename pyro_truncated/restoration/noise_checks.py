"""Warnings of noise that one level does not stand for."""

from __future__ import annotations

import itertools
import math
import warnings

import torch
from torch import Tensor

from pyro_truncated.restoration.channels import noisy_mask, root_mean_square
from pyro_truncated.restoration.noise import deviation, neighbour_sums, noise_level, texture_energy, whole_windows
from pyro_truncated.restoration.photon_counts import FEW_LEVELS, OF_CAMERAS, counts_gain, stabilise

# Noise of stabilised counts is one; outside of these the values are no counts.
MIN_STABLE, MAX_STABLE = 0.7, 1.5
# Counts from which their stabilised noise is one to a few percent.
MANY_PHOTONS = 4.0
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
# Impulses are so large a share of all entries, and half of those of their value, alone and this far from their neighbours in units of
# the range. Fewer than a fifth as many have the next value, or lie within the third share of the range.
MIN_IMPULSES, MIN_HEIGHT, GAP = 0.003, 0.25, 0.05
# Impulses of any number are so large a share, and above or below all neighbours by so many deviations of the signal, and ranges of the
# neighbours. That share was at most 0.0001 of 44 photographs and 0.0003 of noise. It was at least 0.0017 with impulses in every fiftieth
# entry.
MIN_UNLIKE, MIN_DEVIATIONS_APART, MIN_RANGES_APART = 0.0015, 1.2, 2.0
# Quiet windows are the share of least texture. With correlated noise their texture has at most this ratio to that of the quietest. They
# deviate by this share of the signal, and their upper principal variances are so many times the lower ones. So it is in 1 of 308
# photographs with independent noise.
QUIET_SHARE, QUIETEST_SHARE, MAX_RATIO_OF_TEXTURE, MIN_SHARE_OF_QUIET, MIN_RATIO_OF_VARIANCES, MIN_QUIET = 0.2, 0.02, 1.9, 0.1, 3.0, 1000


class VaryingNoiseWarning(UserWarning):
    """Noise is not equal everywhere, and one level was taken off.

    Example:
        >>> counts = torch.poisson(torch.linspace(2.0, 200.0, 64).expand(64, 64))
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     restored = denoise(counts, rounds=1, progress=False)
        >>> any(warning.category is VaryingNoiseWarning for warning in caught)
        True
    """


def warn_about_noise(image: Tensor, num_dims: int, levels: float | Tensor) -> None:
    """Warns of noise that estimated levels do not stand for."""
    if not _warn_if_impulses(image, num_dims):
        _warn_if_noise_varies(image, num_dims, levels)
        _warn_if_correlated(image, num_dims, levels)


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


def _warn_if_noise_varies(image: Tensor, num_dims: int, levels: float | Tensor) -> None:
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
        f"the noise grows with the brightness: {found}, and one level is removed everywhere. {advice}", VaryingNoiseWarning, stacklevel=6
    )


def _warn_if_places_differ(image: Tensor, num_dims: int, levels: float | Tensor) -> None:
    spans = [[(size * i // NUM_PARTS, size * (i + 1) // NUM_PARTS) for i in range(NUM_PARTS)] for size in image.shape[:num_dims]]
    noise, white = {}, image / levels
    for place in itertools.product(*spans):
        part = white[tuple(slice(*span) for span in place)]
        if part.numel() < MIN_WINDOWS_OF_PART:
            continue
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
            stacklevel=7,
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
    points = windows.flatten(1)
    return torch.linalg.eigvalsh(points.mT.cov())[: points.shape[1] // 4].mean().clamp(min=0.0).sqrt()


def _is_poisson_noise(image: Tensor, num_dims: int) -> bool:
    """Whether values are counts, up to a gain, with stable noise."""
    gain = counts_gain(image)
    if gain is None or float(image.nan_to_num(0.0).min()) < 0:
        return False
    counts = image / gain
    classes = _brightness_classes(counts, num_dims)
    if classes is None or not MIN_STABLE < noise_level(stabilise(counts), num_dims) < MAX_STABLE:
        return False
    dark, bright = classes[0], classes[-1]
    is_wide = float(bright.mean()) > MIN_RATIO_OF_BRIGHTNESS * float(dark.mean())
    return is_wide and bool(_principal_noise(stabilise(bright)) > MIN_RATIO_OF_STABLE * _principal_noise(stabilise(dark)))


def _warn_if_impulses(image: Tensor, num_dims: int) -> bool:
    """Warns of entries far from all neighbours; returns whether there are any."""
    share, values = _equal_impulses(image, num_dims)
    where = f"at {' or '.join(f'{value:g}' for value in values)}"
    if not values:
        share, height = _unlike_impulses(image, num_dims)
        where = f"by {height:.3g} or more"
    if share:
        warnings.warn(
            f"{share:.1%} of the entries stand alone {where}, far from their neighbours: no normal noise. Of salt and pepper, dead pixels "
            "or cosmic rays make them NaN, and they are filled in.",
            UserWarning,
            stacklevel=6,
        )
    return share > 0


def _equal_impulses(image: Tensor, num_dims: int) -> tuple[float, list[float]]:
    """Returns the share of entries alone at an extreme number, and these."""
    observed = image[~image.isnan()]
    extent, found = float(observed.max() - observed.min()), {}
    for value in (float(observed.min()), float(observed.max())):
        distance = (image - value).abs()
        is_there, others = distance == 0, (distance > 0).to(image.dtype)
        like, unlike = neighbour_sums(is_there.to(image.dtype), num_dims), neighbour_sums(others, num_dims)
        height = neighbour_sums((distance * others).nan_to_num(0.0), num_dims) / unlike.clamp(min=1.0)
        is_alone = is_there & (like <= 1 + 3**num_dims // 8) & (height > MIN_HEIGHT * extent)
        number = int(is_alone.sum())
        gap = max(GAP * extent, float(distance[distance > 0].min())) if extent else 0.0
        is_apart = int((others.bool() & (distance <= gap)).sum()) < 0.2 * number
        if is_apart and number > MIN_IMPULSES * len(observed) and number > 0.5 * int(is_there.sum()):
            found[value] = number / len(observed)
    return sum(found.values()), sorted(found)


def _unlike_impulses(image: Tensor, num_dims: int) -> tuple[float, float]:
    """Returns the share of entries far from all neighbours, and how far."""
    inner = image[(slice(1, -1),) * num_dims]
    if num_dims == 1 or not inner.numel():  # peaks of a signal may be narrow
        return 0.0, 0.0
    highest, lowest = torch.full_like(inner, -math.inf), torch.full_like(inner, math.inf)
    for shift in itertools.product(range(3), repeat=num_dims):
        if set(shift) != {1}:
            near = image[tuple(slice(start, start + size - 2) for start, size in zip(shift, image.shape, strict=False))]
            highest, lowest = torch.maximum(highest, near), torch.minimum(lowest, near)
    height = MIN_DEVIATIONS_APART * float(deviation(image))
    is_alone = torch.maximum(inner - highest, lowest - inner) > (MIN_RANGES_APART * (highest - lowest)).clamp(min=height)
    share = float(is_alone.double().mean())
    # Few different numbers are sparse counts.
    return (share, height) if share > MIN_UNLIKE and len(inner[is_alone].unique()) > FEW_LEVELS else (0.0, 0.0)


def _warn_if_correlated(image: Tensor, num_dims: int, levels: float | Tensor) -> None:
    """Warns of noise in pictures that neighbours share, which stays as texture."""
    if num_dims != 2:  # signals may be smooth
        return
    windows = whole_windows(image / levels, num_dims)
    texture = texture_energy(windows).double()
    # A constant border says nothing of the noise.
    windows, texture = windows[texture > 0], texture[texture > 0]
    if QUIET_SHARE * len(windows) < MIN_QUIET:
        return
    least, most = texture.quantile(texture.new_tensor([QUIETEST_SHARE, QUIET_SHARE])).tolist()
    variances = torch.linalg.eigvalsh(windows.flatten(1).double()[texture <= most].mT.cov())
    size = len(variances)
    # Without the largest, which are of slopes and edges.
    amount = root_mean_square(levels) * math.sqrt(max(0.0, float(variances[: 5 * size // 6].mean())))
    is_alike = most < MAX_RATIO_OF_TEXTURE * least and amount > MIN_SHARE_OF_QUIET * float(deviation(image))
    if is_alike and bool(variances[2 * size // 3] > MIN_RATIO_OF_VARIANCES * variances[size // 6]):
        warnings.warn(
            f"what looks like noise, of deviation {amount:.3g} or more, is alike in neighbouring pixels, as after demosaicing or resizing: "
            "most of it is taken for texture and stays. Restore the raw file, or the picture at a third of its size; noise=... takes "
            "more off.",
            UserWarning,
            stacklevel=6,
        )
