"""Restores large pictures in overlapping tiles.

All patches of a large picture would not fit into memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_truncated.restoration.restore import Restored
from pyro_truncated.utils.console import progress_bar

# Entries of an image, channels included, that are restored at once: about three GB.
_MAX_ENTRIES = 2**19
_OVERLAP = 32


def restore_in_tiles(
    image: Tensor,
    restore: Callable[[Tensor, bool | None], Restored],
    most: int = _MAX_ENTRIES,
    progress: bool | None = None,
    *,
    keeps_seen: bool = False,
) -> tuple[Tensor, float]:
    """Restores an image as a whole or in overlapping tiles.

    Tiles are used if it has more entries than the limit; they fade into each other.

    Args:
        image: ``(height, width)`` or ``(height, width, channels)``; missing entries are NaN.
        restore: restores a part, given whether to show a progress bar.
        most: entries of the largest part.
        progress: whether to show a progress bar; default: if the output is a terminal.
        keeps_seen: whether ``restore`` returns observed entries unchanged, as :func:`.inpaint` does
            without noise. Tiles without missing entries are then skipped, since nothing learned in
            them is used.

    Returns:
        The restored image, and the root mean square of the noise that was learned in the tiles. It
        is zero if nothing was learned in any tile.

    Raises:
        ValueError: before any work is done, if in a part that is restored by itself all is missing.
    """
    is_missing = image.isnan()
    if keeps_seen and not bool(is_missing.any()):
        return image.clone(), 0.0
    if image.numel() <= most:
        whole = restore(image, progress)
        return whole.image, whole.noise
    side = math.isqrt(most // image[0, 0].numel())
    places = list(itertools.product(*(spans(size, side) for size in image.shape[:2])))
    for rows, columns in places:
        if bool(is_missing[rows, columns].flatten(0, 1).all(0).any()):
            where = f"rows {rows.start} to {rows.stop - 1} and columns {columns.start} to {columns.stop - 1}"
            raise ValueError(f"the image is restored in parts of {side} x {side} pixels, and all of {where} is missing: make it smaller")
    if keeps_seen:
        # All parts that cover a missing entry stay: they fade into each other there as ever.
        places = [place for place in places if bool(is_missing[place].any())]
    total, share, squares = torch.zeros_like(image), image.new_zeros(image.shape[:2]), 0.0
    with progress_bar(progress, total=len(places), desc="tiles") as bar:
        for place in places:
            part = restore(image[place], False)
            weight = torch.outer(*(_fading(span) for span in place)).to(image)
            share[place] += weight
            total[place] += part.image * weight.reshape(weight.shape + (1,) * (image.dim() - 2))
            squares += part.noise**2 / len(places)
            bar.update()
    restored = total / share.reshape(share.shape + (1,) * (image.dim() - 2))
    if keeps_seen:
        # Exactly, which means of what is the same in all parts are not; nor is there one where no part was restored.
        restored = torch.where(is_missing, restored, image)
    return restored, math.sqrt(squares)


def spans(size: int, side: int) -> list[slice]:
    """Returns evenly spaced stretches of a side that cover so many entries.

    Neighbours overlap by 32 or more. A shorter side is one stretch.
    """
    side = min(side, size)
    number = math.ceil((size - side) / max(1, side - _OVERLAP)) + 1
    starts = torch.linspace(0, size - side, number).round().long().tolist()
    return [slice(start, start + side) for start in starts]


def _fading(span: slice) -> Tensor:
    """Returns weights that fade to overlapping ends, never to zero."""
    places = torch.arange(span.stop - span.start, dtype=torch.float64)
    return (places + 1).minimum(places.flip(0) + 1).clamp(max=_OVERLAP)
