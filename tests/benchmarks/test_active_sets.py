"""Seconds of an epoch with stochastic active sets against the number of data points, the active set, the minibatch and the outputs.

pytest -m benchmark -s tests/benchmarks/test_active_sets.py
"""

from __future__ import annotations

import pyro
import pytest
import torch
from pyro.contrib.gp import kernels
from pyro.contrib.gp.models import GPLVM, SparseGPRegression
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.optim import Adam

from pyro_truncated.distributions import ActiveSetGaussianProcess
from pyro_truncated.gp import UniformSplits
from pyro_truncated.gplvm import SASDecoder
from tests.benchmarks.timing import best_time, exponent

pytestmark = pytest.mark.benchmark

BASE = {"N": 2000, "A": 50, "B": 200, "D": 100}


def step_of(N: int, A: int, B: int, D: int):
    """One training step of a deterministic decoder with free latents."""
    pyro.clear_param_store()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator)
    decoder = SASDecoder(N, D)
    svi = SVI(decoder.model, decoder.guide, Adam({"lr": 0.01}), Trace_ELBO())
    splits = iter(split for _ in range(10**6) for split in UniformSplits(N, B, A, generator).epoch())
    return lambda: svi.step(x, next(splits))


def epoch_seconds(repeats: int = 8, **sizes: int) -> float:
    """Minimum over steps, times the steps of an epoch: what is least disturbed by other work on the machine."""
    now = BASE | sizes
    return best_time(step_of(**now), repeats) * -(-now["N"] // now["B"])


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("N", (1000, 4000, 16000, 64000)), ("A", (25, 50, 100, 150)), ("B", (100, 200, 400, 800)), ("D", (50, 100, 400, 1600))],
)
def test_growth(name, sizes):
    seconds = [epoch_seconds(**{name: size}) for size in sizes]
    print(
        f"\nseconds of an epoch over {name} = {sizes} (others {BASE}): {', '.join(f'{t:.3f}' for t in seconds)}; "
        f"ratios {', '.join(f'{t / seconds[0]:.2f}' for t in seconds)}; exponent {exponent(sizes, seconds):.2f}"
    )
    if name == "N":
        assert exponent(sizes, seconds) < 1.15


def test_digits():
    """The size of MNIST, extrapolated from single steps, beside a step of Pyro's full-batch GP-LVM on 5000 points."""
    for active, batch in ((100, 500), (200, 500), (400, 1000)):
        seconds = epoch_seconds(N=60_000, A=active, B=batch, D=784)
        print(f"\nepoch over 60000 images, |A|={active}, batch {batch}: {seconds:.2f} s, {seconds / 12:.2f} s per 5000")
    pyro.clear_param_store()
    z, x = torch.randn(5000, 2), torch.randn(784, 5000)
    model = GPLVM(SparseGPRegression(z, x, kernels.RBF(2, lengthscale=torch.ones(2)), z[:100].clone(), torch.tensor(0.5), approx="VFE"))
    svi = SVI(model.model, model.guide, Adam({"lr": 0.01}), TraceMeanField_ELBO())
    full = best_time(svi.step, 3)
    ours = epoch_seconds(N=5000, A=100, B=500, D=784)
    print(f"Pyro's GPLVM, 100 inducing inputs, batch of all 5000: {full:.2f} s a step; our epoch {ours:.2f} s, {full / ours:.2f} times")


def test_one_factor_for_all_outputs():
    """Against the same density as one Gaussian process per output."""
    z, x, kernel = torch.randn(400, 2), torch.randn(400, 64), kernels.RBF(2)

    def together():
        return ActiveSetGaussianProcess(z, kernel, 0.1, 100, 64).log_prob(x)

    def each():
        return [ActiveSetGaussianProcess(z, kernel, 0.1, 100, 1).log_prob(x[:, d : d + 1]) for d in range(64)]

    shared, separate = best_time(together, 10), best_time(each, 2)
    print(f"\n64 outputs, one factor: {1e3 * shared:.1f} ms; a factor each: {1e3 * separate:.1f} ms, {separate / shared:.0f} times")
    assert separate > 5 * shared


def saved_bytes(**sizes: int) -> int:
    """Bytes that the second step keeps for its gradient."""
    step = step_of(**(BASE | sizes))
    step()
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel() * t.element_size()) or t, lambda t: t):
        step()
    return sum(saved)


def test_memory_of_a_step_does_not_grow_with_the_data():
    """What a step keeps for its gradient is the size of the minibatch, at any N, but for the table of latents."""
    small, large = saved_bytes(N=2000), saved_bytes(N=20_000)
    print(f"\nbytes kept for the gradient of a step: {small} of 2000 data points, {large} of 20000")
    # Two numbers per data point, in a few copies.
    assert large - small <= 10 * 18_000 * 2 * 4
