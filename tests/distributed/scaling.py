"""Weak and strong scaling: measured on one and two processes, beyond them by simulation; ``python -m tests.distributed.scaling``.

Writes a table to standard output and, with a file name, a picture.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pyro
import torch
import torch.distributed as dist
from pyro.infer import SVI

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO, distributed
from pyro_truncated.models import BinarySparseCoding
from tests.distributed.crew import Crew

D = H = S = 64
STEPS = 4
NUMBERS = (1, 2, 8, 64, 512)
# Of the network that is simulated: seconds per message and hop, bytes per second (ten gigabits).
LATENCY, BANDWIDTH = 50e-6, 1.25e9
STRONG, WEAK = 1_000_000, 20_000


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a step of one process costs: CPU seconds, bytes that it contributes to messages, and how many these are."""

    seconds: float
    bytes: int
    messages: int


@contextmanager
def counted() -> Iterator[list[int]]:
    """Counts the bytes of every message."""
    sizes: list[int] = []
    verbs = dist.all_gather, dist.all_reduce

    def all_gather(found: Any, own: torch.Tensor) -> Any:
        sizes.append(own.numel() * own.element_size())
        return verbs[0](found, own)

    def all_reduce(own: torch.Tensor) -> Any:
        sizes.append(own.numel() * own.element_size())
        return verbs[1](own)

    dist.all_gather, dist.all_reduce = all_gather, all_reduce
    try:
        yield sizes
    finally:
        dist.all_gather, dist.all_reduce = verbs


def cost(num_data: int) -> Cost:
    """The cost of a full-batch step of binary sparse coding, for this process."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    y = distributed.shard(torch.randn(num_data, D, generator=torch.Generator().manual_seed(0)))
    model = BinarySparseCoding(D, H).initialize(y)
    search = EvolutionarySearch(parents=8, children=4, generations=1)
    svi = SVI(model, AutoTruncated(model, num_states=S), ClosedForm(model), Truncated_ELBO(search))
    svi.step(y)
    svi.step(y)
    with counted() as sizes:
        start = time.process_time()
        for _ in range(STEPS):
            svi.step(y)
        seconds = (time.process_time() - start) / STEPS
    return Cost(seconds, sum(sizes) // STEPS, len(sizes) // STEPS)


def line_through(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """Seconds per step, and per step and data point."""
    x = torch.tensor(sizes, dtype=torch.float64)
    found = torch.linalg.lstsq(torch.stack([torch.ones_like(x), x], 1), torch.tensor(seconds, dtype=torch.float64)).solution
    return max(0.0, float(found[0])), float(found[1])


def step_time(num_data: int, processes: int, fixed: float, per_datum: float, message: Cost) -> float:
    """Seconds of a step by simulation: the largest shard, then messages along a tree and around a ring."""
    compute = fixed + per_datum * math.ceil(num_data / processes)
    if processes == 1:
        return compute
    hops = math.ceil(math.log2(processes))
    return compute + message.messages * LATENCY * hops + 2 * (processes - 1) / processes * message.bytes / BANDWIDTH


def picture(rows: dict[str, list[float]], path: str) -> None:
    """Speed-up at a fixed number of data, and efficiency at a fixed number per process."""
    strong, weak = rows["strong"], rows["weak"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    left.loglog(NUMBERS, [strong[0] / seconds for seconds in strong], "o-", label="simulated")
    left.loglog(NUMBERS, NUMBERS, ":", color="grey", label="ideal")
    left.set(xlabel="processes", ylabel="speed-up", title=f"strong scaling, N = {STRONG:,}")
    left.legend()
    right.semilogx(NUMBERS, [weak[0] / seconds for seconds in weak], "o-")
    right.axhline(1.0, ls=":", color="grey")
    right.set(xlabel="processes", ylabel="efficiency", ylim=(0, 1.05), title=f"weak scaling, {WEAK:,} data points each")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main(path: str | None) -> None:
    """Measures, simulates, and prints."""
    sizes = [500, 1000, 2000, 4000]
    alone = [cost(size).seconds for size in sizes]
    fixed, per_datum = line_through(sizes, alone)
    print(f"one process: {1e3 * fixed:.2f} ms and {1e6 * per_datum:.2f} us per data point of CPU time per step", alone)
    crew = Crew(2)
    shared = {size: crew.results(2, cost, size) for size in (2000, 4000, 8000)}
    crew.end()
    for size, (first, second) in shared.items():
        share = step_time(size, 2, fixed, per_datum, Cost(0, 0, 0))
        print(
            f"two processes, N={size}: {1e3 * first.seconds:.1f} and {1e3 * second.seconds:.1f} ms; compute alone {1e3 * share:.1f} ms",
            first,
        )
    message = shared[2000][0]
    rows = {
        "strong": [step_time(STRONG, number, fixed, per_datum, message) for number in NUMBERS],
        "weak": [step_time(WEAK * number, number, fixed, per_datum, message) for number in NUMBERS],
    }
    print("| processes | " + " | ".join(map(str, NUMBERS)) + " |")
    for name, seconds in rows.items():
        print(f"| {name}, ms per step | " + " | ".join(f"{1e3 * value:.1f}" for value in seconds) + " |")
    print("| speed-up | " + " | ".join(f"{rows['strong'][0] / value:.1f}" for value in rows["strong"]) + " |")
    print("| efficiency | " + " | ".join(f"{rows['weak'][0] / value:.3f}" for value in rows["weak"]) + " |")
    if path is not None:
        picture(rows, path)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
