"""Estimates of entries from groups of similar windows, or from entries nearby."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from pyro_truncated.ops.components import posterior_means
from pyro_truncated.restoration.noise import fill_missing, smooth_image
from pyro_truncated.restoration.windows import Patches


def average_groups(image: Tensor, estimate: Tensor, errors: Tensor, noise: float, channels: int | None = None) -> Tensor:
    """Averages a restored image with groups of similar noisy windows, see :func:`denoise_groups`.

    Their errors are other ones than those of mixtures, so that the mean is nearer to the truth than both. The weight of the groups is
    :math:`v / (v + 3 v')` with the expected squared errors :math:`v` of the estimate and :math:`v'` of theirs, but at most 0.2. Signals,
    volumes and images with missing entries have no groups.
    """
    if image.dim() != (2 if channels is None else 3) or bool(image.isnan().any()):
        return estimate
    average, expected = denoise_groups(image, estimate, noise, channels=channels)
    # What groups count for beside mixtures, at most.
    # Their expected errors count so many times: they leave out that windows were chosen, and are of
    # large matrices.
    return torch.lerp(estimate, average, (errors / (errors + 3.0 * expected)).clamp(max=0.2))


def denoise_groups(image: Tensor, estimate: Tensor, noise: float, *, channels: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns an image in which similar windows are restored together, and errors.

    The group of a window of side 4, in colour 3, are the 24 near by that are nearest to it in an estimate. Its noisy windows, with their
    mean taken off, are a matrix of small rank and noise, see :func:`shrink_singular_values`. What the groups say of an entry is averaged,
    weighted by the inverse of their expected squared errors, which are returned. Nothing may be missing.

    Reference:
        Zhang, Dong, Zhang and Shi, "Two-stage image denoising by principal component analysis with local pixel grouping", Pattern
        Recognition 43, 2010.
    """
    shape = image.shape[:2]
    side = min(4 if channels is None else 3, *shape)
    windows = Patches(shape, side, channels=channels)
    y, x = windows.extract(image), windows.extract(estimate)
    total, expected, share = torch.zeros_like(y), y.new_zeros(len(y), 1), y.new_zeros(len(y), 1)
    centres = Patches(shape, side, min(3, side), channels=channels).places().to(y.device)
    for block in centres.split(4096):
        members = similar(x, block, [size - side + 1 for size in shape])
        groups = y[members]
        mean = groups.mean(1, keepdim=True)
        restored, errors = shrink_singular_values(groups - mean, noise)
        errors = (errors + noise**2 / members.shape[1])[:, None, None].expand(-1, members.shape[1], 1)
        # Bounds weights where squared errors are far below the variance of the noise.
        weights = 1 / (errors + 0.03 * noise**2)
        for sums, what in ((total, weights * (restored + mean)), (expected, weights * errors), (share, weights)):
            sums.index_add_(0, members.flatten(), what.flatten(0, 1))
    whole = share.where(share > 0, 1.0)
    return windows.assemble(total / whole, share), windows.assemble((expected / whole).expand(y.shape), share)


def similar(windows: Tensor, centres: Tensor, counts: list[int], members: int = 24, radius: int = 12) -> Tensor:
    """Returns numbers ``(G, K)`` of the nearest windows, the own one first.

    ``windows (N, D)`` are all in their order, ``counts`` along each dimension. Of those up to a ``radius`` from ``centres (G, 2)`` so many
    ``members`` are found. Both numbers were chosen on images that are not reported: tests/papers/results/restoration.md.
    """
    size, row = centres.new_tensor(counts), centres.new_tensor([counts[1], 1])
    own = windows[(centres * row).sum(1)]
    numbers, distances = [], []
    for shift in itertools.product(range(-radius, radius + 1), repeat=2):
        places = centres + centres.new_tensor(shift)
        is_inside = ((places >= 0) & (places < size)).all(1)
        numbers.append((places.clamp(min=0).minimum(size - 1) * row).sum(1))
        distance = (windows[numbers[-1]] - own).square().sum(1)
        distances.append(torch.where(is_inside, distance, math.inf) if any(shift) else torch.full_like(distance, -1.0))
    distance = torch.stack(distances, 1)
    number = min(members, int(distance.isfinite().sum(1).min()))
    return torch.stack(numbers, 1).gather(1, distance.topk(number, 1, largest=False).indices)


def shrink_singular_values(matrices: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    r"""Denoises matrices ``(G, K, D)`` of small rank by shrinking singular values.

    The result is as near in mean squares as such shrinkage gets.

    For matrices of ``n`` by ``m`` entries, not more columns or rows than ``n``, and singular values :math:`s` in units of
    :math:`\sqrt n \sigma`, with :math:`\beta = m / n`:

    .. math:: \eta(s) = \frac{\sqrt{(s^2 - \beta - 1)^2 - 4 \beta}}{s} \quad \text{for } s > 1 + \sqrt\beta, \qquad 0 \text{ otherwise}.

    The squared error is then :math:`x^2 - \eta^2` for each singular value kept, :math:`x` without noise being the larger root of
    :math:`s^2 = (x^2 + 1) (x^2 + \beta) / x^2`. The expected ones are returned, too, in the mean of each matrix.

    Reference:
        Gavish and Donoho, "Optimal shrinkage of singular values", IEEE Transactions on Information Theory 63, 2017.
    """
    number, entries = matrices.shape[1:]
    small, large = sorted((number, entries))
    beta = small / large
    squares, directions = torch.linalg.eigh(matrices @ matrices.mT if number == small else matrices.mT @ matrices)
    squares = squares.clamp(min=torch.finfo(squares.dtype).tiny) / (large * noise**2)
    is_kept = squares > (1 + math.sqrt(beta)) ** 2
    above = squares - beta - 1
    root = (above.square() - 4 * beta).clamp(min=0.0).sqrt() * is_kept
    projection = (directions * (root / squares).unsqueeze(1)) @ directions.mT
    # The error as a function of 1 / x², whose terms do not cancel.
    inverse = 1 / ((above + root) / 2).clamp(min=math.sqrt(beta))
    errors = (1 + beta + beta * inverse * (3 - beta * inverse.square())) / ((1 + inverse) * (1 + beta * inverse)) * is_kept
    restored = projection @ matrices if number == small else matrices @ projection
    return restored, errors.sum(1) * (large * noise**2 / (number * entries))


# Groups whose singular values are found at once.
_GROUPS_PER_BLOCK = 1024


def average_low_rank_groups(image: Tensor, estimate: Tensor, noise: float, channels: int | None = None, stride: int = 1) -> Tensor:
    r"""Averages a restored image with low-rank estimates of its missing entries.

    The estimates come from groups of similar windows. The group of a window of side 8 are the 60 near by that are nearest to it in the
    restored image. In each of eight steps, every group becomes the matrix without its small singular values. Those are values up to
    :math:`4 \sigma (\sqrt{K} + \sqrt{D})` with :math:`K` windows of :math:`D` entries and :math:`\sigma` of what cannot be predicted.
    Overlapping windows are averaged. The loss at observed entries is added to them before the next step (Bregman iterations), so that the
    missing ones follow. The result counts 0.4 beside the estimate: its errors are other ones.

    Signals, volumes and images with a side below 32 have no groups. There is one for every ``4 * stride`` places along each dimension, with
    channels for every ``6 * stride``, at least for every eighth. Observed entries are those of the estimate, and so are channels without
    texture, which deviate by at most four times the noise.

    Reference:
        Zhang, Zhao and Gao, "Group-based sparse representation for image restoration", IEEE Transactions on Image Processing 23, 2014.
    """
    # Smaller images have too few windows that could be alike.
    if image.dim() != (2 if channels is None else 3) or min(image.shape[:2]) < 32:
        return estimate
    # All numbers were chosen on images that are not reported: tests/papers/results/restoration.md.
    is_observed, result, threshold = ~image.isnan(), estimate, 4.0 * noise
    residual = torch.zeros_like(estimate)
    patches = Patches(image.shape[:2], 8, channels=channels)
    groups = _groups(torch.where(is_observed, image, estimate), patches, stride)
    for _ in range(8):
        result = _low_rank_mean(torch.where(is_observed, image + residual, result), patches, groups, threshold)
        residual = residual + torch.where(is_observed, image - result, 0.0)
    rows = image.reshape(-1, channels or 1)
    has_texture = ((rows - rows.nanmean(0)).square().nanmean(0) > threshold**2).reshape([channels] if channels else [])
    # The share of the groups in the average.
    return torch.where(is_observed | ~has_texture, estimate, torch.lerp(estimate, result, 0.4))


def _groups(image: Tensor, patches: Patches, stride: int, members: int = 60) -> Tensor:
    """Numbers of the windows of all groups, ``(G, K)``."""
    side = patches.size[0]
    stride = min((4 if patches.channels is None else 6) * stride, side)
    windows, counts = patches.extract(image), [size - side + 1 for size in patches.shape]
    centres = Patches(patches.shape, side, stride).places().to(windows.device)
    return torch.cat([similar(windows, block, counts, members) for block in centres.split(_GROUPS_PER_BLOCK)])


def _low_rank_mean(image: Tensor, patches: Patches, groups: Tensor, threshold: float) -> Tensor:
    """Returns the mean of all groups without small singular values."""
    windows = patches.extract(image)
    total, share = torch.zeros_like(windows), windows.new_zeros(len(windows), 1)
    largest = (threshold * (math.sqrt(groups.shape[1]) + math.sqrt(windows.shape[1]))) ** 2
    for members in groups.split(_GROUPS_PER_BLOCK):
        group = windows[members]
        squares, directions = torch.linalg.eigh(group @ group.mT)
        leading = directions * (squares > largest).unsqueeze(1)
        total.index_add_(0, members.flatten(), (leading @ (directions.mT @ group)).flatten(0, 1))
        share.index_add_(0, members.flatten(), share.new_ones(members.numel(), 1))
    return patches.assemble(total / share.clamp(min=1.0), share)


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
    holes larger than windows both are alike. So are they with more than 108 channels.

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
        variances, directions = torch.linalg.eigh(_covariances(neighbours, patches))
        variances = torch.where(variances > _MIN_VARIANCE_RATIO * noise**2, variances, 0.0)
        rank = max(1, int((variances > 0).sum(1).max()))
        factor = (directions * variances.sqrt().unsqueeze(1))[..., -rank:].flip(-1)
        center = rows.new_zeros(len(factor), rows.shape[1])
        means, variances = posterior_means(rows, index, place, center, factor, rows.new_full((len(factor),), noise))
        neighbours = patches.assemble(means, 1 / (variances.mean(1) + _MIN_VARIANCE_RATIO * noise**2))
    return smooth + neighbours.to(image.dtype)


# --- covariances of windows, by place ---


def _covariances(array: Tensor, patches: Patches) -> Tensor:
    """Returns covariances ``(T, D, D)`` of observed pairs of entries at all places."""
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
    """Returns Gaussian weights of positions around each place, also beyond the end."""
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
    """Returns size, window side and deviation of neighbourhoods for every dimension."""
    spread = _NEIGHBOURS ** (1 / len(patches.shape)) / math.sqrt(2 * math.pi)
    sizes = zip(patches.shape, patches.size, strict=True)
    # Of long dimensions spreads are larger: there are 64 places at most.
    return [(size, side, max(spread, size / (_SPREADS_BETWEEN_PLACES * 64))) for size, side in sizes]
