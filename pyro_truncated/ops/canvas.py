"""Sizes, objects and background of scenes, and sums for M-steps."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_truncated.utils.arguments import check_count


@dataclasses.dataclass(frozen=True)
class Canvas:
    """Sizes of images and templates, and where templates may lie.

    Example:
        >>> canvas = Canvas(8, 10, 3, 3, wrap=True)
        >>> canvas.num_pixels, canvas.num_places
        (80, 80)

    Attributes:
        height: rows of an image.
        width: columns of an image.
        template_height: rows of a template.
        template_width: columns of a template.
        wrap: whether a template that leaves on one side comes back on the other. Otherwise it lies inside.

    Raises:
        ValueError: if a size is not positive or templates are larger than images.
    """

    height: int
    width: int
    template_height: int
    template_width: int
    wrap: bool = True

    def __post_init__(self) -> None:
        for name in ("height", "width", "template_height", "template_width"):
            check_count(f"{name} of the canvas", getattr(self, name))
        if self.template_height > self.height or self.template_width > self.width:
            raise ValueError(
                f"templates of {self.template_height} x {self.template_width} pixels do not fit on a canvas of {self.height} x {self.width}"
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the grid of places."""
        if self.wrap:
            return self.height, self.width
        return self.height - self.template_height + 1, self.width - self.template_width + 1

    @property
    def num_places(self) -> int:
        """Number of places of the grid, ``L``."""
        return self.grid[0] * self.grid[1]

    @property
    def num_pixels(self) -> int:
        """Number of pixels of an image, ``D``."""
        return self.height * self.width

    @property
    def num_entries(self) -> int:
        """Number of pixels of a template, ``T``."""
        return self.template_height * self.template_width

    @functools.cached_property
    def pixels(self) -> Tensor:
        """The pixel under each template entry at each place, ``(L, T)`` int64."""
        row, column = (torch.arange(size, device="cpu") for size in self.grid)
        down, right = (torch.arange(size, device="cpu") for size in (self.template_height, self.template_width))
        rows = (row[:, None, None, None] + down[:, None]) % self.height
        columns = (column[:, None, None] + right) % self.width
        return (rows * self.width + columns).reshape(self.num_places, self.num_entries)

    def pixels_on(self, device: torch.device) -> Tensor:
        """The :attr:`pixels` on a device, copied there once."""
        return _pixels_on(self, device)

    @property
    def shape(self) -> tuple[int, ...]:
        """Height and width of the canvas, the template and the grid."""
        return self.height, self.width, self.template_height, self.template_width, *self.grid


@functools.lru_cache(maxsize=16)
def _pixels_on(canvas: Canvas, device: torch.device) -> Tensor:
    return canvas.pixels.to(device)


class SceneParameters(NamedTuple):
    r"""Objects and background.

    Example:
        >>> parameters = SceneParameters(torch.rand(2, 9, 3), torch.rand(2, 9), torch.tensor(0.01), torch.zeros(3), torch.tensor(0.01))
        >>> parameters.features.shape
        torch.Size([2, 9, 3])

    Attributes:
        features: colours of the objects :math:`w`, ``(H, T, F)``.
        masks: mask probabilities :math:`\alpha` in (0, 1), ``(H, T)``.
        variance: :math:`\sigma^2`, a scalar.
        background: mean colour, ``(F,)``.
        background_variance: a scalar.
    """

    features: Tensor
    masks: Tensor
    variance: Tensor
    background: Tensor
    background_variance: Tensor


class SceneStatistics(NamedTuple):
    r"""Sums over data and states, with weights :math:`w_{nc}`, in float64."""

    # Of the probability that the object owns the pixel under an entry, times one, the colours and the squared colours, (H, T, F + 2).
    owned: Tensor
    on: Tensor  # of the probability that a mask is on, (H, T)
    present: Tensor  # over the states with the object, (H,)
    background: Tensor  # of the probability that nothing owns a pixel, times one, the colours and the squared colours, (F + 2,)
