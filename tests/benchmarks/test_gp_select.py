"""What GP-select costs and saves: growth with the problem's size, share of the E-step, and time to a free energy.

    make bench

Times are CPU seconds of one thread, which other processes disturb least, and the shortest of several calls where one call is timed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.datasets import Bars, linear_bars, matched_bars, natural_images, whitened_patches
from pyro_truncated.models import BinarySparseCoding
from pyro_truncated.search import GPSelect, Preselection, Search, Singletons
from tests.benchmarks.timing import exponent

pytestmark = pytest.mark.benchmark


def bars(num_data: int, num_latents: int) -> Bars:
    generator = torch.Generator().manual_seed(0)
    return linear_bars(num_data, num_latents // 2, mean_active=2.0, noise=2**0.5, generator=generator)


def trainer(y: Tensor, num_latents: int, search: Search, num_states: int, start: Tensor | None = None) -> tuple[SVI, BinarySparseCoding]:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model = BinarySparseCoding(y.shape[1], num_latents).initialize(y)
    if start is not None:
        model.weight = start.clone()
    return SVI(model, AutoTruncated(model, num_states=num_states), ClosedForm(model), Truncated_ELBO(search)), model


class Stopwatch:
    """Calls a function and adds up the time that takes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.times = function, []

    def __call__(self, *args: Any) -> Any:
        start = time.process_time()
        result = self.function(*args)
        self.times.append(time.process_time() - start)
        return result


def iteration(num_data: int, num_latents: int, num_selected: int, rank: int | None) -> tuple[float, float, float]:
    """Seconds of one EM iteration between refits, of its affinity, and of an affinity with a refit."""
    # As many dimensions whatever the number of latents.
    y = bars(num_data, num_latents).data[:, :25].contiguous()
    search = GPSelect(num_selected, kernel="composition", rank=rank, refit_every=10**6, merge=False, fit_steps=3)
    svi, _ = trainer(y, num_latents, search, 2**num_selected)
    watch = search.affinity = Stopwatch(search.affinity)
    svi.step(y)
    refit, watch.times = watch.times[0], []
    step = Stopwatch(svi.step)
    for _ in range(4):
        step(y)
    return min(step.times), min(watch.times), refit


SWEEPS = {
    "N, exact": ("num_data", (500, 1000, 2000, 3000), {"rank": None}),
    "N, rank 100": ("num_data", (500, 1000, 2000, 4000, 8000), {"rank": 100}),
    "H": ("num_latents", (10, 20, 40, 80), {"rank": 100}),
    "H'": ("num_selected", (4, 6, 8, 10), {"rank": 100}),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_growth(name):
    argument, sizes, settings = SWEEPS[name]
    base = {"num_data": 1000, "num_latents": 10, "num_selected": 5, **settings}
    iteration(**{**base, argument: sizes[0]})
    rows = [iteration(**{**base, argument: size}) for size in sizes]
    total, affinity, refit = (list(column) for column in zip(*rows, strict=True))
    print(f"\nGP-select over {name} = {sizes}, others {base}")
    for what, seconds in (("EM iteration", total), ("affinity of it", affinity), ("affinity with refit", refit)):
        print(f"  {what}: {', '.join(f'{1e3 * s:.0f}' for s in seconds)} ms, exponent {exponent(sizes, seconds):.2f}")
    shares = ", ".join(f"{100 * a / t:.0f} %" for a, t in zip(affinity, total, strict=True))
    print(f"  share of the selection in an iteration between refits: {shares}")
    assert exponent(sizes, refit) < 3.2


def curve(
    make: Callable[[], SVI], y: Tensor, seconds: float = math.inf, iterations: int | None = None, goal: float = math.inf
) -> list[tuple[float, float]]:
    """Seconds and free energies per data point of the iterations up to a time, number or free energy; an earlier one compiles."""
    make().step(y)
    svi = make()
    start, points = time.process_time(), []
    while not points or (points[-1][0] < seconds and len(points) != iterations and points[-1][1] < goal):
        loss = svi.step(y)
        points.append((time.process_time() - start, -loss / len(y)))
    return points


@pytest.mark.parametrize("num_latents", [10, 12, 14, 16])
def test_against_full_enumeration(num_latents):
    """Time until EM is within 0.1 nats per data point of the free energy that full enumeration ends at, both from the same start."""
    data = bars(500, num_latents)
    y, start = data.data, data.components + 2 * torch.randn(data.components.shape, generator=torch.Generator().manual_seed(1))
    exact = curve(
        lambda: trainer(y, num_latents, ExhaustiveSearch(), 2**num_latents, start)[0], y, iterations=10 if num_latents < 14 else 4
    )
    goal = exact[-1][1] - 0.1
    selected = curve(lambda: trainer(y, num_latents, GPSelect(7, rank=100), 64, start)[0], y, exact[-1][0] + 10, goal=goal)
    needed, reached = next(t for t, f in exact if f >= goal), selected[-1][0]
    seconds = exact[-1][0] / len(exact)
    print(
        f"\nH={num_latents}: free energy per data point {exact[-1][1]:.3f} after {len(exact)} iterations with all {2**num_latents} states, "
        f"{selected[-1][1]:.3f} after {len(selected)} by GP-select with 64; within 0.1 nats of the former after {needed:.2f} s and "
        f"{reached:.2f} s, {needed / reached:.1f} times as fast; one iteration {seconds:.3f} s and {reached / len(selected):.3f} s"
    )
    assert selected[-1][1] >= goal


def test_natural_patches_at_equal_time():
    """Free energies that searches reach in the same time on the same patches."""
    y, _ = whitened_patches(natural_images(), 12, 2000, torch.Generator().manual_seed(0))
    evolution = {"parents": 6, "generations": 2, "crossover": True, "mutation": "sparseflips"}
    searches: dict[str, Callable[[], Search]] = {
        "evolution": lambda: EvolutionarySearch(**evolution),
        "GP-select": lambda: GPSelect(6, kernel="rbf", rank=200, refit_every=20, max_active=4),
        "GP-select + evolution": lambda: GPSelect(4, kernel="rbf", rank=200, refit_every=20) + EvolutionarySearch(**evolution),
        "singletons + evolution": lambda: Preselection(Singletons(), 4) + EvolutionarySearch(**evolution),
    }

    def started(search: Search) -> SVI:
        svi, model = trainer(y, 100, search, 50)
        model.weight = 0.3 * model.weight.detach()
        return svi

    budget = 12.0
    curves = {name: curve(lambda make=make: started(make()), y, budget) for name, make in searches.items()}
    print(f"\nnatural patches, N=2000, D=144, H=100, S=50, free energy per patch after a quarter, half and all of {budget:.0f} s")
    for name, points in curves.items():
        values = [next(f for t, f in points if t >= share * budget) for share in (0.25, 0.5, 1)]
        print(f"  {name}: {', '.join(f'{value:.2f}' for value in values)}; {len(points)} iterations")


def test_composition_on_bars():
    """Runs that find all of twenty crowded bars: evolution alone, GP-select alone, and both, for the same number of iterations."""
    searches: dict[str, Callable[[], Search]] = {
        "evolution": lambda: EvolutionarySearch(8, generations=1, crossover=True),
        "GP-select": lambda: GPSelect(6, rank=100),
        "GP-select + evolution": lambda: GPSelect(6, rank=100) + EvolutionarySearch(8, generations=1, crossover=True),
        "singletons + evolution": lambda: Preselection(Singletons(), 6) + EvolutionarySearch(8, generations=1, crossover=True),
    }
    print("\ncrowded bars, N=1000, D=100, H=20, S=60, 40 iterations")
    for name, make in searches.items():
        found, bounds, began = [], [], time.process_time()
        for seed in range(3):
            y, components, _ = linear_bars(1000, 10, generator=torch.Generator().manual_seed(seed))
            svi, model = trainer(y, 20, make(), 60)
            bounds.append([-svi.step(y) / len(y) for _ in range(40)][-1])
            found.append(matched_bars(model.weight, components))
        seconds = (time.process_time() - began) / len(found)
        print(f"  {name}: bars {found}, free energy {', '.join(f'{bound:.2f}' for bound in bounds)}, {seconds:.1f} s a run")
