"""First estimates of missing entries by linear prediction.

Covariances near a place are assumed to depend on distances of entries only.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from pyro_truncated.ops.components import posterior_means
from pyro_truncated.restoration.noise import fill_missing, smooth_image
from pyro_truncated.restoration.windows import Patches

# Of images of which more than the first part is seen windows are small; large ones are for seeing anything at all. Windows are no larger
# part of the array than the second, so that covariances are not those of what is seen by chance.
_MIN_OBSERVED_SHARE, _MAX_WINDOW_SHARE = 2 / 3, 1 / 16
# Entries around a place whose pairs say what covariances are there.
_NEIGHBOURS = 628
# Places are so many spreads of a neighbourhood apart.
_SPREADS_BETWEEN_PLACES = 1.6
# Directions whose variance is below this part of the noise's change nothing.
_MIN_VARIANCE_RATIO = 0.05


def predict_missing(image: Tensor, num_dims: int, noise: float) -> Tensor:
    r"""Predicts missing entries, and those below noise, from windows.

    The differences :math:`d` of the array from a smooth one are taken to be normal. Their
    covariances depend on distance, channels and roughly the place :math:`q`, and are estimated from
    pairs of entries near it:

    .. math:: C_{cc'}(h; q) = \frac{\sum_p w_q(p)\, d_c(p)\, d_{c'}(p + h) + \kappa\, C_{cc'}(h)}{\sum_p w_q(p) + \kappa}, \qquad
        w_q(p) = \exp\Bigl(-\frac{|p - q|^2}{2 \rho^2}\Bigr),

    with sums over the observed pairs (of negative :math:`h` those of :math:`-h`). :math:`C(h)` is
    the ratio of the sums of all places, and :math:`\kappa` counts as 30 pairs. An entry becomes the
    mean of the posterior means that windows have of it, weighted by the inverse of their expected
    squared errors. Twice this is done again with the pairs of the predicted array. Each channel
    tells what the others are, which the mean of neighbours (:func:`.fill_missing`) cannot know. Inside of
    holes larger than windows both are alike.

    Args:
        image: missing entries are NaN; returned as it is if there are none, and by :func:`.fill_missing` if it has more than 108 channels.
        num_dims: its dimensions without channels.
        noise: standard deviation of the noise.

    References:
        Cressie, "Statistics for spatial data", Wiley, 1993, chapter 3 (ordinary kriging). Haas, "Local prediction of a spatio-temporal
        process with an application to wet sulfate deposition", Journal of the American Statistical Association 90, 1995 (covariances of
        moving neighbourhoods).
    """
    if not bool(image.isnan().any()):
        return image
    shape, channels = image.shape[:num_dims], image.shape[-1] if image.dim() > num_dims else None
    # Entries of a window, with all channels, at most. Of more channels nothing is predicted.
    most = min(108 / (channels or 1), max(3**num_dims, _MAX_WINDOW_SHARE * math.prod(shape)))
    is_mostly_observed = num_dims == 2 and float((~image.isnan()).double().mean()) > _MIN_OBSERVED_SHARE
    # The side of windows: of images that are mostly observed; of signals, other images, and volumes.
    usual = 5 if is_mostly_observed else {1: 32, 2: 8}.get(num_dims, 3)
    side = min(usual, *shape, int(most ** (1 / num_dims) + 1e-9))
    if side == 0:
        return fill_missing(image, num_dims)
    patches = Patches(shape, side, channels=channels)
    smooth = smooth_image(fill_missing(image, num_dims), num_dims)
    rest = (image - smooth).double()
    rows, place = patches.extract(rest), _nearest_place(patches).to(rest.device)
    neighbours, index = rest, torch.arange(len(rows), device=rows.device)
    # The first learns from what is seen, the others from what is predicted, too.
    for _ in range(3):
        factor = _directions(_covariances(neighbours, patches), noise)
        center = rows.new_zeros(len(factor), rows.shape[1])
        means, variances = posterior_means(rows, index, place, center, factor, rows.new_full((len(factor),), noise))
        neighbours = patches.assemble(means, 1 / (variances.mean(1) + _MIN_VARIANCE_RATIO * noise**2))
    return smooth + neighbours.to(image.dtype)


def _directions(covariance: Tensor, noise: float) -> Tensor:
    """Directions ``(T, D, R)`` of covariances ``(T, D, D)``, the longest first."""
    variances, directions = torch.linalg.eigh(covariance)
    variances = torch.where(variances > _MIN_VARIANCE_RATIO * noise**2, variances, 0.0)
    rank = max(1, int((variances > 0).sum(1).max()))
    longest: Tensor = (directions * variances.sqrt().unsqueeze(1))[..., -rank:].flip(-1)
    return longest


# --- covariances of windows, by place ---


def _covariances(array: Tensor, patches: Patches) -> Tensor:
    """Returns covariances ``(T, D, D)`` of windows at all places.

    They come from pairs of entries that are not NaN. Pairs never observed have none.
    """
    planes = array if patches.channels is not None else array.unsqueeze(-1)
    around = [0, 0, *itertools.chain.from_iterable((0, side - 1) for side in reversed(patches.size))]
    values, is_observed = (F.pad(of_all, around) for of_all in (planes.nan_to_num(0.0), (~planes.isnan()).to(planes)))
    weights = [_weights(size, side, spread).to(planes) for size, side, spread in _dimensions(patches)]
    by_distance = planes.new_empty(*(2 * side - 1 for side in patches.size), math.prod(map(len, weights)), *[planes.shape[-1]] * 2)
    zero = (0,) * len(patches.size)
    for distance in itertools.product(*(range(1 - side, side) for side in patches.size)):
        if distance >= zero:
            covariances = _by_place(values, is_observed, distance, weights)
            by_distance[distance] = covariances
            by_distance[tuple(-along for along in distance)] = covariances.mT
    places = torch.cartesian_prod(*(torch.arange(side, device=array.device) for side in patches.size)).reshape(-1, len(patches.size))
    return by_distance[(places - places.unsqueeze(1)).unbind(-1)].permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)


def _by_place(values: Tensor, is_observed: Tensor, distance: tuple[int, ...], weights: list[Tensor]) -> Tensor:
    """Covariances of channels that far apart, ``(T, C, C)``."""
    dims, back = tuple(range(len(distance))), tuple(-along for along in distance)
    sums, numbers = (_products(array, array.roll(back, dims), weights) for array in (values, is_observed))
    of_all = sums.sum(0) / numbers.sum(0).clamp(min=1e-9)
    # So many pairs of the whole array count beside those near the place.
    return (sums + 30 * of_all) / (numbers + 30)


def _products(first: Tensor, second: Tensor, weights: list[Tensor]) -> Tensor:
    """Sums of products of channels over the neighbourhoods of places, ``(T, C, C)``."""
    # One channel after the other: those of all with all are many times the array.
    return torch.stack([_near(channel.unsqueeze(-1) * second, weights) for channel in first.unbind(-1)], 1)


def _near(array: Tensor, weights: list[Tensor]) -> Tensor:
    """Weighted sums over neighbourhoods, ``(T, ...)``."""
    for weight in reversed(weights):
        array = torch.tensordot(weight, array, ([1], [len(weights) - 1]))
    return array.flatten(0, len(weights) - 1)


def _weights(size: int, side: int, spread: float) -> Tensor:
    """Returns Gaussian weights of positions around each place of a dimension.

    Positions go beyond its end by the side of a window.
    """
    number = _num_places(size, spread)
    places = (torch.arange(number).double() + 0.5) * size / number
    return (-0.5 * ((torch.arange(size + side - 1) + 0.5 - places.unsqueeze(1)) / spread).square()).exp()


def _nearest_place(patches: Patches) -> Tensor:
    """The place that the middle of a window is nearest to, ``(N,)``."""
    index = torch.zeros(len(patches), dtype=torch.long)
    for first, (size, side, spread) in zip(patches.places().mT, _dimensions(patches), strict=True):
        number = _num_places(size, spread)
        index = index * number + (2 * first + side) * number // (2 * size)
    return index


def _num_places(size: int, spread: float) -> int:
    return max(1, round(size / (_SPREADS_BETWEEN_PLACES * spread)))


def _dimensions(patches: Patches) -> list[tuple[int, int, float]]:
    """Returns size, window side and standard deviation of neighbourhoods for every dimension.

    A neighbourhood then has a fixed sum of weights.
    """
    spread = _NEIGHBOURS ** (1 / len(patches.shape)) / math.sqrt(2 * math.pi)
    sizes = zip(patches.shape, patches.size, strict=True)
    # Of long dimensions spreads are larger: there are 64 places at most.
    return [(size, side, max(spread, size / (_SPREADS_BETWEEN_PLACES * 64))) for size, side in sizes]
