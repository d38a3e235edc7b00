"""Fits of objects at places in plain torch, for any device and any number of colours."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.canvas import Canvas, SceneParameters
from pyro_truncated.ops.words import take
from pyro_truncated.utils.budget import rows_per_block


def scan(images: Tensor, scene: SceneParameters, canvas: Canvas, energy: Tensor, logits: Tensor, used: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.scene_scan.scan_places`; ``energy`` is ``-log p_0``, ``logits`` hold the objects' constants."""
    pixels, variance = canvas.pixels_on(images.device), scene.variance.double()
    out = images.new_empty(len(images), len(scene.features), len(pixels), dtype=torch.float32)
    step = rows_per_block(32 * pixels.numel() * images.shape[-1])
    for start in range(0, len(images), step):
        rows = slice(start, start + step)
        under, behind = images[rows][:, pixels].double(), energy[rows][:, pixels]
        for h, (feature, mask) in enumerate(zip(scene.features.double(), scene.masks.double(), strict=True)):
            ratio = behind + logits[h] - 0.5 * (under - feature).square().sum(-1) / variance
            terms = torch.log1p(-mask) + torch.nn.functional.softplus(ratio)
            out[rows, h] = (terms * used[h]).sum(-1).float()
    return out


def scan_at(
    images: Tensor, scene: SceneParameters, canvas: Canvas, energy: Tensor, logits: Tensor, used: Tensor, objects: Tensor, places: Tensor
) -> Tensor:
    """See :func:`pyro_truncated.ops.scene_scan.scan_at`; the whole scan, of which a few places are taken."""
    return take(scan(images, scene, canvas, energy, logits, used), objects).gather(2, places)
