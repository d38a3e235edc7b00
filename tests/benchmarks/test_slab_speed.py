"""Spike-and-slab sparse coding with a full covariance of the slabs beside independent slabs: CPU seconds of one thread.

make bench
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numba
import pytest
import torch
from torch import Tensor

from pyro_truncated import EvolutionarySearch, StateSpace, ops
from pyro_truncated.models import SpikeSlabSparseCoding
from tests.benchmarks.timing import em_step

pytestmark = pytest.mark.benchmark

NUM_DATA = 1000


@pytest.fixture(autouse=True)
def one_thread():
    before = numba.get_num_threads(), torch.get_num_threads()
    numba.set_num_threads(1)
    torch.set_num_threads(1)
    yield
    numba.set_num_threads(before[0])
    torch.set_num_threads(before[1])


def in_turns(functions: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """The fewest CPU seconds of each of several functions, called in turns: what else the machine does disturbs all alike."""
    seconds = [float("inf")] * len(functions)
    for function in functions:
        function()
    for _ in range(repeats):
        for number, function in enumerate(functions):
            start = time.process_time()
            function()
            seconds[number] = min(seconds[number], time.process_time() - start)
    return seconds


def covariance_of(num_latents: int, generator: torch.Generator) -> Tensor:
    root = torch.randn(num_latents, num_latents, generator=generator).double() / num_latents**0.5
    return root @ root.mT + 0.1 * torch.eye(num_latents).double()


@pytest.mark.parametrize(("size", "pixels", "states", "active"), [(32, 64, 30, 4), (64, 64, 20, 3), (128, 128, 10, 5), (256, 256, 30, 12)])
def test_scored_states(size: int, pixels: int, states: int, active: int) -> None:
    generator = torch.Generator().manual_seed(0)
    words = StateSpace([2] * size).pack((torch.rand(NUM_DATA, states, size, generator=generator) < active / size).float())
    weight, value = torch.randn(pixels, size, generator=generator), 3 * torch.randn(NUM_DATA, pixels, generator=generator)
    mean, covariance = torch.ones(size).double(), covariance_of(size, generator)
    given = words, value.double(), weight.double(), torch.ones(pixels).double(), mean
    functions = [
        lambda: ops.slab_log_prob(*given, covariance.diagonal().sqrt()),
        lambda: ops.slab_log_prob(*given, covariance),
    ]
    independent, full = (1e9 * seconds / words[..., 0].numel() for seconds in in_turns(functions, 7))
    print(f"\nH={size} D={pixels} S={states}, {active} active: {independent:.0f} and {full:.0f} ns a state, ratio {full / independent:.2f}")
    assert full <= 2 * independent


@pytest.mark.parametrize(("size", "pixels", "states", "active"), [(32, 64, 30, 3), (64, 128, 30, 8), (128, 128, 20, 5), (256, 256, 20, 8)])
def test_steps(size: int, pixels: int, states: int, active: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, root = torch.randn(pixels, size, generator=generator), torch.linalg.cholesky(covariance_of(size, generator)).float()
    slabs = 1 + torch.randn(NUM_DATA, size, generator=generator) @ root.mT
    slabs *= torch.rand(NUM_DATA, size, generator=generator) < active / size
    y = slabs @ weight.mT + 0.5 * torch.randn(NUM_DATA, pixels, generator=generator)
    steps = []
    for covariance in ("diag", "full"):
        model = SpikeSlabSparseCoding(pixels, size, covariance=covariance)
        steps.append(em_step(model, y, EvolutionarySearch(crossover=True), states, warm_up=8))
    independent, full = (1e3 * seconds for seconds in in_turns(steps, 6))
    print(f"\nH={size} D={pixels} S={states}, {active} active: EM steps of {independent:.0f} and {full:.0f} ms, {full / independent:.2f}")
    assert full <= 2 * independent
