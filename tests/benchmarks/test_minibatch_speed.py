"""CPU seconds of a step on a minibatch, for more and more data around it.

make bench
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pyro
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO
from pyro_truncated.models import BinarySparseCoding

BATCH = 1000
SIZES = (10_000, 100_000, 1_000_000)


def minibatch_step(num_data: int, kind: str) -> Callable[[], float]:
    pyro.set_rng_seed(0)
    y = torch.randn(num_data, 25)
    model = BinarySparseCoding(25, 10).initialize(y[:1000])
    guide = AutoTruncated(model, 16)
    optimizer = Adam({"lr": 0.001}) if kind == "gradient" else ClosedForm(model, minibatch=kind)
    svi = SVI(model, guide, optimizer, Truncated_ELBO(EvolutionarySearch(parents=4, children=3, generations=1)))
    return lambda: float(svi.step(y, BATCH))


def cpu_seconds(steps: Sequence[Callable[[], float]], repeats: int = 60) -> list[float]:
    """The smallest of many for each, taken in turns: what the work needs when nothing else disturbs."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats):
        for step, found in zip(steps, times, strict=True):
            start = time.process_time()
            step()
            found.append(time.process_time() - start)
    return [min(found) for found in times]


@pytest.mark.benchmark
@pytest.mark.parametrize("kind", ["incremental", "online", "gradient"])
def test_a_step_costs_what_its_batch_costs(kind):
    seconds = cpu_seconds([minibatch_step(size, kind) for size in SIZES])
    listed = ", ".join(f"N={size:.0e} {value:.4f} CPU s" for size, value in zip(SIZES, seconds, strict=True))
    print(f"\n{kind} step on {BATCH} of N data points: {listed}, last to first {seconds[-1] / seconds[0]:.2f}")
    # What is left are rows that lie further apart in memory.
    assert seconds[-1] / seconds[0] <= 1.3
