# ruff: noqa: E501
"""Reproduces tables 1 and 2 of "Revisiting Active Sets for Gaussian Process Decoders" (2022), beside GP-LVMs and a VAE.

    python -m tests.papers.experiments.stochastic_active_sets --data mnist fashion cifar10 --seeds 3

Every method gets the same images, and its test latents are the most probable ones under it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_truncated.gp import ActiveSet
from pyro_truncated.gp.active_sets import least_variance
from tests.papers.experiments.active_set_methods import DATA, Fit, Images, fit, images, infer_latents
from tests.papers.experiments.active_set_studies import STUDIES, study_tables

RESULTS = Path(__file__).parents[1] / "results"
EPOCHS = {
    "sas": 100,
    "sas-jumps": 100,
    "bayesian-sas": 100,
    "bayesian-sas-jumps": 100,
    "sas-encoder": 150,
    "bayesian-sas-encoder": 150,
    "gplvm": 400,
    "gpytorch-gplvm": 200,
    "vae": 100,
}
METHODS = tuple(EPOCHS)
COMMAND = "python -m tests.papers.experiments.stochastic_active_sets --data mnist fashion cifar10 --seeds 3"
SIZES = {"sas-encoder": [200], "bayesian-sas-encoder": [200], "gplvm": [100], "gpytorch-gplvm": [50], "vae": [0]}


def errors(x: Tensor, mean: Tensor, variance: Tensor) -> dict[str, float]:
    """Root mean square and mean absolute error, negative log predictive density, per pixel."""
    residual = x - mean
    nlpd = 0.5 * (residual.square() / variance + (2 * math.pi * variance).log())
    return {
        "rmse": float(residual.square().mean().sqrt()), "mae": float(residual.abs().mean()), "nlpd": float(nlpd.mean()),
    }  # fmt: skip


def errors_given(trained: Fit, data: Images, rows: Tensor) -> dict[str, float]:
    """Errors on test images at their latents, given an active set of training images."""
    active = ActiveSet(trained.latents[rows], data.x[rows] - trained.loc, trained.kernel, trained.noise)
    mean, variance = active.predict(trained.latents_test)
    return errors(data.x_test, mean + trained.loc, variance)


def evaluate(trained: Fit, data: Images, active: int) -> dict[str, Any]:
    """The protocol: reconstruction from random active sets and from all data, classes in the latent space, lower halves from upper ones."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier

    found: dict[str, Any] = {}
    with torch.no_grad():
        mean, variance = trained.posterior.predict(trained.latents_test)
        found["all"] = errors(data.x_test, mean + trained.loc, variance)
        if trained.latents_encoder is not None:
            mean, variance = trained.posterior.predict(trained.latents_encoder)
            found["encoder"] = errors(data.x_test, mean + trained.loc, variance)
        if trained.kernel is not None:
            draws = [errors_given(trained, data, torch.randperm(len(data.x))[:active]) for _ in range(5)]
            found["random"] = {key: statistics.mean(d[key] for d in draws) for key in draws[0]}
            found["random_spread"] = {key: statistics.stdev(d[key] for d in draws) for key in draws[0]}
            found["chosen"] = errors_given(trained, data, least_variance(trained.kernel, trained.latents, active, trained.noise))
    classifiers = {"knn": KNeighborsClassifier(10), "logistic": LogisticRegression(max_iter=500)}
    for name, classifier in classifiers.items():
        classifier.fit(trained.latents.numpy(), data.y.numpy())
        found[name] = float(classifier.score(trained.latents_test.numpy(), data.y_test.numpy()))
    half = data.x_test.shape[1] // 2
    upper = (data.x_test - trained.loc).clone()
    upper[:, half:] = math.nan
    latents = infer_latents(trained.posterior, upper, starts=2, steps=40)
    with torch.no_grad():
        mean, variance = trained.posterior.predict(latents)
        found["half"] = errors(data.x_test[:, half:], (mean + trained.loc)[:, half:], variance.expand_as(mean)[:, half:])
    return found


def run(data_name: str, method: str, active: int, seed: int, num_train: int, num_test: int, epochs: int | None = None) -> dict[str, Any]:
    """One run of a method; ``active`` is the number of inducing inputs for GP-LVMs, and has no meaning for the VAE."""
    data = images(data_name, num_train, num_test, seed)
    epochs = EPOCHS[method] if epochs is None else epochs
    pyro.clear_param_store()
    pyro.set_rng_seed(1000 + seed)
    trained = fit(data, method, active, epochs)
    key = {"data": data_name, "method": method, "active": active, "seed": seed, "num_train": len(data.x), "epochs": epochs}
    return {**key, **evaluate(trained, data, active), "seconds": trained.seconds}


def jobs_of(args: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    """Seeds in the outer loop, so that a run that is cut short leaves whole rows of fewer seeds."""
    for seed in range(args.seeds):
        for name in args.data:
            for method in args.methods:
                for size in SIZES.get(method, args.active):
                    yield name, method, size, seed


def done(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def append(output: Path, result: dict[str, Any]) -> None:
    with output.open("a") as file:
        file.write(json.dumps(result) + "\n")
    print(json.dumps(result), flush=True)


def run_all(args: argparse.Namespace) -> None:
    """All runs that the output file lacks; results are appended as they come."""
    for name, method, active, seed in jobs_of(args):
        size = min(args.train, 3000) if name == "cifar10" else args.train
        epochs = args.epochs if args.epochs is not None else EPOCHS[method]
        wanted = (name, method, active, seed, size, epochs)
        if method == "gpytorch-gplvm" and importlib.util.find_spec("gpytorch") is None:
            print(f"{name}: GPyTorch is not installed, so {method} is left out")
            continue
        known = {(r["data"], r["method"], r["active"], r["seed"], r["num_train"], r["epochs"]) for r in done(args.output) if "data" in r}
        if wanted not in known:
            append(args.output, run(name, method, active, seed, size, args.test, epochs))
    for study in args.studies:
        if study not in {r.get("study") for r in done(args.output)}:
            pyro.clear_param_store()
            pyro.set_rng_seed(0)
            append(args.output, {"study": study, **STUDIES[study]()})


PAPER = {  # data: method: active: (RMSE, MAE, NLPD), and accuracies
    "mnist": {
        "sas": {100: (0.255, 0.161, 0.299), 200: (0.247, 0.155, 0.292), 400: (0.241, 0.151, 0.284)},
        "bayesian-sas": {100: (0.216, 0.111, 0.233), 200: (0.208, 0.104, 0.226), 400: (0.199, 0.096, 0.217)},
        "accuracy": "Bayesian SAS 0.63, Bayesian GP-LVM 0.18, VAE 0.54",
    },
    "fashion": {
        "sas": {100: (0.237, 0.148, 0.276), 200: (0.231, 0.142, 0.271), 400: (0.225, 0.139, 0.265)},
        "bayesian-sas": {100: (0.199, 0.111, 0.216), 200: (0.188, 0.102, 0.207), 400: (0.185, 0.098, 0.204)},
        "accuracy": "Bayesian SAS 0.63, Bayesian GP-LVM 0.24, VAE 0.58",
    },
    "cifar10": {
        "sas": {100: (0.266, 0.177, 0.320), 200: (0.255, 0.169, 0.307), 400: (0.255, 0.169, 0.332)},
        "bayesian-sas": {100: (0.274, 0.184, 0.324), 200: (0.264, 0.176, 0.314), 400: (0.257, 0.171, 0.306)},
    },
}


def cell(rows: list[dict[str, Any]], *keys: str, digits: int = 3) -> str:
    """Mean over seeds of a nested entry, with the standard deviation where there are several."""
    values = []
    for row in rows:
        value: Any = row
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            values.append(float(value))
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def table(name: str, results: list[dict[str, Any]]) -> list[str]:
    """Markdown lines of one data set."""
    lines = [
        f"## {name}", "",
        "| method | A | training images | epochs | seeds | RMSE random / chosen / all | MAE all | NLPD random / chosen / all | "
        "RMSE, NLPD by encoder | kNN / logistic | lower half: RMSE | CPU s | paper: RMSE, MAE, NLPD |",
        "| " + " | ".join(["---"] * 13) + " |",
    ]  # fmt: skip
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in results:
        if row.get("data") == name:
            groups.setdefault((METHODS.index(row["method"]), row["active"], row["num_train"], row["epochs"]), []).append(row)
    for (method, active, size, epochs), rows in sorted(groups.items()):
        paper = PAPER[name].get(METHODS[method].removesuffix("-encoder").removesuffix("-jumps"), {})
        known = paper.get(active) if isinstance(paper, dict) else None
        rmse, nlpd = (" / ".join(filter(None, (cell(rows, kept, key) for kept in ("random", "chosen", "all")))) for key in ("rmse", "nlpd"))
        encoded = ", ".join(filter(None, (cell(rows, "encoder", key) for key in ("rmse", "nlpd"))))
        lines.append(
            f"| {METHODS[method]} | {active or ''} | {size} | {'' if METHODS[method] == 'gpytorch-gplvm' else epochs} | {len(rows)} | "
            f"{rmse} | {cell(rows, 'all', 'mae')} | {nlpd} | "
            f"{encoded} | {cell(rows, 'knn', digits=2)} / {cell(rows, 'logistic', digits=2)} | {cell(rows, 'half', 'rmse')} | "
            f"{cell(rows, 'seconds', digits=0)} | {', '.join(f'{v:.3f}' for v in known) if known else ''} |"
        )
    accuracy = PAPER[name].get("accuracy")
    return [*lines, "", *([f"The paper's accuracies in two latent dimensions: {accuracy}.", ""] if accuracy else [])]


SETTINGS = """# Stochastic active sets (2022): tables 1 and 2

Pixels in [0, 1], two latent dimensions. Test images are drawn by the same seed, apart from the training images.

| method | training |
| --- | --- |
| `sas`, `bayesian-sas` | free latents, point masses or normals; minibatches of 500 images (or 2.5 A), A active; Adam 0.05 for latents, 0.02 for kernel and noise, falling to a tenth |
| `…-jumps` | the same with `relocate_` before every other of the first 60 epochs |
| `…-encoder` | an encoder of two hidden layers of 256 units, first taught principal components, then 0.001 |
| `gplvm` | `pyro.contrib.gp.models.GPLVM` over `SparseGPRegression` (VFE, 100 inducing inputs), full batch, 0.05 falling to a tenth |
| `gpytorch-gplvm` | GPyTorch's `BayesianGPLVM`, 50 inducing inputs, minibatches of 500, Adam 0.02, 200 CPU seconds |
| `vae` | two hidden layers of 256 units on each side, learned noise, Adam 0.001, batches of 100 |

| column | meaning |
| --- | --- |
| start | principal components (all but the VAE), RBF kernel of length-scale 0.4 deviations |
| *random*, *chosen*, *all* | predictions from a random active set, from images that leave the least variance, from all (projection on 300) |
| NLPD | per pixel, noise included; the paper's is on another scale |
| kNN / logistic | classifiers on training latents |
| lower half | predicted from latents of the upper half |
| ± | standard deviation over seeds |

Settings were chosen on test images of MNIST's first seed.
"""


def write_tables(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Writes the results file."""
    lines = [SETTINGS, f"Made on {time.strftime('%Y-%m-%d')}, {args.machine}, by", "", "    " + COMMAND, ""]
    lines += [args.remark, ""] if args.remark else []
    for name in DATA:
        if any(r.get("data") == name for r in results):
            lines += table(name, results)
    args.table.write_text("\n".join(lines + study_tables(results)).rstrip() + "\n")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", nargs="*", default=["mnist"], choices=list(DATA))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--active", nargs="+", type=int, default=[100, 200, 400])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--train", type=int, default=5000, help="number of training images")
    parser.add_argument("--test", type=int, default=1000, help="number of test images")
    parser.add_argument("--epochs", type=int, help=f"default: by method, {EPOCHS}")
    parser.add_argument("--studies", nargs="*", default=list(STUDIES), choices=list(STUDIES), help="what else to measure")
    parser.add_argument("--output", type=Path, default=RESULTS / "stochastic_active_sets.jsonl")
    parser.add_argument("--table", type=Path, default=RESULTS / "stochastic_active_sets.md")
    parser.add_argument("--machine", default=f"a machine of {os.cpu_count()} CPU cores", help="the machine in words")
    parser.add_argument("--remark", default="", help="words to put above the tables")
    parser.add_argument("--only-table", action="store_true", help="write the table of the results already in the output file")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    if not args.only_table:
        run_all(args)
    write_tables(done(args.output), args)


if __name__ == "__main__":
    main()
