"""Holes larger than patches, checked on pixels that are seen."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.sparse as sparse
import torch
from scipy.ndimage import distance_transform_edt
from scipy.sparse.linalg import spsolve
from torch import Tensor

from pyro_truncated.restoration.patch_size_stacking import stacking_weights

# Pixels this far from all that is seen are checked; from the second distance on the check alone decides.
LEAST_DEPTH, FULL_DEPTH = 3.0, 7.0
# A hole that is moved hides at least this part of its size; all of them leave this part of what is seen.
LEAST_OVERLAP, LEAST_LEFT = 0.5, 0.6
# Strength of the prior around equal weights, as a number of moved holes.
SHRINKAGE = 0.1
# Squared errors below this part of the largest are as good as none.
LEAST_RATIO = 1e-6


def fill_large_holes(image: Tensor, restored: Tensor, restore: Callable[[Tensor], Tensor]) -> Tensor:
    r"""Averages a restored image, in large holes, with a membrane.

    Far from all that is seen patches say little, and what is made of them may be farther from the
    truth than a :func:`membrane`. The hole is moved to several places where the image is seen, as far
    from the border as it is, and all of them are filled in at once. Both get the weights
    that are best there (:func:`.stacking_weights`). Every moved hole counts as one datum, as its
    pixels err together: errors are divided by the root mean square of the better one's.

    The average counts fully from seven pixels off what is seen on, and not at all up to three.

    Args:
        image: the damaged image, ``(height, width)`` or ``(height, width, channels)``; what is missing is NaN.
        restored: what was made of it.
        restore: restores another image of this shape.

    Returns:
        The restored image as it was if no hole is as deep, or there is no room to try.
    """
    is_hole = _holes(image)
    share = _share(is_hole)
    moved = _moved(is_hole) if bool((share == 1).any()) else []
    if not moved:
        return restored
    everywhere = torch.stack(moved).any(0)
    hidden = torch.where(_over(everywhere, image), torch.nan, image)
    candidates, counts = torch.stack([restore(hidden), _membranes(hidden)]), _share(everywhere | is_hole)
    arrays, truths = zip(*(_datum(candidates, image, counts * one) for one in moved), strict=True)
    weights = stacking_weights(torch.cat(arrays, 1), torch.cat(truths), SHRINKAGE)
    found = torch.tensordot(weights.to(restored), torch.stack([restored, _membranes(image)]), 1)
    return torch.lerp(restored, found, _over(share.to(restored), image))


def _datum(candidates: Tensor, image: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what fills a moved hole, and the truth.

    The unit is each channel's least error.
    """
    planes = image.reshape(*image.shape[:2], -1).double()
    parts, truth = candidates.reshape(len(candidates), *planes.shape).double(), planes.nan_to_num(0.0)
    counts = torch.where(planes.isnan(), 0.0, counts.to(planes).unsqueeze(-1))
    errors = ((parts - truth).square() * counts).sum((1, 2))
    least = errors.amin(0).maximum(LEAST_RATIO * errors.amax(0)).clamp(min=torch.finfo(image.dtype).tiny)
    scale = (counts / least).sqrt()
    return (parts * scale).flatten(1), (truth * scale).flatten()


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


def _moved(is_hole: Tensor) -> list[Tensor]:
    """Returns the hole at several different places that are seen.

    It is mirrored, turned, or moved by half of the image.
    """
    near_corner = min(_mirrored(is_hole), key=lambda other: int(other.nonzero().sum()))
    half = [size // 2 for size in is_hole.shape]
    shifted = [is_hole.roll(shifts, (0, 1)) for shifts in ((half[0], 0), (0, half[1]), half)]
    least, most = LEAST_OVERLAP * int(is_hole.sum()), (1 - LEAST_LEFT) * int((~is_hole).sum())
    moved, taken = [], is_hole
    for other in (*_mirrored(is_hole), *_mirrored(_transposed(near_corner)), *shifted):
        new = other & ~taken
        if int(new.sum()) >= least and int(((taken | new) & ~is_hole).sum()) <= most:
            moved.append(new)
            taken = taken | new
    return moved


def _mirrored(is_hole: Tensor) -> list[Tensor]:
    return [is_hole.flip(dims) for dims in ((), (0,), (1,), (0, 1))]


def _transposed(is_hole: Tensor) -> Tensor:
    """Returns rows as columns, in the largest square at the first corner."""
    side, found = min(is_hole.shape), torch.zeros_like(is_hole)
    found[:side, :side] = is_hole[:side, :side].mT
    return found


def _membranes(image: Tensor) -> Tensor:
    """Returns a membrane in each channel."""
    planes = image.unsqueeze(-1) if image.dim() == 2 else image
    return torch.stack([membrane(plane) for plane in planes.unbind(-1)], -1).reshape(image.shape)


def membrane(image: Tensor) -> Tensor:
    r"""Fills in what makes :math:`\sum |\nabla u|^2` least.

    It is the best linear prediction where power falls with the square of the frequency, as it does in photographs.
    Differences across the border are left out.

    Args:
        image: ``(height, width)``; what is missing is NaN.

    Reference:
        Field, "Relations between the statistics of natural images and the response properties of cortical cells", Journal of the
        Optical Society of America A 4, 1987.
    """
    values = image.double().cpu().numpy()
    unknown = np.isnan(values).ravel()
    if not unknown.any():
        return image
    rows, columns = map(_differences, values.shape)
    along = (sparse.kron(rows, sparse.eye_array(values.shape[1])), sparse.kron(sparse.eye_array(values.shape[0]), columns))
    differences = sparse.vstack(along).tocsc()
    inner, outer = differences[:, np.flatnonzero(unknown)], differences[:, np.flatnonzero(~unknown)]
    solution = values.ravel().copy()
    solution[unknown] = spsolve((inner.T @ inner).tocsc(), -inner.T @ (outer @ solution[~unknown]))
    return torch.from_numpy(solution.reshape(values.shape)).to(image)


def _differences(size: int) -> sparse.csr_array:
    """Returns differences of neighbours, ``(size - 1, size)``."""
    ones = np.ones(size - 1)
    return sparse.csr_array(sparse.diags_array([-ones, ones], offsets=[0, 1], shape=(size - 1, size)))
