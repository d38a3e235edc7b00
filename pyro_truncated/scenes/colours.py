"""Maps of colours, for regressions on images."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_truncated.ops.k_means import k_means


def colour_maps(num_colours: int = 12, stride: int = 2, width: float = 0.1) -> Callable[[Tensor], Tensor]:
    """Returns maps of colours as inputs of a :class:`PlaceRegression`.

    Images are alike in them if they show the same colours at about the same place.

    The colours that differ from the background are clustered (k-means) when the returned function sees images for the
    first time. Every pixel is then a vector of memberships: softmax of minus squared distances over ``2 width**2``,
    without the background. These maps are averaged over 3 x 3 pixels and thinned out.

    Example:
        >>> scenes = occluded_scenes(generated_objects(2, 3), 10, (8, 8), presence=0.5, wrap=True)
        >>> model = OcclusiveComponents(2, (8, 8), (3, 3)).initialize(scenes.data)
        >>> search = PlacementSelection(PlaceRegression(model.canvas, inputs=colour_maps(4)), 2)

    Args:
        num_colours: number of clusters.
        stride: distance of the pixels kept.
        width: distance of colours at which memberships soften.

    Returns:
        A function that maps images ``(n, height, width, F)`` to inputs ``(n, D)``.
    """
    palette: list[Tensor] = []

    def maps(images: Tensor) -> Tensor:
        """Pooled maps of how much each pixel is of each colour."""
        pixels = images.flatten(0, 2)
        if not palette:
            palette.append(_palette(pixels, num_colours))
        memberships = (-torch.cdist(pixels, palette[0].to(pixels)).square() / (2 * width**2)).softmax(-1)[:, 1:]
        layers = memberships.reshape(*images.shape[:3], -1).movedim(-1, 1)
        pooled = torch.nn.functional.avg_pool2d(torch.nn.functional.pad(layers, (1, 1, 1, 1), mode="circular"), 3, stride)
        return pooled.flatten(1)

    return maps


def _palette(pixels: Tensor, number: int, most: int = 20_000, steps: int = 15) -> Tensor:
    """Returns the most frequent colour and cluster centres, ``(number + 1, F)``."""
    background = pixels.median(0).values
    distance = (pixels - background).norm(dim=-1)
    colours = pixels[distance > 5 * distance.median()]
    if len(colours) < number:
        raise ValueError(f"images show only {len(colours)} pixels that differ from their background; {number} colours need more")
    colours = colours[:: max(1, len(colours) // most)]
    # From dark to bright, so that no draw is needed.
    centres = colours[colours.sum(-1).argsort()][(torch.arange(number) * (len(colours) - 1)) // max(1, number - 1)]
    return torch.cat([background.unsqueeze(0), k_means(colours, centres, steps)])
