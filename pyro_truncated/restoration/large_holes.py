"""Large holes of images: patches are averaged with smooth surfaces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import scipy.sparse as sparse
import torch
from scipy.ndimage import distance_transform_edt
from scipy.signal import oaconvolve
from scipy.sparse.linalg import spsolve
from torch import Tensor

# Radius of discs that fit into large holes, in pixels; from what distance of all that is seen the check alone decides. All numbers here
# were chosen on images that are not reported: tests/papers/results/restoration.md.
LEAST_RADIUS, FULL_DEPTH = 7.0, 4.0
# A hole that is moved hides at least this part of its size; all of them leave this part of what is seen.
LEAST_OVERLAP, LEAST_LEFT = 0.5, 0.6


def fill_large_holes(image: Tensor, estimate: Tensor, restore: Callable[[Tensor], Tensor]) -> Tensor:
    r"""Averages a restored image, in large holes, with two surfaces.

    Far from all that is seen patches smooth over edges, an :func:`anisotropic_membrane` over textures,
    and a :func:`biharmonic` surface is best where the image is smooth. The hole is moved to several places
    where the image is seen, as far from the border as it is, and ``restore`` fills all of them in.
    Weights are inverse to the squares of the mean squared errors :math:`e^2` there.
    Their mean over the moved holes :math:`k` is geometric:

    .. math:: w_s \propto \Bigl( \prod_k e_{sk}^2 \Bigr)^{-2 / K}

    Large holes are what discs of radius 7 cover, but for the pixels beside what is seen. The average
    counts the more the deeper a pixel lies, and fully from the fourth one on.
    Without a large hole, or room to try, the ``estimate`` is returned.

    Reference:
        Bates and Granger, "The combination of forecasts", Operational Research Quarterly 20, 1969.
    """
    is_hole = image.isnan() if image.dim() == 2 else image.isnan().all(-1)
    share = _share(is_hole)
    # Surfaces need two pixels in both dimensions.
    copies = _shift_hole(is_hole) if bool(share.any()) and min(share.shape) > 1 else []
    if not copies:
        return estimate
    everywhere = torch.stack(copies).any(0)
    hidden, counts = torch.where(_over(everywhere, image), torch.nan, image), _share(everywhere | is_hole)
    candidates = _candidates(hidden, restore(hidden), counts)
    weights = (-2 * torch.stack([_log_errors(candidates, image, counts * one) for one in copies]).mean((0, 2))).softmax(0)
    average = torch.tensordot(weights.to(estimate), _candidates(image, estimate, share), 1)
    return torch.lerp(estimate, average, _over(share.to(estimate), image))


def _candidates(image: Tensor, estimate: Tensor, share: Tensor) -> Tensor:
    restored = torch.where(image.isnan(), estimate, image)
    cut = torch.where(_over(share > 0, image), torch.nan, restored)
    planes = image.reshape(*share.shape, -1).unbind(-1)
    return torch.stack([restored, anisotropic_membrane(cut), torch.stack([biharmonic(plane) for plane in planes], -1).reshape(image.shape)])


def _log_errors(candidates: Tensor, image: Tensor, counts: Tensor) -> Tensor:
    """Returns logarithms of squared errors of candidates, summed over pixels, ``(S, C)``."""
    planes = image.reshape(*image.shape[:2], -1).double()
    errors = (candidates.reshape(len(candidates), *planes.shape).double() - planes).square() * counts.to(planes).unsqueeze(-1)
    return errors.nansum((1, 2)).clamp(min=torch.finfo(image.dtype).tiny).log()


def _over(pixels: Tensor, image: Tensor) -> Tensor:
    """Numbers of pixels, for all channels of an image."""
    return pixels if image.dim() == 2 else pixels.unsqueeze(-1)


def _share(is_hole: Tensor) -> Tensor:
    """How far the check decides, from zero to one."""
    depth = distance_transform_edt(is_hole.cpu().numpy())
    is_centre = depth >= LEAST_RADIUS
    is_large = is_centre.any() & (distance_transform_edt(~is_centre) < LEAST_RADIUS - 1)
    return torch.from_numpy((depth / FULL_DEPTH).clip(max=1.0) * is_large).to(is_hole.device)


def _shift_hole(is_hole: Tensor) -> list[Tensor]:
    """Returns the hole mirrored, turned, or moved to places that are seen."""
    near_corner = min(_mirror(is_hole), key=lambda other: int(other.nonzero().sum()))
    half = [size // 2 for size in is_hole.shape]
    shifted = [is_hole.roll(shifts, (0, 1)) for shifts in ((half[0], 0), (0, half[1]), half)]
    least, most = LEAST_OVERLAP * int(is_hole.sum()), (1 - LEAST_LEFT) * int((~is_hole).sum())
    copies, is_covered = [], is_hole
    # Rows as columns, in the largest square at the first corner.
    side, transposed = min(is_hole.shape), torch.zeros_like(is_hole)
    transposed[:side, :side] = near_corner[:side, :side].mT
    for other in (*_mirror(is_hole), *_mirror(transposed), *shifted):
        new = other & ~is_covered
        if int(new.sum()) >= least and int(((is_covered | new) & ~is_hole).sum()) <= most:
            copies.append(new)
            is_covered = is_covered | new
    return copies


def _mirror(is_hole: Tensor) -> list[Tensor]:
    return [is_hole.flip(dims) for dims in ((), (0,), (1,), (0, 1))]


def anisotropic_membrane(image: Tensor) -> Tensor:
    r"""Fills in what makes :math:`\sum \nabla u^\top A \nabla u` least; missing is NaN, in all channels.

    The matrices are inverse squares of structure tensors, which all channels share:

    .. math:: A(q) \propto T(q)^{-2}, \qquad T(q) = \sum_p \Bigl(1 + \frac{|p - q|^2}{\rho^2}\Bigr)^{-2} \nabla u(p) \nabla u(p)^\top,

    with a sum over the pixels that are seen, :math:`\rho = 4` and :math:`\det A = 1`. Gradients of a normal field with this energy,
    and one matrix everywhere, have covariances proportional to :math:`A^{-1/2}`. With equal eigenvalues it is the best linear
    prediction where power falls with the square of the frequency, as it does in photographs.
    Differences across the border are left out.

    References:
        Galić, Weickert, Welk, Bruhn, Belyaev and Seidel, "Image compression with anisotropic diffusion", Journal of Mathematical
        Imaging and Vision 31, 2008. Field, "Relations between the statistics of natural images and the response properties of cortical
        cells", Journal of the Optical Society of America A 4, 1987.
    """
    planes = image.reshape(*image.shape[:2], -1)
    gradient = _directed_gradient(planes.double().cpu().numpy())
    return torch.stack([_minimize(plane, gradient) for plane in planes.unbind(-1)], -1).reshape(image.shape)


def biharmonic(image: Tensor) -> Tensor:
    r"""Fills in what makes :math:`\sum (\Delta u)^2` least, of one channel; missing is NaN.

    It is the best linear prediction where power falls with the fourth power of the frequency, and is cut off at the range of what is seen.
    Differences across the border are left out.

    Reference:
        Damelin and Hoang, "On surface completion and image inpainting by biharmonic functions", International Journal of Mathematics and
        Mathematical Sciences, 2018.
    """
    gradient = _gradient(image)
    return _minimize(image, gradient.T @ gradient)


def _minimize(image: Tensor, operator: sparse.csc_array) -> Tensor:
    """Fills in what makes the squares of an operator's values least."""
    values = image.double().cpu().numpy()
    unknown = np.isnan(values).ravel()
    if not unknown.any():
        return image
    inner, outer = operator[:, np.flatnonzero(unknown)], operator[:, np.flatnonzero(~unknown)]
    solution = values.ravel().copy()
    boundary = solution[~unknown]
    solution[unknown] = spsolve((inner.T @ inner).tocsc(), -inner.T @ (outer @ boundary)).clip(boundary.min(), boundary.max())
    return torch.from_numpy(solution.reshape(values.shape)).to(image)


def _gradient(image: Tensor) -> sparse.csc_array:
    pixels = np.arange(image.numel()).reshape(image.shape)
    return sparse.vstack(
        [_differences(pixels[:-1], pixels[1:], pixels.size), _differences(pixels[:, :-1], pixels[:, 1:], pixels.size)]
    ).tocsc()


def _directed_gradient(planes: np.ndarray) -> sparse.csc_array:
    r"""Returns :math:`A^{1/2} \nabla` as a matrix, for flat images.

    Gradients are those at the corners of squares of two by two pixels, of squares that are not seen.
    """
    is_cut, tensors = _structure_tensors(planes)
    roots = np.linalg.inv(tensors) * np.sqrt(np.linalg.det(tensors))[:, None, None]
    pixels = np.arange(planes[..., 0].size).reshape(planes.shape[:2])
    corners = [pixels[rows, columns][is_cut] for rows, columns in itertools.product((slice(-1), slice(1, None)), repeat=2)]
    upper_left, upper_right, lower_left, lower_right = corners
    vertical = [_differences(*ends, pixels.size) for ends in ((upper_left, lower_left), (upper_right, lower_right))]
    horizontal = [_differences(*ends, pixels.size) for ends in ((upper_left, upper_right), (lower_left, lower_right))]
    return sparse.vstack(
        [
            sparse.diags_array(root[:, 0]) @ down + sparse.diags_array(root[:, 1]) @ across
            for down, across, root in itertools.product(vertical, horizontal, roots.swapaxes(0, 1))
        ]
    ).tocsc()


def _structure_tensors(planes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns which squares are not seen, and their tensors, ``(N, 2, 2)``."""
    # In pixels: there a gradient counts a fourth of one at the place itself; from four times of it on it does not count.
    distance = 4
    down, across = (np.diff(planes, axis=axis) for axis in (0, 1))
    gradients = np.stack([down[:, 1:] + down[:, :-1], across[1:] + across[:-1]], -1) / 2
    products = np.einsum("hwci,hwcj->hwij", gradients, gradients)
    is_cut = np.isnan(products).any((2, 3))
    products[is_cut] = 0.0
    products /= max(products.max(), np.finfo(float).tiny)
    reach = 4 * distance + math.ceil(distance_transform_edt(is_cut).max())
    squares = np.arange(-reach, reach + 1) ** 2
    weights = (1 + (squares + squares[:, None]) / distance**2) ** -2.0
    tensors = oaconvolve(products, weights[..., None, None], mode="same", axes=(0, 1))[is_cut]
    # Both eigenvalues grow by a hundredth of the trace. Where all is constant, but for rounding of the largest products, no direction
    # is told from another.
    variances = 0.01 * tensors.trace(axis1=1, axis2=2).clip(1e-10)
    return is_cut, tensors + variances[:, None, None] * np.eye(2)


def _differences(starts: np.ndarray, ends: np.ndarray, number: int) -> sparse.csr_array:
    """Returns differences of pairs of pixels, ``(starts.size, number)``."""
    ones, rows = np.ones(starts.size), np.arange(starts.size)
    entries = np.concatenate([-ones, ones]), (np.tile(rows, 2), np.concatenate([starts.ravel(), ends.ravel()]))
    return sparse.csr_array(entries, shape=(starts.size, number))
