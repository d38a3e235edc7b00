"""Compiled CPU kernels for scenes of occluding objects: what an object at a place says about an image is computed once for all states.

Per state, work is done only where objects overlap. Everything is float64, and sums do not depend on the number of threads. The tuples
``model``, ``memory`` and ``state`` are those of :mod:`pyro_truncated.ops.compiled.scene_objects`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.canvas import Canvas, SceneParameters
from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.compiled.scene_objects import background_energy, forget, lay_out, make_memory, pixel_under
from pyro_truncated.ops.compiled.scene_pixels import own_pixel, shared_pixels, switched_on, those_over
from pyro_truncated.ops.compiled.threads import HEAVY, parallel_kernel
from pyro_truncated.ops.compiled.walk import as_array

_MAX_BLOCKS = 16
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
    (num_objects, num_entries, channels), num_blocks = scene.features.shape, min(max(1, len(places)), _MAX_BLOCKS)
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
    """Gauss-Legendre rules on the unit interval of 1, 2, ... nodes, up to what is exact for ``most`` objects, one behind the other."""
    rules = [np.polynomial.legendre.leggauss(number) for number in range(1, (most + 1) // 2 + 1)]
    return np.concatenate([(nodes + 1) / 2 for nodes, _ in rules]), np.concatenate([weights / 2 for _, weights in rules])


@njit(cache=True, nogil=True, error_model="numpy")
def _room(places, model, num_pixels):
    """What a block of images needs: memory, one state of theirs, what lies over a pixel, and the pixels that objects share."""
    memory, state, local = make_memory(places, model[1].shape[0], model[1].shape[1], model[3])
    space = np.zeros(num_pixels, np.int64), np.empty(num_pixels, np.int64), np.empty(num_pixels, np.int64)
    return memory, state, local, space


@parallel_kernel(cost=HEAVY, error_model="numpy")
def _log_prob(places, rank, images, features, masks, variance, background, background_variance, shape, nodes, weights, out):
    """Log densities ``(N, C)`` of images ``(N, D, F)`` under states: places ``(N, C, H)``, -1 for absent objects, and depth ranks."""
    num_data, num_candidates = places.shape[:2]
    num_blocks = min(num_data, _MAX_BLOCKS)
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


@parallel_kernel(cost=HEAVY, error_model="numpy")
def _pixel_log_prob(places, rank, images, features, masks, variance, background, background_variance, shape, nodes, weights, out):
    """Log densities of the pixels ``(N, C, D)``; the other arguments are those of :func:`_log_prob`, which sums them."""
    num_data, num_candidates = places.shape[:2]
    num_blocks = min(num_data, _MAX_BLOCKS)
    constant = 0.5 * images.shape[2] * np.log(2 * np.pi)
    for block in prange(num_blocks):
        low, high = num_data * block // num_blocks, num_data * (block + 1) // num_blocks
        model = features, masks, variance, shape, nodes, weights
        memory, state, local, space = _room(places[low:high], model, images.shape[1])
        energy = np.empty(images.shape[1])
        for n in range(low, high):
            background_energy(images[n], background, background_variance, energy)
            for c in range(num_candidates):
                out[n, c] = -energy - constant
                count = lay_out(places[n, c], rank[n, c], images[n], energy, model, memory, state)
                _add_ratios(count, model, memory, state, local, space, out[n, c])
            forget(memory)


@njit(cache=True, nogil=True, error_model="numpy")
def _add_ratios(count, model, memory, state, local, space, out):
    """Adds log ratios of the density under a state and that of the background to its pixels."""
    masks, shape, nodes, weights = model[1], model[3], model[4], model[5]
    found, top, left, slots = state
    member, entry, alpha, ratio, share, responsibility, _, factor = local
    for j in range(count):
        for i in range(masks.shape[1]):
            out[pixel_under(shape, top[j], left[j], i)] += memory[3][slots[j], i]
    for x in range(shared_pixels(count, shape, state, space)):
        pixel = space[1][x]
        over = those_over(
            pixel, space[2][x], count, masks, memory[2], shape[0], shape[1], shape[3], found, top, left, slots, member, entry, alpha, ratio
        )
        out[pixel] += own_pixel(over, nodes, weights, alpha, ratio, share, responsibility, factor)
        out[pixel] += np.log(factor[0])
        for m in range(over):
            out[pixel] -= memory[3][member[m], entry[m]]


@njit(cache=True, nogil=True, error_model="numpy")
def _correction(count, model, memory, state, local, space):
    """What the log density of a state is above that of its objects taken one by one, from the pixels that they share."""
    # Arrays are taken out of their tuples here, once: doing so costs more than the work on a pixel.
    masks, nodes, weights = model[1], model[4], model[5]
    height, width, extent = model[3][0], model[3][1], model[3][3]
    ratios, singles = memory[2], memory[3]
    found, top, left, slots = state
    member, entry, alpha, ratio, share, responsibility, _, factor = local
    value, product = 0.0, 1.0
    pixels, bits = space[1], space[2]
    for x in range(shared_pixels(count, model[3], state, space)):
        over = those_over(
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


@njit(cache=True, nogil=True, error_model="numpy")
def _collect(weight, count, model, memory, state, local, space, held, owned, switched):
    """Adds a state's weight to its slots, and what differs from objects that lie alone where they overlap."""
    masks, nodes, weights = model[1], model[4], model[5]
    height, width, extent = model[3][0], model[3][1], model[3][3]
    ratios, singles = memory[2], memory[3]
    found, top, left, slots = state
    member, entry, alpha, ratio, share, responsibility, on, factor = local
    pixels, bits = space[1], space[2]
    for j in range(count):
        held[slots[j]] += weight
    for x in range(shared_pixels(count, model[3], state, space)):
        over = those_over(
            pixels[x], bits[x], count, masks, ratios, height, width, extent, found, top, left, slots, member, entry, alpha, ratio
        )
        own_pixel(over, nodes, weights, alpha, ratio, share, responsibility, factor)
        switched_on(over, nodes, weights, alpha, share, responsibility, on)
        for m in range(over):
            slot, i = member[m], entry[m]
            alone = alpha[m] * np.exp(ratio[m] - singles[slot, i])
            owned[slot, i] += weight * (responsibility[m] - alone)
            switched[slot, i] += weight * (on[m] - alone)


@njit(cache=True, nogil=True, error_model="numpy")
def _add_image(image, model, memory, held, owned, switched, own, sums, bits, counts):
    """Adds what the slots of one image have collected to the sums of their objects, and empties them; ``own`` gets the objects' share."""
    masks, shape = model[1], model[3]
    for s in range(memory[1][0]):
        key = memory[1][s + 1]
        h, place = key // (shape[4] * shape[5]), key % (shape[4] * shape[5])
        counts[h] += held[s]
        for i in range(masks.shape[1]):
            alone = held[s] * masks[h, i] * np.exp(memory[2][s, i] - memory[3][s, i])
            share = alone + owned[s, i]
            pixel = pixel_under(shape, place // shape[5], place % shape[5], i)
            own[pixel] += share
            bits[h, i] += alone + switched[s, i]
            _add_pixel(image[pixel], share, sums[h, i])
            owned[s, i] = 0.0
            switched[s, i] = 0.0
        held[s] = 0.0


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _add_pixel(pixel, share, sums):
    """Adds a weight, the weighted colours, and the weighted square of a pixel."""
    sums[0] += share
    for f in range(len(pixel)):
        sums[f + 1] += share * pixel[f]
        sums[len(pixel) + 1] += share * pixel[f] * pixel[f]


@parallel_kernel(cost=HEAVY, error_model="numpy")
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
            own[:] = 0.0
            _add_image(images[n], model, memory, held, owned, switched, own, sums[block], bits[block], counts[block])
            for p in range(num_pixels):
                _add_pixel(images[n, p], total - own[p], rest[block])
            forget(memory)
