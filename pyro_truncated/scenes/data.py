"""Scenes of occluding objects, real or generated."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.datasets import load


class Objects(NamedTuple):
    """Pictures of objects, to compose scenes of.

    Example:
        >>> features, masks = generated_objects(3, 5)
        >>> features.shape, masks.shape
        (torch.Size([3, 5, 5, 3]), torch.Size([3, 5, 5]))

    Attributes:
        features: colours ``(K, height, width, channels)`` float32 in [0, 1]; zero outside the mask.
        masks: which pixels belong to the object, ``(K, height, width)`` bool.
    """

    features: Tensor
    masks: Tensor


def coil_objects(num: int = 16) -> Objects:
    """COIL-100 objects from the front, 10 x 10 pixels, half covered, in colour.

    Example:
        >>> try:
        ...     objects = coil_objects(4)
        ... except DatasetNotFoundError:
        ...     objects = generated_objects(4)  # where the data folder does not hold them
        >>> len(objects.features)
        4

    Raises:
        DatasetNotFoundError: if the data folder does not hold them.
        ValueError: if more objects are asked for than there are.
    """
    stored = load("coil100_17obj")
    front = stored["angle"] == 0
    if not 1 <= num <= front.sum():
        raise ValueError(f"num must lie in 1 .. {front.sum()}; got {num}")
    masks = torch.from_numpy(stored["cover10"][front][:num] >= 128)
    features = torch.from_numpy(stored["X10"][front][:num].astype(np.float32) / 255)
    return Objects(features * masks.unsqueeze(-1), masks)


def generated_objects(num: int, size: int = 10, generator: torch.Generator | None = None) -> Objects:
    """Draws blobs of random shape and colour.

    The radius of a blob is a random smooth function of the angle. Its colour changes linearly from one random colour to another.

    Example:
        >>> generated_objects(2, 6).features.shape
        torch.Size([2, 6, 6, 3])
    """
    offset = torch.arange(size) - (size - 1) / 2
    row, column = offset[:, None].expand(size, size), offset.expand(size, size)
    angle, radius = torch.atan2(row, column), torch.hypot(row, column)
    orders = torch.arange(1, 4)
    phase = 2 * math.pi * torch.rand(num, len(orders), 1, 1, generator=generator)
    waves = torch.cos(orders[:, None, None] * angle + phase).sum(1) / 3
    # Blobs that reach to between 0.4 and 1 of half the side.
    masks = radius <= size / 2 * (0.7 + 0.3 * waves)
    colours = 0.15 + 0.85 * torch.rand(2, num, 1, 1, 3, generator=generator)
    direction = 2 * math.pi * torch.rand(num, 1, 1, generator=generator)
    blend = (0.5 + (direction.cos() * row + direction.sin() * column) / (1.5 * size)).clamp(0, 1).unsqueeze(-1)
    return Objects((blend * colours[0] + (1 - blend) * colours[1]) * masks.unsqueeze(-1), masks)


class Scenes(NamedTuple):
    """Images of objects at random places that hide each other.

    Example:
        >>> scenes = occluded_scenes(generated_objects(2, 3), 10, (8, 8), presence=0.5, wrap=True)
        >>> scenes.data.shape, scenes.presence.shape
        (torch.Size([10, 8, 8, 3]), torch.Size([10, 2]))

    Attributes:
        data: images ``(N, height, width, channels)``.
        presence: which objects each image holds, ``(N, K)`` uint8.
        position: flat index of the pixel under the upper left corner of each object, ``(N, K)`` int64; drawn for absent ones too.
        depth: a random permutation per image, ``(N, K)`` int64; of two objects the one of smaller depth hides the other.
    """

    data: Tensor
    presence: Tensor
    position: Tensor
    depth: Tensor


def occluded_scenes(
    objects: Objects,
    num_data: int,
    canvas: tuple[int, int] = (30, 30),
    *,
    presence: float = 0.2,
    noise: float = 0.05,
    wrap: bool = False,
    generator: torch.Generator | None = None,
) -> Scenes:
    """Draws scenes of objects on a black canvas, in random depth order.

    The defaults are the test of GP-select (Neural Computation 29, 2017, section 5.3) but for the noise: the paper mentions none.

    Example:
        >>> occluded_scenes(generated_objects(2, 6), 5, (16, 16)).data.shape
        torch.Size([5, 16, 16, 3])

    Args:
        objects: what the scenes are made of.
        num_data: number of images ``N``.
        canvas: height and width of an image.
        presence: probability that an object is in an image.
        noise: standard deviation of the pixels' noise.
        wrap: whether an object that leaves the canvas on one side comes back on the other. Otherwise objects lie inside.
        generator: source of randomness.

    Raises:
        ValueError: if the objects do not fit on the canvas, or a number is out of range.
    """
    (num, height, width), (rows, columns) = objects.masks.shape, canvas
    if height > rows or width > columns:
        raise ValueError(f"objects of {height} x {width} pixels do not fit on a canvas of {rows} x {columns}")
    if not 0 <= presence <= 1 or not noise >= 0:
        raise ValueError(f"presence must lie in [0, 1] and noise must not be negative; got {presence} and {noise}")
    present = torch.rand(num_data, num, generator=generator) < presence
    limits = (rows, columns) if wrap else (rows - height + 1, columns - width + 1)
    top, left = (torch.randint(limit, (num_data, num), generator=generator) for limit in limits)
    depth = torch.rand(num_data, num, generator=generator).argsort(1)
    data = torch.zeros(num_data, rows * columns, objects.features.shape[-1])
    image = torch.arange(num_data)
    for owner in depth.argsort(1).mT.flip(0):  # the rearmost object of every image first
        row = (top[image, owner, None] + torch.arange(height)) % rows
        column = (left[image, owner, None] + torch.arange(width)) % columns
        pixels = (row.unsqueeze(-1) * columns + column.unsqueeze(-2)).flatten(1)
        is_visible = (objects.masks[owner] & present[image, owner, None, None]).flatten(1).unsqueeze(-1)
        under = ops.gather_states(data, pixels)
        data[image.unsqueeze(-1), pixels] = torch.where(is_visible, objects.features[owner].flatten(1, 2), under)
    data += noise * torch.randn(data.shape, generator=generator)
    return Scenes(data.reshape(num_data, rows, columns, -1), present.to(torch.uint8), top * columns + left, depth)


class Match(NamedTuple):
    """How alike true and learned objects are.

    Example:
        >>> objects = generated_objects(2, 3)
        >>> match = match_objects(objects.features, objects.masks, objects)
        >>> match.is_recovered()
        tensor([True, True])

    Attributes:
        similarity: cosine of true objects and learned features times masks, at the shift where it is largest, ``(K, H)``.
        shift: that shift, rows and columns, ``(K, H, 2)`` int64. An object at a position is the learned one at the
            position plus the shift.
    """

    similarity: Tensor
    shift: Tensor

    def is_recovered(self, threshold: float = 0.9) -> Tensor:
        """Which true objects ``(K,)`` have a learned one of their own."""
        similarity, match = self.similarity.max(1)
        owner = self.similarity.argmax(0)
        return (similarity >= threshold) & (owner[match] == torch.arange(len(match), device=match.device))

    def recovered(self, threshold: float = 0.9) -> Tensor:
        """The old name of :meth:`is_recovered`."""
        warnings.warn("recovered has a new name: use is_recovered", DeprecationWarning, stacklevel=2)
        return self.is_recovered(threshold)


@torch.no_grad()
def match_objects(features: Tensor, masks: Tensor, objects: Objects) -> Match:
    """Compares learned objects with true ones at all shifts.

    Features are ``(H, t, u, F)``, mask probabilities ``(H, t, u)``.

    Example:
        >>> objects = generated_objects(2, 3)
        >>> match_objects(objects.features, objects.masks, objects).similarity.shape
        torch.Size([2, 2])
    """
    pictures = (features * masks.unsqueeze(-1)).double().movedim(-1, 1)
    true = objects.features.double().movedim(-1, 1)
    height, width = pictures.shape[-2:]
    products = torch.nn.functional.conv2d(true, pictures, padding=(height - 1, width - 1))
    norms = true.flatten(1).norm(dim=1).unsqueeze(1) * pictures.flatten(1).norm(dim=1)
    best = products.flatten(2).max(-1)
    size = products.shape[-1]
    shift = torch.stack([best.indices // size - (height - 1), best.indices % size - (width - 1)], -1)
    return Match(best.values / norms.clamp(min=1e-12), shift)
