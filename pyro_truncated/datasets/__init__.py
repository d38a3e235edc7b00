"""Data: stored data sets, images and patches, artificial bars tests."""

from pyro_truncated.datasets.bars import Bars, bar_components, linear_bars, matched_bars, noisy_or_bars, overlapping_bars
from pyro_truncated.datasets.images import (
    DATA_VARIABLE,
    IMAGE_SOURCES,
    DatasetNotFoundError,
    Whitening,
    binarize,
    binary_patches,
    clamp_brightest,
    data_folder,
    fit_whitening,
    generated_images,
    image_patches,
    load,
    natural_images,
    save_whitened_patches,
    whitened_patches,
)

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
