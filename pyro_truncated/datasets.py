"""Data: stored real data sets, natural image patches and their preprocessing, and the artificial bars tests."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_truncated.counts import check_count

DATA_VARIABLE = "PYRO_TRUNCATED_DATA"
IMAGE_SOURCES = ("hyvarinen", "vanhateren", "sklearn", "generated")


class DatasetNotFoundError(FileNotFoundError):
    """A stored data set is not in the data folder."""


def data_folder() -> Path:
    """The folder of the stored data sets.

    The environment variable ``PYRO_TRUNCATED_DATA`` names it; without it, it is ``../shared/data`` beside the repository, or else
    beside the working directory.
    """
    if named := os.environ.get(DATA_VARIABLE):
        return Path(named)
    beside_repository = Path(__file__).parents[2] / "shared" / "data"
    return beside_repository if beside_repository.is_dir() else Path.cwd().parent / "shared" / "data"


def load(name: str) -> dict[str, np.ndarray]:
    """Loads the arrays of a stored data set ``<name>.npz`` by their names.

    Raises:
        DatasetNotFoundError: if the data folder holds no such file.
    """
    file = data_folder() / f"{name}.npz"
    if not file.is_file():
        raise DatasetNotFoundError(f"data set {name!r} not found at {file}; set {DATA_VARIABLE} to the folder that holds {name}.npz")
    with np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def natural_images(source: str | None = None) -> list[Tensor]:
    """Grey images of natural scenes, each ``(height, width)`` float32 in [0, 1].

    Args:
        source: ``"hyvarinen"`` (eleven images) or ``"vanhateren"`` (one large image, linear in light intensity) from the data folder,
            ``"sklearn"`` (the two photographs that scikit-learn ships), or ``"generated"`` (see :func:`generated_images`).
            Without a choice the first of these that can be had.

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
    """Images with the edges and the spectrum of natural scenes, for use where there is no photograph.

    Discs of random grey and of radii with density proportional to ``r**-3`` occlude each other (the dead leaves model). Over them
    lies weak noise with amplitudes falling as one over the spatial frequency.

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


def image_patches(images: Sequence[Tensor], size: int, num: int, generator: torch.Generator | None = None) -> Tensor:
    """Draws ``num`` square patches ``(num, size**2)``, uniformly over all positions in all images.

    Raises:
        ValueError: if an image is smaller than a patch or there is none.
    """
    size, num = check_count("size", size), check_count("num", num)
    if not images or any(min(image.shape) < size for image in images):
        raise ValueError(f"patches of {size} x {size} need images at least as large; got {[tuple(image.shape) for image in images]}")
    windows = [image.unfold(0, size, 1).unfold(1, size, 1) for image in images]
    counts = torch.tensor([float(window.shape[0] * window.shape[1]) for window in windows])
    source = torch.multinomial(counts, num, replacement=True, generator=generator)
    position = torch.rand(2, num, generator=generator, dtype=torch.float64)
    patches = images[0].new_empty(num, size, size)
    for index, window in enumerate(windows):
        chosen = source == index
        row, column = ((position[axis, chosen] * window.shape[axis]).long() for axis in (0, 1))
        patches[chosen] = window[row, column]
    return patches.flatten(1)


@dataclasses.dataclass(frozen=True)
class Whitening:
    r"""ZCA whitening on the leading principal components and its pseudo-inverse.

    With the eigenvectors :math:`U` and eigenvalues :math:`\Lambda` kept of the covariance, ``whiten`` is
    :math:`U \Lambda^{-1/2} U^\top` and ``dewhiten`` is :math:`U \Lambda^{1/2} U^\top` (Bell & Sejnowski, 1997). A dictionary ``(D, H)``
    learned on whitened data is ``dewhiten @ dictionary`` in pixel space.

    Attributes:
        mean: mean ``(D,)`` of the data.
        whiten: whitening matrix ``(D, D)``, symmetric.
        dewhiten: de-whitening matrix ``(D, D)``, symmetric.
        num_components: number of principal components kept.
    """

    mean: Tensor
    whiten: Tensor
    dewhiten: Tensor
    num_components: int

    def apply(self, data: Tensor) -> Tensor:
        """Whitened data ``(N, D)``: mean zero, and unit variance along every component kept."""
        return (data - self.mean) @ self.whiten

    def invert(self, whitened: Tensor) -> Tensor:
        """Data ``(N, D)`` from whitened data, up to what lies in the components dropped."""
        return whitened @ self.dewhiten + self.mean


def fit_whitening(data: Tensor, variance: float = 0.95) -> Whitening:
    """ZCA whitening of data ``(N, D)`` on the fewest principal components that hold the given share of the variance.

    Computed in float64, returned in the type of the data.

    Raises:
        ValueError: if ``variance`` is not in (0, 1] or the data are constant.
    """
    if not 0 < variance <= 1:
        raise ValueError(f"variance must lie in (0, 1]; got {variance}")
    mean = data.double().mean(0)
    centred = data.double() - mean
    eigenvalues, eigenvectors = torch.linalg.eigh(centred.mT @ centred / len(data))
    eigenvalues, eigenvectors = eigenvalues.flip(0).clamp(min=0), eigenvectors.flip(1)
    if eigenvalues[0] == 0:
        raise ValueError("constant data cannot be whitened")
    share = eigenvalues.cumsum(0) / eigenvalues.sum()
    numerical_rank = int((eigenvalues > eigenvalues[0] * len(eigenvalues) * torch.finfo(data.dtype).eps).sum())
    kept = min(int((share < variance).sum()) + 1, numerical_rank)
    root, basis = eigenvalues[:kept].sqrt(), eigenvectors[:, :kept]
    whiten, dewhiten = (basis / root) @ basis.mT, (basis * root) @ basis.mT
    return Whitening(mean.to(data), whiten.to(data), dewhiten.to(data), kept)


def whitened_patches(
    images: Sequence[Tensor],
    size: int,
    num: int,
    generator: torch.Generator | None = None,
    *,
    clamp: float = 0.02,
    structure: float = 0.25,
    variance: float = 0.95,
) -> tuple[Tensor, Whitening]:
    """Natural image patches as sparse coding wants them.

    The highest amplitudes are clamped against light reflections, patches without structure are left out, and the rest is ZCA whitened
    (Evolutionary Expectation Maximization for Generative Models with Binary Latents, 2018, section 5.2). The paper leaves two things
    open, decided here as follows. A patch has no structure if its standard deviation is below ``structure`` times the median one. The mean
    brightness of each patch is taken off first, since it alone would make up most of the variance that the whitening is to keep.

    Args:
        images: grey images.
        size: side of a patch.
        num: number of patches ``N`` to return.
        generator: source of the random positions.
        clamp: share of the brightest pixels that are set to the value below them.
        structure: least standard deviation of a patch, relative to the median.
        variance: share of the variance that the whitening keeps.

    Returns:
        Whitened patches ``(N, size**2)`` and the whitening, which was fitted to them.
    """
    size, num = check_count("size", size), check_count("num", num)
    images = [clamp_brightest(image, clamp) for image in images]
    patches = image_patches(images, size, 2 * num, generator)
    deviation = patches.std(1)
    kept = patches[(deviation > 0) & (deviation >= structure * deviation.median())][:num]
    kept = kept - kept.mean(1, keepdim=True)
    if len(kept) < num:
        raise ValueError(
            f"fewer than half of the patches have a standard deviation of at least {structure} times the median; lower `structure`"
        )
    whitening = fit_whitening(kept, variance)
    return whitening.apply(kept), whitening


def clamp_brightest(values: Tensor, share: float) -> Tensor:
    """Sets the given share of the largest values to the largest of the others."""
    if not 0 <= share < 1:
        raise ValueError(f"share must lie in [0, 1); got {share}")
    return values.clamp(max=values.flatten().kthvalue(max(1, math.ceil((1 - share) * values.numel()))).values)


def binary_patches(
    images: Sequence[Tensor], size: int, num: int, generator: torch.Generator | None = None, *, clamp: float = 0.01
) -> Tensor:
    """Binary patches ``(num, size**2)``: pixels drawn from Bernoulli distributions with the grey values of natural image patches.

    The brightest pixels are clamped and every patch is stretched to [0, 1] before (Evolutionary Expectation Maximization for
    Generative Models with Binary Latents, 2018, section 5.2).
    """
    patches = image_patches([clamp_brightest(image, clamp) for image in images], size, num, generator)
    return binarize(patches, generator)


def binarize(patches: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Stretches every patch ``(N, D)`` to [0, 1] and draws its pixels from Bernoulli distributions; constant patches become all zero."""
    low, high = patches.amin(1, keepdim=True), patches.amax(1, keepdim=True)
    grey = (patches - low) / (high - low).clamp(min=torch.finfo(patches.dtype).tiny)
    return torch.bernoulli(grey, generator=generator)


class Bars(NamedTuple):
    """A bars test.

    Attributes:
        data: images ``(N, D)``.
        components: what generated them, one column per bar ``(D, H)``.
        states: which bars each image holds, ``(N, H)`` uint8.
    """

    data: Tensor
    components: Tensor
    states: Tensor


def bar_components(size: int, width: int = 1) -> Tensor:
    """All horizontal, then all vertical bars on a ``size x size`` grid, ``(size**2, 2 * (size - width + 1))`` of zeros and ones.

    A bar is ``size`` pixels long and ``width`` wide. Bars of one orientation start at successive pixels, so they overlap if ``width > 1``.
    """
    size, width = check_count("size", size), check_count("width", width)
    if width > size:
        raise ValueError(f"width, that of a bar, must lie in 1 .. {size}; got {width}")
    offset = torch.arange(size) - torch.arange(size - width + 1)[:, None]
    profile = ((offset >= 0) & (offset < width)).float()
    horizontal = profile[:, :, None].expand(-1, -1, size)
    vertical = profile[:, None, :].expand(-1, size, -1)
    return torch.cat([horizontal, vertical]).flatten(1).mT.contiguous()


def _bar_states(num_data: int, num_bars: int, mean_active: float, generator: torch.Generator | None) -> Tensor:
    num_data = check_count("num_data", num_data)
    if not 0 <= mean_active <= num_bars:
        raise ValueError(f"mean_active must lie in 0 .. {num_bars}; got {mean_active}")
    return (torch.rand(num_data, num_bars, generator=generator) < mean_active / num_bars).to(torch.uint8)


def _noisy_or(states: Tensor, components: Tensor, generator: torch.Generator | None) -> Bars:
    silent = (states.float() @ torch.log1p(-components.double()).float().mT).exp()
    return Bars(torch.bernoulli(1 - silent, generator=generator), components, states)


def noisy_or_bars(
    num_data: int,
    size: int = 8,
    *,
    mean_active: float = 2.0,
    weight: float = 0.8,
    background: float = 0.0,
    generator: torch.Generator | None = None,
) -> Bars:
    r"""The standard bars test of the noisy-OR model: :math:`p(y_d = 1 \mid s) = 1 - \prod_h (1 - W_{dh} s_h)`.

    ``2 * size`` bars that do not overlap within an orientation appear independently (Foeldiak, 1990).

    Args:
        num_data: number of images ``N``.
        size: side of the image.
        mean_active: mean number of bars in an image.
        weight: probability that a bar switches on a pixel of its own.
        background: probability that it switches on any other pixel.
        generator: source of the randomness.
    """
    if not (0 <= weight < 1 and 0 <= background < 1):
        raise ValueError(f"weight and background must lie in [0, 1); got {weight} and {background}")
    mask = bar_components(size)
    states = _bar_states(num_data, mask.shape[1], mean_active, generator)
    return _noisy_or(states, background + (weight - background) * mask, generator)


def overlapping_bars(
    num_data: int = 400, *, mean_active: float = 2.0, weight: float = 0.8, generator: torch.Generator | None = None
) -> Bars:
    """Sixteen strongly overlapping bars under a noisy-OR.

    Eight horizontal and eight vertical bars, each nine pixels long and two wide, lie on a 9 x 9 grid, so that half of a bar is shared with
    each parallel neighbour. This is a reconstruction of the test of Luecke & Sahani (JMLR 2008, figure 9) that Evolutionary
    Expectation Maximization (2018, figure 4) repeats. The latter states 400 images and sixteen strongly overlapping bars; the grid
    and the width of the bars, two of them in an image on average, and the noisy-OR weight are choices made here.
    """
    components = weight * bar_components(9, width=2)
    return _noisy_or(_bar_states(num_data, components.shape[1], mean_active, generator), components, generator)


def linear_bars(
    num_data: int,
    size: int = 10,
    *,
    mean_active: float = 5.0,
    amplitude: float = 10.0,
    noise: float = 2.0,
    generator: torch.Generator | None = None,
) -> Bars:
    r"""Bars that add up, with Gaussian noise: :math:`y \sim N(W s, \mathrm{noise}^2 I)`.

    The defaults are the crowded test of Evolutionary Expectation Maximization (2018, section 5.1): twenty bars, five of them in an
    image on average. The amplitude and the noise, which the paper does not state, follow other work on this test.

    Args:
        num_data: number of images ``N``.
        size: side of the image; there are ``2 * size`` bars.
        mean_active: mean number of bars in an image.
        amplitude: value of a bar's pixels.
        noise: standard deviation of the noise.
        generator: source of the randomness.
    """
    components = amplitude * bar_components(size)
    states = _bar_states(num_data, components.shape[1], mean_active, generator)
    data = states.float() @ components.mT
    return Bars(data + noise * torch.randn(data.shape, generator=generator), components, states)


def matched_bars(weight: Tensor, truth: Tensor, threshold: float = 0.9) -> int:
    """How many true components ``(D, H_true)`` a learned dictionary ``(D, H)`` recovers.

    A true component is recovered if its most similar column, by cosine, has a similarity of at least ``threshold`` and is in turn
    more similar to no other true component. So no column counts for two components, and a column that blends two counts for none.
    """
    if weight.shape[0] != truth.shape[0]:
        raise ValueError(f"weight and truth must have the same number of rows; got {tuple(weight.shape)} and {tuple(truth.shape)}")
    columns, components = (torch.nn.functional.normalize(matrix.detach().double(), dim=0) for matrix in (weight, truth))
    similarities = components.mT @ columns
    similarity, column = similarities.max(1)
    owner = similarities.argmax(0)
    return int(((similarity >= threshold) & (owner[column] == torch.arange(len(column), device=column.device))).sum())
