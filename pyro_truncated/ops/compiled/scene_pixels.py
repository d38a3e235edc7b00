"""Where objects of a scene overlap: who owns such a pixel, and whose masks are on. See :mod:`pyro_truncated.ops.compiled.scene_objects`."""

import numpy as np

from pyro_truncated.ops.compiled.compilation import njit

# Masks are never so close to zero or one that what is smaller could count.
_LOST = -60.0


@njit(cache=True, nogil=True, error_model="numpy")
def shared_pixels(count, shape, state, space):
    """Lists the pixels over which several objects of a state lie, with a bit for each of these objects; returns their number.

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


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def those_over(pixel, bits, count, masks, ratios, height, width, extent, found, top, left, slots, member, entry, alpha, ratio):
    """Objects over a pixel: their slots and template entries, mask probabilities and log density ratios; returns their number."""
    row, column = pixel // width, pixel % width
    over = 0
    for j in range(count):
        if bits & (np.int64(1) << j):
            down, right = row - top[j], column - left[j]
            i = (down + height * (down < 0)) * extent + right + width * (right < 0)
            member[over], entry[over] = slots[j], i
            alpha[over], ratio[over] = masks[found[j], i], ratios[slots[j], i]
            over += 1
    return over


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def own_pixel(over, nodes, weights, alpha, ratio, share, responsibility, factor):
    """Density ratio of a pixel under the objects over it: returns the logarithm of a factor and leaves the other in ``factor[0]``.

    Prior and posterior probabilities of owning the pixel go to ``share`` and ``responsibility``.

    In depth order the first object whose mask is on owns the pixel; otherwise one drawn uniformly from those whose mask is on does, by a
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


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _exp(x):
    """The exponential function of what is not positive; where it would be lost beside one, or is one, no call is made."""
    if x == 0.0:
        return 1.0
    return np.exp(x) if x > _LOST else 0.0


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def switched_on(over, nodes, weights, alpha, share, responsibility, on):
    """Posterior probabilities that the masks of the objects over a pixel are on, after :func:`own_pixel`."""
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
