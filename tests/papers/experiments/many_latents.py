"""``learn(model, y)`` with a hundred latents and more, at its defaults: ``python -m tests.papers.experiments.many_latents``.

Patches of 16x16 pixels are sums of five localised waves (Gabor functions of norm ten) on average, with noise of deviation one; of
spike-and-slab models each with a normal coefficient. Found is a wave that a learned element matches by a cosine of at least 0.9.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.nn.functional import normalize

from pyro_truncated import learn
from pyro_truncated.models import BinarySparseCoding, SpikeSlabSparseCoding
from pyro_truncated.multistart import DisagreeingStartsWarning

SIZE, MEAN_ACTIVE, NORM, SLAB_SCALE = 16, 5.0, 10.0, 1.05
MODELS: dict[str, Any] = {"binary": BinarySparseCoding, "spike-and-slab": SpikeSlabSparseCoding}


def waves(number: int, generator: torch.Generator) -> Tensor:
    """Gabor functions of random place, direction, width, wavelength and phase, ``(number, pixels)``."""
    column, row, direction, width, frequency, phase = torch.rand(6, number, 1, 1, generator=generator).unbind()
    angle, width = math.pi * direction, 1 + 1.5 * width
    pixels = torch.arange(float(SIZE))
    x, y = pixels - SIZE * column, pixels.unsqueeze(-1) - SIZE * row
    across, along = x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()
    envelope = (-(across.square() + (along / 1.5).square()) / (2 * width.square())).exp()
    return normalize((envelope * (2 * math.pi * ((0.1 + 0.2 * frequency) * across + phase)).cos()).flatten(1), dim=1)


def run(kind: str, number: int, num_data: int, seed: int) -> str:
    """What was found, in words."""
    generator = torch.Generator().manual_seed(seed)
    truth = waves(number, generator)
    coefficients = (torch.rand(num_data, number, generator=generator) < MEAN_ACTIVE / number).float()
    if kind == "spike-and-slab":
        coefficients = SLAB_SCALE * coefficients * torch.randn(coefficients.shape, generator=generator)
    y = NORM * coefficients @ truth + torch.randn(num_data, SIZE**2, generator=generator)
    pyro.set_rng_seed(seed)
    model = MODELS[kind](SIZE**2, number)
    start = time.process_time()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", DisagreeingStartsWarning)
        guide = learn(model, y, progress=False)
    seconds = time.process_time() - start
    matches = (truth @ normalize(model.weight.detach(), dim=0)).abs()
    found = len(set(matches.argmax(1)[matches.amax(1) >= 0.9].tolist()))
    said = "warned" if told else "silent"
    return f"{kind}, {num_data} patches, seed {seed}: {found} of {number}, {len(guide.starts)} starts, {said}, {seconds:.0f} CPU s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--latents", type=int, default=100)
    parser.add_argument("--data", type=int, default=10_000)
    parser.add_argument("--seeds", nargs="*", type=int, default=[2, 3])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for kind in args.models:
        for seed in args.seeds:
            print(run(kind, args.latents, args.data, seed), flush=True)


if __name__ == "__main__":
    main()
