"""Data: stored data sets, images and patches, artificial bars tests."""

from pyro_truncated.datasets.bars import Bars, bar_components, linear_bars, matched_bars, noisy_or_bars, overlapping_bars
from pyro_truncated.datasets.images import IMAGE_SOURCES, generated_images, natural_images
from pyro_truncated.datasets.patches import (
    Whitening,
    binarize,
    binary_patches,
    clamp_brightest,
    fit_whitening,
    image_patches,
    save_whitened_patches,
    whitened_patches,
)
from pyro_truncated.datasets.stored import DATA_VARIABLE, DatasetNotFoundError, data_folder, load

__all__ = [
    "DATA_VARIABLE",
    "IMAGE_SOURCES",
    "Bars",
    "DatasetNotFoundError",
    "Whitening",
    "bar_components",
    "binarize",
    "binary_patches",
    "clamp_brightest",
    "data_folder",
    "fit_whitening",
    "generated_images",
    "image_patches",
    "linear_bars",
    "load",
    "matched_bars",
    "natural_images",
    "noisy_or_bars",
    "overlapping_bars",
    "save_whitened_patches",
    "whitened_patches",
]
