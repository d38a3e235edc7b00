"""Compiled CPU kernel that slides every object over every image: a correlation with a soft threshold inside, in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from pyro_truncated.ops.canvas import Canvas, SceneParameters
from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.compiled.threads import HEAVY, parallel_kernel
from pyro_truncated.ops.vectorised import scene_scan as vectorised

# Three planes whatever the number of colours: no loop over them keeps the compiler from using vector registers.
_MAX_COLOURS = 3
# log(1 + exp(-t)) is within 3e-5 of log(2) / p(t)^4 for t >= 0 with this polynomial p: no call keeps the loop from being vectorised.
_C1, _C2, _C3, _C4, _C5 = (np.float32(c) for c in (0.1802179992, 0.0366454358, 0.002935278954, -0.000194380999, 3.955016947e-05))
_LOG2, _ZERO, _ONE, _FAR = np.float32(0.6931471805599453), np.float32(0.0), np.float32(1.0), np.float32(30.0)


def scan(images: Tensor, scene: SceneParameters, canvas: Canvas, energy: Tensor, logits: Tensor, used: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.scene_scan.scan_places`; more than three colours are left to torch."""
    if images.shape[-1] > _MAX_COLOURS:
        return vectorised.scan(images, scene, canvas, energy, logits, used)
    out = torch.empty(len(images), len(scene.features), *canvas.grid, device="cpu")
    _scan(*_arrays(images, scene, canvas, energy, logits, used), out.numpy())
    return out.flatten(2)


def scan_at(
    images: Tensor, scene: SceneParameters, canvas: Canvas, energy: Tensor, logits: Tensor, used: Tensor, objects: Tensor, places: Tensor
) -> Tensor:
    """See :func:`pyro_truncated.ops.scene_scan.scan_at`; more than three colours are left to torch."""
    if images.shape[-1] > _MAX_COLOURS:
        return vectorised.scan_at(images, scene, canvas, energy, logits, used, objects, places)
    arrays = _arrays(images, scene, canvas, energy, logits, used)
    out = torch.empty(places.shape, device="cpu")
    _scan_at(*arrays, canvas.grid[1], objects.numpy(), places.contiguous().numpy(), out.numpy())
    return out


def _arrays(images: Tensor, scene: SceneParameters, canvas: Canvas, energy: Tensor, logits: Tensor, used: Tensor) -> tuple[Any, ...]:
    """What the compiled scans take: three planes of colours, padded by what templates reach over, and the objects."""
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
    return *(t.contiguous().numpy() for t in tensors), (canvas.template_width, full[1]), used.contiguous().numpy()


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nnan", "nsz", "arcp"})
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
    """Log likelihood ratios of each object alone at each place.

    Args:
        planes: three colour planes over their noise deviation times root two, padded on the right and below and flattened, ``(N, 3, P)``.
        energy: minus the log density of what else the pixels may show, ``(N, P)``.
        colours: template colours on the same scale, ``(H, T, 3)``.
        logits: log-odds of the masks and what else does not depend on the image, ``(H, T)``.
        floors: log probability that a mask is off, ``(H, T)``.
        shape: width of the template, and of the padded image.
        is_used: entries that take part, ``(H, T)``.
        out: result, ``(N, H, rows, columns)``.
    """
    num_data, num_objects, rows, columns = out.shape
    # Rows run on into the padding, so that one loop goes over all places; what it adds there is dropped.
    length = (rows - 1) * shape[1] + columns
    for n in prange(num_data):
        total = np.empty(length, np.float32)
        for h in range(num_objects):
            total[:] = _ZERO
            for i in range(colours.shape[1]):
                if is_used[h, i]:
                    low = i // shape[0] * shape[1] + i % shape[0]
                    high = low + length
                    first, second, third = planes[n, 0, low:high], planes[n, 1, low:high], planes[n, 2, low:high]
                    _add_entry(first, second, third, energy[n, low:high], colours[h, i], logits[h, i], floors[h, i], total)
            for r in range(rows):
                out[n, h, r] = total[r * shape[1] : r * shape[1] + columns]


@parallel_kernel(cost=HEAVY, error_model="numpy", fastmath={"reassoc", "contract", "nnan", "nsz", "arcp"})
def _scan_at(planes, energy, colours, logits, floors, shape, is_used, columns, objects, places, out):
    """The same for objects ``(N, K)`` at places ``(N, K, P)`` only, ``columns`` of them in a row; the result ``out`` is ``(N, K, P)``."""
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
