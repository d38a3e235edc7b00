"""Trains for as long as it is told and watches what should stand still: ``python -m tests.faults.soak --minutes 90``.

One model after the other is trained, on all data or on minibatches, saved after every step, thrown away and taken up again from the
checkpoint, converted to ArviZ and checked. Memory must not grow, the free energy of closed-form runs on all data must never fall, and no
file may be left over. The exit status says whether that was so.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyro
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO, to_arviz
from pyro_truncated.diagnostics import check_truncation
from pyro_truncated.models import (
    BinarySparseCoding,
    DiscreteSparseCoding,
    GaussianMixture,
    NoisyOr,
    PoissonMixture,
    SpikeSlabSparseCoding,
)
from pyro_truncated.training import fit

NUM_DATA, NUM_OBSERVED, STEPS = 300, 16, 12
# A sum over float32 numbers may differ by this much of its size from one step to the next.
ROUNDING = 1e-6
# Memory in MiB that may come on top after the first rounds: numba, torch and Python keep caches of a bounded size.
MEMORY = 30.0


@dataclasses.dataclass
class Found:
    """What was seen.

    Attributes:
        cycles: number of runs.
        steps: number of steps that free energies were compared over.
        falls: models and steps at which the free energy fell, and by how much.
        left: files that were left over.
        memory: resident memory in MiB after each round over all models, with the minute it was measured in.
    """

    cycles: int = 0
    steps: int = 0
    falls: list[str] = dataclasses.field(default_factory=list)
    left: list[str] = dataclasses.field(default_factory=list)
    memory: list[tuple[float, float]] = dataclasses.field(default_factory=list)

    def growth(self) -> float:
        """How much more memory the last third of the rounds has taken, in the median, than the second."""
        values = np.array([size for _, size in self.memory])
        third = len(values) // 3
        return float(np.median(values[-third:]) - np.median(values[third : 2 * third])) if third else 0.0


def normal_data(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    patterns = 5 * torch.rand(6, NUM_OBSERVED, generator=generator)
    active = torch.rand(NUM_DATA, 6, generator=generator) < 0.3
    return active.float() @ patterns + torch.randn(NUM_DATA, NUM_OBSERVED, generator=generator)


def binary_data(seed: int) -> Tensor:
    return (normal_data(seed) > 3.0).float()


def count_data(seed: int) -> Tensor:
    return normal_data(seed).clamp(min=0).round()


MODELS: dict[str, tuple[Callable[[], object], Callable[[int], Tensor], int]] = {
    "BinarySparseCoding": (lambda: BinarySparseCoding(NUM_OBSERVED, 10), normal_data, 20),
    "NoisyOr": (lambda: NoisyOr(NUM_OBSERVED, 10), binary_data, 20),
    "SpikeSlabSparseCoding": (lambda: SpikeSlabSparseCoding(NUM_OBSERVED, 10), normal_data, 20),
    "DiscreteSparseCoding": (lambda: DiscreteSparseCoding(NUM_OBSERVED, 10), normal_data, 20),
    "GaussianMixture": (lambda: GaussianMixture(NUM_OBSERVED, 5), normal_data, 5),
    "PoissonMixture": (lambda: PoissonMixture(NUM_OBSERVED, 5), count_data, 5),
}
WAYS = ("all data", "minibatches", "gradients")


def make(name: str, way: str, seed: int) -> tuple[SVI, Tensor, int | None]:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    build, data, num_states = MODELS[name]
    y = data(seed)
    model = build().initialize(y)
    optimizer = Adam({"lr": 0.01}) if way == "gradients" else ClosedForm(model)
    svi = SVI(model, AutoTruncated(model, num_states=num_states), optimizer, Truncated_ELBO(EvolutionarySearch(parents=4, children=3)))
    return svi, y, None if way == "all data" else 50


def cycle(name: str, way: str, seed: int, folder: Path, found: Found) -> None:
    """A run in two halves, what is made of it, and what it should have left alone."""
    path = folder / "run.pt"
    for steps in (STEPS // 2, STEPS):
        svi, y, batch_size = make(name, way, seed)
        training = fit(svi, y, batch_size, steps=steps, checkpoint=path, checkpoint_seconds=0.0, progress=False)
    _check_growth(f"{name} on {way}, seed {seed}", training.record["free_energy"] if way == "all data" else [], found)
    to_arviz(svi.model, svi.guide, y, num_samples=20, num_predictive=10, training=training.record)
    check_truncation(svi.guide, y, search=EvolutionarySearch(parents=4, children=3), steps=2, num_samples=25, warn=False)
    found.left += [f"{name} on {way}: {file}" for file in os.listdir(folder) if file != "run.pt"]
    path.unlink()
    found.cycles += 1


def _check_growth(name: str, values: list[float], found: Found) -> None:
    for step, (before, after) in enumerate(itertools.pairwise(values), 1):
        found.steps += 1
        if not after >= before - ROUNDING * abs(before):
            found.falls.append(f"{name}, step {step}: {before} to {after}")


def resident_memory() -> float:
    """MiB that this process has in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def soak(minutes: float, folder: Path) -> Found:
    """Trains until the time is up."""
    found, start = Found(), time.monotonic()
    for seed in itertools.count():
        for name, way in itertools.product(MODELS, WAYS):
            if time.monotonic() - start > 60 * minutes:
                return found
            cycle(name, way, seed, folder, found)
        found.memory.append(((time.monotonic() - start) / 60, resident_memory()))
        print(f"minute {found.memory[-1][0]:.1f}: {found.cycles} runs, {found.memory[-1][1]:.0f} MiB, {len(found.falls)} falls", flush=True)
    raise AssertionError("unreachable")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=90.0)
    minutes = parser.parse_args().minutes
    # What the data or so short a training call for is not the matter here.
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        found = soak(minutes, Path(folder))
    print(f"{found.cycles} runs, {found.steps} steps compared, memory grew by {found.growth():.1f} MiB from the second third to the last")
    for name, items in (("falls of the free energy", found.falls), ("files left over", found.left)):
        print(f"{len(items)} {name}", *items[:20], sep="\n  ")
    return int(bool(found.falls or found.left) or found.growth() > MEMORY)


if __name__ == "__main__":
    sys.exit(main())
