"""Holes larger than patches, checked on pixels that are seen."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.sparse as sparse
import torch
from scipy.ndimage import distance_transform_edt
from scipy.sparse.linalg import spsolve
from torch import Tensor

from pyro_truncated.restoration.patch_size_stacking import weights_of_arrays

# Pixels this far from all that is seen are checked; from the second distance on the check alone decides.
LEAST_DEPTH, FULL_DEPTH = 3.0, 7.0
# A hole that is moved onto seen pixels hides at least this part of its size, and leaves this part of the image.
LEAST_OVERLAP, LEAST_LEFT = 0.5, 0.3


def fill_large_holes(image: Tensor, restored: Tensor, restore: Callable[[Tensor], Tensor]) -> Tensor:
    r"""Averages a restored image, in large holes, with surface and mean.

    Far from all that is seen patches say little, and what is made of them may be farther from the
    truth than the mean. The holes are moved to where the image is seen, and restored there, too.
    The three are averaged with the weights that are best there, see :func:`.weights_of_arrays`. The
    prior around equal weights is the weaker, the better the best of the three is. They count fully
    from seven pixels off what is seen on, and not at all up to three.

    Args:
        image: the damaged image, ``(height, width)`` or ``(height, width, channels)``; what is missing is NaN.
        restored: what was made of it.
        restore: restores another image of this shape.

    Returns:
        The restored image as it was if no hole is as deep, or there is no room to try.
    """
    is_hole = _holes(image)
    share = _share(is_hole)
    if not bool((share == 1).any()):
        return restored
    moved = _moved(is_hole)
    if moved is None:
        return restored
    hidden = torch.where(_over(moved, image), torch.nan, image)
    tried = (_share(moved | is_hole) > 0) & moved
    arrays = torch.stack([array[tried] for array in (restore(hidden), *_surfaces(hidden))])
    truth = image[tried]
    seen = ~truth.isnan()
    noise = float((arrays - truth)[:, seen].square().mean(1).min().sqrt())
    weights = weights_of_arrays(arrays[:, seen], truth[seen], max(noise, torch.finfo(image.dtype).tiny ** 0.5))
    found = torch.tensordot(weights.to(restored), torch.stack([restored, *_surfaces(image)]), 1)
    return torch.lerp(restored, found, _over(share.to(restored), image))


def _holes(image: Tensor) -> Tensor:
    """Pixels of which nothing is seen, ``(height, width)``."""
    return image.isnan() if image.dim() == 2 else image.isnan().all(-1)


def _over(pixels: Tensor, image: Tensor) -> Tensor:
    """Numbers of pixels, for all channels of an image."""
    return pixels if image.dim() == 2 else pixels.unsqueeze(-1)


def _share(is_hole: Tensor) -> Tensor:
    """How far the check decides, from zero to one."""
    depth = torch.from_numpy(distance_transform_edt(is_hole.cpu().numpy())).to(is_hole.device)
    return ((depth - LEAST_DEPTH) / (FULL_DEPTH - LEAST_DEPTH)).clamp(0.0, 1.0)


def _moved(is_hole: Tensor) -> Tensor | None:
    """Returns the holes moved onto pixels that are seen.

    They are mirrored, or moved by half of the image; ``None`` if that hides too little or too much.
    """
    height, width = is_hole.shape
    turned = [is_hole.flip(dims) for dims in ((0,), (1,), (0, 1))]
    shifted = [is_hole.roll(shifts, (0, 1)) for shifts in ((height // 2, 0), (0, width // 2), (height // 2, width // 2))]
    moved = [other & ~is_hole for other in (*turned, *shifted)]
    best = max(moved, key=lambda other: int(other.sum()))
    left = float((~(best | is_hole)).double().mean())
    return best if int(best.sum()) >= LEAST_OVERLAP * int(is_hole.sum()) and left >= LEAST_LEFT else None


def _surfaces(image: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a smooth surface and the mean of each channel."""
    planes = image.unsqueeze(-1) if image.dim() == 2 else image
    smooth = torch.stack([biharmonic(plane) for plane in planes.unbind(-1)], -1)
    mean = planes.flatten(0, 1).nanmean(0).expand_as(planes)
    return smooth.reshape(image.shape), mean.reshape(image.shape)


def biharmonic(image: Tensor) -> Tensor:
    r"""Fills in what makes :math:`\sum (\Delta u)^2` least.

    Differences across the border are left out.

    Args:
        image: ``(height, width)``; what is missing is NaN.

    Reference:
        Damelin and Hoang, "On surface completion and image inpainting by biharmonic functions: numerical aspects", International Journal
        of Mathematics and Mathematical Sciences, 2018.
    """
    values = image.double().cpu().numpy()
    unknown = np.isnan(values).ravel()
    if not unknown.any():
        return image
    laplacian = _laplacian(*values.shape).tocsc()
    inner, outer = laplacian[:, np.flatnonzero(unknown)], laplacian[:, np.flatnonzero(~unknown)]
    solution = values.ravel().copy()
    solution[unknown] = spsolve((inner.T @ inner).tocsc(), -inner.T @ (outer @ solution[~unknown]))
    return torch.from_numpy(solution.reshape(values.shape)).to(image)


def _laplacian(height: int, width: int) -> sparse.csr_array:
    """Returns the operator of second differences along rows and columns, added.

    At borders there are none across.
    """

    def second(size: int) -> sparse.csr_array:
        inner = np.r_[0.0, np.ones(size - 2), 0.0] if size > 2 else np.zeros(size)
        return sparse.csr_array(sparse.diags_array([inner[1:], -2 * inner, inner[:-1]], offsets=[-1, 0, 1], shape=(size, size)))

    rows = sparse.kron(second(height), sparse.eye_array(width))
    columns = sparse.kron(sparse.eye_array(height), second(width))
    return sparse.csr_array(rows + columns)
