"""Reproduces the sparse coding experiments of "GP-select: Accelerating EM using adaptive subspace preselection" (2017), section 5.1.

    python -m tests.papers.experiments.gp_select --models A B --seeds 10 --workers 2

Bars are learned with latents selected by hand-crafted affinities and by Gaussian processes with three kernels. Every experiment runs
twice: as the paper says (as far as it does), and with this library's start and search.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import copy
import functools
import json
import math
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

from pyro_truncated import AutoTruncated, ClosedForm, Truncated_ELBO
from pyro_truncated.datasets import Bars, bar_components, matched_bars
from pyro_truncated.em.gibbs import GibbsEM, GibbsGuide
from pyro_truncated.models import BinarySparseCoding, MaxSpikeSlabSparseCoding, SpikeSlabSparseCoding
from pyro_truncated.search import Cosine, GPSelect, Preselection, Singletons
from tests.papers.experiments.evolutionary_em import cooling

SIZE, NUM_LATENTS, NUM_SELECTED, AMPLITUDE, VARIANCE = 5, 10, 5, 10.0, 2.0
SELECTIONS = ("hand", "linear", "rbf", "composition")
VARIANTS = ("ours", "paper")
MODELS: dict[str, Callable[[int, int], Any]] = {
    "A": functools.partial(BinarySparseCoding, offset=False),
    "B": functools.partial(SpikeSlabSparseCoding, offset=False),
    "C": MaxSpikeSlabSparseCoding,
}
# The paper gives no slab parameters. Their mean is 1, so that a bar has the same mean amplitude in all models.
SLAB_DEVIATION = {"A": 0.0, "B": 0.5, "C": 0.3}
ITERATIONS = 30
WITHOUT_CHANCE = 5
TOLERANCE = 0.02
# Chosen on data sets other than those of the table (seeds 100 to 108), where six to eight of ten such starts find all bars.
NUM_STARTS, SHORT_STEPS = {"A": 10, "B": 5, "C": 5}, {"A": 20, "B": 40, "C": 20}
SHORT_DATA, SHORT_TEMPERATURE = 500, 4.0
OUTPUT = Path(__file__).parents[1] / "results" / "gp_select.jsonl"
RANK = {"ours": 150, "paper": None}
MAX_FIT, FIT_STEPS = 150, 8


def bars_of(model: str, num_data: int, generator: torch.Generator) -> Bars:
    """Bars that add up (A), that add up with varying strength (B), or of which the strongest shows in each pixel (C)."""
    components = AMPLITUDE * bar_components(SIZE)
    states = (torch.rand(num_data, NUM_LATENTS, generator=generator) < 2 / NUM_LATENTS).float()
    coefficients = states * (1 + SLAB_DEVIATION[model] * torch.randn(states.shape, generator=generator))
    strongest = (coefficients.unsqueeze(1) * components).amax(-1).clamp(min=0.0)
    clean = strongest if model == "C" else coefficients @ components.mT
    noise = VARIANCE**0.5 * torch.randn(clean.shape, generator=generator)
    return Bars(clean + noise, components, states.to(torch.uint8))


def selection_of(name: str, kind: str, model: Any, *, merge: bool, rank: int | None = None) -> Preselection:
    """The hand-crafted selection of the paper for the model, or a learned one with the kernel named."""
    if name != "hand":
        search = GPSelect(NUM_SELECTED, kernel=name, merge=merge, rank=rank, fit_steps=FIT_STEPS)
        search.affinity.max_fit = MAX_FIT
        return search
    affinity = Singletons() if kind == "B" else Cosine(lambda: model.weight)
    return Preselection(affinity, NUM_SELECTED, merge=merge)


def _mean_start(model: Any, y: Tensor) -> None:
    """The usual start of the group's sparse coding papers: the data mean with noise of a quarter of the data's deviation."""
    model.initialize(y)
    with torch.no_grad():
        weight = y.mean(0).unsqueeze(-1) + y.std() / 4 * torch.randn_like(model.weight)
        model.weight = weight.abs().clamp(min=1e-3) if isinstance(model, MaxSpikeSlabSparseCoding) else weight


def _best_of_short_starts(kind: str, selection: str, model: Any, y: Tensor, num_starts: int, steps: int) -> None:
    """The start of this library: the best of a few short annealed runs on a part of the data, with the selection of the run itself.

    As :func:`pyro_truncated.best_start`, but chance is switched off at the end: free energies of populations that are replaced
    in every step can only be compared where no place in them is given away at random.
    """
    part, best = y[torch.randperm(len(y))[:SHORT_DATA]], (math.inf, model.state_dict())
    for _ in range(num_starts):
        model.initialize(part)
        search = selection_of(selection, kind, model, merge=False)
        svi = trainer(kind, model, search, cooling(SHORT_TEMPERATURE, steps))
        loss = run_steps(svi, search, part, steps)[-1]
        svi.optim.release()
        if loss < best[0]:
            best = loss, copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(best[1][name])


def trainer(kind: str, model: Any, search: Preselection, temperature: Callable[[int], float] | float = 1.0) -> SVI:
    """SVI with closed-form M-steps: truncated EM for A and B, Gibbs sampling for C."""
    if kind == "C":
        return SVI(model, GibbsGuide(model), ClosedForm(model), GibbsEM(search, temperature=temperature))
    guide = AutoTruncated(model, num_states=2**NUM_SELECTED)
    return SVI(model, guide, ClosedForm(model), Truncated_ELBO(search, temperature=temperature))


def run_steps(svi: SVI, search: Preselection, y: Tensor, steps: int, tolerance: float = 0.0) -> list[float]:
    """Losses of at most so many EM iterations, in the last of which no place of the selection is given to chance.

    They end early when five have changed the free energy by less than ``tolerance`` nats per data point.
    """
    losses: list[float] = []
    last = steps
    while len(losses) < last:
        search.explore = 0.1 if len(losses) < last - WITHOUT_CHANCE else 0.0
        losses.append(svi.step(y))
        converged = len(losses) > WITHOUT_CHANCE and abs(losses[-1] - losses[-1 - WITHOUT_CHANCE]) < tolerance * len(y)
        if converged and last == steps:
            last = min(steps, len(losses) + WITHOUT_CHANCE)
    return losses


def prepared(kind: str, variant: str, selection: str, y: Tensor, **overrides: Any) -> tuple[Any, Preselection, SVI]:
    """Model, selection and trainer of one run."""
    model = MODELS[kind](SIZE**2, NUM_LATENTS)
    if variant == "paper":
        _mean_start(model, y)
    else:
        num_starts, steps = overrides.get("num_starts", NUM_STARTS[kind]), overrides.get("short_steps", SHORT_STEPS[kind])
        _best_of_short_starts(kind, selection, model, y, num_starts, steps)
    search = selection_of(selection, kind, model, merge=variant == "ours", rank=RANK[variant])
    return model, search, trainer(kind, model, search)


def run(
    kind: str, selection: str, variant: str, seed: int, *, num_data: int = 2000, iterations: int = ITERATIONS, **overrides: Any
) -> dict[str, Any]:
    """One run; ``kind`` is the model's letter and ``variant`` is ``"paper"`` or ``"ours"``."""
    bars = bars_of(kind, num_data, torch.Generator().manual_seed(seed))
    pyro.set_rng_seed(1000 + seed)
    pyro.clear_param_store()
    start = time.process_time()
    model, search, svi = prepared(kind, variant, selection, bars.data, **overrides)
    losses = run_steps(svi, search, bars.data, iterations, TOLERANCE)
    return {
        "model": kind, "selection": selection, "variant": variant, "seed": seed, "iterations": len(losses),
        "bars": matched_bars(model.weight, bars.components, 0.95), "of": NUM_LATENTS,
        "free_energy": -losses[-1] / num_data, "converged": iterations_needed(losses),
        "variance": float(model.scale.detach()) ** 2, "active": float(model.prior.detach().mean()) * NUM_LATENTS,
        "seconds": time.process_time() - start,
    }  # fmt: skip


def iterations_needed(losses: Sequence[float], share: float = 0.99) -> int:
    """The first iteration from which on the free energy stays within a hundredth of its whole rise from its last value."""
    first, last = losses[0], losses[-1]
    outside = [step for step, loss in enumerate(losses) if abs(loss - last) > (1 - share) * abs(first - last)]
    return outside[-1] + 1 if outside else 0


def jobs_of(models: Sequence[str], seeds: int, variants: Sequence[str]) -> list[tuple[str, str, str, int]]:
    """Seeds in the outer loop, so that a run that is cut short leaves whole rows."""
    return [
        (kind, selection, variant, seed) for seed in range(seeds) for variant in variants for kind in models for selection in SELECTIONS
    ]


def _job(job: tuple[str, str, str, int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return run(*job)


def done(output: Path) -> list[dict[str, Any]]:
    """The results already in the output file."""
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def run_all(jobs: list[tuple[str, str, str, int]], workers: int, output: Path) -> list[dict[str, Any]]:
    """All runs that the output file lacks, spread over processes of one thread each; results are appended as they come."""
    before = {(r["model"], r["selection"], r["variant"], r["seed"]) for r in done(output)}
    missing = [job for job in jobs if job not in before]
    os.environ["OMP_NUM_THREADS"] = os.environ["NUMBA_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with output.open("a") as file, contextlib.ExitStack() as stack:
        if workers > 1:
            pool = stack.enter_context(concurrent.futures.ProcessPoolExecutor(workers, mp_context=context))
            results = (future.result() for future in concurrent.futures.as_completed([pool.submit(_job, job) for job in missing]))
        else:
            results = (_job(job) for job in missing)
        for result in results:
            file.write(json.dumps(result) + "\n")
            file.flush()
    return done(output)


PAPER = {
    "A": {"hand": "all runs", "linear": "all runs", "rbf": "not stated", "composition": "all runs"},
    "B": {"hand": "8 of 10", "linear": "0 of 10", "rbf": "7 of 10", "composition": "not stated"},
    "C": {"hand": "all runs", "linear": "all runs", "rbf": "not stated", "composition": "all runs"},
}


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown lines: a row per model, variant and selection."""
    lines = [
        "| model | configuration | selection | runs | all 10 bars | bars on average | the paper | noise variance, median | "
        "active, median | iterations to converge, median | CPU seconds per run, median |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind in MODELS:
        for variant in reversed(VARIANTS):
            for selection in SELECTIONS:
                group = [r for r in results if (r["model"], r["variant"], r["selection"]) == (kind, variant, selection)]
                if not group:
                    continue
                medians = {key: statistics.median(r[key] for r in group) for key in ("variance", "active", "converged", "seconds")}
                lines.append(
                    f"| {kind} | {'as in the paper' if variant == 'paper' else 'this library'} | {selection} | {len(group)} | "
                    f"{sum(r['bars'] == r['of'] for r in group)} | {sum(r['bars'] for r in group) / len(group):.1f} | "
                    f"{PAPER[kind][selection]} | {medians['variance']:.2f} | {medians['active']:.2f} | {medians['converged']:.0f} | "
                    f"{medians['seconds']:.1f} |"
                )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--only-table", action="store_true", help="print the table of the results already in the output file")
    args = parser.parse_args()
    if not args.only_table:
        run_all(jobs_of(args.models, args.seeds, args.variants), args.workers, args.output)
    print("\n".join(table(done(args.output))))


if __name__ == "__main__":
    main()
