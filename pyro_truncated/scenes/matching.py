"""How alike true and learned objects are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_truncated.scenes.data import Objects


class Match(NamedTuple):
    """How alike true and learned objects are.

    Example:
        >>> objects = generated_objects(2, 3)
        >>> match = match_objects(objects.features, objects.masks, objects)
        >>> match.recovered()
        tensor([True, True])

    Attributes:
        similarity: cosine of true objects and learned features times masks, at the shift where it is largest, ``(K, H)``.
        shift: that shift, rows and columns, ``(K, H, 2)`` int64. An object at a position is the learned one at the
            position plus the shift.
    """

    similarity: Tensor
    shift: Tensor

    def recovered(self, threshold: float = 0.9) -> Tensor:
        """Which true objects are recovered, ``(K,)`` bool.

        An object is recovered if it is so similar to a learned one that in turn resembles no other more.
        """
        similarity, learned = self.similarity.max(1)
        owner = self.similarity.argmax(0)
        return (similarity >= threshold) & (owner[learned] == torch.arange(len(learned), device=learned.device))


@torch.no_grad()
def match_objects(features: Tensor, masks: Tensor, objects: Objects) -> Match:
    """Compares learned objects with true ones at all shifts.

    Features are ``(H, t, u, F)``, mask probabilities ``(H, t, u)``.

    Example:
        >>> objects = generated_objects(2, 3)
        >>> match_objects(objects.features, objects.masks, objects).similarity.shape
        torch.Size([2, 2])
    """
    learned = (features * masks.unsqueeze(-1)).double().movedim(-1, 1)
    true = objects.features.double().movedim(-1, 1)
    height, width = learned.shape[-2:]
    products = torch.nn.functional.conv2d(true, learned, padding=(height - 1, width - 1))
    norms = true.flatten(1).norm(dim=1).unsqueeze(1) * learned.flatten(1).norm(dim=1)
    best = products.flatten(2).max(-1)
    size = products.shape[-1]
    shift = torch.stack([best.indices // size - (height - 1), best.indices % size - (width - 1)], -1)
    return Match(best.values / norms.clamp(min=1e-12), shift)
