"""A first guess of what is missing: linear prediction, if covariances depend on nothing but how far entries are apart."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.low_rank import posterior_means
from pyro_truncated.restoration.first_guesses import filled, smoothed
from pyro_truncated.restoration.windows import Patches

# Sides of the windows that predict, by the number of dimensions without channels.
_SIDES, _SIDE_OF_VOLUMES = {1: 32, 2: 5}, 3
# Entries of a window, with all channels, at most: each window has a covariance of its own. Of more channels nothing is predicted.
_MOST_ENTRIES = 108
# Directions whose variance is below this part of the noise's change nothing.
_LEAST_VARIANCE = 0.05


def predicted(image: Tensor, num_dims: int, noise: float) -> Tensor:
    r"""An array with what is missing, and all else below noise, as predicted from what is seen in windows around it.

    The differences :math:`d` of the array from a smooth one are taken to be normal with covariances that depend on distance and channels
    alone, so that they are estimated from all pairs of entries that are seen:

    .. math:: C_{cc'}(h) = \frac{1}{|P|} \sum_{p \in P} d_c(p)\, d_{c'}(p + h), \qquad
        P = \{p : d_c(p) \text{ and } d_{c'}(p + h) \text{ are seen}\}.

    An entry becomes the mean of the posterior means that windows have of it, weighted by the inverse of their expected squared errors. Of
    channels each tells what the others are, which the mean of neighbours (:func:`.filled`) cannot know; inside of holes that are larger
    than windows both are alike.

    Args:
        image: missing entries are NaN; returned as it is if there are none, and by :func:`.filled` if it has more than 108 channels.
        num_dims: its dimensions without channels.
        noise: standard deviation of the noise.

    Reference:
        Cressie, "Statistics for spatial data", Wiley, 1993, chapter 3 (ordinary kriging).
    """
    if not bool(image.isnan().any()):
        return image
    shape, channels = image.shape[:num_dims], image.shape[-1] if image.dim() > num_dims else None
    side = min(_SIDES.get(num_dims, _SIDE_OF_VOLUMES), *shape, int((_MOST_ENTRIES / (channels or 1)) ** (1 / num_dims)))
    if side == 0:
        return filled(image, num_dims)
    patches = Patches(shape, side, channels=channels)
    smooth = smoothed(filled(image, num_dims), num_dims)
    rest = image - smooth
    factor = _factor(rest, patches, noise)
    rows = patches.extract(rest).double()
    index = torch.arange(len(rows), device=rows.device)
    center, scale = rows.new_zeros(1, rows.shape[1]), rows.new_full((1,), noise)
    means, variances = posterior_means(rows, index, torch.zeros_like(index), center, factor.unsqueeze(0), scale)
    return smooth + patches.assemble(means, 1 / (variances.mean(1) + _LEAST_VARIANCE * noise**2)).to(image.dtype)


def _factor(rest: Tensor, patches: Patches, noise: float) -> Tensor:
    """The directions ``(D, R)`` of the covariance of windows, of which pairs that are never seen have none."""
    planes = (rest if patches.channels is not None else rest.unsqueeze(-1)).double()
    is_seen = (~planes.isnan()).double()
    products, numbers = (_at_distances(array, patches) for array in (planes.nan_to_num(0.0), is_seen))
    by_distance = products / numbers.round().clamp(min=1.0)
    places = torch.cartesian_prod(*(torch.arange(side, device=rest.device) for side in patches.size)).reshape(-1, len(patches.size))
    distances = (places - places.unsqueeze(1)).unbind(-1)
    covariance = by_distance[distances].transpose(1, 2).flatten(2).flatten(0, 1)
    variances, directions = torch.linalg.eigh(0.5 * (covariance + covariance.mT))
    is_kept = variances > _LEAST_VARIANCE * noise**2
    is_kept[-1] = True
    factor: Tensor = (directions * variances.clamp(min=0.0).sqrt())[:, is_kept]
    return factor


def _at_distances(array: Tensor, patches: Patches) -> Tensor:
    """Sums of products of entries of windows, by their distance along every dimension (negative ones at the end) and both channels."""
    dims = list(range(len(patches.size)))
    padded = [size + side for size, side in zip(patches.shape, patches.size, strict=True)]
    within = torch.meshgrid(*(torch.arange(1 - side, side, device=array.device).roll(1 - side) for side in patches.size), indexing="ij")
    waves = torch.fft.rfftn(array, padded, dims)
    # One channel after the other: all distances of all pairs of them are many times the array.
    sums = (torch.fft.irfftn(wave.conj().unsqueeze(-1) * waves, padded, dims)[within] for wave in waves.unbind(-1))
    return torch.stack(list(sums), -2)
