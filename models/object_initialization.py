"""Initial objects: averages of windows that show one object alone."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from pyro_truncated.distributions import Canvas
from pyro_truncated.extend import device_of
from pyro_truncated.models.binary_causes import random_rows

_MARGIN = 2  # pixels around a window that shall show background
_WINDOWS_PER_IMAGE = 4
_WINDOWS_PER_OBJECT, _MAX_WINDOWS = 60, 2000
_CANDIDATES_PER_OBJECT, _MAX_CANDIDATES = 20, 500
_CLUSTERS_PER_OBJECT, _KMEANS_STEPS = 2, 4
_MAX_MISSING_SHARE = 0.3  # less of a window's energy is missing in an object that it shows
_NOISE_OF_COPIES = 0.1
_MAX_PIXELS = 20_000
_WINDOWS_PER_BLOCK = 100  # windows that are compared at once


class Windows(NamedTuple):
    """Windows of images less their background, with what lies around them.

    Attributes:
        pixels: ``(n, F, t + 4 p, u + 4 q)`` float32: objects of ``t x u`` pixels may lie up to ``p`` rows and ``q`` columns off the centre.
        energy: squared length of the ``t x u`` pixels at the centre, less that of the noise, ``(n,)``.
        reach: ``p`` and ``q``.
        noise: variance of the noise.
    """

    pixels: Tensor
    energy: Tensor
    reach: tuple[int, int]
    noise: Tensor

    def within(self, times: int) -> Tensor:
        """The centres with so many times ``p`` and ``q`` pixels around them."""
        rows, columns = ((2 - times) * reach for reach in self.reach)
        return self.pixels[..., rows : self.pixels.shape[-2] - rows, columns : self.pixels.shape[-1] - columns]


class Clusters(NamedTuple):
    """What windows show in common.

    Attributes:
        objects: ``(K, F, t, u)``, less the background.
        size: how many windows each is the average of, ``(K,)``.
        energy: squared length, less that of the noise left, ``(K,)``.
    """

    objects: Tensor
    size: Tensor
    energy: Tensor

    def take(self, index: Tensor) -> Clusters:
        """Some of them."""
        return Clusters(*(value[index] for value in self))

    def stand_out(self, noise: Tensor) -> Tensor:
        """Returns which pixels differ from the background, ``(K, t, u)``.

        The difference exceeds noise that averages leave.
        """
        left_over = self.objects.shape[1] * noise / self.size
        return self.objects.square().sum(1) > 4 * left_over[:, None, None]


def estimate_background(pixels: Tensor, generator: torch.Generator | None, steps: int = 30) -> tuple[Tensor, Tensor]:
    """Colour ``(F,)`` and variance of the background among pixels ``(P, F)``.

    It is the narrow part of a mixture of two normal distributions, fitted by EM; what the wide part covers are the objects.
    """
    some = random_rows(pixels, min(len(pixels), _MAX_PIXELS), generator)
    least = (1e-6 * some.square().mean()).clamp(min=1e-12)
    colour, (mean, wide) = some.median(0).values, _moments(some, torch.ones_like(some[:, 0]))
    variance, wide = (some - colour).square().mean(1).quantile(0.25).clamp(min=least), wide.clamp(min=least)
    share = torch.full_like(variance, 0.5)
    for _ in range(steps):
        behind = share.log() - 0.5 * ((some - colour).square() / variance + variance.log()).sum(1)
        before = (1 - share).log() - 0.5 * ((some - mean).square() / wide + wide.log()).sum(1)
        is_behind = (behind - before).sigmoid()
        share = is_behind.mean().clamp(0.05, 0.99)
        colour, spread = _moments(some, is_behind)
        mean, wide = _moments(some, 1 - is_behind)
        variance, wide = spread.mean().clamp(min=least), wide.clamp(min=least)
    return colour, variance


def _moments(points: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted means and variances ``(F,)`` of points ``(P, F)``."""
    weights = (weights / weights.sum().clamp(min=1e-12)).unsqueeze(1)
    mean = (weights * points).sum(0)
    return mean, (weights * (points - mean).square()).sum(0)


def lone_windows(images: Tensor, noise: Tensor, canvas: Canvas, num_objects: int) -> Windows:
    """Returns windows of images ``(N, height, width, F)``, without their background.

    Little is visible around them.
    """
    num_channels = images.shape[-1]
    alone, energy, place = _brightest_windows(images.square().sum(-1) - num_channels * noise, canvas)
    # What noise alone would show does not stand out.
    stands_out = energy > 4 * noise * math.sqrt(2 * canvas.num_entries * num_channels)
    alone = torch.where(stands_out, alone / energy.clamp(min=1e-12), -torch.inf).flatten()
    number = min(_WINDOWS_PER_OBJECT * num_objects, _MAX_WINDOWS, max(1, int(alone.isfinite().sum())))
    best = alone.topk(number).indices
    row, place = best // place.shape[1], place.flatten()[best]
    height, width = canvas.template_height, canvas.template_width
    rows, columns = height // 2, width // 2
    top, left = place // canvas.grid[1] - 2 * rows, place % canvas.grid[1] - 2 * columns
    pixels = _cut(images.movedim(-1, 1), row, top, left, (height + 4 * rows, width + 4 * columns), canvas.wrap)
    return Windows(pixels.float().contiguous(), energy.flatten()[best].float(), (rows, columns), noise.float())


def typical_objects(windows: Windows, number: int, generator: torch.Generator | None) -> Clusters:
    """Averages windows that show the same object.

    The objects are those that most of the windows show.

    Some of the windows are the first objects. Those that the others make up for best go, until
    there are twice as many as asked for. Every window then belongs to the object that it resembles
    most, at the best shift. The object becomes the mean of its windows, and this is repeated. Of
    these, in which there is hardly any noise, again those go that the others make up for best.
    """
    count = min(_CANDIDATES_PER_OBJECT * number, _MAX_CANDIDATES)
    drawn = torch.randperm(len(windows.energy), generator=generator, device=device_of(generator))[:count].to(windows.energy.device)
    found = Clusters(windows.within(0)[drawn], torch.ones_like(drawn), windows.energy[drawn])
    found = _parted(found.take(prune_objects(missing_energy(windows, found)[0], _CLUSTERS_PER_OBJECT * number)), len(drawn), generator)
    for _ in range(_KMEANS_STEPS):
        found = _average(windows, found)
    return found.take(prune_objects(missing_energy(windows, found)[0], number))


def _parted(found: Clusters, number: int, generator: torch.Generator | None) -> Clusters:
    """Returns objects beyond the first ``number``, which repeat these with noise.

    Equal objects would stay equal in learning.
    """
    device = found.objects.device if generator is None else generator.device
    noise = torch.randn(found.objects[number:].shape, generator=generator, device=device).to(found.objects)
    size = found.objects[number:].square().mean((1, 2, 3), keepdim=True).sqrt()
    return found._replace(objects=torch.cat([found.objects[:number], found.objects[number:] + _NOISE_OF_COPIES * size * noise]))


def missing_energy(windows: Windows, found: Clusters) -> tuple[Tensor, Tensor]:
    """Returns the missing share of windows' energy and the best shift.

    Both are ``(n, K)``, for objects at that shift.
    """
    products = [conv2d(part, found.objects).flatten(2).max(2) for part in windows.within(1).split(_WINDOWS_PER_BLOCK)]
    product, shift = (torch.cat([getattr(part, name) for part in products]) for name in ("values", "indices"))
    energy = windows.energy.unsqueeze(1)
    return (energy + found.energy - 2 * product).clamp(min=0.0) / energy.clamp(min=1e-12), shift


def prune_objects(missing: Tensor, number: int) -> Tensor:
    """Returns positions of so many objects after pruning.

    Those go first, one after the other, that the others explain best. Too few repeat.
    """
    explained = (_MAX_MISSING_SHARE - missing).clamp(min=0.0)
    kept = torch.arange(explained.shape[1], device=missing.device)
    while len(kept) > number:
        best = explained[:, kept].topk(2, 1)
        losses = torch.zeros_like(missing[0, kept]).index_add_(0, best.indices[:, 0], best.values[:, 0] - best.values[:, 1])
        kept = torch.cat([kept[: losses.argmin()], kept[losses.argmin() + 1 :]])
    return kept[torch.arange(number, device=kept.device) % len(kept)]


def _average(windows: Windows, found: Clusters) -> Clusters:
    """Returns objects as means of the windows that resemble them most.

    Objects of a single window stay as they are.
    """
    missing, shift = missing_energy(windows, found)
    nearest = missing.min(1)
    is_alike, owner = nearest.values < _MAX_MISSING_SHARE, nearest.indices
    best = shift.gather(1, owner.unsqueeze(1)).squeeze(1)
    (height, width), (rows, columns) = found.objects.shape[-2:], windows.reach
    side = 2 * columns + 1
    aligned = _cut(
        windows.pixels, torch.arange(len(best), device=best.device), best // side, best % side, (height + 2 * rows, width + 2 * columns)
    )
    size = torch.zeros_like(found.size).index_add_(0, owner, is_alike.to(found.size))
    total = torch.zeros_like(aligned[:1]).repeat(len(size), 1, 1, 1).index_add_(0, owner, aligned * is_alike[:, None, None, None])
    mean = total / size.clamp(min=1)[:, None, None, None]
    # Where most of it is seen: the first window may have cut something off.
    seen = conv2d(mean.square().sum(1, keepdim=True), _centre(height, width).to(mean)[None, None]).flatten(1).argmax(1)
    objects = _cut(mean, torch.arange(len(seen), device=seen.device), seen // side, seen % side, (height, width))
    energy = objects.square().sum((1, 2, 3)) - objects[0].numel() * windows.noise / size.clamp(min=1)
    several = size > 1
    return Clusters(
        torch.where(several[:, None, None, None], objects, found.objects),
        torch.where(several, size, found.size),
        torch.where(several, energy, found.energy),
    )


def _brightest_windows(contrast: Tensor, canvas: Canvas) -> tuple[Tensor, Tensor, Tensor]:
    """Returns salient windows of contrasts ``(N, height, width)`` with empty surroundings.

    There are several of each, without overlap.

    Returns:
        What is seen inside less what is seen around, what is seen inside, and the places, all ``(N, P)``.
    """
    height, width = canvas.template_height, canvas.template_width
    inner = _centre(height, width).to(contrast)
    kernels = torch.stack([pad(inner, (_MARGIN,) * 4, value=-2.0), pad(torch.ones_like(inner), (_MARGIN,) * 4)]).unsqueeze(1)
    every = torch.arange(len(contrast), device=contrast.device)
    corner = torch.full_like(every, -_MARGIN)
    rows, columns = (cells - 1 + side + 2 * _MARGIN for cells, side in zip(canvas.grid, (height, width), strict=True))
    around = _cut(contrast.unsqueeze(1), every, corner, corner, (rows, columns), canvas.wrap)
    score, inside = conv2d(around, kernels).flatten(2).unbind(1)
    found = []
    for _ in range(_WINDOWS_PER_IMAGE):
        best = score.max(1)
        found.append((best.values, inside.gather(1, best.indices.unsqueeze(1)).squeeze(1), best.indices))
        score = score.masked_fill(_overlap(best.indices, canvas), -torch.inf)
    alone, energy, place = (torch.stack(values, 1) for values in zip(*found, strict=True))
    return alone, energy, place


def _centre(height: int, width: int) -> Tensor:
    """Returns weights of a window's pixels, lower off its centre.

    Small objects then lie in the centre.
    """
    down, right = torch.arange(height).double() - (height - 1) / 2, torch.arange(width).double() - (width - 1) / 2
    return 1 - 0.2 * ((down[:, None] / height).square() + (right / width).square())


def _overlap(place: Tensor, canvas: Canvas) -> Tensor:
    """Which places ``(N, L)`` have windows that overlap those at places ``(N,)``."""
    near: list[Tensor] = []
    for position, size, cells, side in (
        (place // canvas.grid[1], canvas.height, canvas.grid[0], canvas.template_height),
        (place % canvas.grid[1], canvas.width, canvas.grid[1], canvas.template_width),
    ):
        distance = (torch.arange(cells, device=place.device) - position.unsqueeze(1)).abs()
        near.append((torch.minimum(distance, size - distance) if canvas.wrap else distance) < side)
    rows, columns = near
    return (rows.unsqueeze(2) & columns.unsqueeze(1)).flatten(1)


def _cut(pictures: Tensor, which: Tensor, top: Tensor, left: Tensor, size: tuple[int, int], wrap: bool = True) -> Tensor:
    """Returns parts ``(n, F, *size)`` of pictures ``(N, F, rows, columns)``.

    Beyond edges lies the other side, or nothing.
    """
    index, is_inside = [], []
    for corner, steps, limit in zip((top, left), size, pictures.shape[2:], strict=True):
        along = corner.unsqueeze(1) + torch.arange(steps, device=corner.device)
        index.append(along % limit)
        is_inside.append((along >= 0) & (along < limit))
    found = pictures.movedim(1, -1)[which[:, None, None], index[0].unsqueeze(2), index[1].unsqueeze(1)]
    if not wrap:
        found = found * (is_inside[0].unsqueeze(2) & is_inside[1].unsqueeze(1)).unsqueeze(-1)
    return found.movedim(-1, 1)
