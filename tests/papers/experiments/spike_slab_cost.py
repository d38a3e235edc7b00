"""What the spike-and-slab GP-LVM costs: one bound and gradient, minibatches against all data at once, sixty thousand images."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_truncated import datasets, ops
from pyro_truncated.gplvm import SpikeSlabGPLVM, explicit_copy, fit, fit_minibatches, initialize, natural_step

# Sizes N, M, Q.
SIZES = ((200, 50, 10), (500, 50, 10), (1000, 50, 10), (2000, 50, 10), (1000, 25, 10), (1000, 100, 10), (1000, 50, 5), (1000, 50, 20))
# GPy 1.15 at M=50, Q=10, RBF, on another machine of the same kind: CPU seconds and peak memory in GB.
REFERENCE = {200: (0.57, 0.57), 500: (1.30, 1.2), 1000: (2.49, 2.3), 2000: (4.94, 4.4)}


def make(num_data: int, num_inducing: int = 50, num_latents: int = 10, num_outputs: int = 12) -> tuple[SpikeSlabGPLVM, Tensor]:
    """A model with uncertain switches and RBF kernel, and random data."""
    torch.manual_seed(0)
    y = torch.randn(num_data, num_outputs, dtype=torch.float64)
    model = SpikeSlabGPLVM(num_data, num_outputs, num_latents, num_inducing=num_inducing)
    initialize(model, y)
    with torch.no_grad():
        model.logits = torch.randn_like(model.logits)
    return model, y


def cpu_seconds(model: SpikeSlabGPLVM, y: Tensor, repeats: int = 3) -> float:
    """Least CPU time of a bound and its gradient; the first one does not count."""
    times = []
    for _ in range(repeats + 1):
        start = time.process_time()
        model.bound(y).backward()
        times.append(time.process_time() - start)
    return min(times[1:])


def peak() -> float:
    """Peak resident memory of this process in GB (on Linux; ``getrusage`` would count that of the process that has started this one)."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 2**20


def peak_gigabytes(num_data: int, num_inducing: int = 50, num_latents: int = 10) -> tuple[float, float]:
    """Peak resident memory of a new process that makes one bound and gradient, and how much of it came after the imports."""
    command = (
        "import torch; from tests.papers.experiments.spike_slab_cost import *; torch.set_num_threads(1); before = peak(); "
        f"model, y = make({num_data}, {num_inducing}, {num_latents}); model.bound(y).backward(); print(before, peak())"
    )
    found = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout.split()
    return float(found[1]), float(found[1]) - float(found[0])


def run_bound(num_data: int, num_inducing: int, num_latents: int) -> dict[str, Any]:
    """CPU seconds and memory of one bound and gradient: switches uncertain, switches on, and the same in plain torch."""
    torch.set_num_threads(1)
    model, y = make(num_data, num_inducing, num_latents)
    uncertain = cpu_seconds(model, y)
    with model.fix_switches(1.0):
        on = cpu_seconds(model, y)
    with ops.use_backend("vectorised"):
        plain = cpu_seconds(model, y, 1)
    total, own = peak_gigabytes(num_data, num_inducing, num_latents)
    return {
        "experiment": "cost", "size": [num_data, num_inducing, num_latents], "seconds": uncertain, "seconds_on": on, "seconds_plain": plain,
        "memory": total, "memory_own": own,
    }  # fmt: skip


def curved_data(num_data: int = 1000) -> Tensor:
    """Twelve outputs that are quadratic in two latents, with noise of standard deviation 0.3."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, 2, generator=generator, dtype=torch.float64)
    clean = torch.cat([x, x.square(), x.prod(1, keepdim=True)], 1) @ torch.randn(5, 12, generator=generator, dtype=torch.float64)
    return clean + 0.3 * torch.randn(clean.shape, generator=generator, dtype=torch.float64)


def run_minibatches(most: int = 12) -> dict[str, Any]:
    """CPU seconds until minibatches are within a hundredth of the bound that all data at once reach from the same start."""
    torch.set_num_threads(1)
    y = curved_data()
    full = SpikeSlabGPLVM(1000, 12, 5, num_inducing=30)
    torch.manual_seed(0)
    start = time.process_time()
    bound = fit(full, y, warm_up=60, steps=60, rounds=2, generator=torch.Generator().manual_seed(0)).bound
    seconds = time.process_time() - start
    model = SpikeSlabGPLVM(1000, 12, 5, num_inducing=30)
    initialize(model, y, generator=torch.Generator().manual_seed(0))
    first = float(model.bound(y).detach())
    explicit = explicit_copy(model, y)
    history, spent = [], 0.0
    for part in range(most):
        start = time.process_time()
        fit_minibatches(explicit, y, 100, batch_size=200, learning_rate=0.05, rate=1.0, switches_from=0.0 if part else 0.3)
        natural_step(explicit, y)
        spent += time.process_time() - start
        reached = float(explicit.bound(y).detach())
        history.append([100 * (part + 1), spent, reached])
        if reached >= bound - 0.01 * abs(bound):
            break
    return {"experiment": "minibatches", "first": first, "bound": bound, "seconds": seconds, "history": history}


def run_many(epochs: int = 2, batch_size: int = 500) -> dict[str, Any]:
    """All training images of MNIST: CPU seconds per epoch, and what the epochs do."""
    torch.set_num_threads(1)
    images = torch.from_numpy(datasets.load("mnist_train")["X"]).flatten(1).float() / 255
    torch.manual_seed(0)
    before, start = peak(), time.process_time()
    model = SpikeSlabGPLVM(*images.shape, 10, num_inducing=50, collapsed=False)
    initialize(model, images)
    natural_step(model, images)
    history = [[time.process_time() - start, float(model.bound(images).detach()) / len(images)]]
    for epoch in range(epochs):
        start = time.process_time()
        fit_minibatches(model, images, -(-len(images) // batch_size), batch_size=batch_size, switches_from=0.0 if epoch else 0.5)
        seconds = time.process_time() - start
        natural_step(model, images)
        history.append([seconds, float(model.bound(images).detach()) / len(images)])
    return {"experiment": "many", "num_data": len(images), "batch_size": batch_size, "history": history, "memory": peak() - before}
