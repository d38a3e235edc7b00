"""Stored data sets, natural images and their patches."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pyro_truncated.utils.arguments import check_count

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
    beside_repository = Path(__file__).parents[3] / "shared" / "data"
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


def image_patches(images: Sequence[Tensor], size: int, num: int, generator: torch.Generator | None = None) -> Tensor:
    """Draws ``num`` square patches ``(num, size**2)``, uniformly over all positions in all images.

    Example:
        >>> image_patches(generated_images(1, 32), 8, 50).shape
        torch.Size([50, 64])

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
        return (data - self.mean) @ self.whiten

    def invert(self, whitened: Tensor) -> Tensor:
        """Returns data ``(N, D)`` from whitened data, without the dropped components."""
        return whitened @ self.dewhiten + self.mean


def fit_whitening(data: Tensor, variance: float = 0.95) -> Whitening:
    """Fits ZCA whitening to data ``(N, D)``, for a share of variance.

    Computed in float64, returned in the type of the data.

    Example:
        >>> y = torch.randn(500, 4) @ torch.randn(4, 4)
        >>> whitening = fit_whitening(y, variance=1.0)
        >>> torch.allclose(whitening.apply(y).mT.cov(), torch.eye(4), atol=1e-2)
        True

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
    patches = _structured_patches([clamp_brightest(image, clamp) for image in images], size, num, structure, generator)
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
    images = [clamp_brightest(image, clamp) for image in images]
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
    patches = image_patches([clamp_brightest(image, clamp) for image in images], size, num, generator)
    return binarize(patches, generator)


def binarize(patches: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Stretches patches ``(N, D)`` to [0, 1] and draws binary pixels.

    Example:
        >>> binarize(torch.rand(5, 9)).unique()
        tensor([0., 1.])
    """
    low, high = patches.amin(1, keepdim=True), patches.amax(1, keepdim=True)
    grey = (patches - low) / (high - low).clamp(min=torch.finfo(patches.dtype).tiny)
    return torch.bernoulli(grey, generator=generator)
