"""``learn(model, y)`` with the library's models, on data of their own families: ``python -m tests.papers.experiments.every_model``.

Twelve bars on 6x6 pixels, two of them in an image on average, and 600 images; of mixtures ten components. Found is what is matched by a
cosine of at least 0.9, of mixtures what a learned component is near to.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_truncated import learn
from pyro_truncated.datasets import bar_components, matched_bars
from pyro_truncated.models import (
    BinarySparseCoding,
    BinaryVAE,
    DiscreteSparseCoding,
    ExponentialFamilyMaximalCauses,
    GatedDecoder,
    GaussianMixture,
    MaximalCauses,
    MaxSpikeSlabSparseCoding,
    NoisyOr,
    PoissonMixture,
    SpikeSlabSparseCoding,
)
from pyro_truncated.multistart import DisagreeingStartsWarning

NUM_DATA, SIZE, NUM_BARS, NUM_COMPONENTS = 600, 6, 12, 10
NUM_LABELLED, NUM_MOVING = 60, 150
Made = tuple[Any, Tensor, Tensor]


class Images:
    """Bars that are on, and noise."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.bars = bar_components(SIZE)
        self.on = (torch.rand(NUM_DATA, NUM_BARS, generator=self.generator) < 2 / NUM_BARS).float()

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self.generator)

    def summed(self, coefficients: Tensor, noise: float) -> Tensor:
        """Bars of length ten that add up."""
        return coefficients @ (10 * self.bars.mT) + noise * self.normal(NUM_DATA, SIZE**2)

    def largest(self, coefficients: Tensor) -> Tensor:
        """The largest of the bars that cover a pixel."""
        return (coefficients.unsqueeze(-1) * self.bars.mT).amax(1)


def binary(images: Images) -> Made:
    return BinarySparseCoding(36, 12), images.summed(images.on, 2.0), images.bars


def ternary(images: Images) -> Made:
    sign = 2.0 * (torch.rand(images.on.shape, generator=images.generator) < 0.5) - 1.0
    return DiscreteSparseCoding(36, 12), images.summed(images.on * sign, 2.0), images.bars


def spike_slab(images: Images, **arguments: Any) -> Made:
    slabs = 1 + 0.5 * images.normal(NUM_DATA, NUM_BARS)
    return SpikeSlabSparseCoding(36, 12, **arguments), images.summed(images.on * slabs, 1.0), images.bars


def spike_slab_full(images: Images) -> Made:
    return spike_slab(images, covariance="full")


def max_spike_slab(images: Images) -> Made:
    slabs = 10 + 2 * images.normal(NUM_DATA, NUM_BARS)
    return MaxSpikeSlabSparseCoding(36, 12), images.largest(images.on * slabs) + images.normal(NUM_DATA, SIZE**2), images.bars


def noisy_or(images: Images) -> Made:
    off = (1 - 0.8 * images.on.unsqueeze(-1) * images.bars.mT).prod(1)
    return NoisyOr(36, 12), torch.bernoulli(1 - off, generator=images.generator), images.bars


def maximal(images: Images) -> Made:
    return MaximalCauses(36, 12), torch.poisson((10 * images.largest(images.on)).clamp(min=0.1), generator=images.generator), images.bars


def family(name: str) -> Callable[[Images], Made]:
    """Maxima as means of another family."""

    def made(images: Images) -> Made:
        largest, generator = images.largest(images.on), images.generator
        if name == "bernoulli":
            y = torch.bernoulli(0.05 + 0.85 * largest, generator=generator)
        elif name == "poisson":
            y = torch.poisson(0.3 + 8 * largest, generator=generator)
        else:
            shape = 1.0 if name == "exponential" else 2.0
            y = torch._standard_gamma(torch.full(largest.shape, shape), generator=generator) * (0.3 + 10 * largest) / shape
        return ExponentialFamilyMaximalCauses(36, 12, family=name), y, images.bars

    return made


def gaussian_mixture(images: Images) -> Made:
    means, number = 3 * images.normal(NUM_COMPONENTS, 8), torch.randint(NUM_COMPONENTS, (NUM_DATA,), generator=images.generator)
    return GaussianMixture(8, NUM_COMPONENTS), means[number] + images.normal(NUM_DATA, 8), means


def poisson_mixture(images: Images) -> Made:
    rates = 20 * torch.rand(NUM_COMPONENTS, 36, generator=images.generator)
    number = torch.randint(NUM_COMPONENTS, (NUM_DATA,), generator=images.generator)
    return PoissonMixture(36, NUM_COMPONENTS), torch.poisson(rates[number], generator=images.generator), rates


def saturated(images: Images) -> Made:
    """Bars that are no brighter where they cross: a network with rectifiers can say so, a linear model cannot."""
    loc = (images.on @ images.bars.mT / images.bars.max()).clamp(max=1.0)
    return BinaryVAE(36, 12), 10 * loc + 2 * images.normal(NUM_DATA, SIZE**2), images.bars


def moving(images: Images) -> Made:
    """Four bumps that are there or not, each in a row of its own at a place of its own; sixty signals of 210 are labelled."""
    switches = (torch.rand(NUM_LABELLED + NUM_MOVING, 4, generator=images.generator) < 0.4).float()
    poses = images.normal(len(switches), 4, 1)
    rows = switches.unsqueeze(-1) * (-(torch.linspace(-2.5, 2.5, 12) - poses).square() / 0.5).exp()
    x = rows.flatten(-2) + 0.1 * images.normal(len(switches), 48)
    known = slice(0, NUM_LABELLED)
    return GatedDecoder(x[known], switches[known], poses[known]), x[NUM_LABELLED:], switches[NUM_LABELLED:]


MODELS: dict[str, Callable[[Images], Made]] = {
    "BinarySparseCoding": binary,
    "DiscreteSparseCoding": ternary,
    "SpikeSlabSparseCoding": spike_slab,
    "SpikeSlabSparseCoding, full": spike_slab_full,
    "MaxSpikeSlabSparseCoding": max_spike_slab,
    "NoisyOr": noisy_or,
    "MaximalCauses": maximal,
    **{f"ExponentialFamilyMaximalCauses, {name}": family(name) for name in ("poisson", "bernoulli", "exponential", "gamma")},
    "BinaryVAE": saturated,
    "GatedDecoder": moving,
    "GaussianMixture": gaussian_mixture,
    "PoissonMixture": poisson_mixture,
}


def number_found(model: Any, truth: Tensor, guide: Any = None) -> int:
    """Components that are recovered; the signs of ternary elements are not determined. Of moving parts, signals with all of them right."""
    if isinstance(model, GatedDecoder):
        return int((guide.marginals()["b"].round() == truth).all(1).sum())
    if isinstance(model, (GaussianMixture, PoissonMixture)):
        learned = model.loc if isinstance(model, GaussianMixture) else model.rate
        near = torch.cdist(truth, learned.detach()).min(0)
        return len(set(near.indices[near.values < 0.3 * truth.std() * truth.shape[1] ** 0.5].tolist()))
    if isinstance(model, BinaryVAE):
        with torch.no_grad():
            weight = (model.mean(torch.eye(NUM_BARS)) - model.mean(torch.zeros(1, NUM_BARS))).mT
        return matched_bars(weight, truth)
    weight = model.weight.detach()
    return matched_bars(weight * weight.sum(0).sign() if isinstance(model, DiscreteSparseCoding) else weight, truth)


def run(name: str, seed: int) -> str:
    """One call of ``learn``."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    model, y, truth = MODELS[name](Images(seed))
    start = time.process_time()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", DisagreeingStartsWarning)
        guide = learn(model, y, progress=False)
    seconds, size = time.process_time() - start, NUM_COMPONENTS if "Mixture" in name else NUM_MOVING if name == "GatedDecoder" else NUM_BARS
    said = "warned" if told else "silent"
    return f"{name}, seed {seed}: {number_found(model, truth, guide)} of {size}, {len(guide.starts)} starts, {said}, {seconds:.0f} CPU s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[511, 512, 513])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.models:
        for seed in args.seeds:
            print(run(name, seed), flush=True)


if __name__ == "__main__":
    main()
