"""Fills in missing entries from low-rank groups of similar windows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_truncated.restoration.nonlocal_groups import similar
from pyro_truncated.restoration.windows import Patches

# Chosen on images that are not reported: tests/papers/results/restoration.md.
_SIDE, _STRIDE, _STRIDE_OF_COLOURS, _MEMBERS = 8, 4, 6, 60
_BREGMAN_STEPS, _STRENGTH, _WEIGHT = 8, 4.0, 0.4
# Smaller images have too few windows that could be alike.
_LEAST_SIDE = 32
# Groups whose singular values are found at once.
_GROUPS_PER_BLOCK = 1024


def average_low_rank_groups(image: Tensor, estimate: Tensor, noise: float, channels: int | None = None, stride: int = 1) -> Tensor:
    r"""Averages a restored image with low-rank estimates of its missing entries.

    The estimates come from groups of similar windows.

    The group of a window of side 8 are the 60 near by that are nearest to it in the restored image.
    In each of eight steps, every group becomes the matrix without its small singular values. Those
    are values up to :math:`4 \sigma (\sqrt{K} + \sqrt{D})` with :math:`K` windows of :math:`D`
    entries. Overlapping windows are averaged. The loss at observed entries is added to them before
    the next step (Bregman iterations), so that the missing ones follow. The result counts 0.4 beside
    the estimate: its errors are other ones.

    Args:
        image: the image with missing entries (NaN), without noise. For signals, volumes and images
            with a side below 32 the estimate is returned unchanged.
        estimate: the restored image.
        noise: standard deviation :math:`\sigma` of what cannot be predicted.
        channels: number of channels; ``None`` for an image without.
        stride: above 1 fewer groups: one for every ``4 * stride`` places along each dimension, with channels for every ``6 * stride``, at
            least for every eighth.

    Returns:
        The image. Its observed entries are those of the estimate, and so are channels without
        texture, which deviate by at most four times the noise.

    Reference:
        Zhang, Zhao and Gao, "Group-based sparse representation for image restoration", IEEE Transactions on Image Processing 23, 2014.
    """
    if image.dim() != (2 if channels is None else 3) or min(image.shape[:2]) < _LEAST_SIDE:
        return estimate
    is_seen, found = ~image.isnan(), estimate
    lost = torch.zeros_like(estimate)
    patches = Patches(image.shape[:2], _SIDE, channels=channels)
    groups = _groups(torch.where(is_seen, image, estimate), patches, stride)
    for _ in range(_BREGMAN_STEPS):
        found = _low_rank_mean(torch.where(is_seen, image + lost, found), patches, groups, _STRENGTH * noise)
        lost = lost + torch.where(is_seen, image - found, 0.0)
    return torch.where(is_seen | ~_with_texture(image, noise, channels), estimate, torch.lerp(estimate, found, _WEIGHT))


def _with_texture(image: Tensor, noise: float, channels: int | None) -> Tensor:
    """Returns which channels deviate by more than the threshold, ``(channels,)``.

    For an image without channels it is one truth value.
    """
    seen = image.reshape(-1, channels or 1)
    return ((seen - seen.nanmean(0)).square().nanmean(0) > (_STRENGTH * noise) ** 2).reshape([channels] if channels else [])


def _groups(image: Tensor, patches: Patches, stride: int) -> Tensor:
    """Numbers of the windows of all groups, ``(G, K)``."""
    stride = min((_STRIDE if patches.channels is None else _STRIDE_OF_COLOURS) * stride, _SIDE)
    windows, counts = patches.extract(image), [size - _SIDE + 1 for size in patches.shape]
    centres = Patches(patches.shape, _SIDE, stride).places().to(windows.device)
    return torch.cat([similar(windows, block, counts, _MEMBERS) for block in centres.split(_GROUPS_PER_BLOCK)])


def _low_rank_mean(image: Tensor, patches: Patches, groups: Tensor, noise: float) -> Tensor:
    """Returns the mean of all groups without small singular values."""
    windows = patches.extract(image)
    total, share = torch.zeros_like(windows), windows.new_zeros(len(windows), 1)
    largest = (noise * (math.sqrt(groups.shape[1]) + math.sqrt(windows.shape[1]))) ** 2
    for members in groups.split(_GROUPS_PER_BLOCK):
        group = windows[members]
        squares, directions = torch.linalg.eigh(group @ group.mT)
        kept = directions * (squares > largest).unsqueeze(1)
        total.index_add_(0, members.flatten(), (kept @ (directions.mT @ group)).flatten(0, 1))
        share.index_add_(0, members.flatten(), share.new_ones(members.numel(), 1))
    return patches.assemble(total / share.clamp(min=1.0), share)
