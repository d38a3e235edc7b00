"""Scenes of occluding objects, and scans of places, in plain torch.

Until kernels are compiled, :mod:`pyro_truncated.ops.vectorised.ordered_scenes` serves in their place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pyro_truncated.ops.backend import is_vectorised
from pyro_truncated.ops.canvas import Canvas, SceneParameters
from pyro_truncated.ops.packed_states import gather_states
from pyro_truncated.ops.vectorised import ordered_scenes
from pyro_truncated.ops.vectorised.ordered_scenes import gauss_rule
from pyro_truncated.utils.budget import row_slices, rows_per_block

_TINY = 1e-300


def log_prob(places: Tensor, rank: Tensor | None, images: Tensor, scene: SceneParameters, canvas: Canvas) -> Tensor:
    """Log densities ``(N, C)``; see :func:`pyro_truncated.ops.scenes.scene_log_prob`. Differentiable by torch itself."""
    if not is_vectorised(places):
        return _in_order(ordered_scenes.log_prob, places, rank, images, scene, canvas)
    return torch.cat([pixels.sum(-1) for pixels in _pixel_blocks(places, rank, images, scene, canvas)])


def pixel_log_prob(places: Tensor, rank: Tensor | None, images: Tensor, scene: SceneParameters, canvas: Canvas) -> Tensor:
    """Log densities of the pixels ``(N, C, D)``; see :func:`pyro_truncated.ops.scenes.scene_pixel_log_prob`."""
    if not is_vectorised(places):
        return _in_order(ordered_scenes.pixel_log_prob, places, rank, images, scene, canvas)
    return torch.cat(list(_pixel_blocks(places, rank, images, scene, canvas)))


def _in_order(
    function: Callable[..., Tensor], places: Tensor, rank: Tensor | None, images: Tensor, scene: SceneParameters, canvas: Canvas
) -> Tensor:
    images, scene = images.double(), _doubles(scene)
    blocks = row_slices(max(1, len(places)), _bytes_per_row(places, images))
    return torch.cat([function(places[rows], None if rank is None else rank[rows], images[rows], scene, canvas) for rows in blocks])


def _pixel_blocks(places: Tensor, rank: Tensor | None, images: Tensor, scene: SceneParameters, canvas: Canvas) -> Iterator[Tensor]:
    images, (features, masks, variance, background, background_variance) = images.double(), _doubles(scene)
    for rows in row_slices(max(1, len(places)), _bytes_per_row(places, images)):
        behind = normal_log_density(images[rows], background, background_variance)
        ranks = None if rank is None else rank[rows]
        alpha, ratio = _layers(places[rows], images[rows], behind, features, masks, variance, canvas)
        share, rest = _shares(alpha, ranks)
        yield behind.unsqueeze(1) + _mixture(share, rest, ratio)


def statistics(
    places: Tensor, rank: Tensor | None, weights: Tensor, images: Tensor, scene: SceneParameters, canvas: Canvas
) -> tuple[Tensor, ...]:
    """See :class:`pyro_truncated.ops.canvas.SceneStatistics`."""
    images, weights, scene = images.double(), weights.double(), _doubles(scene)
    if not is_vectorised(places):
        block, sums = ordered_scenes.empty_statistics(len(places), scene)
        for rows in row_slices(len(places), _bytes_per_row(places, images)):
            some = places[rows], None if rank is None else rank[rows], weights[rows], images[rows]
            ordered_scenes.add_statistics(sums, block[rows], *some, scene, canvas)
        return tuple(total.sum(0) for total in sums)
    features, masks, variance, background, background_variance = scene
    (num_objects, num_entries), channels = masks.shape, images.shape[-1]
    owned = images.new_zeros(num_objects, num_entries, channels + 2)
    on, present = images.new_zeros(num_objects, num_entries), images.new_zeros(num_objects)
    rest_sums = images.new_zeros(channels + 2)
    for rows in row_slices(len(places), _bytes_per_row(places, images)):
        image, ranks = images[rows], None if rank is None else rank[rows]
        behind = normal_log_density(image, background, background_variance)
        alpha, ratio = _layers(places[rows], image, behind, features, masks, variance, canvas)
        share, rest = _shares(alpha, ranks)
        density = _mixture(share, rest, ratio)
        weight = weights[rows, :, None, None]
        responsibility = share * (ratio - density.unsqueeze(2)).exp()
        switched = _mask_probabilities(alpha, (ratio - density.unsqueeze(2)).exp(), share, ranks)
        under = canvas.pixels_on(places.device)[places[rows].clamp(min=0).long()]
        colours = torch.cat([torch.ones_like(image[..., :1]), image, image.square().sum(-1, keepdim=True)], -1)
        here = (places[rows] >= 0).unsqueeze(-1)
        shares = (weight * responsibility).gather(3, under) * here
        on += ((weight * switched).gather(3, under) * here).sum((0, 1))
        row = torch.arange(len(image), device=image.device)[:, None, None, None]
        owned += torch.einsum("ncht,nchtf->htf", shares, colours[row, under])
        present += (weight.squeeze(-1) * here.squeeze(-1)).sum((0, 1))
        left = weights[rows].sum(1, keepdim=True) - (weight * responsibility).sum((1, 2))
        rest_sums += torch.einsum("np,npf->f", left, colours)
    return owned, on, present, rest_sums


def means(places: Tensor, rank: Tensor | None, weights: Tensor, images: Tensor, scene: SceneParameters, canvas: Canvas) -> Tensor:
    """Posterior means of the colours without noise, ``(N, D, F)``; see :func:`pyro_truncated.ops.scenes.scene_means`."""
    images, weights, (features, masks, variance, background, background_variance) = images.double(), weights.double(), _doubles(scene)
    blocks = []
    for rows in row_slices(max(1, len(places)), _bytes_per_row(places, images)):
        behind = normal_log_density(images[rows], background, background_variance)
        alpha, ratio = _layers(places[rows], images[rows], behind, features, masks, variance, canvas)
        share, rest = _shares(alpha, None if rank is None else rank[rows])
        owner = share * (ratio - _mixture(share, rest, ratio).unsqueeze(2)).exp() * weights[rows, :, None, None]
        under = canvas.pixels_on(places.device)[places[rows].clamp(min=0).long()]
        shades = (owner.gather(3, under) * (places[rows] >= 0).unsqueeze(-1)).unsqueeze(-1) * (features - background)
        flat = shades.flatten(1, 3)
        total = images.new_zeros(len(flat), images.shape[1], images.shape[2])
        total = total.scatter_add(1, under.flatten(1).unsqueeze(-1).expand_as(flat), flat)
        blocks.append(total + weights[rows].sum(1)[:, None, None] * background)
    return torch.cat(blocks)


def _layers(
    places: Tensor, images: Tensor, behind: Tensor, features: Tensor, masks: Tensor, variance: Tensor, canvas: Canvas
) -> tuple[Tensor, Tensor]:
    """Mask probabilities and log density ratios, ``(N, C, H, D)``."""
    present = (places >= 0).unsqueeze(-1)
    under = canvas.pixels_on(places.device)[places.clamp(min=0).long()]
    row = torch.arange(len(images), device=images.device)[:, None, None, None]
    ratio = normal_log_density(images[row, under], features, variance) - behind[row, under]
    blank = images.new_zeros(*places.shape, images.shape[1])
    return blank.scatter(3, under, masks * present), blank.scatter(3, under, ratio * present)


def _shares(alpha: Tensor, rank: Tensor | None) -> tuple[Tensor, Tensor]:
    """Prior probabilities of owners, ``(N, C, H, D)``, and of none, ``(N, C, D)``."""
    off = 1 - alpha
    if rank is not None:
        return alpha * _front(off, rank, torch.cumprod, 1.0), off.prod(2)
    share = torch.zeros_like(alpha)
    for node, weight in gauss_rule(alpha.shape[2]):
        factor = off + alpha * node
        share = share + weight * factor.prod(2, keepdim=True) / factor
    return alpha * share, off.prod(2)


def _mask_probabilities(alpha: Tensor, ratio: Tensor, share: Tensor, rank: Tensor | None) -> Tensor:
    """Posterior probabilities that masks are on."""
    responsibility = share * ratio
    if rank is not None:
        return responsibility + alpha * _front(responsibility, rank, torch.cumsum, 0.0)
    total = responsibility
    for node, weight in gauss_rule(alpha.shape[2]):
        factor = 1 - alpha + alpha * node
        owner = ratio * alpha / factor
        others = owner.sum(2, keepdim=True) - owner
        total = total + weight * node * factor.prod(2, keepdim=True) * alpha / factor * others
    return total


def _mixture(share: Tensor, rest: Tensor, ratio: Tensor) -> Tensor:
    """Log of the density ratio of each pixel, ``(N, C, D)``."""
    owners = torch.where(share > 0, share.clamp(min=_TINY).log() + ratio, -math.inf)
    return torch.cat([rest.clamp(min=_TINY).log().unsqueeze(2), owners], 2).logsumexp(2)


def _front(values: Tensor, rank: Tensor, accumulate: Callable[[Tensor, int], Tensor], start: float) -> Tensor:
    """Returns sums or products over the objects in front of each."""
    order = rank.argsort(2).unsqueeze(-1).expand_as(values)
    sorted_values = values.gather(2, order)
    before = torch.cat([torch.full_like(sorted_values[:, :, :1], start), accumulate(sorted_values, 2)[:, :, :-1]], 2)
    return torch.zeros_like(values).scatter(2, order, before)


def _doubles(scene: SceneParameters) -> SceneParameters:
    return SceneParameters(*(tensor.double() for tensor in scene))


def _bytes_per_row(places: Tensor, images: Tensor) -> int:
    """Of sixteen tensors with a number per state, object and pixel."""
    return 16 * 8 * places.shape[1] * places.shape[2] * images.shape[1]


def scan(images: Tensor, scene: SceneParameters, canvas: Canvas, energy: Tensor, logits: Tensor, is_used: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.scenes.scan_places`; ``energy`` is ``-log p_0``, ``logits`` hold the objects' constants."""
    pixels, variance = canvas.pixels_on(images.device), scene.variance.double()
    out = images.new_empty(len(images), len(scene.features), len(pixels), dtype=torch.float32)
    step = rows_per_block(32 * pixels.numel() * images.shape[-1])
    for start in range(0, len(images), step):
        rows = slice(start, start + step)
        under, behind = images[rows][:, pixels].double(), energy[rows][:, pixels]
        for h, (feature, mask) in enumerate(zip(scene.features.double(), scene.masks.double(), strict=True)):
            ratio = behind + logits[h] - 0.5 * (under - feature).square().sum(-1) / variance
            terms = torch.log1p(-mask) + torch.nn.functional.softplus(ratio)
            out[rows, h] = (terms * is_used[h]).sum(-1).float()
    return out


def scan_at(
    images: Tensor, scene: SceneParameters, canvas: Canvas, energy: Tensor, logits: Tensor, is_used: Tensor, objects: Tensor, places: Tensor
) -> Tensor:
    """See :func:`pyro_truncated.ops.scenes.scan_at`; the whole scan, of which a few places are taken."""
    return gather_states(scan(images, scene, canvas, energy, logits, is_used), objects).gather(2, places)


def normal_log_density(value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Log density of an isotropic normal distribution over the last dimension."""
    error = (value - mean).square().sum(-1)
    return -0.5 * (error / variance + value.shape[-1] * (2 * math.pi * variance).log())
