"""CPU seconds of a loss and its gradient: sets of states for each node beside Pyro's own enumeration.

All sets are full, so that both compute the same number.

make bench
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import TraceEnum_ELBO, config_enumerate
from pyro.ops.indexing import Vindex
from torch import Tensor

from pyro_truncated import AutoTruncated, Truncated_ELBO

NUM_STEPS = 1000
NUM_STATES = 4


def _transition() -> Tensor:
    return pyro.param("transition", lambda: torch.full((NUM_STATES, NUM_STATES), 0.1) + 0.6 * torch.eye(NUM_STATES))


def loop(y: Tensor, steps: Callable[[range], Iterable[int]] = iter) -> None:
    """A Python loop over steps, few of which are observed; Pyro enumerates it with ``pyro.markov`` only."""
    transition = _transition()
    z: Any = 0
    for t in steps(range(NUM_STEPS)):
        z = pyro.sample(f"z_{t}", dist.Categorical(Vindex(transition)[z]))
        if t % 10 == 0:
            pyro.sample(f"y_{t}", dist.Normal(z.to(y.dtype), 1.0), obs=y[t, 0])


def sequences(y: Tensor) -> None:
    """Sequences in a plate, every step observed, by ``pyro.markov``."""
    transition = _transition()
    with pyro.plate("data", y.shape[1]):
        z: Any = 0
        for t in pyro.markov(range(NUM_STEPS)):
            z = pyro.sample(f"z_{t}", dist.Categorical(Vindex(transition)[z]))
            pyro.sample(f"y_{t}", dist.Normal(z.to(y.dtype), 1.0), obs=y[t])


def switches(y: Tensor) -> None:
    """A Bernoulli chain."""
    stay = pyro.param("stay", lambda: torch.tensor([0.1, 0.8]))
    z: Any = torch.tensor(0.0)
    for t in pyro.markov(range(NUM_STEPS)):
        z = pyro.sample(f"z_{t}", dist.Bernoulli(Vindex(stay)[z.long()]))
        pyro.sample(f"y_{t}", dist.Normal(z, 1.0), obs=y[t, 0])


def tree(y: Tensor) -> None:
    """A binary tree of sites."""
    transition = _transition()
    values: list[Tensor] = []
    for t in range(NUM_STEPS):
        z: Any = values[(t - 1) // 2] if t else 0
        values.append(pyro.sample(f"z_{t}", dist.Categorical(Vindex(transition)[z])))
        if 2 * t + 1 >= NUM_STEPS:
            pyro.sample(f"y_{t}", dist.Normal(values[-1].to(y.dtype), 1.0), obs=y[t, 0])


def hierarchy(y: Tensor) -> None:
    """Classes of groups above classes of their members."""
    transition = _transition()
    groups, members = pyro.plate("groups", 100, dim=-2), pyro.plate("members", 1000, dim=-1)
    with groups:
        kind = pyro.sample("kind", dist.Categorical(torch.ones(NUM_STATES)))
        with members:
            z = pyro.sample("z", dist.Categorical(Vindex(transition)[kind]))
            pyro.sample("y", dist.Normal(z.to(y.dtype), 1.0), obs=y[:100].repeat(1, 100))


def _no_guide(y: Tensor) -> None:
    """All latents are enumerated in the model."""


def cpu_seconds(step: Callable[[], Any], repeats: int = 3) -> tuple[float, float]:
    """The first call, and the shortest of some more."""
    times = []
    for _ in range(1 + repeats):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    return times[0], min(times[1:])


def measured(model: Callable[[Tensor], None]) -> dict[str, float]:
    """The seconds of both, and by how much the losses differ."""
    pyro.clear_param_store()
    y = torch.randn(NUM_STEPS, 10, generator=torch.Generator().manual_seed(0))
    guide, ours, stock = AutoTruncated(model, NUM_STATES), Truncated_ELBO(), TraceEnum_ELBO(max_plate_nesting=2)
    enumerated = config_enumerate(functools.partial(loop, steps=pyro.markov) if model is loop else model)
    losses = [float(ours.loss(model, guide, y)), float(stock.loss(enumerated, _no_guide, y))]
    guide = AutoTruncated(model, NUM_STATES)
    first, step = cpu_seconds(lambda: ours.loss_and_grads(model, guide, y))
    stock_first, stock_step = cpu_seconds(lambda: stock.loss_and_grads(enumerated, _no_guide, y))
    return {
        "difference": abs(losses[0] / losses[1] - 1),
        "first": first,
        "step": step,
        "stock first": stock_first,
        "stock step": stock_step,
        "ratio": step / stock_step,
    }


@pytest.mark.benchmark
@pytest.mark.parametrize(("model", "most"), [(loop, 1 / 3), (sequences, 1 / 3), (switches, 1 / 3), (hierarchy, math.inf)])
def test_a_step_beside_enumeration(model, most):
    """A third of the time at most where sites are many; no claim for few sites in large plates."""
    found = measured(model)
    print(f"\n{model.__name__}: " + ", ".join(f"{name} {value:.3g}" for name, value in found.items()))
    assert found["difference"] < 1e-5
    assert found["ratio"] < most


@pytest.mark.benchmark
def test_a_step_of_a_tree():
    """Pyro has too few dimensions to enumerate it."""
    pyro.clear_param_store()
    y = torch.randn(NUM_STEPS, 10, generator=torch.Generator().manual_seed(0))
    guide, ours = AutoTruncated(tree, NUM_STATES), Truncated_ELBO()
    first, step = cpu_seconds(lambda: ours.loss_and_grads(tree, guide, y))
    print(f"\ntree: first {first:.3g}, step {step:.3g}")
    assert step < 2.0
