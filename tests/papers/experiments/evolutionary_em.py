# ruff: noqa: E501
"""Reproduces the experiments of "Evolutionary Expectation Maximization for Generative Models with Binary Latents" (2018).

    python -m tests.papers.experiments.evolutionary_em --experiment noisy_or_bars --seeds 10 --workers 2

Every experiment runs twice: as the paper says (as far as it does), and with this library's start and annealing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO
from pyro_truncated.datasets import Bars, linear_bars, matched_bars, noisy_or_bars, overlapping_bars
from pyro_truncated.models import BinarySparseCoding, NoisyOr
from pyro_truncated.multistart import best_start

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
    paper_model: Callable[[], Any]
    paper_start: Callable[[Any, Tensor], None]
    best: str
    num_states: int = 120
    iterations: int = 100
    temperature: float = 1.0
    num_starts: int = 1
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
    "noisy_or_bars": Experiment(
        lambda g: noisy_or_bars(10_000, 8, generator=g),
        lambda: NoisyOr(64, 16),
        lambda: NoisyOr(64, 16, update="fixed_point"),
        _uniform_start,
        best="fitparents-sparseflips",
        num_starts=8,
    ),
    "overlapping_bars": Experiment(
        lambda g: overlapping_bars(400, generator=g),
        lambda: NoisyOr(81, 32),
        lambda: NoisyOr(81, 32, update="fixed_point"),
        _uniform_start,
        best="fitparents-sparseflips",
        temperature=3.0,
        num_starts=4,
        default_seeds=25,
    ),
    "bsc_bars": Experiment(
        lambda g: linear_bars(5000, 10, generator=g),
        lambda: BinarySparseCoding(100, 20, offset=False),
        lambda: BinarySparseCoding(100, 20, offset=False),
        _mean_start,
        best="fitparents-cross-randflips",
        iterations=300,
        temperature=8.0,
        num_starts=8,
        default_seeds=20,
    ),
}


SHORT_STEPS = 80


def cooling(start: float, iterations: int, share: float = 0.6) -> Callable[[int], float]:
    """A temperature that falls linearly to one over a share of the iterations."""
    return lambda step: max(1.0, start + (1.0 - start) * step / (share * iterations))


def run(
    name: str, evolution: str, variant: str, seed: int, device: str = "cpu", iterations: int | None = None, **overrides: Any
) -> dict[str, Any]:
    """One run; ``variant`` is ``"paper"`` or ``"ours"``."""
    experiment = dataclasses.replace(EXPERIMENTS[name], **overrides)
    iterations = iterations or experiment.iterations
    bars = experiment.data(torch.Generator().manual_seed(seed))
    bars = Bars(*(tensor.to(device) for tensor in bars))
    pyro.set_rng_seed(1000 + seed)
    pyro.clear_param_store()
    start = time.perf_counter()
    search = EvolutionarySearch(experiment.parents, experiment.children, experiment.generations, **EVOLUTIONS[evolution])
    init: Any = None
    temperature: Any = cooling(experiment.temperature, iterations)
    if variant == "paper":
        model = experiment.paper_model().to(device)
        with torch.no_grad():
            experiment.paper_start(model, bars.data)
        init, temperature = _bernoulli_states(len(bars.data), experiment.num_states, model.num_latents), 1.0
    else:
        model = experiment.model().to(device)
        if experiment.num_starts > 1:
            warm = cooling(experiment.temperature, SHORT_STEPS)
            best_start(model, bars.data, search, num_starts=experiment.num_starts, num_data=1000, steps=SHORT_STEPS, temperature=warm)
            temperature = 1.0
        else:
            model.initialize(bars.data)
    preparation = time.perf_counter() - start
    guide = AutoTruncated(model, num_states=experiment.num_states, init=init)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(search, temperature=temperature))
    losses = [svi.step(bars.data) for _ in range(iterations)]
    seconds = time.perf_counter() - start
    return {
        "experiment": name, "evolution": evolution, "variant": variant, "seed": seed, "iterations": iterations,
        "free_energy": -losses[-1] / len(bars.data),
        "bars": matched_bars(model.weight, bars.components), "of": bars.components.shape[1],
        "priors": priors_recovered(model, bars),
        "decreases": sum(b > a + 1e-6 * abs(a) for a, b in itertools.pairwise(losses)),
        "seconds": seconds, "seconds_of_starts": preparation,
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
    """Whether the activation rates are right: a matched latent's within a quarter of its bar's frequency, a shared one within a tenth."""
    rate = bars.states.double().mean(0)
    prior = model.prior.detach().double()
    if prior.dim() == 0:
        return bool((prior * model.num_latents - rate.sum()).abs() < 0.1 * rate.sum())
    columns, truth = (torch.nn.functional.normalize(m.detach().double(), dim=0) for m in (model.weight, bars.components))
    match = (truth.mT @ columns).argmax(1)
    return bool(((prior[match] - rate).abs() < 0.25 * rate).all())


def jobs_of(
    names: list[str], seeds: int | None, evolutions: list[str] | None, variants: Sequence[str], device: str
) -> list[tuple[Any, ...]]:
    """Seeds in the outer loop, so that a run that is cut short leaves whole rows; this library's variant with its best search only."""
    counts = {name: seeds or EXPERIMENTS[name].default_seeds for name in names}
    found = []
    for variant in variants:
        for seed in range(max(counts.values())):
            for name in (name for name in names if seed < counts[name]):
                chosen = evolutions or (list(EVOLUTIONS) if variant == "paper" else [EXPERIMENTS[name].best])
                found += [(name, evolution, variant, seed, device) for evolution in chosen]
    return found


def _job(arguments: tuple[Any, ...]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return run(*arguments)


def _done(output: Path) -> list[dict[str, Any]]:
    """The results already in the output file."""
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def run_all(jobs: list[tuple[Any, ...]], workers: int, output: Path) -> list[dict[str, Any]]:
    """All runs that the output file lacks, spread over processes of one thread each; results are appended as they come."""
    done_before = {(r["experiment"], r["evolution"], r["variant"], r["seed"]) for r in _done(output)}
    jobs = [job for job in jobs if job[:4] not in done_before]
    os.environ["OMP_NUM_THREADS"] = os.environ["NUMBA_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    found = []
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool, output.open("a") as file:
        for done in concurrent.futures.as_completed([pool.submit(_job, job) for job in jobs]):
            found.append(done.result())
            file.write(json.dumps(found[-1]) + "\n")
            file.flush()
    return found


PAPER = {
    "noisy_or_bars": "figure 3 only, no numbers in the text: fitparents-sparseflips best, crossover lowers the reliability",
    "overlapping_bars": "all 16 bars in 13 of 25 runs, 14.92 on average, median 16",
    "bsc_bars": "figure 5 only, no numbers in the text: cross with randflips very reliable, sparseflips poor",
}


def table(name: str, results: list[dict[str, Any]]) -> list[str]:
    """Markdown lines for one experiment: a row per evolutionary algorithm and variant."""
    rows = [r for r in results if r["experiment"] == name]
    total = rows[0]["of"]
    lines = [
        f"## {name.replace('_', ' ')}", "", f"The paper: {PAPER[name]}.", "",
        f"| configuration | search | runs | all {total} bars | bars and priors | bars on average | "
        "F per data point, best / median | seconds per run, median |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for variant in ("paper", "ours"):
        for evolution in EVOLUTIONS:
            group = [r for r in rows if r["variant"] == variant and r["evolution"] == evolution]
            if not group:
                continue
            bounds = [r["free_energy"] for r in group]
            complete = [r["bars"] == total for r in group]
            lines.append(
                f"| {'as in the paper' if variant == 'paper' else 'this library'} | {evolution} | {len(group)} | {sum(complete)} | "
                f"{sum(full and r['priors'] for full, r in zip(complete, group, strict=True))} | "
                f"{sum(r['bars'] for r in group) / len(group):.2f} | "
                f"{max(bounds):.3f} / {statistics.median(bounds):.3f} | {statistics.median(r['seconds'] for r in group):.0f} |"
            )
    return [*lines, ""]


PATCHES = "## natural patches"


SETTINGS = """# Evolutionary EM (2018): bars tests

| setting | noisy-OR bars | overlapping bars | linear bars |
| --- | --- | --- | --- |
| data | 8x8, N=10000 | 16 bars of 9 x 2 pixels on 9 x 9, two on average, N=400 | 10x10, five bars on average, amplitude 10, noise 2, N=5000 |
| latents, iterations | H=16, 100 | H=32, 100 | H=20, 300 |
| probability of a pixel | 0.8 | 0.8 | |
| restarts, *this library* | 8 | 4, annealed from 3 | 8, annealed from 8 |

Everywhere S=120, 2 generations, 8 parents, 7 children (56 with crossover). Amplitudes, noise and probabilities are not in the paper.

| configuration | start | M-step, restarts |
| --- | --- | --- |
| *as in the paper* | uniform weights (noisy-OR) or the data mean with noise; states from Bernoulli(1/H) | the paper's fixed-point M-step with a leak of 0.001; no annealing |
| *this library* | `initialize`, `initial_population` | exact M-steps; the best of short restarts of 80 iterations on at most 1000 data points |

A bar is recovered by a column with cosine similarity of at least 0.9. A prior is recovered within a quarter of the bar's frequency, a shared rate within a tenth.
With H=32 surplus latents share the work, so priors of overlapping bars cannot be recovered. Run `n` has data seed `n` and training seed `1000 + n`.
"""


def write_tables(results: list[dict[str, Any]], file: Path, machine: str) -> None:
    """Writes the results file."""
    results = sorted(results, key=lambda r: r["seed"])
    lines = [
        SETTINGS,
        f"Made on {time.strftime('%Y-%m-%d')}, {machine}, by",
        "",
        "    python -m tests.papers.experiments.evolutionary_em",
        "",
    ]
    plain = [r for r in results if r["variant"] == "paper" and r["experiment"] == "bsc_bars"]
    falls = sum(r["decreases"] for r in plain)
    missing = len(jobs_of(list(EXPERIMENTS), None, None, ("ours", "paper"), "cpu")) - len(results)
    if missing > 0:
        lines += [
            f"**Incomplete: {missing} of the planned runs have not been made; the column `runs` says how many each row stands on.**",
            "",
        ]
    for name in EXPERIMENTS:
        if any(r["experiment"] == name for r in results):
            lines += table(name, results)
    if plain:
        lines.append(f"The free energy of the linear bars, trained without annealing, fell in {falls} steps of {len(plain)} run(s).")
    # Written by hand from what tests.papers.experiments.natural_patches prints.
    patches = file.read_text().partition(PATCHES) if file.exists() else ("", "", "")
    file.write_text("\n".join(lines) + "\n" + (f"\n{PATCHES}{patches[2]}" if patches[1] else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiment", nargs="+", default=list(EXPERIMENTS), choices=list(EXPERIMENTS))
    parser.add_argument("--evolution", nargs="+", choices=list(EVOLUTIONS))
    parser.add_argument("--variant", nargs="+", default=["ours", "paper"], choices=["paper", "ours"])
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results" / "evolutionary_em.jsonl")
    parser.add_argument("--table", type=Path, default=Path(__file__).parents[1] / "results" / "evolutionary_em.md")
    parser.add_argument("--machine", default=f"a machine of {os.cpu_count()} CPU cores", help="the machine in words")
    parser.add_argument("--only-table", action="store_true", help="write the table of the results already in the output file")
    args = parser.parse_args()
    if not args.only_table:
        run_all(jobs_of(args.experiment, args.seeds, args.evolution, args.variant, args.device), args.workers, args.output)
    write_tables(_done(args.output), args.table, args.machine)


if __name__ == "__main__":
    main()
