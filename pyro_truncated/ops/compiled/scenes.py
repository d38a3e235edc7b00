"""Compiled CPU kernels for scenes of occluding objects, in float64.

What an object at a place says about an image is computed once for all states. Per state, work is done only where objects overlap.

Plain torch takes 4 to 7 times as long with lists of overlaps, and over 40 times for scans (200 images of 400 pixels, 6 objects).

Arguments that go together are tuples. ``model`` is (features ``(H, T, F)``, masks ``(H, T)``, variance, shape, nodes, weights). Its shape
holds height and width of canvas, template and grid of places; nodes are empty if objects lie in depth order. ``memory`` is (slot of each
object and place, slots in use, log density ratios, log likelihood ratios, their sums). ``state`` is (objects, top edges, left edges, slots)
of one state.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.canvas import Canvas, SceneParameters
from pyro_truncated.ops.compiled.compilation import BLOCKS, HEAVY, njit, parallel_kernel
from pyro_truncated.ops.compiled.iterate_active import as_array, copy
from pyro_truncated.ops.vectorised import scenes as vectorised


@njit
def background_energy(image, background, variance, energy):
    """Writes ``-log p_B(y_p)`` up to ``F / 2 log(2 pi)`` for every pixel; returns minus its sum."""
    total = 0.0
    shift = 0.5 * image.shape[1] * np.log(variance)
    for p in range(image.shape[0]):
        error = 0.0
        for f in range(image.shape[1]):
            error += (image[p, f] - background[f]) ** 2
        energy[p] = 0.5 * error / variance + shift
        total -= energy[p]
    return total


@njit(forceinline=True)
def pixel_under(shape, top, left, i):
    """The pixel under an entry of a template."""
    row, column = top + i // shape[3], left + i % shape[3]
    return (row - shape[0] * (row >= shape[0])) * shape[1] + column - shape[1] * (column >= shape[1])


@njit
def _add_place(image, energy, h, top, left, model, memory, slot):
    """Fills a slot with log density and likelihood ratios, entry by entry."""
    features, masks, variance, shape = model[0][h], model[1][h], model[2], model[3]
    ratio, single, total = memory[2][slot], memory[3][slot], memory[4]
    shift = 0.5 * image.shape[1] * np.log(variance)
    total[slot] = 0.0
    for i in range(len(masks)):
        p = pixel_under(shape, top, left, i)
        error = 0.0
        for f in range(image.shape[1]):
            error += (image[p, f] - features[i, f]) ** 2
        g = energy[p] - 0.5 * error / variance - shift
        ratio[i] = g
        if g > 0.0:
            single[i] = g + np.log(masks[i] + (1.0 - masks[i]) * np.exp(-g))
        else:
            single[i] = np.log(1.0 - masks[i] + masks[i] * np.exp(g))
        total[slot] += single[i]


@njit
def lay_out(places, rank, image, energy, model, memory, state):
    """Lists a state's objects, front to back, and fills missing slots."""
    shape, in_depth = model[3], len(model[4]) == 0
    slot_of, used = memory[0], memory[1]
    found, top, left, slots = state
    count = 0
    for h in range(len(places)):
        if places[h] >= 0:
            at = count
            while in_depth and at > 0 and rank[found[at - 1]] > rank[h]:
                found[at] = found[at - 1]
                at -= 1
            found[at] = h
            count += 1
    for j in range(count):
        h = found[j]
        top[j], left[j] = places[h] // shape[5], places[h] % shape[5]
        key = h * shape[4] * shape[5] + places[h]
        if slot_of[key] < 0:
            slot_of[key] = used[0]
            used[0] += 1
            used[used[0]] = key
            _add_place(image, energy, h, top[j], left[j], model, memory, slot_of[key])
        slots[j] = slot_of[key]
    return count


@njit
def forget(memory):
    """Empties the slots, for the next image."""
    slot_of, used = memory[0], memory[1]
    for s in range(used[0]):
        slot_of[used[s + 1]] = -1
    used[0] = 0


@njit
def make_memory(places, num_objects, num_entries, shape):
    """Allocates memory for images with states ``(n, C, H)`` and one state."""
    size, most = 1, 1
    for n in range(places.shape[0]):
        total = 0
        for c in range(places.shape[1]):
            count = 0
            for h in range(places.shape[2]):
                count += places[n, c, h] >= 0
            total += count
            most = max(most, count)
        size = max(size, total)
    num_keys = num_objects * shape[4] * shape[5]
    size = min(size, num_keys)
    ratio, single = np.empty((size, num_entries)), np.empty((size, num_entries))
    slot_of, used = np.empty(num_keys, np.int64), np.empty(size + 1, np.int64)
    for key in range(num_keys):
        slot_of[key] = -1
    used[0] = 0
    memory = slot_of, used, ratio, single, np.empty(size)
    state = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    numbers = np.empty(most), np.empty(most), np.empty(most), np.empty(most), np.empty(most)
    local = np.empty(most, np.int64), np.empty(most, np.int64), numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], np.empty(1)
    return memory, state, local


# Masks are never so close to zero or one that what is smaller could count.
_LOST = -60.0


@njit
def list_shared_pixels(count, shape, state, space):
    """Lists pixels that several objects cover, with their bits; returns their number.

    The first array of ``space`` is zero before and after.
    """
    top, left = state[1], state[2]
    cover, pixels, bits = space
    height, width, tall, wide = shape[0], shape[1], shape[2], shape[3]
    overlapping = np.int64(0)
    for j in range(count):
        for other in range(j):
            down, right = abs(top[j] - top[other]), abs(left[j] - left[other])
            if min(down, height - down) < tall and min(right, width - right) < wide:
                overlapping |= (np.int64(1) << j) | (np.int64(1) << other)
    found = 0
    for turn in range(2):
        for j in range(count):
            bit = np.int64(1) << j
            if not overlapping & bit:
                continue
            for down in range(top[j], top[j] + tall):
                row = (down - height * (down >= height)) * width
                for right in range(left[j], left[j] + wide):
                    p = row + right - width * (right >= width)
                    if turn == 0:
                        cover[p] |= bit
                        continue
                    if cover[p] & (cover[p] - 1):
                        pixels[found], bits[found] = p, cover[p]
                        found += 1
                    cover[p] = 0
    return found


@njit(forceinline=True)
def list_covering(pixel, bits, count, masks, ratios, height, width, extent, objects, top, left, slots, member, entry, alpha, ratio):
    """Lists slot, entry, mask probability and ratio of objects over a pixel."""
    row, column = pixel // width, pixel % width
    over = 0
    for j in range(count):
        if bits & (np.int64(1) << j):
            down, right = row - top[j], column - left[j]
            i = (down + height * (down < 0)) * extent + right + width * (right < 0)
            member[over], entry[over] = slots[j], i
            alpha[over], ratio[over] = masks[objects[j], i], ratios[slots[j], i]
            over += 1
    return over


@njit(forceinline=True)
def own_pixel(over, nodes, weights, alpha, ratio, share, responsibility, factor):
    """Returns the log of a factor of a pixel's density ratio.

    The other factor is left in ``factor[0]``; prior and posterior probabilities of owning the pixel go to ``share`` and ``responsibility``.
    In depth order the first object whose mask is on owns the pixel. Otherwise it is drawn uniformly from those whose mask is on, by a
    Gauss-Legendre rule that is exact for their number.
    """
    rest, peak = 1.0, 0.0
    for j in range(over):
        share[j] = alpha[j] * rest if len(nodes) == 0 else 0.0
        rest *= 1.0 - alpha[j]
        peak = max(peak, ratio[j])
    if len(nodes) > 0 and over == 2:
        share[0], share[1] = alpha[0] * (1.0 - 0.5 * alpha[1]), alpha[1] * (1.0 - 0.5 * alpha[0])
    elif len(nodes) > 0:
        number = (over + 1) // 2
        for m in range(number * (number - 1) // 2, number * (number + 1) // 2):
            product = weights[m]
            for j in range(over):
                product *= 1.0 - alpha[j] + alpha[j] * nodes[m]
            for j in range(over):
                share[j] += alpha[j] * product / (1.0 - alpha[j] + alpha[j] * nodes[m])
    total = rest * _exp(-peak)
    for j in range(over):
        responsibility[j] = share[j] * _exp(ratio[j] - peak)
        total += responsibility[j]
    for j in range(over):
        responsibility[j] /= total
    factor[0] = total
    return peak


@njit(forceinline=True)
def _exp(x):
    """The exponential of a non-positive number, without a call where trivial."""
    if x == 0.0:
        return 1.0
    return np.exp(x) if x > _LOST else 0.0


@njit(forceinline=True)
def mask_probabilities(over, nodes, weights, alpha, share, responsibility, on):
    """Computes posterior mask probabilities over a pixel, after :func:`own_pixel`."""
    if over == 2 and len(nodes) > 0:
        # The integral of u is one half.
        on[0] = responsibility[0] + 0.5 * responsibility[1] * alpha[0] * alpha[1] / share[1]
        on[1] = responsibility[1] + 0.5 * responsibility[0] * alpha[0] * alpha[1] / share[0]
        return
    for j in range(over):
        on[j] = responsibility[j]
        for front in range(j if len(nodes) == 0 else 0):
            on[j] += alpha[j] * responsibility[front]
    number = (over + 1) // 2 if len(nodes) > 0 else 0
    for m in range(number * (number - 1) // 2, number * (number + 1) // 2):
        product = weights[m] * nodes[m]
        for j in range(over):
            product *= 1.0 - alpha[j] + alpha[j] * nodes[m]
        for j in range(over):
            rest = alpha[j] * product / (1.0 - alpha[j] + alpha[j] * nodes[m])
            for owner in range(over):
                if owner != j:
                    # Both masks on, and the others whatever they are.
                    both = rest * alpha[owner] / (1.0 - alpha[owner] + alpha[owner] * nodes[m])
                    on[j] += responsibility[owner] * both / share[owner]


_SMALL = 1e-200


def log_prob(places: Tensor, rank: Tensor | None, images: Tensor, scene: SceneParameters, canvas: Canvas) -> Tensor:
    """See :func:`pyro_truncated.ops.scenes.scene_log_prob`."""
    states, model = _arguments(places, rank, scene, canvas)
    out = torch.empty(places.shape[:2], dtype=torch.float64, device="cpu")
    _log_prob(*states, as_array(images), *model, out.numpy())
    return out


def pixel_log_prob(places: Tensor, rank: Tensor | None, images: Tensor, scene: SceneParameters, canvas: Canvas) -> Tensor:
    """See :func:`pyro_truncated.ops.scenes.scene_pixel_log_prob`."""
    states, model = _arguments(places, rank, scene, canvas)
    out = torch.empty(*places.shape[:2], images.shape[1], dtype=torch.float64, device="cpu")
    _pixel_log_prob(*states, as_array(images), *model, out.numpy())
    return out


def statistics(
    places: Tensor, rank: Tensor | None, weights: Tensor, images: Tensor, scene: SceneParameters, canvas: Canvas
) -> tuple[Tensor, ...]:
    """See :class:`pyro_truncated.ops.canvas.SceneStatistics`."""
    (num_objects, num_entries, channels), num_blocks = scene.features.shape, min(max(1, len(places)), BLOCKS)
    shapes = (num_objects, num_entries, channels + 2), (num_objects, num_entries), (num_objects,), (channels + 2,)
    sums = [torch.zeros(num_blocks, *shape, dtype=torch.float64, device="cpu") for shape in shapes]
    states, model = _arguments(places, rank, scene, canvas)
    _statistics(*states, as_array(weights), as_array(images), *model, *(total.numpy() for total in sums))
    return tuple(total.sum(0) for total in sums)


def _arguments(places: Tensor, rank: Tensor | None, scene: SceneParameters, canvas: Canvas) -> tuple[Any, Any]:
    """States and model as the kernels take them."""
    states = places.to(torch.int32).contiguous().numpy()
    ranks = states if rank is None else rank.to(torch.int32).contiguous().numpy()
    nodes, weights = _quadrature(len(scene.masks)) if rank is None else (np.empty(0), np.empty(0))
    objects = as_array(scene.features), as_array(scene.masks), float(scene.variance)
    behind = as_array(scene.background), float(scene.background_variance)
    return (states, ranks), (*objects, *behind, np.array(canvas.shape), nodes, weights)


@functools.lru_cache(maxsize=4)
def _quadrature(most: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Legendre rules of 1, 2, ... nodes, exact up to ``most`` objects."""
    rules = [np.polynomial.legendre.leggauss(number) for number in range(1, (most + 1) // 2 + 1)]
    return np.concatenate([(nodes + 1) / 2 for nodes, _ in rules]), np.concatenate([weights / 2 for _, weights in rules])


@njit
def _room(places, model, num_pixels):
    """Allocates memory, one state and pixel lists for a block of images."""
    memory, state, local = make_memory(places, model[1].shape[0], model[1].shape[1], model[3])
    space = np.zeros(num_pixels, np.int64), np.empty(num_pixels, np.int64), np.empty(num_pixels, np.int64)
    return memory, state, local, space


def _are_few(places, rank, images, features, *_):
    """Whether torch takes less time for so many entries than compiling."""
    return places.size * features.shape[1] <= 2**21


@parallel_kernel(cost=HEAVY, has_plain=_are_few)
def _log_prob(places, rank, images, features, masks, variance, background, background_variance, shape, nodes, weights, out):
    """Log densities ``(N, C)`` of images under states ``(N, C, H)`` and depth ranks."""
    num_data, num_candidates = places.shape[:2]
    num_blocks = min(num_data, BLOCKS)
    constant = 0.5 * images.shape[1] * images.shape[2] * np.log(2 * np.pi)
    for block in prange(num_blocks):
        low, high = num_data * block // num_blocks, num_data * (block + 1) // num_blocks
        model = features, masks, variance, shape, nodes, weights
        memory, state, local, space = _room(places[low:high], model, images.shape[1])
        energy = np.empty(images.shape[1])
        for n in range(low, high):
            base = background_energy(images[n], background, background_variance, energy) - constant
            for c in range(num_candidates):
                count = lay_out(places[n, c], rank[n, c], images[n], energy, model, memory, state)
                value = base
                for j in range(count):
                    value += memory[4][state[3][j]]
                out[n, c] = value + _correction(count, model, memory, state, local, space)
            forget(memory)


@parallel_kernel(cost=HEAVY, has_plain=_are_few)
def _pixel_log_prob(places, rank, images, features, masks, variance, background, background_variance, shape, nodes, weights, out):
    """Log densities ``(N, C, D)`` of the pixels, which :func:`_log_prob` sums."""
    num_data, num_candidates = places.shape[:2]
    num_blocks = min(num_data, BLOCKS)
    constant = 0.5 * images.shape[2] * np.log(2 * np.pi)
    for block in prange(num_blocks):
        low, high = num_data * block // num_blocks, num_data * (block + 1) // num_blocks
        model = features, masks, variance, shape, nodes, weights
        memory, state, local, space = _room(places[low:high], model, images.shape[1])
        energy = np.empty(images.shape[1])
        for n in range(low, high):
            background_energy(images[n], background, background_variance, energy)
            for c in range(num_candidates):
                for p in range(len(energy)):
                    out[n, c, p] = -energy[p] - constant
                count = lay_out(places[n, c], rank[n, c], images[n], energy, model, memory, state)
                _add_ratios(count, model, memory, state, local, space, out[n, c])
            forget(memory)


@njit
def _add_ratios(count, model, memory, state, local, space, out):
    """Adds a state's log density ratios over the background to its pixels."""
    masks, shape, nodes, weights = model[1], model[3], model[4], model[5]
    found, top, left, slots = state
    member, entry, alpha, ratio, share, responsibility, _, factor = local
    for j in range(count):
        for i in range(masks.shape[1]):
            out[pixel_under(shape, top[j], left[j], i)] += memory[3][slots[j], i]
    for x in range(list_shared_pixels(count, shape, state, space)):
        pixel = space[1][x]
        over = list_covering(
            pixel, space[2][x], count, masks, memory[2], shape[0], shape[1], shape[3], found, top, left, slots, member, entry, alpha, ratio
        )
        out[pixel] += own_pixel(over, nodes, weights, alpha, ratio, share, responsibility, factor)
        out[pixel] += np.log(factor[0])
        for m in range(over):
            out[pixel] -= memory[3][member[m], entry[m]]


@njit
def _correction(count, model, memory, state, local, space):
    """A state's log density beyond that of its single objects."""
    # Arrays are taken out of their tuples here, once: doing so costs more than the work on a pixel.
    masks, nodes, weights = model[1], model[4], model[5]
    height, width, extent = model[3][0], model[3][1], model[3][3]
    ratios, singles = memory[2], memory[3]
    found, top, left, slots = state
    member, entry, alpha, ratio, share, responsibility, _, factor = local
    value, product = 0.0, 1.0
    pixels, bits = space[1], space[2]
    for x in range(list_shared_pixels(count, model[3], state, space)):
        over = list_covering(
            pixels[x], bits[x], count, masks, ratios, height, width, extent, found, top, left, slots, member, entry, alpha, ratio
        )
        value += own_pixel(over, nodes, weights, alpha, ratio, share, responsibility, factor)
        for m in range(over):
            value -= singles[member[m], entry[m]]
        # One logarithm for many factors.
        product *= factor[0]
        if product < _SMALL:
            value += np.log(product)
            product = 1.0
    return value + np.log(product)


@njit
def _collect(weight, count, model, memory, state, local, space, mass, owner_mass, mask_mass):
    """Adds a state's weight to its slots, with corrections at overlaps."""
    masks, nodes, weights = model[1], model[4], model[5]
    height, width, extent = model[3][0], model[3][1], model[3][3]
    ratios, singles = memory[2], memory[3]
    objects, top, left, slots = state
    member, entry, alpha, ratio, share, responsibility, on, factor = local
    pixels, bits = space[1], space[2]
    for j in range(count):
        mass[slots[j]] += weight
    for x in range(list_shared_pixels(count, model[3], state, space)):
        over = list_covering(
            pixels[x], bits[x], count, masks, ratios, height, width, extent, objects, top, left, slots, member, entry, alpha, ratio
        )
        own_pixel(over, nodes, weights, alpha, ratio, share, responsibility, factor)
        mask_probabilities(over, nodes, weights, alpha, share, responsibility, on)
        for m in range(over):
            slot, i = member[m], entry[m]
            alone = alpha[m] * np.exp(ratio[m] - singles[slot, i])
            owner_mass[slot, i] += weight * (responsibility[m] - alone)
            mask_mass[slot, i] += weight * (on[m] - alone)


@njit
def _add_image(image, model, memory, mass, owner_mass, mask_mass, own, sums, bits, counts):
    """Adds the slots of one image to object sums and empties them."""
    masks, shape = model[1], model[3]
    for s in range(memory[1][0]):
        key = memory[1][s + 1]
        h, place = key // (shape[4] * shape[5]), key % (shape[4] * shape[5])
        counts[h] += mass[s]
        for i in range(masks.shape[1]):
            alone = mass[s] * masks[h, i] * np.exp(memory[2][s, i] - memory[3][s, i])
            share = alone + owner_mass[s, i]
            pixel = pixel_under(shape, place // shape[5], place % shape[5], i)
            own[pixel] += share
            bits[h, i] += alone + mask_mass[s, i]
            _add_pixel(image[pixel], share, sums[h, i])
            owner_mass[s, i] = 0.0
            mask_mass[s, i] = 0.0
        mass[s] = 0.0


@njit(forceinline=True)
def _add_pixel(pixel, share, sums):
    """Adds a pixel's weight, weighted colours, and weighted square."""
    sums[0] += share
    for f in range(len(pixel)):
        sums[f + 1] += share * pixel[f]
        sums[len(pixel) + 1] += share * pixel[f] * pixel[f]


@parallel_kernel(cost=HEAVY, has_plain=lambda places, rank, weights, *others: _are_few(places, rank, *others))
def _statistics(
    places, rank, state_weights, images, features, masks, variance, background, background_variance, shape, nodes, weights,
    sums, bits, counts, rest,
):  # fmt: skip
    """Expected sums of M-step and gradient, by blocks of images; see :func:`pyro_truncated.ops.scenes.scene_statistics`."""
    num_data, num_pixels = images.shape[:2]
    num_blocks = len(sums)
    for block in prange(num_blocks):
        low, high = num_data * block // num_blocks, num_data * (block + 1) // num_blocks
        model = features, masks, variance, shape, nodes, weights
        memory, state, local, space = _room(places[low:high], model, num_pixels)
        held, owned, switched = np.zeros(len(memory[4])), np.zeros(memory[2].shape), np.zeros(memory[2].shape)
        energy, own = np.empty(num_pixels), np.empty(num_pixels)
        for n in range(low, high):
            background_energy(images[n], background, background_variance, energy)
            total = 0.0
            for c in range(places.shape[1]):
                if state_weights[n, c] != 0.0:
                    total += state_weights[n, c]
                    count = lay_out(places[n, c], rank[n, c], images[n], energy, model, memory, state)
                    _collect(state_weights[n, c], count, model, memory, state, local, space, held, owned, switched)
            for p in range(num_pixels):
                own[p] = 0.0
            _add_image(images[n], model, memory, held, owned, switched, own, sums[block], bits[block], counts[block])
            for p in range(num_pixels):
                _add_pixel(images[n, p], total - own[p], rest[block])
            forget(memory)


# Three planes whatever the number of colours: no loop over them keeps the compiler from using vector registers.
_MAX_COLOURS = 3
# log(1 + exp(-t)) is within 3e-5 of log(2) / p(t)^4 for t >= 0 with this polynomial p: no call keeps the loop from being vectorised.
_C1, _C2, _C3, _C4, _C5 = (np.float32(c) for c in (0.1802179992, 0.0366454358, 0.002935278954, -0.000194380999, 3.955016947e-05))
_LOG2, _ZERO, _ONE, _FAR = np.float32(0.6931471805599453), np.float32(0.0), np.float32(1.0), np.float32(30.0)


def scan(images: Tensor, scene: SceneParameters, canvas: Canvas, energy: Tensor, logits: Tensor, is_used: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.scenes.scan_places`; more than three colours are left to torch."""
    if images.shape[-1] > _MAX_COLOURS:
        return vectorised.scan(images, scene, canvas, energy, logits, is_used)
    out = torch.empty(len(images), len(scene.features), *canvas.grid, device="cpu")
    _scan(*_arrays(images, scene, canvas, energy, logits, is_used), out.numpy())
    return out.flatten(2)


def scan_at(
    images: Tensor, scene: SceneParameters, canvas: Canvas, energy: Tensor, logits: Tensor, is_used: Tensor, objects: Tensor, places: Tensor
) -> Tensor:
    """See :func:`pyro_truncated.ops.scenes.scan_at`; more than three colours are left to torch."""
    if images.shape[-1] > _MAX_COLOURS:
        return vectorised.scan_at(images, scene, canvas, energy, logits, is_used, objects, places)
    arrays = _arrays(images, scene, canvas, energy, logits, is_used)
    out = torch.empty(places.shape, device="cpu")
    _scan_at(*arrays, canvas.grid[1], objects.numpy(), places.contiguous().numpy(), out.numpy())
    return out


def _arrays(images: Tensor, scene: SceneParameters, canvas: Canvas, energy: Tensor, logits: Tensor, is_used: Tensor) -> tuple[Any, ...]:
    """Colours, in three padded planes, and objects for compiled scans."""
    height, width, (rows, columns) = canvas.height, canvas.width, canvas.grid
    root, missing = (2 * scene.variance.double()).sqrt(), 3 - images.shape[-1]
    colours = torch.nn.functional.pad((scene.features.double() / root).float(), (0, missing))
    planes = torch.nn.functional.pad((images.double() / root).float(), (0, missing)).mT.reshape(-1, 3, height, width)
    full = rows + canvas.template_height - 1, columns + canvas.template_width - 1
    reach = (0, full[1] - width, 0, full[0] - height)
    energy = energy.float().reshape(-1, 1, height, width)
    planes, padded = (torch.nn.functional.pad(t, reach, mode="circular") for t in (planes, energy))
    floors = torch.log1p(-scene.masks.double()).float()
    tensors = planes.flatten(2), padded.flatten(1), colours, logits.float(), floors
    return *(t.contiguous().numpy() for t in tensors), (canvas.template_width, full[1]), is_used.contiguous().numpy()


@njit(fastmath={"reassoc", "contract", "nnan", "nsz", "arcp"})
def _add_entry(first, second, third, energy, colour, logit, floor, out):
    """Adds one template entry's log likelihood ratio ``log(1 - a + a exp(g))`` over all places."""
    red, green, blue = colour[0], colour[1], colour[2]
    for c in range(len(out)):
        x = energy[c] + logit - (first[c] - red) ** 2 - (second[c] - green) ** 2 - (third[c] - blue) ** 2
        t = min(abs(x), _FAR)
        p = _ONE + t * (_C1 + t * (_C2 + t * (_C3 + t * (_C4 + t * _C5))))
        p *= p
        out[c] += floor + max(x, _ZERO) + _LOG2 / (p * p)


@parallel_kernel(cost=HEAVY)
def _scan(planes, energy, colours, logits, floors, shape, is_used, out):
    """Log likelihood ratios of each object alone at each place, in ``out``.

    ``planes (N, 3, P)`` are colours over the noise deviation times root two, padded and flattened, ``energy (N, P)`` minus the log density
    of what else the pixels may show. Templates have ``colours (H, T, 3)``, ``logits`` and ``floors`` (log probability that a mask is off).
    ``shape`` is the width of the template and of the padded image.
    """
    num_data, num_objects, rows, columns = out.shape
    # Rows run on into the padding, so that one loop goes over all places; what it adds there is dropped.
    length = (rows - 1) * shape[1] + columns
    for n in prange(num_data):
        total = np.empty(length, np.float32)
        for h in range(num_objects):
            for c in range(length):
                total[c] = _ZERO
            for i in range(colours.shape[1]):
                if is_used[h, i]:
                    low = i // shape[0] * shape[1] + i % shape[0]
                    high = low + length
                    first, second, third = planes[n, 0, low:high], planes[n, 1, low:high], planes[n, 2, low:high]
                    _add_entry(first, second, third, energy[n, low:high], colours[h, i], logits[h, i], floors[h, i], total)
            for r in range(rows):
                copy(total[r * shape[1] : r * shape[1] + columns], out[n, h, r])


@parallel_kernel(cost=HEAVY, fastmath={"reassoc", "contract", "nnan", "nsz", "arcp"})
def _scan_at(planes, energy, colours, logits, floors, shape, is_used, columns, objects, places, out):
    """The same for objects ``(N, K)`` at places ``(N, K, P)`` only."""
    for n in prange(len(objects)):
        for k in range(objects.shape[1]):
            h = objects[n, k]
            for p in range(places.shape[2]):
                corner = places[n, k, p] // columns * shape[1] + places[n, k, p] % columns
                total = _ZERO
                for i in range(colours.shape[1]):
                    if is_used[h, i]:
                        at = corner + i // shape[0] * shape[1] + i % shape[0]
                        x = energy[n, at] + logits[h, i]
                        for c in range(3):
                            x -= (planes[n, c, at] - colours[h, i, c]) ** 2
                        t = min(abs(x), _FAR)
                        q = _ONE + t * (_C1 + t * (_C2 + t * (_C3 + t * (_C4 + t * _C5))))
                        q *= q
                        total += floors[h, i] + max(x, _ZERO) + _LOG2 / (q * q)
                out[n, k, p] = total
