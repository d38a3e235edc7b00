"""What an object at a place says about an image, computed once for all states: slots of memory for objects at places.

Arguments that go together are tuples: ``model`` is (features ``(H, T, F)``, masks ``(H, T)``, variance, shape, nodes, weights), where
shape holds height and width of canvas, template and grid of places, and nodes are empty if objects lie in depth order; ``memory`` is
(slot of each object and place, slots in use, log density ratios, log likelihood ratios, their sums), and ``state`` is (objects, top edges,
left edges, slots) of one state.
"""

import numpy as np

from pyro_truncated.ops.compiled.compilation import njit


@njit(cache=True, nogil=True, error_model="numpy")
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


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def pixel_under(shape, top, left, i):
    """The pixel under an entry of a template."""
    row, column = top + i // shape[3], left + i % shape[3]
    return (row - shape[0] * (row >= shape[0])) * shape[1] + column - shape[1] * (column >= shape[1])


@njit(cache=True, nogil=True, error_model="numpy")
def _add_place(image, energy, h, top, left, model, memory, slot):
    """Fills a slot: log ratios of object and background densities, and log likelihood ratios of the object alone, entry by entry."""
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


@njit(cache=True, nogil=True, error_model="numpy")
def lay_out(places, rank, image, energy, model, memory, state):
    """Lists the objects of a state, front to back if they lie in depth order, and fills missing slots; returns their number."""
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


@njit(cache=True, nogil=True, error_model="numpy")
def forget(memory):
    """Empties the slots, for the next image."""
    slot_of, used = memory[0], memory[1]
    for s in range(used[0]):
        slot_of[used[s + 1]] = -1
    used[0] = 0


@njit(cache=True, nogil=True, error_model="numpy")
def make_memory(places, num_objects, num_entries, shape):
    """Memory for images whose states are ``(n, C, H)``, and for one state of them."""
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
    memory = np.full(num_keys, -1, np.int32), np.zeros(size + 1, np.int64), ratio, single, np.empty(size)
    state = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    numbers = np.empty(most), np.empty(most), np.empty(most), np.empty(most), np.empty(most)
    local = np.empty(most, np.int64), np.empty(most, np.int64), numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], np.empty(1)
    return memory, state, local
