"""Restoration by networks: models that are trained by gradients, on patches of which pixels are missing."""

from __future__ import annotations

import math

import pyro
import torch

from pyro_truncated.models import BinaryVAE
from pyro_truncated.restoration import inpaint


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_network_fills_in_what_is_missing():
    pyro.set_rng_seed(0)
    image, missing = torch.rand(12, 12, generator=generator(0)).cumsum(0), torch.rand(12, 12, generator=generator(1)) < 0.3
    restored = inpaint(image.where(~missing, math.nan), model=BinaryVAE(16, 4, hidden=(4,)), side=4, passes=1, num_states=4, progress=False)
    assert bool(restored.image.isfinite().all())
    assert float(restored.image[missing].min()) > -1.0
    assert float(restored.image[missing].max()) < float(image.max()) + 1.0
