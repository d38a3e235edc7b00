"""Scenes of occluding objects in plain torch, in the order of kernels.

Until these are compiled, this serves in their place on the CPU, to the last digit. Cumulative sums and products, and sums at places that an
index names, go from the first entry to the last.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_truncated.ops.canvas import Canvas, SceneParameters
from pyro_truncated.ops.vectorised.in_order import add, exp, log, total

# As in the kernels.
_LOST, _SMALL, _BLOCKS = -60.0, 1e-200, 16


class _Slots(NamedTuple):
    """Objects at places of images, computed once for all states."""

    image: Tensor  # (S,), in the order in which states need them
    kind: Tensor  # the object, (S,)
    pixel: Tensor  # under each entry, (S, T)
    mask: Tensor  # (S, T), as the others
    ratio: Tensor
    single: Tensor


class _Layout(NamedTuple):
    """States as lists of their objects, front to back."""

    energy: Tensor  # of the background, (N, D)
    state: Tensor  # (E,)
    level: Tensor  # (E,)
    slot: Tensor  # (E,)
    slots: _Slots


class _Cells(NamedTuple):
    """Pixels of states that several objects cover: their members, front to back."""

    cell: Tensor  # of every member, (M,), as the next four
    slot: Tensor
    entry: Tensor
    responsibility: Tensor
    on: Tensor
    where: Tensor  # state and pixel of every cell, in one number, (X,), as the others
    turn: Tensor  # its turn in its state
    peak: Tensor
    factor: Tensor


def _likelihood_ratio(values: Tensor) -> Tensor:
    return torch.where(values > _LOST, exp(values), 0.0)


def _square(errors: Tensor, variance: Tensor) -> Tensor:
    return 0.5 * total(errors.square()) / variance


def _add_pixels(sums: Tensor, index: Tensor, pixels: Tensor, share: Tensor) -> None:
    """Adds weights, weighted colours and squares to rows of sums."""
    channels, scaled = pixels.shape[-1], share.unsqueeze(-1) * pixels
    column = torch.arange(2 * channels + 1).clamp(max=channels + 1)
    values = torch.cat([share.unsqueeze(-1), scaled, scaled * pixels], -1)
    add(sums, index.unsqueeze(-1) * (channels + 2) + column, values)


def log_prob(places: Tensor, rank: Tensor | None, images: Tensor, scene: SceneParameters, canvas: Canvas) -> Tensor:
    """Log densities ``(N, C)`` of some images under states."""
    layout = _lay_out(places, rank, images, scene, canvas)
    constant = 0.5 * images.shape[1] * images.shape[2] * log(images.new_tensor(2 * math.pi))
    totals = images.new_zeros(places.shape[0] * places.shape[1], places.shape[2] + 1)
    totals[:, 0] = (total(-layout.energy) - constant).repeat_interleave(places.shape[1])
    totals[layout.state, layout.level + 1] = total(layout.slots.single)[layout.slot]
    value, cells = total(totals), _find_cells(layout, images.shape[1], rank is not None)
    if len(cells.where):
        value = value + _corrections(cells, layout.slots, len(value), images.shape[1], places.shape[2])
    return value.view(places.shape[:2])


def _corrections(cells: _Cells, slots: _Slots, num_states: int, num_pixels: int, num_objects: int) -> Tensor:
    """What states are worth beyond their single objects."""
    state, most = cells.where // num_pixels, int(cells.turn.max()) + 1
    terms, factor = slots.single.new_zeros(most, num_objects + 2, num_states), slots.single.new_ones(most, num_states)
    terms[cells.turn, 0, state], factor[cells.turn, state] = cells.peak, cells.factor
    within = torch.arange(len(cells.cell)) - torch.searchsorted(cells.cell, cells.cell)
    terms[cells.turn[cells.cell], within + 1, state[cells.cell]] = -slots.single[cells.slot, cells.entry]
    product, logged = torch.ones_like(factor[0]), torch.ones_like(factor)
    for turn in range(most):
        product = product * factor[turn]
        is_small = product < _SMALL
        logged[turn] = torch.where(is_small, product, 1.0)
        product = torch.where(is_small, 1.0, product)
    terms[:, -1] = log(logged)
    return terms.flatten(0, 1).cumsum(0)[-1] + log(product)


def pixel_log_prob(places: Tensor, rank: Tensor | None, images: Tensor, scene: SceneParameters, canvas: Canvas) -> Tensor:
    """Log densities of their pixels, ``(N, C, D)``."""
    layout = _lay_out(places, rank, images, scene, canvas)
    constant = 0.5 * images.shape[2] * log(images.new_tensor(2 * math.pi))
    out = (-layout.energy - constant).unsqueeze(1).repeat(1, places.shape[1], 1)
    slots, cells = layout.slots, _find_cells(layout, images.shape[1], rank is not None)
    add(out, layout.state.unsqueeze(1) * images.shape[1] + slots.pixel[layout.slot], slots.single[layout.slot])
    add(out, cells.where, cells.peak)
    add(out, cells.where, log(cells.factor))
    add(out, cells.where[cells.cell], -slots.single[cells.slot, cells.entry])
    return out


def empty_statistics(num_data: int, scene: SceneParameters) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The block of every image, and empty sums for each block."""
    num_blocks, channels, masks = min(max(1, num_data), _BLOCKS), scene.features.shape[2], scene.masks
    shapes = (*masks.shape, channels + 2), masks.shape, masks.shape[:1], (channels + 2,)
    # Where kernels split them.
    block = torch.bucketize(torch.arange(num_data), num_data * torch.arange(1, num_blocks) // num_blocks, right=True)
    return block, tuple(masks.new_zeros(num_blocks, *shape) for shape in shapes)


def add_statistics(
    sums: tuple[Tensor, ...],
    block: Tensor,
    places: Tensor,
    rank: Tensor | None,
    weights: Tensor,
    images: Tensor,
    scene: SceneParameters,
    canvas: Canvas,
) -> None:
    """Adds some images to sums ``(owned, on, present, background)`` of their blocks."""
    num_pixels, (num_objects, num_entries) = images.shape[1], scene.masks.shape
    owned, on, present, background = sums
    # States without weight take no part.
    layout = _lay_out(places.masked_fill(weights.unsqueeze(-1) == 0, -1), rank, images, scene, canvas)
    slots, cells = layout.slots, _find_cells(layout, num_pixels, rank is not None)
    mass, owner_mass, mask_mass = images.new_zeros(len(slots.image)), torch.zeros_like(slots.single), torch.zeros_like(slots.single)
    add(mass, layout.slot, weights.flatten()[layout.state])
    likelihood = exp(slots.ratio - slots.single)
    at, weight = cells.slot * num_entries + cells.entry, weights.flatten()[cells.where[cells.cell] // num_pixels]
    alone = (slots.mask * likelihood).flatten()[at]
    add(owner_mass, at, weight * (cells.responsibility - alone))
    add(mask_mass, at, weight * (cells.on - alone))
    alone = mass.unsqueeze(1) * slots.mask * likelihood
    share, own = alone + owner_mass, torch.zeros_like(layout.energy)
    add(own, slots.image.unsqueeze(1) * num_pixels + slots.pixel, share)
    kind = block[slots.image] * num_objects + slots.kind
    entry = kind.unsqueeze(1) * num_entries + torch.arange(num_entries)
    add(present, kind, mass)
    add(on, entry, alone + mask_mass)
    _add_pixels(owned, entry, images[slots.image.unsqueeze(1), slots.pixel], share)
    _add_pixels(background, block.unsqueeze(1).expand(-1, num_pixels), images, total(weights).unsqueeze(1) - own)


def _lay_out(places: Tensor, rank: Tensor | None, images: Tensor, scene: SceneParameters, canvas: Canvas) -> _Layout:
    features, masks, variance, background, background_variance = scene
    shift = 0.5 * images.shape[2] * log(torch.stack([variance, background_variance]).view(2))
    energy = _square(images - background, background_variance) + shift[1]
    order = torch.arange(places.shape[2]).expand(places.shape) if rank is None else rank.long()
    order = order.masked_fill(places < 0, torch.iinfo(order.dtype).max).argsort(dim=2, stable=True)
    ordered = places.long().gather(2, order)
    data, candidate, level = (ordered >= 0).nonzero(as_tuple=True)
    kind, place = order[data, candidate, level], ordered[data, candidate, level]
    keys, slot = ((data * len(masks) + kind) * canvas.num_places + place).unique(return_inverse=True)
    first, by_need = torch.full_like(keys, len(slot)).scatter_reduce(0, slot, torch.arange(len(slot)), "amin").sort()
    image, kind, pixel = data[first], kind[first], canvas.pixels[place[first]]
    mask, under = masks[kind], (image.unsqueeze(1), pixel)
    ratio = energy[under] - _square(images[under] - features[kind], variance) - shift[0]
    chances = torch.where(ratio > 0, mask, 1 - mask) + torch.where(ratio > 0, 1 - mask, mask) * exp(-ratio.abs())
    slots = _Slots(image, kind, pixel, mask, ratio, ratio.clamp(min=0.0) + log(chances))
    return _Layout(energy, data * places.shape[1] + candidate, level, by_need.argsort()[slot], slots)


def _find_cells(layout: _Layout, num_pixels: int, in_depth: bool) -> _Cells:
    slots, num_entries = layout.slots, layout.slots.mask.shape[1]
    where = (layout.state.unsqueeze(1) * num_pixels + slots.pixel[layout.slot]).flatten()
    member = (where.bincount()[where] > 1).nonzero().squeeze(1)
    member = member[where[member].argsort(stable=True)]
    where, cell, size = where[member].unique_consecutive(return_inverse=True, return_counts=True)
    slot, entry, first = layout.slot[member // num_entries], member % num_entries, size.cumsum(0) - size
    alpha, ratio = slots.mask[slot, entry], slots.ratio[slot, entry]
    (responsibility, on), (peak, factor) = alpha.new_empty(2, len(alpha)), alpha.new_empty(2, len(size))
    for number in size.unique().tolist():
        here = (size == number).nonzero().squeeze(1)
        at = first[here].unsqueeze(1) + torch.arange(number)
        peak[here], factor[here], responsibility[at], on[at] = _own(alpha[at], ratio[at], in_depth)
    # Kernels list the pixels of the foremost object first.
    state = where // num_pixels
    turn = member[first].argsort().argsort() - torch.searchsorted(state, state)
    return _Cells(cell, slot, entry, responsibility, on, where, turn, peak, factor)


def _own(alpha: Tensor, ratio: Tensor, in_depth: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log density ratios in two factors, owners, and masks that are on."""
    peak, off, number = ratio.amax(1, keepdim=True).clamp(min=0.0), 1 - alpha, alpha.shape[1]
    rest, rule = off.cumprod(1), [] if in_depth else gauss_rule(number)
    nodes = [(weight, node, off + alpha * node) for node, weight in rule]
    if in_depth:
        share = alpha * torch.cat([torch.ones_like(rest[:, :1]), rest[:, :-1]], 1)
    elif number == 2:
        share = alpha * (1 - 0.5 * alpha.flip(1))
    else:
        share = torch.zeros_like(alpha)
        for weight, _, factor in nodes:
            share = share + alpha * _product(weight, factor) / factor
    responsibility = share * _likelihood_ratio(ratio - peak)
    mass = total(torch.cat([rest[:, -1:] * _likelihood_ratio(-peak), responsibility], 1)).unsqueeze(1)
    responsibility = responsibility / mass
    if in_depth:
        on = torch.stack(
            [total(torch.cat([responsibility[:, j : j + 1], alpha[:, j : j + 1] * responsibility[:, :j]], 1)) for j in range(number)], 1
        )
    elif number == 2:
        on = responsibility + 0.5 * responsibility.flip(1) * alpha[:, :1] * alpha[:, 1:] / share.flip(1)
    else:
        on = responsibility.clone()
        for weight, node, factor in nodes:
            alone = alpha * _product(weight * node, factor) / factor
            for j in range(number):
                # Both masks on, and the others whatever they are.
                both = responsibility * (alone[:, j : j + 1] * alpha / factor) / share
                both[:, j] = 0.0
                on[:, j] = total(torch.cat([on[:, j : j + 1], both], 1))
    return peak.squeeze(1), mass.squeeze(1), responsibility, on


def _product(start: float, factor: Tensor) -> Tensor:
    return torch.cat([torch.full_like(factor[:, :1], start), factor], 1).cumprod(1)[:, -1:]


def gauss_rule(num_objects: int) -> list[tuple[float, float]]:
    """A Gauss-Legendre rule on the unit interval, exact for so many objects."""
    nodes, weights = np.polynomial.legendre.leggauss((num_objects + 1) // 2)
    return [(float(node + 1) / 2, float(weight) / 2) for node, weight in zip(nodes, weights, strict=True)]
