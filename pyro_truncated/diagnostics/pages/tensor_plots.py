"""Small plots of learned parameters, drawn into given axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

COLOUR = "#2b5c8a"
ACCENT = "#c8553d"
GAPS = "#a9bfd6"  # tells white fields from the space between them


def mosaic(images: Tensor, columns: int | None = None, gap: int = 1) -> np.ndarray:
    """Tiles images ``(K, height, width)`` in an about square mosaic; gaps are NaN."""
    if images.dim() != 3 or not len(images):
        raise ValueError(f"images must have shape (K, height, width) with K > 0; got {tuple(images.shape)}")
    count, height, width = images.shape
    columns = columns or math.ceil(math.sqrt(count * height / width))
    rows = -(-count // columns)
    tiles = np.full((rows * columns, height + gap, width + gap), np.nan)
    tiles[:count, :height, :width] = images.detach().cpu().double().numpy()
    sheet = tiles.reshape(rows, columns, height + gap, width + gap).transpose(0, 2, 1, 3)
    image: np.ndarray = sheet.reshape(rows * (height + gap), columns * (width + gap))
    return image[: image.shape[0] - gap, : image.shape[1] - gap]


def _as_images(flat: Tensor, shape: tuple[int, int] | None) -> Tensor:
    """Rows ``(K, D)`` as images; square unless a shape is given."""
    side = math.isqrt(flat.shape[-1])
    shape = shape or (side, side)
    if math.prod(shape) != flat.shape[-1]:
        raise ValueError(f"{flat.shape[-1]} pixels do not make images of shape {shape}; give their shape as (height, width)")
    return flat.reshape(*flat.shape[:-1], *shape)


def _show(ax: Axes, picture: np.ndarray, limits: tuple[float, float], gaps: str = "white") -> Axes:
    grey = matplotlib.colormaps["gray"].with_extremes(bad=gaps)
    ax.imshow(np.ma.masked_invalid(picture), cmap=grey, vmin=limits[0], vmax=limits[1], interpolation="nearest")
    ax.set_axis_off()
    return ax


def plot_dictionary(weight: Tensor, ax: Axes, *, shape: tuple[int, int] | None = None, columns: int | None = None) -> Axes:
    """Plots columns of a dictionary ``(D, H)`` as scaled images; grey is zero."""
    fields = _as_images(weight.detach().mT, shape)
    peak = fields.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(fields.dtype).tiny)
    return _show(ax, mosaic(fields / peak, columns), (-1.0, 1.0), gaps=GAPS)


def plot_free_energy(values: Sequence[float] | Tensor, ax: Axes, *, label: str | None = None) -> Axes:
    """Plots the free energy over iterations, the last four fifths."""
    curve = np.asarray(values, dtype=float)
    ax.plot(np.arange(1, len(curve) + 1), curve, color=COLOUR, linewidth=1.8, label=label)
    late = curve[len(curve) // 5 :]
    if np.ptp(late) > 0:
        ax.set_ylim(late.min() - 0.15 * np.ptp(late), late.max() + 0.1 * np.ptp(late))
    ax.set_xlabel("iteration")
    ax.set_ylabel("free energy")
    return tidy(ax)


def plot_activations(marginals: Tensor, ax: Axes) -> Axes:
    """Plots a histogram of expected active latents, from probabilities ``(N, H)``."""
    active = marginals.detach().double().sum(-1).cpu().numpy()
    width = max(1.0, np.ceil(active.max()) // 30)  # about 30 bins
    # Around whole numbers: where posteriors are points, 0.999 and 1.001 belong together.
    edges = width * np.arange((active.max() + 0.5) // width + 2) - 0.5
    ax.hist(active, bins=edges.tolist(), color=COLOUR, edgecolor="white", linewidth=0.5)
    ax.axvline(active.mean(), color=ACCENT, linewidth=1.8, label=f"mean {active.mean():.1f}")
    ax.set_xlabel("active latents per data point")
    ax.set_ylabel("data points")
    ax.legend(frameon=False)
    return tidy(ax)


def plot_usage(marginals: Tensor, ax: Axes) -> Axes:
    """Plots how often each latent is active, from probabilities ``(N, H)``."""
    usage = marginals.detach().double().mean(0).sort(descending=True).values.cpu().numpy()
    ax.bar(np.arange(len(usage)), usage, width=1.0, color=COLOUR)
    ax.set_xlabel("latent, most active first")
    ax.set_ylabel("share of data points")
    return tidy(ax)


def plot_decompositions(
    originals: Tensor, parts: Sequence[Tensor], ax: Axes, *, shape: tuple[int, int] | None = None, most: int = 8
) -> Axes:
    """Plots original, reconstruction and components ``(k, D)`` of each data point.

    All images of a row share one grey scale, grey is zero. Of more than ``most`` components the strongest are shown.
    """
    rows = []
    for original, components in zip(originals, parts, strict=True):
        order = components.double().square().sum(-1).argsort(descending=True)[:most]
        row = _as_images(original.new_zeros(most + 2, original.shape[-1]).fill_(math.nan), shape)
        row[0] = _as_images(original, shape)
        row[1] = _as_images(components.sum(0), shape)
        row[2 : 2 + len(order)] = _as_images(components[order], shape)
        peak = row[0].abs().max().clamp(min=torch.finfo(row.dtype).tiny)
        rows.append(mosaic(row / peak, most + 2, gap=2))
    gap = np.full((3, rows[0].shape[1]), np.nan)
    picture = np.concatenate([block for row in rows for block in (row, gap)][:-1])
    width = (picture.shape[1] + 2) / (most + 2)
    titles = ["patch", "sum", *(f"{index + 1}." for index in range(most))]
    for column, title in enumerate(titles):
        ax.text((column + 0.5) * width - 1.5, -2, title, ha="center", va="bottom", fontsize=8, color="black")
    return _show(ax, picture, (-1.0, 1.0))


def tidy(ax: Axes) -> Axes:
    """The axes without a frame on top and to the right."""
    ax.spines[["top", "right"]].set_visible(False)
    return ax
