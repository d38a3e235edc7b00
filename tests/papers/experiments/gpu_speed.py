"""Seconds of a training step on a GPU, beside the compiled kernels on all cores of the same machine.

    python -m tests.papers.experiments.gpu_speed --output FILE

Data are standard normal numbers (or binary ones, or counts); what is timed hardly depends on them. The free energies of both after
their last step, from the same seed, stand beside the seconds: that of the sixth, or of one before if all take long.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, Truncated_ELBO
from pyro_truncated.models import (
    BinarySparseCoding,
    BinaryVAE,
    GaussianMixture,
    MaximalCauses,
    NoisyOr,
    SpikeSlabSparseCoding,
)

WARM_UP, STEPS, LONG = 3, 3, 20.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step.

    Attributes:
        make: makes the model.
        data: draws the data.
        num_states: states per data point.
        learning_rate: of Adam; without, M-steps are in closed form.
        batch: data points of a minibatch; without, all.
    """

    make: Callable[[], Any]
    data: Callable[[torch.Generator], Tensor]
    num_states: int
    learning_rate: float | None = None
    batch: int | None = None


def normal(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(shape, generator=generator)


def binary(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: (torch.rand(shape, generator=generator) < 0.2).float()


def counts(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.poisson(4 * torch.rand(shape, generator=generator), generator=generator)


CASES: dict[str, Case] = {
    "BinarySparseCoding, 64 latents, 64 dimensions, 100 000 points": Case(lambda: BinarySparseCoding(64, 64), normal(100_000, 64), 16),
    "BinarySparseCoding, 300 latents, 144 dimensions, 100 000 points": Case(lambda: BinarySparseCoding(144, 300), normal(100_000, 144), 24),
    "BinarySparseCoding, 1000 latents, 114 dimensions, minibatches of 5000 of 1 000 000 points": Case(
        lambda: BinarySparseCoding(114, 1000), normal(1_000_000, 114), 24, batch=5000
    ),
    "BinarySparseCoding, 64 latents, 64 dimensions, 1000 points": Case(lambda: BinarySparseCoding(64, 64), normal(1000, 64), 16),
    "SpikeSlabSparseCoding, 64 latents, 64 dimensions, 50 000 points": Case(lambda: SpikeSlabSparseCoding(64, 64), normal(50_000, 64), 16),
    "NoisyOr, 100 latents, 100 dimensions, 50 000 points": Case(lambda: NoisyOr(100, 100), binary(50_000, 100), 16),
    "MaximalCauses, 100 latents, 100 dimensions, 50 000 points": Case(lambda: MaximalCauses(100, 100), counts(50_000, 100), 16),
    "GaussianMixture, full, 200 components, 32 dimensions, 200 000 points": Case(lambda: GaussianMixture(32, 200), normal(200_000, 32), 8),
    "BinaryVAE, 64 latents, two layers of 512, 256 dimensions, 5000 points": Case(
        lambda: BinaryVAE(256, 64, hidden=(512, 512)), normal(5000, 256), 16, learning_rate=1e-3
    ),
}  # fmt: skip


def optimizer_of(case: Case, model: Any) -> Any:
    """Adam, or M-steps in closed form."""
    if case.learning_rate is not None:
        return Adam({"lr": case.learning_rate})
    return ClosedForm(model) if case.batch is None else ClosedForm(model, minibatch="online")


def timed(case: Case, device: str) -> dict[str, float]:
    """The shortest of some steps in seconds, and the free energy per data point after them."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    y = case.data(torch.Generator().manual_seed(0)).to(device)
    model = case.make().to(device)
    model.initialize(y)
    guide = AutoTruncated(model, case.num_states)
    svi = SVI(model, guide, optimizer_of(case, model), Truncated_ELBO())
    seconds, loss = [], 0.0
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        loss = svi.step(y) if case.batch is None else svi.step(y, case.batch)
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        # The first step compiles.
        if sum(seconds[1:]) > LONG:
            break
    peak = torch.cuda.max_memory_allocated() / 2**30 if device != "cpu" else math.nan
    return {"seconds": min(seconds[1:]), "steps": len(seconds), "free_energy": -loss / len(y), "gibibytes": peak}


def occupied(left: float) -> Tensor:
    """Memory of the device that nobody else can have, but for so many GiB."""
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(max(0, free - int(left * 2**30)), dtype=torch.uint8, device="cuda")


def told(device: str, row: dict[str, float]) -> str:
    """A result in words."""
    return f"{device} {row['seconds']:.4f} s ({row['free_energy']:.4f}, {row['gibibytes']:.1f} GiB)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="*", default=["cpu", "cuda"])
    parser.add_argument("--cases", nargs="*", default=list(CASES), help="beginnings of their names")
    parser.add_argument("--free", type=float, help="GiB of the device's memory that are left free, as on a smaller one")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    os.environ["PYRO_TRUNCATED_BACKGROUND"] = "0"
    taken = occupied(args.free) if args.free else None
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    print(f"{machine}; {os.cpu_count()} cores, {torch.get_num_threads()} threads; torch {torch.__version__}", flush=True)
    for name, case in CASES.items():
        if not name.startswith(tuple(args.cases)):
            continue
        row: dict[str, Any] = {"case": name, "machine": machine, **{device: timed(case, device) for device in args.devices}}
        print(name, *(told(device, row[device]) for device in args.devices), flush=True)
        if args.output:
            with args.output.open("a") as file:
                print(json.dumps(row), file=file)
    del taken


if __name__ == "__main__":
    main()
