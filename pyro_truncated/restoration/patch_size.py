"""Sizes of patches by noise, missing entries, dimensions and model."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.restoration.model_training import ModelOfPatches
from pyro_truncated.restoration.noise_estimation import deviation

# Sides of patches of images up to this ratio of noise and signal: tests/papers/results/restoration.md.
_SIDES = ((0.4, (5, 6, 8)), (0.8, (6, 7, 8)), (math.inf, (7, 8, 10)))
# Up to this ratio the last round of images of some size has sides that suit the image.
_LARGEST_RATIO = 0.4
_LEAST_EXTENT = 100
_SIDES_OF_COLOURS, _SIDES_OF_VOLUMES, _SIDES_OF_SIGNALS = (4, 5, 6, 8), (4, 5), (32, 64)
# Of colours where entries are missing: as good as the four, in a fourth of the time, as every window has a covariance of its own.
_SIDES_OF_COLOURS_IF_MISSING = (4, 5)
# If of so few pixels anything is seen, windows have to be larger to show any stripes: of grey images and of colours.
_FEW_PIXELS, _SIDES_IF_FEW, _SIDES_OF_COLOURS_IF_FEW = 1 / 3, (6, 10), (5, 7)
_SIDES_OF_MODELS = ((0.4, 8), (0.8, 12), (math.inf, 16))


def sides_of_mixtures(image: Tensor, noise: float, shape: torch.Size, has_channels: bool) -> list[int]:
    """Sides of patches for mixtures, none larger than the image."""
    wanted: tuple[int, ...]
    if len(shape) != 2:
        wanted = _SIDES_OF_SIGNALS if len(shape) == 1 else _SIDES_OF_VOLUMES
    elif _share_of_pixels(image, has_channels) < _FEW_PIXELS:
        wanted = _SIDES_OF_COLOURS_IF_FEW if has_channels else _SIDES_IF_FEW
    elif has_channels:
        wanted = _SIDES_OF_COLOURS_IF_MISSING if bool(image.isnan().any()) else _SIDES_OF_COLOURS
    else:
        wanted = _by_noise(_SIDES, image, noise)
    return sorted({min(side, *shape) for side in wanted})


def _share_of_pixels(image: Tensor, has_channels: bool) -> float:
    """The share of pixels of which a channel is seen."""
    is_seen = ~image.isnan()
    return float((is_seen.any(-1) if has_channels else is_seen).double().mean())


def can_stack_sides(image: Tensor, noise: float) -> bool:
    """Whether stacking can choose the sides of an image's patches.

    The image must have some size, little noise and no missing entries.
    """
    is_large = image.dim() == 2 and min(image.shape) >= _LEAST_EXTENT
    return is_large and not bool(image.isnan().any()) and _ratio(image, noise) <= _LARGEST_RATIO


def side_of(model: ModelOfPatches, shape: torch.Size, channels: int | None) -> int | None:
    """Returns the side of patches that a finished model has.

    None if no such patch fits into the image.
    """
    entries = getattr(model, "num_observed", None)
    if not isinstance(entries, int):
        return None
    side = round((entries / (channels or 1)) ** (1 / len(shape)))
    return side if 0 < side <= min(shape) and side ** len(shape) * (channels or 1) == entries else None


def side_for_model(image: Tensor, noise: float, shape: torch.Size) -> int:
    """Returns the side of patches for a mixture.

    It grows with the noise and is at most that of the image.
    """
    if len(shape) == 1:
        return min(64, len(image))
    wanted: int = _by_noise(_SIDES_OF_MODELS, image, noise) if len(shape) == 2 else 8
    smallest: int = min(wanted, *shape)
    return smallest


def _by_noise(table: tuple[tuple[float, Any], ...], image: Tensor, noise: float) -> Any:
    """Returns a table's first entry whose limit reaches the noise-to-signal ratio."""
    ratio = _ratio(image, noise)
    return next(value for limit, value in table if ratio <= limit)


def _ratio(image: Tensor, noise: float) -> float:
    """Of the standard deviations of noise and signal."""
    return noise / math.sqrt(max(float(deviation(image)) ** 2 - noise**2, 1e-12 * noise**2))
