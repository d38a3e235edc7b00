"""Cost of the spike-and-slab GP-LVM's bound and gradient, beside the same in plain torch; and what minibatches need to catch up.

make bench
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import pytest
import torch

from pyro_truncated.gp import mixture_products_dense
from pyro_truncated.gplvm import SpikeSlabGPLVM, explicit_copy, fit, fit_minibatches, initialize, natural_step

# GPy 1.15 at M=50, Q=10, RBF, on another machine of the same kind: CPU seconds and peak memory in GB.
REFERENCE = {200: (0.57, 0.57), 500: (1.30, 1.2), 1000: (2.49, 2.3), 2000: (4.94, 4.4)}


def make(num_data: int, num_inducing: int = 50, num_latents: int = 10, num_outputs: int = 12) -> tuple[SpikeSlabGPLVM, torch.Tensor]:
    torch.manual_seed(0)
    y = torch.randn(num_data, num_outputs, dtype=torch.float64)
    model = SpikeSlabGPLVM(num_data, num_outputs, num_latents, num_inducing=num_inducing)
    initialize(model, y)
    with torch.no_grad():
        model.logits = torch.randn_like(model.logits)
    return model, y


def cpu_seconds(model: SpikeSlabGPLVM, y: torch.Tensor, repeats: int = 3) -> float:
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.process_time()
        model.bound(y).backward()
        best = min(best, time.process_time() - start)
    return best


def peak_gigabytes(num_data: int) -> tuple[float, float]:
    """Peak resident memory of a new process that makes one bound and gradient, and how much of it came after the imports."""
    command = (
        "import torch; from tests.benchmarks.test_psi_speed import *; torch.set_num_threads(1); "
        f"before = peak(); model, y = make({num_data}); model.bound(y).backward(); print(before, peak())"
    )
    found = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout.split()
    return float(found[1]), float(found[1]) - float(found[0])


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@pytest.mark.benchmark
def test_bound_and_gradient(monkeypatch):
    torch.set_num_threads(1)
    print("\n   N    M   Q  switches   CPU s   plain torch   ratio   reference")
    for num_data, num_inducing, num_latents in (
        (200, 50, 10),
        (1000, 25, 10),
        (1000, 50, 5),
        (1000, 50, 10),
        (2000, 50, 10),
        (1000, 100, 10),
    ):
        model, y = make(num_data, num_inducing, num_latents)
        for held in (None, 1.0):
            with model.holding(model.probability.detach() if held is None else held):
                seconds = cpu_seconds(model, y)
                with monkeypatch.context() as patch:
                    patch.setattr("pyro_truncated.gp.mixture_products._kernels", lambda tensor: mixture_products_dense)
                    plain = cpu_seconds(model, y, 1)
            reference = REFERENCE.get(num_data, ("", ""))[0] if (num_inducing, num_latents) == (50, 10) else ""
            kind = "uncertain" if held is None else "on"
            size = f"{num_data:5} {num_inducing:4} {num_latents:3}  {kind:9}"
            print(f"{size} {seconds:7.3f} {plain:10.3f} {plain / seconds:10.1f}   {reference}")
    total, own = peak_gigabytes(1000)
    print(f"peak memory at N=1000, M=50, Q=10: {total:.2f} GB, of which {own:.2f} GB came after the imports (reference 2.3 GB)")
    assert own < 0.3


@pytest.mark.benchmark
def test_minibatches_reach_the_collapsed_bound():
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 2, generator=generator, dtype=torch.float64)
    clean = torch.cat([x, x.square(), x.prod(1, keepdim=True)], 1) @ torch.randn(5, 12, generator=generator, dtype=torch.float64)
    y = clean + 0.3 * torch.randn(clean.shape, generator=generator, dtype=torch.float64)
    full = SpikeSlabGPLVM(1000, 12, 5, num_inducing=30)
    torch.manual_seed(0)
    start = time.process_time()
    bound = fit(full, y, warm_up=60, steps=60, rounds=2).bound
    seconds = time.process_time() - start
    model = SpikeSlabGPLVM(1000, 12, 5, num_inducing=30)
    initialize(model, y)
    first = float(model.bound(y).detach())
    explicit = explicit_copy(model, y)
    start, spent = time.process_time(), None
    for epochs in range(1, 9):
        fit_minibatches(explicit, y, 100, batch_size=200, learning_rate=0.05, switches_from=0.3 if epochs == 1 else 0.0)
        natural_step(explicit, y)
        reached = float(explicit.bound(y).detach())
        share = (reached - first) / (bound - first)
        spent_so_far = time.process_time() - start
        print(f"\n{100 * epochs} minibatches, {spent_so_far:.1f} CPU s, bound {reached:.0f}, {100 * share:.2f} % of the gain", end="")
        if share >= 0.99:
            spent = time.process_time() - start
            break
    print(f"\ncollapsed: {seconds:.1f} CPU s to {bound:.0f} from {first:.0f}; minibatches to 99 % of the gain: {spent}")
    assert reached <= bound + 0.02 * abs(bound)


@pytest.mark.benchmark
def test_sixty_thousand_data_points(real_data):
    """All training images of MNIST: seconds per epoch and what two epochs do."""
    torch.set_num_threads(1)
    images = torch.from_numpy(real_data("mnist_train")["X"]).flatten(1).float() / 255
    torch.manual_seed(0)
    before, start = peak(), time.process_time()
    model = SpikeSlabGPLVM(*images.shape, 10, num_inducing=50, collapsed=False)
    initialize(model, images)
    natural_step(model, images)
    begun = float(model.bound(images).detach()) / len(images)
    print(f"\nstart: {time.process_time() - start:.1f} CPU s, bound per image {begun:.1f}")
    reached = begun
    for epoch in range(2):
        start = time.process_time()
        fit_minibatches(model, images, -(-len(images) // 500), batch_size=500, switches_from=0.0 if epoch else 0.5)
        seconds = time.process_time() - start
        natural_step(model, images)
        reached = float(model.bound(images).detach()) / len(images)
        print(
            f"epoch {epoch + 1}: {seconds:.1f} CPU s, bound per image {reached:.1f}, peak memory {peak() - before:.2f} GB beyond the data's"
        )
    assert reached > begun
