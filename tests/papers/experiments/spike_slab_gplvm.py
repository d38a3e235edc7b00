# ruff: noqa: E501 (the sentences of a report)
"""Reproduces the experiments of "Spike and slab Gaussian process latent variable models" (2015).

    python -m tests.papers.experiments.spike_slab_gplvm --experiments signals fewer retrieval digits cost minibatches many

Finished runs are appended to the output file; a run that it holds is not made again.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.papers.experiments import spike_slab_cost, spike_slab_digits, spike_slab_retrieval, spike_slab_signals

RESULTS = Path(__file__).parents[1] / "results"
EXPERIMENTS = ("signals", "fewer", "retrieval", "digits", "cost", "minibatches", "many")
Job = tuple[str, Callable[..., dict[str, Any]], dict[str, Any]]

INTRODUCTION = """# Spike and slab GP-LVM (2015)

Made on {date}, {machine}. All settings are defaults unless said.

    python -m tests.papers.experiments.spike_slab_gplvm --experiments signals fewer retrieval digits cost minibatches many
"""
SIGNALS = """
## Section 5.1: three signals

Fifty points; views of 12 outputs through standard normal maps; five latent dimensions; data seed `n` in run `n`.
A pattern is right if two dimensions are on (SSGPLVM), or one is private to each view and one shared (SSMRD). Signals: correlation above 0.95.
Long initial length-scales were decided after SSMRD with RBF kernels had failed on seed 0 at noise 0.1.

| model | kernel | noise | start | runs | by switches: pattern / and signals | effective: pattern / and signals | correlation, least / median | bound, median | CPU s, median |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
SIGNALS_REFERENCE = """
GPy 1.15, linear kernels, noise 0.1: SSGPLVM 10 of 10 (principal components), 0 of 10 (random); SSMRD 0 (default), 4 (joint components), 0 of 10 (random).
"""
FEWER = """
The paper used linear kernels. With an RBF kernel the bound prefers fewer latents:

| model | noise | seed | fewer latents: number, bound | principal components: number, bound |
| --- | --- | --- | --- | --- |
"""
RETRIEVAL = """
## Section 5.3: Wikipedia, images and texts

Mean average precision over the 2173 training articles. All 693 test articles, last column the 349 that are at hand. One run each, not stored.

| method | topics seen | image query | text query | average | average, queries at hand |
| --- | --- | --- | --- | --- | --- |
| SSMRD from principal components | none | 0.175 | 0.445 | 0.310 | 0.308 (84 CPU s) |
| canonical correlations, 9 dimensions, cosine | none | 0.212 | 0.197 | 0.204 | 0.203 |
| SSMRD from labels: latents never trained | those of stored articles | 0.330 | 0.699 | 0.514 | 0.513 (30 CPU s) |
| after 40 free iterations (the first row of the next table) | those of stored articles | 0.254 | 0.593 | 0.424 | 0.417 |
| with 100 more free iterations | those of stored articles | 0.156 | 0.492 | 0.324 | not made |
| with 200 more, the bound still rising | those of stored articles | 0.165 | 0.474 | 0.319 | not made |
| logistic regression of each view | those of stored articles | 0.379 | 0.755 | 0.567 | 0.569 |

{text}

| method | image query | text query | average |
| --- | --- | --- | --- |
"""
RETRIEVAL_TEXT = (
    """The published label start is an early stop: precision falls as training goes on (Q=10, {inducing} inducing inputs per view, RBF)."""
)
DIGITS = """
## Section 5.2: ones, sevens and nines of MNIST

The paper uses 10 of 20 dimensions. This model wants every dimension it is given, on unseen images as well.

| images per class | inducing inputs | CPU s | dimensions used of 20 | accuracy by switches | best accuracy by a length-scale threshold (dimensions) | accuracy on pixels | reconstruction error (spread of the data) |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
DIGITS_TEXT = """
300 images, M=50, tested on official test images (one run each, not stored):

| training | dimensions on | bound | bound per test image | error of test images | nearest neighbour |
| --- | --- | --- | --- | --- | --- |
| `fit`, Q=5 | 5 | 126574 | 296 | 0.142 | 0.928 |
| `fit`, Q=10 | 10 | 136783 | 357 | 0.129 | 0.904 |
| `fit`, Q=20 | 20 | 148943 | 410 | 0.116 | 0.921 |
| `fit`, Q=30 | 30 | 154467 | 446 | 0.107 | 0.909 |
| Q=20, prior 0.5, switches by gradient from 0.5 | 20 | 149897 | 426 | 0.117 | 0.917 |
| Q=20, switches by gradient from 0.1 | 4 | 110078 | 245 | 0.155 | 0.906 |
"""


COST = """
## Cost

CPU seconds of one bound with its gradient, one thread (least of three), RBF kernel, 12 outputs. GPy 1.15 was measured on another machine of the same kind.

| N | M | Q | CPU s, switches uncertain | switches on | plain torch | memory, GB | beyond the imports, GB | GPy: CPU s, GB |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
MINIBATCHES = """
`fit_minibatches` (1000 points, quadratic outputs, Q=5, M=30, 200 points a step). `fit` reaches {bound:.0f} in {seconds:.1f} CPU s from the same start ({first:.0f}).

| steps | CPU s | bound | distance, % of the collapsed bound | share of the gain from the start |
| --- | --- | --- | --- | --- |
"""


def signal_jobs(seeds: int, kernels: list[str]) -> Iterator[Job]:
    """All settings of section 5.1, seeds in the outer loop."""
    for seed, kernel, model, noise, start in itertools.product(range(seeds), kernels, ("SSGPLVM", "SSMRD"), (0.01, 0.1), ("pca", "random")):
        yield "signals", spike_slab_signals.run, {"model_name": model, "kernel": kernel, "noise": noise, "start": start, "seed": seed}


def run_all(jobs: list[Job], output: Path) -> list[dict[str, Any]]:
    """Makes the runs that the output file does not hold yet, one line each; returns all it holds then."""
    output.parent.mkdir(parents=True, exist_ok=True)
    found = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    done = {result["key"] for result in found}
    for experiment, function, job in jobs:
        key = json.dumps({"experiment": experiment, **job}, sort_keys=True)
        if key in done:
            continue
        found.append({"key": key, **function(**job)})
        with output.open("a") as file:
            file.write(json.dumps(found[-1]) + "\n")
        print({name: value for name, value in found[-1].items() if not isinstance(value, list) and name != "key"}, flush=True)
    return found


def write_tables(results: list[dict[str, Any]], path: Path, machine: str, planned: int) -> None:
    """Writes the tables of all results there are."""
    of = {name: [r for r in results if r["experiment"] == name] for name in EXPERIMENTS}
    text = INTRODUCTION.format(date=datetime.date.today().isoformat(), machine=machine)
    if missing := planned - len(of["signals"]):
        text += f"\n**Incomplete: {missing} of the {planned} runs of section 5.1 have not been made; the column `runs` says how many there are.**\n"
    if of["signals"]:
        text += SIGNALS + "".join(_signal_rows(of["signals"]))
        text += SIGNALS_REFERENCE
    if of["fewer"]:
        text += FEWER + "".join(_fewer_rows(of["fewer"], of["signals"]))
    if of["retrieval"]:
        text += _retrieval(of["retrieval"])
    if of["digits"]:
        text += DIGITS + "".join(map(_digit_row, of["digits"])) + DIGITS_TEXT
    for name, describe in (("cost", _cost), ("minibatches", _minibatches), ("many", _many)):
        if of[name]:
            text += describe(of[name])
    path.write_text(text)


def _signal_rows(results: list[dict[str, Any]]) -> Iterator[str]:
    def setting(r: dict[str, Any]) -> tuple[Any, ...]:
        return r["model"], r["kernel"], r["noise"], r["start"]

    for (model, kernel, noise, start), group in itertools.groupby(sorted(results, key=setting), setting):
        runs = list(group)
        cells = []
        for name in ("gamma", "effective"):
            right = sum(r[f"{name}_pattern"] for r in runs)
            recovered = sum(r[f"{name}_pattern"] and r[f"{name}_correlation"] > spike_slab_signals.CORRELATION for r in runs)
            cells.append(f"{right} / {recovered}")
        correlations = [r["effective_correlation"] for r in runs]
        bound, seconds = (statistics.median(r[name] for r in runs) for name in ("bound", "seconds"))
        spread = f"{_down(min(correlations))} / {_down(statistics.median(correlations))}"
        yield f"| {model} | {kernel} | {noise} | {start} | {len(runs)} | {cells[0]} | {cells[1]} | {spread} | {bound:.1f} | {seconds:.1f} |\n"


def is_curved(r: dict[str, Any]) -> bool:
    """Whether the first view has two dimensions on and the second view one of these."""
    if r["model"] != "SSMRD" or r["kernel"] != "rbf":
        return False
    first, second = ({q for q, probability in enumerate(row) if probability > 0.5} for row in r["gamma"])
    return len(first) == 2 and len(second) == 1 and second < first


def _cost(results: list[dict[str, Any]]) -> str:
    rows = []
    for r in results:
        sizes = " | ".join(map(str, r["size"]))
        reference = spike_slab_cost.REFERENCE.get(r["size"][0]) if r["size"][1:] == [50, 10] else None
        others = "" if reference is None else f"{reference[0]}, {reference[1]}"
        seconds = " | ".join(f"{r[name]:.3f}" for name in ("seconds", "seconds_on", "seconds_plain"))
        rows.append(f"| {sizes} | {seconds} | {r['memory']:.2f} | {r['memory_own']:.2f} | {others} |\n")
    return COST + "".join(rows)


def _minibatches(results: list[dict[str, Any]]) -> str:
    r = results[-1]
    rows = [
        f"| {steps} | {seconds:.1f} | {reached:.0f} | {100 * (r['bound'] - reached) / abs(r['bound']):.2f} "
        f"| {_down((reached - r['first']) / (r['bound'] - r['first']))} |\n"
        for steps, seconds, reached in r["history"]
    ]
    text = MINIBATCHES.format(**{name: r[name] for name in ("first", "bound", "seconds")}) + "".join(rows)
    steps, _, reached = r["history"][-1]
    if reached < r["bound"] - 0.01 * abs(r["bound"]):
        text += f"\n**1 % has not been reached within {steps} steps.**\n"
    return text


def _many(results: list[dict[str, Any]]) -> str:
    r = results[-1]
    start, *epochs = r["history"]
    trained = "; ".join(f"epoch {number}: {seconds:.1f} CPU s, {bound:.1f}" for number, (seconds, bound) in enumerate(epochs, 1))
    return (
        f"\nAll {r['num_data']} training images of MNIST (784 outputs, Q=10, M=50, {r['batch_size']} images a step). Start: {start[0]:.1f} CPU s, "
        f"bound per image {start[1]:.1f}; {trained}. Peak memory {r['memory']:.2f} GB beyond the imports and the images.\n"
    )


def _down(value: float) -> str:
    """Three decimals, never rounded up."""
    return f"{math.floor(1000 * value) / 1000:.3f}"


def _fewer_rows(results: list[dict[str, Any]], signals: list[dict[str, Any]]) -> Iterator[str]:
    def described(r: dict[str, Any]) -> str:
        on = sum(max(column) > 0.5 for column in zip(*r["gamma"], strict=True))
        return f"{on}, {r['bound']:.1f}"

    others = {(r["model"], r["noise"], r["seed"]): described(r) for r in signals if (r["kernel"], r["start"]) == ("rbf", "pca")}
    for r in results:
        beside = others.get((r["model"], r["noise"], r["seed"]), "not run")
        yield f"| {r['model']} | {r['noise']} | {r['seed']} | {described(r)} | {beside} |\n"


def _retrieval(results: list[dict[str, Any]]) -> str:
    last = results[-1]
    names = ("num_data", "steps", "rounds", "noise_share")
    described = RETRIEVAL_TEXT.format(**{name: last[name] for name in names}, inducing=spike_slab_retrieval.NUM_INDUCING)
    ours = " | ".join(_down(last[name]) for name in ("image", "text", "average"))
    rows = [f"| this library, SSMRD | {ours} |\n"]
    rows += [f"| {name} | {i:.3f} | {t:.3f} | {a:.3f} |\n" for name, (i, t, a) in spike_slab_retrieval.PAPER.items()]
    return (
        RETRIEVAL.format(text=described)
        + "".join(rows)
        + f"\nOne run, {last['seconds']:.0f} CPU s, whose settings were in the script before it was made. The other rows are the paper's table 1.\n"
    )


def _digit_row(r: dict[str, Any]) -> str:
    best = max(r["by_threshold"])
    return (
        f"| {r['per_class']} | {r['num_inducing']} | {r['seconds']:.0f} | {r['used']} | {_down(r['accuracy'])} | {_down(best)} "
        f"({r['by_threshold'].index(best) + 1}) | {_down(r['pixels'])} | {r['error']:.3f} ({r['spread']:.3f}) |\n"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--experiments", nargs="+", default=["signals"], choices=EXPERIMENTS)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--kernels", nargs="+", default=["linear", "rbf"], choices=["linear", "rbf"])
    parser.add_argument("--images", type=int, default=1000, help="digits of each class")
    parser.add_argument("--output", type=Path, default=RESULTS / "spike_slab_gplvm.jsonl")
    parser.add_argument("--table", type=Path, default=RESULTS / "spike_slab_gplvm.md")
    parser.add_argument("--machine", default="2 cores of a shared x86 server, no GPU")
    parser.add_argument("--only-table", action="store_true", help="write the tables of the runs that the output file holds")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    jobs: list[Job] = []
    if "signals" in args.experiments:
        jobs += signal_jobs(args.seeds, args.kernels)
    if "fewer" in args.experiments:
        jobs += [
            ("fewer", spike_slab_signals.run_fewer, {"model_name": model, "noise": noise, "seed": seed})
            for model, noise, seed in itertools.product(("SSGPLVM", "SSMRD"), (0.01, 0.1), range(3))
        ]
    if "retrieval" in args.experiments:
        jobs.append(("retrieval", spike_slab_retrieval.run, {}))
    if "digits" in args.experiments:
        jobs.append(("digits", spike_slab_digits.run, {"per_class": args.images}))
    if "cost" in args.experiments:
        names = ("num_data", "num_inducing", "num_latents")
        jobs += [("cost", spike_slab_cost.run_bound, dict(zip(names, size, strict=True))) for size in spike_slab_cost.SIZES]
    if "minibatches" in args.experiments:
        jobs.append(("minibatches", spike_slab_cost.run_minibatches, {}))
    if "many" in args.experiments:
        jobs.append(("many", spike_slab_cost.run_many, {}))
    results = run_all([] if args.only_table else jobs, args.output)
    write_tables(results, args.table, args.machine, len(list(signal_jobs(10, ["linear", "rbf"]))))


if __name__ == "__main__":
    main()
