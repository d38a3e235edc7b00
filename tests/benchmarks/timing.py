"""What the benchmarks share: timing, machine ceilings, fits of exponents, and the models they time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO


def best_time(f: Callable[[], Any], repeats: int = 5, warm_up: int = 1) -> float:
    """The shortest of several calls in seconds: what the work needs when nothing else disturbs."""
    for _ in range(warm_up):
        f()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return min(times)


def cpu_seconds(f: Callable[[], Any], repeats: int = 7, warm_up: int = 1) -> float:
    """The fewest CPU seconds of several calls, after a few others."""
    found = []
    for number in range(warm_up + repeats):
        start = time.process_time()
        f()
        if number >= warm_up:
            found.append(time.process_time() - start)
    return min(found)


def ceilings() -> dict[str, float]:
    """This machine's matrix product (GFLOP/s, float32 and float64) and memory copy (GB/s, read and written) as torch reaches them."""
    found = {}
    for dtype in (torch.float32, torch.float64):
        a = torch.randn(2000, 2000, dtype=dtype)
        found[str(dtype).removeprefix("torch.")] = 2 * 2000**3 / best_time(lambda a=a: a @ a) / 1e9
    x = torch.randn(40_000_000)
    y = torch.empty_like(x)
    found["copy"] = 2 * x.numel() * 4 / best_time(lambda: y.copy_(x)) / 1e9
    return found


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Slope of log seconds over log size by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def em_step(model: Any, y: Tensor, search: EvolutionarySearch, num_states: int, warm_up: int = 10) -> Callable[[], float]:
    """A function that makes one EM iteration, after a few have brought the populations into a typical state."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model.initialize(y)
    guide = AutoTruncated(model, num_states=num_states)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(search))
    for _ in range(warm_up):
        svi.step(y)
    return lambda: float(svi.step(y))


def naive_sparse_coding(y: Tensor, weight: Tensor, noise: float, prior: float) -> None:
    """Binary sparse coding as one writes it in plain Pyro."""
    weight = pyro.param("weight", lambda: weight.clone())
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((weight.shape[1],), prior)).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT, noise).to_event(1), obs=y)


def naive_noisy_or(y: Tensor, weight: Tensor, leak: float, prior: float) -> None:
    """Noisy-OR as one writes it in plain Pyro."""
    weight = pyro.param("weight", lambda: weight.clone())
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((weight.shape[1],), prior)).to_event(1))
        off = (s @ torch.log1p(-weight).mT).exp() * (1 - leak)
        pyro.sample("y", dist.Bernoulli((1 - off).clamp(1e-6, 1 - 1e-6)).to_event(1), obs=y)
