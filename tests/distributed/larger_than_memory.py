"""Training on ten million data points that stay on the disk: ``python -m tests.distributed.larger_than_memory FOLDER N [STEPS]``.

Prints, ten times in a run, the CPU time of a step since the last time and what is resident now and at most, pages of files included. An
epoch of ten million data points are 9766 steps.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from pathlib import Path

import numpy as np
import pyro
import torch
from pyro.infer import SVI

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO, distributed
from pyro_truncated.models import BinarySparseCoding

D = H = S = 64
SIZE, STEPS, WARM_UP = 1024, 1000, 12


def make_data(path: Path, number: int) -> None:
    """Random sums of random causes in a file, a part at a time."""
    generator = torch.Generator().manual_seed(0)
    causes = torch.randn(H, D, generator=generator)
    y = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(number, D))
    for start in range(0, number, 100_000):
        size = min(100_000, number - start)
        on = (torch.rand(size, H, generator=generator) < 2 / H).float()
        y[start : start + size] = on @ causes + 0.3 * torch.randn(size, D, generator=generator)


def data(folder: Path, number: int) -> Path:
    """The file, which another process has made: what that took of memory is not counted."""
    path = folder / f"y-{number}.npy"
    if not path.exists():
        maker = multiprocessing.get_context("spawn").Process(target=make_data, args=(path, number))
        maker.start()
        maker.join()
    return path


def memory() -> float:
    """The most memory so far, in gigabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def resident() -> str:
    """What is resident now: the process's own memory and pages of files."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    own, files = (int(lines[name].split()[0]) / 2**20 for name in ("RssAnon", "RssFile"))
    return f"{own:.2f} GB of its own and {files:.2f} GB of files"


def main(folder: Path, number: int, steps: int = STEPS) -> None:
    """Initialises and trains."""
    pyro.set_rng_seed(0)
    y = distributed.shard(np.load(data(folder, number), mmap_mode="r"))
    start, before = time.process_time(), memory()
    model = BinarySparseCoding(D, H).initialize(y)
    print(
        f"N={number}: initialize {time.process_time() - start:.1f} s of CPU time, memory {before:.2f} before and {memory():.2f} GB after it"
    )
    guide = AutoTruncated(model, num_states=S, store=folder / "populations")
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(EvolutionarySearch(parents=8, children=4, generations=1)))
    batches, free_energies = distributed.Batches(y, SIZE), []
    parts = {steps * part // 10 for part in range(1, 11)}
    begun, start = 0, time.process_time()
    for step in range(-WARM_UP, steps):
        if step == 0:
            start = time.process_time()
        with batches.at(step + WARM_UP):
            free_energies.append(-svi.step(y) / number)
        done = step + 1
        if done > 0 and done in parts:
            seconds = (time.process_time() - start) / (done - begun)
            told = f"free energy per data point from {free_energies[0]:.2f} to {np.mean(free_energies[-50:]):.2f}"
            print(f"N={number}: {done} steps, the last {done - begun} of {1e3 * seconds:.1f} ms of CPU time each, {told}", flush=True)
            print(f"N={number}: {resident()}, at most {memory():.2f} GB", flush=True)
            begun, start = done, time.process_time()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
