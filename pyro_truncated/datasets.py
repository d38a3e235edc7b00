"""Data sets: bars tests, stored data, natural images and their patches."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_truncated.utils.arguments import check_count
from pyro_truncated.utils.arrays import as_data
from pyro_truncated.utils.constraints import as_signed

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


class Bars(NamedTuple):
    """A bars test.

    Example:
        >>> data, components, states = linear_bars(10, 4)
        >>> components.shape
        torch.Size([16, 8])

    Attributes:
        data: images ``(N, D)``.
        components: what generated them, one column per bar ``(D, H)``.
        states: which bars each image holds, ``(N, H)`` uint8.
    """

    data: Tensor
    components: Tensor
    states: Tensor


def bar_components(size: int, width: int = 1) -> Tensor:
    """Returns all horizontal, then all vertical bars, ``(size**2, 2 * (size - width + 1))``.

    A bar of ones is ``size`` pixels long and ``width`` wide. Bars of one orientation start at successive pixels.

    Example:
        >>> bar_components(2)
        tensor([[1., 0., 1., 0.],
                [1., 0., 0., 1.],
                [0., 1., 1., 0.],
                [0., 1., 0., 1.]])
    """
    size, width = check_count("size", size), check_count("width", width)
    if width > size:
        raise ValueError(f"width must lie in 1 .. {size}, the size of the image; got {width}")
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

    Example:
        >>> noisy_or_bars(100, 4).data.unique()
        tensor([0., 1.])

    Args:
        num_data: number of images ``N``.
        size: side of the image.
        mean_active: mean number of bars in an image.
        weight: probability that a bar switches on a pixel of its own.
        background: probability that it switches on any other pixel.
        generator: source of randomness.
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

    Eight horizontal and eight vertical bars lie on a 9 x 9 grid, each nine pixels long and two wide. This reconstructs the test of Luecke &
    Sahani (JMLR 2008, figure 9) and of Evolutionary Expectation Maximization (2018, figure 4). Grid, width, two bars in an image on
    average, and the noisy-OR weight are choices made here.

    Example:
        >>> overlapping_bars(10).components.shape[1]
        16
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

    The defaults are the crowded test of Evolutionary Expectation Maximization (2018, section 5.1): twenty bars, five of them in an image on
    average. The amplitude and the noise follow other work on this test.

    Example:
        >>> bars = linear_bars(100, 6, mean_active=2.0)
        >>> bars.data.shape, bars.components.shape, bars.states.shape
        (torch.Size([100, 36]), torch.Size([36, 12]), torch.Size([100, 12]))

    Args:
        num_data: number of images ``N``.
        size: side of the image. There are ``2 * size`` bars.
        mean_active: mean number of bars in an image.
        amplitude: value of a bar's pixels.
        noise: standard deviation of the noise.
        generator: source of randomness.
    """
    if not (0 <= noise < math.inf and abs(amplitude) < math.inf):
        raise ValueError(f"noise must be finite and at least 0, and amplitude finite; got {noise} and {amplitude}")
    components = amplitude * bar_components(size)
    states = _bar_states(num_data, components.shape[1], mean_active, generator)
    data = states.float() @ components.mT
    return Bars(data + noise * torch.randn(data.shape, generator=generator), components, states)


def matched_bars(weight: Tensor, truth: Tensor, threshold: float = 0.9) -> int:
    """How many true components ``(D, H_true)`` a learned dictionary ``(D, H)`` recovers.

    A true component is recovered if its most similar column has a cosine of at least ``threshold``, and resembles no other true component
    more.

    Example:
        >>> components = bar_components(4)
        >>> matched_bars(3 * components[:, torch.randperm(8)], components)  # in any order and scale
        8
    """
    weight, truth = as_data("weight", weight), as_data("truth", truth)
    if weight.shape[0] != truth.shape[0]:
        raise ValueError(f"weight and truth must have the same number of rows; got {tuple(weight.shape)} and {tuple(truth.shape)}")
    columns, components = (torch.nn.functional.normalize(matrix.detach().double(), dim=0) for matrix in (weight, truth))
    similarities = components.mT @ columns
    similarity, column = similarities.max(1)
    owner = similarities.argmax(0)
    return int(((similarity >= threshold) & (owner[column] == torch.arange(len(column), device=column.device))).sum())


DATA_VARIABLE = "PYRO_TRUNCATED_DATA"


class DatasetNotFoundError(FileNotFoundError):
    """A stored data set is not in the data folder.

    Example:
        >>> try:
        ...     arrays = load("no_such_data")
        ... except DatasetNotFoundError as error:
        ...     print("not there")
        not there
    """


def data_folder() -> Path:
    """The folder of the stored data sets.

    The environment variable ``PYRO_TRUNCATED_DATA`` names it, else it is ``../shared/data`` beside the repository, or the working
    directory.

    Example:
        >>> isinstance(data_folder(), Path)
        True
    """
    if named := os.environ.get(DATA_VARIABLE):
        return Path(named)
    beside_repository = Path(__file__).parents[2] / "shared" / "data"
    return beside_repository if beside_repository.is_dir() else Path.cwd().parent / "shared" / "data"


def load(name: str) -> dict[str, np.ndarray]:
    """Loads the arrays of a stored data set ``<name>.npz`` by their names.

    Example:
        >>> try:
        ...     x = load("snelson1d")["x_train"]
        ... except DatasetNotFoundError:
        ...     x = torch.linspace(0, 6, 200).numpy()  # where the data folder does not hold it

    Raises:
        DatasetNotFoundError: if the data folder holds no such file.
    """
    file = data_folder() / f"{name}.npz"
    if not file.is_file():
        raise DatasetNotFoundError(f"data set {name!r} not found at {file}; set {DATA_VARIABLE} to the folder that holds {name}.npz")
    with np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


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

    Discs of random grey and of radii with density proportional to ``r**-3`` occlude each other (the dead leaves model). Weak noise has
    amplitudes that fall as one over the spatial frequency.

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
        # Texture with a twentieth of the range as its deviation.
        images.append((image + 0.05 * noise / noise.std()).clamp(0, 1))
    return images


# Patches that are written at once.
_ROWS_PER_BLOCK = 50_000


def _numbers(name: str, value: Any) -> Tensor:
    """An array as floating point numbers."""
    tensor = as_data(name, value)
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())


def _grey_images(images: Sequence[Any]) -> list[Tensor]:
    """Grey images as tensors of floating point numbers, in one type."""
    tensors = [as_signed(as_data("images", image)) for image in images]
    if others := [tuple(image.shape) for image in tensors if image.dim() != 2]:
        raise ValueError(f"images must be grey, each of shape (height, width); got one of shape {others[0]}")
    if any(bool(image.isnan().any()) for image in tensors):
        raise ValueError("images must be complete; got NaN, or entries under a mask")
    dtype = functools.reduce(torch.promote_types, (image.dtype for image in tensors), torch.bool)
    return [image.to(dtype if dtype.is_floating_point else torch.get_default_dtype()) for image in tensors]


def image_patches(images: Sequence[Tensor], size: int, num: int, generator: torch.Generator | None = None) -> Tensor:
    """Draws ``num`` square patches ``(num, size**2)``, uniformly over all positions in all images.

    Example:
        >>> image_patches(generated_images(1, 32), 8, 50).shape
        torch.Size([50, 64])

    Raises:
        ValueError: if an image is smaller than a patch, not grey or not complete, or there is none.
    """
    size, num, images = check_count("size", size), check_count("num", num), _grey_images(images)
    if not images or any(min(image.shape) < size for image in images):
        raise ValueError(f"patches of {size} x {size} need images at least as large; got {[tuple(image.shape) for image in images]}")
    windows = [image.unfold(0, size, 1).unfold(1, size, 1) for image in images]
    counts = torch.tensor([float(window.shape[0] * window.shape[1]) for window in windows])
    source = torch.multinomial(counts, num, replacement=True, generator=generator)
    position = torch.rand(2, num, generator=generator, dtype=torch.float64)
    patches = images[0].new_empty(num, size, size)
    for index, window in enumerate(windows):
        is_own = source == index
        row, column = ((position[axis, is_own] * window.shape[axis]).long() for axis in (0, 1))
        patches[is_own] = window[row, column]
    return patches.flatten(1)


@dataclasses.dataclass(frozen=True)
class Whitening:
    r"""ZCA whitening on the leading principal components and its pseudo-inverse.

    With the eigenvectors :math:`U` and eigenvalues :math:`\Lambda` kept of the covariance, ``whiten`` is
    :math:`U \Lambda^{-1/2} U^\top` and ``dewhiten`` is :math:`U \Lambda^{1/2} U^\top` (Bell & Sejnowski, 1997). A dictionary ``(D, H)``
    learned on whitened data is ``dewhiten @ dictionary`` in pixel space.

    Example:
        >>> y = torch.randn(500, 4) @ torch.randn(4, 4)
        >>> whitening = fit_whitening(y, variance=1.0)
        >>> torch.allclose(whitening.invert(whitening.apply(y)), y, atol=1e-2)
        True

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
        return (as_data("data", data, self.mean) - self.mean) @ self.whiten

    def invert(self, whitened: Tensor) -> Tensor:
        """Returns data ``(N, D)`` from whitened data, without the dropped components."""
        return as_data("whitened", whitened, self.mean) @ self.dewhiten + self.mean


def fit_whitening(data: Tensor, variance: float = 0.95) -> Whitening:
    """Fits ZCA whitening to data ``(N, D)``, for a share of variance.

    Computed in float64, returned in the type of the data.

    Example:
        >>> y = torch.randn(500, 4) @ torch.randn(4, 4)
        >>> whitening = fit_whitening(y, variance=1.0)
        >>> torch.allclose(whitening.apply(y).mT.cov(), torch.eye(4), atol=1e-2)
        True

    Raises:
        ValueError: if ``variance`` is not in (0, 1], or the data are constant or not finite.
    """
    data = _numbers("data", data)
    if not 0 < variance <= 1:
        raise ValueError(f"variance must lie in (0, 1]; got {variance}")
    if not bool(data.isfinite().all()):
        raise ValueError(f"data must be finite to be whitened; got {int((~data.isfinite()).sum())} entries that are not")
    mean = data.double().mean(0)
    centred = data.double() - mean
    eigenvalues, eigenvectors = torch.linalg.eigh(centred.mT @ centred / len(data))
    eigenvalues, eigenvectors = eigenvalues.flip(0).clamp(min=0), eigenvectors.flip(1)
    if eigenvalues[0] == 0:
        raise ValueError("data must vary to be whitened; got rows that are all equal")
    share = eigenvalues.cumsum(0) / eigenvalues.sum()
    numerical_rank = int((eigenvalues > eigenvalues[0] * len(eigenvalues) * torch.finfo(data.dtype).eps).sum())
    rank = min(int((share < variance).sum()) + 1, numerical_rank)
    root, basis = eigenvalues[:rank].sqrt(), eigenvectors[:, :rank]
    whiten, dewhiten = (basis / root) @ basis.mT, (basis * root) @ basis.mT
    return Whitening(mean.to(data), whiten.to(data), dewhiten.to(data), rank)


def whitened_patches(
    images: Sequence[Tensor],
    size: int,
    num: int,
    generator: torch.Generator | None = None,
    *,
    clamp: float = 0.02,
    structure: float = 0.25,
    variance: float = 0.95,
    whitening: Whitening | None = None,
) -> tuple[Tensor, Whitening]:
    """Natural image patches as sparse coding wants them.

    The highest amplitudes are clamped, patches without structure left out, the mean brightness removed, and the rest is ZCA whitened
    (Evolutionary Expectation Maximization, 2018, section 5.2). A patch has no structure if its standard deviation is below ``structure``
    times the median one.

    Example:
        >>> y, whitening = whitened_patches(generated_images(2, 64), 6, 300)
        >>> y.shape
        torch.Size([300, 36])

    Args:
        images: grey images.
        size: side of a patch.
        num: number of patches ``N`` to return.
        generator: source of the random positions.
        clamp: share of the brightest pixels that are set to the value below them.
        structure: least standard deviation of a patch, relative to the median.
        variance: share of the variance that the whitening keeps.
        whitening: that of other patches, which these are to be compared with. Default: it is fitted to these.

    Returns:
        Whitened patches ``(N, size**2)`` and the whitening.
    """
    size, num = check_count("size", size), check_count("num", num)
    patches = _structured_patches([clamp_brightest(image, clamp) for image in _grey_images(images)], size, num, structure, generator)
    whitening = fit_whitening(patches, variance) if whitening is None else whitening
    return whitening.apply(patches), whitening


def save_whitened_patches(
    file: str | Path,
    images: Sequence[Tensor],
    size: int,
    num: int,
    generator: torch.Generator | None = None,
    *,
    clamp: float = 0.02,
    structure: float = 0.25,
    variance: float = 0.95,
) -> Whitening:
    """Writes :func:`whitened_patches` beyond memory to a ``.npy`` file.

    They are made 50 000 at a time, to the first of which the whitening is fitted.

    Example:
        >>> import numpy as np
        >>> whitening = save_whitened_patches("patches.npy", generated_images(2, 64), 6, 300)
        >>> np.load("patches.npy", mmap_mode="r").shape
        (300, 36)

    Args:
        file: the file. One that is there is replaced.
        images: grey images.
        size: side of a patch.
        num: number of patches ``N`` to write.
        generator: source of the random positions.
        clamp: share of the brightest pixels that are set to the value below them.
        structure: least standard deviation of a patch, relative to the median.
        variance: share of the variance that the whitening keeps.

    Returns:
        The whitening.
    """
    size, num = check_count("size", size), check_count("num", num)
    images = [clamp_brightest(image, clamp) for image in _grey_images(images)]
    whitening: Whitening | None = None
    written = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=(num, size**2))
    for start in range(0, num, _ROWS_PER_BLOCK):
        patches = _structured_patches(images, size, min(_ROWS_PER_BLOCK, num - start), structure, generator)
        whitening = fit_whitening(patches, variance) if whitening is None else whitening
        written[start : start + len(patches)] = whitening.apply(patches).numpy()
    written.flush()
    assert whitening is not None
    return whitening


def _structured_patches(images: Sequence[Tensor], size: int, num: int, structure: float, generator: torch.Generator | None) -> Tensor:
    """Patches ``(num, size**2)`` with structure, without their mean brightness."""
    patches = image_patches(images, size, 2 * num, generator)
    deviation = patches.std(1)
    structured = patches[(deviation > 0) & (deviation >= structure * deviation.median())][:num]
    if len(structured) < num:
        raise ValueError(
            f"fewer than half of the patches have a standard deviation of at least {structure} times the median; lower `structure`"
        )
    return structured - structured.mean(1, keepdim=True)


def clamp_brightest(values: Tensor, share: float) -> Tensor:
    """Clamps a given share of the largest values.

    Example:
        >>> clamp_brightest(torch.tensor([1.0, 2.0, 3.0, 9.0]), 0.25)
        tensor([1., 2., 3., 3.])
    """
    values = as_data("values", values)
    if not 0 <= share < 1:
        raise ValueError(f"share must lie in [0, 1); got {share}")
    return values.clamp(max=values.flatten().kthvalue(max(1, math.ceil((1 - share) * values.numel()))).values)


def binary_patches(
    images: Sequence[Tensor], size: int, num: int, generator: torch.Generator | None = None, *, clamp: float = 0.01
) -> Tensor:
    """Draws binary patches ``(num, size**2)`` from natural images.

    The brightest pixels are clamped and every patch is stretched to [0, 1] (Evolutionary Expectation Maximization, 2018, section 5.2). Grey
    values are the probabilities of the pixels.

    Example:
        >>> binary_patches(generated_images(1, 32), 4, 20).shape
        torch.Size([20, 16])
    """
    patches = image_patches([clamp_brightest(image, clamp) for image in _grey_images(images)], size, num, generator)
    return binarize(patches, generator)


def binarize(patches: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Stretches patches ``(N, D)`` to [0, 1] and draws binary pixels.

    Example:
        >>> binarize(torch.rand(5, 9)).unique()
        tensor([0., 1.])
    """
    patches = _numbers("patches", patches)
    low, high = patches.amin(1, keepdim=True), patches.amax(1, keepdim=True)
    grey = (patches - low) / (high - low).clamp(min=torch.finfo(patches.dtype).tiny)
    return torch.bernoulli(grey, generator=generator)
