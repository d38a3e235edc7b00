"""Images: stored ones, those of scikit-learn, and generated ones."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pyro_truncated.datasets.stored import DatasetNotFoundError, load
from pyro_truncated.utils.counts import check_count

IMAGE_SOURCES = ("hyvarinen", "vanhateren", "sklearn", "generated")


def natural_images(source: str | None = None) -> list[Tensor]:
    """Grey images of natural scenes, each ``(height, width)`` float32 in [0, 1].

    Example:
        >>> [image.dim() for image in natural_images("generated")][:1]
        [2]

    Args:
        source: ``"hyvarinen"`` (eleven images) or ``"vanhateren"`` (one large image, linear in light intensity) from
            the data folder. ``"sklearn"`` are its two photographs, ``"generated"`` see :func:`generated_images`.
            Default: the first of these that is available.

    Raises:
        DatasetNotFoundError: if the chosen stored set is missing.
        ImportError: if ``"sklearn"`` is chosen and scikit-learn is not installed.
        ValueError: if the source is unknown.
    """
    if source is None:
        for candidate in IMAGE_SOURCES:
            try:
                return natural_images(candidate)
            except (DatasetNotFoundError, ImportError):
                continue
    if source == "hyvarinen":
        return [_grey(image, 255) for image in load("natural_images_hyvarinen").values()]
    if source == "vanhateren":
        image = load("vanhateren_one")["image"]
        return [_grey(image, image.max())]
    if source == "sklearn":
        from sklearn.datasets import load_sample_images

        return [_grey(image.mean(-1), 255) for image in load_sample_images().images]
    if source == "generated":
        return generated_images(8, 256, torch.Generator().manual_seed(0))
    raise ValueError(f"source must be one of {IMAGE_SOURCES} or None; got {source!r}")


def _grey(image: np.ndarray, white: float) -> Tensor:
    return torch.from_numpy(image.astype(np.float32) / np.float32(white))


def generated_images(num: int, size: int, generator: torch.Generator | None = None, num_discs: int = 400) -> list[Tensor]:
    """Draws images with the edges and the spectrum of natural scenes.

    Discs of random grey and of radii with density proportional to ``r**-3`` occlude each other (the dead leaves model). Over them
    lies weak noise with amplitudes falling as one over the spatial frequency.

    Example:
        >>> [image.shape for image in generated_images(2, 32)]
        [torch.Size([32, 32]), torch.Size([32, 32])]

    Returns:
        ``num`` images, each ``(size, size)`` float32 in [0, 1].
    """
    num, size = check_count("num", num), check_count("size", size)
    num_discs = check_count("num_discs", num_discs, least=0)
    grid = torch.arange(size, dtype=torch.float32)
    frequency = torch.fft.fftfreq(size).square()
    falloff = 1 / (frequency[:, None] + frequency).sqrt().clamp(min=1 / size)
    images = []
    for _ in range(num):
        image = torch.full((size, size), 0.5)
        row, column, quantile, grey = torch.rand(4, num_discs, generator=generator)
        smallest, largest = 2.0, size / 3
        radius = (smallest**-2 + quantile * (largest**-2 - smallest**-2)).rsqrt()
        for r, c, disc_radius, disc_grey in zip(row * size, column * size, radius, grey, strict=True):
            image[(grid[:, None] - r).square() + (grid - c).square() < disc_radius.square()] = disc_grey
        noise = torch.fft.ifft2(torch.fft.fft2(torch.randn(size, size, generator=generator)) * falloff).real
        images.append((image + 0.05 * noise / noise.std()).clamp(0, 1))
    return images
