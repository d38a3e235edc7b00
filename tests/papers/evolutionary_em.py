"""Reproduces the experiments of "Evolutionary Expectation Maximization for Generative Models with Binary Latents" (2018).

    python -m tests.papers.evolutionary_em --experiment noisy_or_bars --seeds 10 --workers 2 --output results.json

Every experiment runs twice: as the paper says (as far as it does), and with this library's start and annealing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO
from pyro_truncated.datasets import Bars, linear_bars, matched_bars, noisy_or_bars, overlapping_bars
from pyro_truncated.models import BinarySparseCoding, NoisyOr

EVOLUTIONS: dict[str, dict[str, Any]] = {
    "randparents-randflips": {"selection": "randparents"},
    "fitparents-randflips": {},
    "fitparents-sparseflips": {"mutation": "sparseflips"},
    "fitparents-cross-randflips": {"crossover": True},
    "fitparents-cross-sparseflips": {"crossover": True, "mutation": "sparseflips"},
}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A bars test: how its data are drawn, which model learns them, and the size of the search."""

    data: Callable[[torch.Generator], Bars]
    model: Callable[[], Any]
    num_states: int
    iterations: int
    start: Callable[[Any, Tensor], None]
    temperature: float
    parents: int = 8
    children: int = 7
    generations: int = 2
    default_seeds: int = 10


def _mean_start(model: BinarySparseCoding, y: Tensor) -> None:
    """The usual start of the group's sparse coding papers: the data mean with noise of a quarter of the data's deviation."""
    noise = y.std() / 4 * torch.randn_like(model.weight)
    model.weight = y.mean(0).unsqueeze(-1) + noise
    model.scale = y.std()
    model.prior = torch.full_like(model.prior, 1 / model.num_latents)


def _uniform_start(model: NoisyOr, y: Tensor) -> None:
    """Weights uniform in the unit interval (the paper does not say)."""
    model.weight = 0.05 + 0.9 * torch.rand_like(model.weight)
    model.prior = torch.full_like(model.prior, 1 / model.num_latents)


EXPERIMENTS = {
    "noisy_or_bars": Experiment(lambda g: noisy_or_bars(10_000, 8, generator=g), lambda: NoisyOr(64, 16), 120, 100, _uniform_start, 3.0),
    "overlapping_bars": Experiment(
        lambda g: overlapping_bars(400, generator=g), lambda: NoisyOr(81, 32), 120, 100, _uniform_start, 3.0, default_seeds=25
    ),
    "bsc_bars": Experiment(
        lambda g: linear_bars(5000, 10, generator=g), lambda: BinarySparseCoding(100, 20), 120, 300, _mean_start, 8.0, default_seeds=20
    ),
}


def cooling(start: float, iterations: int, share: float = 0.6) -> Callable[[int], float]:
    """A temperature that falls linearly to one over a share of the iterations."""
    return lambda step: max(1.0, start + (1.0 - start) * step / (share * iterations))


def run(name: str, evolution: str, variant: str, seed: int, device: str = "cpu", iterations: int | None = None, **overrides: Any) -> dict[str, Any]:
    """One run; ``variant`` is ``"paper"`` or ``"ours"``."""
    experiment = dataclasses.replace(EXPERIMENTS[name], **overrides)
    iterations = iterations or experiment.iterations
    bars = experiment.data(torch.Generator().manual_seed(seed))
    bars = Bars(*(tensor.to(device) for tensor in bars))
    pyro.set_rng_seed(1000 + seed)
    pyro.clear_param_store()
    model = experiment.model().to(device)
    init = None
    if variant == "paper":
        with torch.no_grad():
            experiment.start(model, bars.data)
        init = _bernoulli_states(len(bars.data), experiment.num_states, model.num_latents)
    else:
        model.initialize(bars.data)
    guide = AutoTruncated(model, num_states=experiment.num_states, init=init)
    search = EvolutionarySearch(experiment.parents, experiment.children, experiment.generations, **EVOLUTIONS[evolution])
    temperature = 1.0 if variant == "paper" else cooling(experiment.temperature, iterations)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(search, temperature=temperature))
    start = time.perf_counter()
    losses = [svi.step(bars.data) for _ in range(iterations)]
    seconds = time.perf_counter() - start
    return {
        "experiment": name, "evolution": evolution, "variant": variant, "seed": seed, "iterations": iterations,
        "free_energy": -losses[-1] / len(bars.data),
        "bars": matched_bars(model.weight, bars.components), "of": bars.components.shape[1],
        "priors": priors_recovered(model, bars),
        "decreases": sum(b > a + 1e-6 * abs(a) for a, b in zip(losses, losses[1:], strict=False)),
        "seconds_per_iteration": seconds / iterations,
    }  # fmt: skip


def _bernoulli_states(num_data: int, num_states: int, num_latents: int) -> Callable[[], Tensor]:
    """States drawn from a Bernoulli distribution of parameter 1/H, drawn again where they repeat (the paper's start)."""

    def draw() -> Tensor:
        from pyro_truncated import Population, StateSpace

        space = StateSpace([2] * num_latents)
        rate = 1 / num_latents
        words = space.random((num_data, num_states), rate)
        while len(rows := Population(space, words, torch.zeros(words.shape[:2])).find_duplicates()):
            # The rate grows a little with every try: few distinct sparse states exist where H is small.
            rate = min(0.5, rate * 1.05)
            extra = torch.cat([words[rows], space.random((len(rows), num_states), rate)], 1)
            words[rows] = _first_distinct(extra, num_states)
        return space.unpack(words)

    return draw


def _first_distinct(words: Tensor, num_states: int) -> Tensor:
    """Moves repetitions behind the distinct states of each row and cuts off."""
    keys = words.squeeze(-1)
    order = keys.sort(dim=1, stable=True)
    repeated = torch.zeros_like(keys, dtype=torch.bool)
    repeated.scatter_(1, order.indices[:, 1:], order.values[:, 1:] == order.values[:, :-1])
    return words.gather(1, repeated.long().argsort(dim=1, stable=True)[:, :num_states, None])


def priors_recovered(model: Any, bars: Bars) -> bool:
    """Whether the activation rates are right: each matched latent's within a quarter of how often its bar occurs; a shared one within a tenth."""
    rate = bars.states.double().mean(0)
    prior = model.prior.detach().double()
    if prior.dim() == 0:
        return bool((prior * model.num_latents - rate.sum()).abs() < 0.1 * rate.sum())
    columns, truth = (torch.nn.functional.normalize(m.detach().double(), dim=0) for m in (model.weight, bars.components))
    match = (truth.mT @ columns).argmax(1)
    return bool(((prior[match] - rate).abs() < 0.25 * rate).all())


def _job(arguments: tuple[Any, ...]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return run(*arguments)


def run_all(names: list[str], seeds: int | None, workers: int, evolutions: list[str] | None = None, variants: tuple[str, ...] = ("paper", "ours"), device: str = "cpu") -> list[dict[str, Any]]:
    """All runs, spread over processes of one thread each."""
    jobs = [
        (name, evolution, variant, seed, device)
        for name in names
        for seed in range(seeds or EXPERIMENTS[name].default_seeds)
        for variant in variants
        for evolution in (evolutions or EVOLUTIONS)
    ]
    os.environ["OMP_NUM_THREADS"] = os.environ["NUMBA_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    found = []
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for result in pool.map(_job, jobs):
            print(json.dumps(result), flush=True)
            found.append(result)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiment", nargs="+", default=list(EXPERIMENTS), choices=list(EXPERIMENTS))
    parser.add_argument("--evolution", nargs="+", choices=list(EVOLUTIONS))
    parser.add_argument("--variant", nargs="+", default=["paper", "ours"], choices=["paper", "ours"])
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results = run_all(args.experiment, args.seeds, args.workers, args.evolution, tuple(args.variant), args.device)
    if args.output:
        args.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
