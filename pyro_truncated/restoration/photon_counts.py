"""Photon counts, whose variance is their mean: Anscombe's transform."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

# The offset of Anscombe's transform, and what is below the transformed zero.
OFFSET = 3 / 8
# Means up to this number are inverted by a table, larger ones by the limit for many photons.
MAX_MEAN_IN_TABLE, TABLE_SIZE = 1000.0, 4001
# Largest relative distance of values from multiples of one number, the gain.
GAIN_RTOL = 1e-3
# Whole numbers of which fewer differ may be multiples of one number by chance.
FEW_LEVELS = 5
OF_CAMERAS = (
    "Of a camera with gain g, offset o and read noise r restore z = 2 * sqrt(max((y - o) / g + 3 / 8 + (r / g)**2, 0)) with noise=1: "
    "then y is o + g * (z**2 / 4 - 1 / 8 - (r / g)**2)"
)


def stabilise(counts: Tensor) -> Tensor:
    r"""Returns Anscombe's transform :math:`2 \sqrt{n + 3/8}`: the noise of Poisson counts becomes one.

    Reference:
        Anscombe, "The transformation of Poisson, binomial and negative-binomial data", Biometrika 35, 1948.
    """
    return 2 * (counts + OFFSET).clamp(min=0.0).sqrt()


def unbiased_inverse(values: Tensor) -> Tensor:
    r"""Returns the exact unbiased inverse of :func:`stabilise`.

    The mean count :math:`\lambda` solves :math:`\mathbb E[2 \sqrt{n + 3/8} \mid n \sim \mathrm{Poisson}(\lambda)] = v`. It is zero for
    values below the transform of zero.

    Reference:
        Mäkitalo and Foi, "Optimal inversion of the Anscombe transformation in low-count Poisson image denoising",
        IEEE Transactions on Image Processing 20, 2011.
    """
    means, expected = _table()
    targets = values.double().cpu().numpy()
    small = torch.from_numpy(np.asarray(np.interp(targets, expected, means))).to(values)
    return torch.where(values < float(expected[-1]), small, values.square() / 4 - 1 / 8)


@functools.cache
def _table() -> tuple[np.ndarray, np.ndarray]:
    """Means, and the expected transforms of counts with these means."""
    means = torch.linspace(0, math.sqrt(MAX_MEAN_IN_TABLE), TABLE_SIZE, dtype=torch.float64).square()
    counts = torch.arange(int(MAX_MEAN_IN_TABLE + 12 * math.sqrt(MAX_MEAN_IN_TABLE)), dtype=torch.float64)
    transforms = stabilise(counts)
    expected = [
        torch.special.xlogy(counts, some.unsqueeze(-1)).sub(some.unsqueeze(-1)).sub(torch.lgamma(counts + 1)).exp() @ transforms
        for some in means.split(256)
    ]
    return means.numpy(), torch.cat(expected).numpy()


def estimate_gain(counts: Tensor) -> float:
    """Returns what counts were multiplied with: the least distance, or one."""
    values = counts[~counts.isnan()].double()
    if float(values.min()) < 0:
        raise ValueError(
            f"noise='poisson' needs photon counts of at least 0; got {float(values.min()):g}: subtract no background. {OF_CAMERAS}"
        )
    return counts_gain(counts) or 1.0


def counts_gain(counts: Tensor) -> float | None:
    """Returns the least distance of values if all are multiples.

    Else it is ``None``. Of other whole numbers, or of few different ones, it is one.
    """
    values = counts[~counts.isnan()].double()
    is_whole = bool((values == values.round()).all())
    levels = torch.cat([values.new_zeros(1), values]).unique()
    if is_whole and len(levels) < FEW_LEVELS:
        return 1.0
    gain = float(levels.diff().min())
    multiples = levels / gain
    if bool(((multiples - multiples.round()).abs() <= GAIN_RTOL).all()):
        return gain
    return 1.0 if is_whole else None
