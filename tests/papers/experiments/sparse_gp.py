# ruff: noqa: E501
"""Reproduces the experiments of "Efficient Optimization for Sparse Gaussian Process Regression" (Cao et al., PAMI 2015) on data at hand.

    python -m tests.papers.experiments.sparse_gp --experiment lipophilicity kin40k --splits 3

Every method learns inducing inputs and hyper-parameters from the same start within the same CPU time.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import json
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_truncated.gp import (
    AllNoiseWarning,
    ExchangeSearch,
    RandomSearch,
    RestrictedKernel,
    SubsetGPRegression,
    smooth_rbf,
)
from pyro_truncated.ops.components import k_means
from tests.papers.baselines.cholqr import CholQRSearch
from tests.papers.baselines.greedy import GreedyVarianceSearch, InformativeVectorSearch, KMeansSearch, TitsiasSearch
from tests.papers.experiments.sparse_gp_data import (
    Split,
    esol,
    hog,
    kin40k,
    lipophilicity,
    photoswitch,
    pol,
    pumadyn32nm,
    sarcos,
    snelson,
    thrombin,
)

RESULTS = Path(__file__).parents[1] / "results"


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to choose inducing inputs, and options of :class:`SubsetGPRegression` and its ``fit``."""

    search: Callable[[], Any]
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)


METHODS = {
    "random": Method(RandomSearch),
    "greedy variance, re-selected": Method(GreedyVarianceSearch),
    "IVM, re-selected": Method(InformativeVectorSearch),
    "Titsias-16": Method(TitsiasSearch),
    "Titsias-16, FITC": Method(TitsiasSearch, model={"objective": "fitc"}),
    "Titsias-16, PP": Method(TitsiasSearch, model={"objective": "pp"}),
    "Titsias-512": Method(lambda: TitsiasSearch(512)),
    "CholQR-z16": Method(CholQRSearch, fit={"attempts_per_epoch": 15}),
    "CholQR-z128": Method(lambda: CholQRSearch(128), fit={"attempts_per_epoch": 15}),
    "CholQR-z64, OI": Method(lambda: CholQRSearch(64, pivots="optimized"), fit={"attempts_per_epoch": 15}),
    "CholQR-z64, AA": Method(lambda: CholQRSearch(64, adaptive=True), fit={"attempts_per_epoch": 15}),
    "exchange": Method(ExchangeSearch),
    "exchange, samples of rows": Method(ExchangeSearch, fit={"max_rows": 2000}),
    "exchange, PP": Method(ExchangeSearch, model={"objective": "pp"}),
    "exchange, FITC": Method(ExchangeSearch, model={"objective": "fitc"}),
    "subset of data": Method(RandomSearch),
    "exact, default": Method(ExchangeSearch),
    "k-means, then free": Method(KMeansSearch, fit={"free_inputs": True, "subset_share": 0.02, "free_input_evaluations": 10_000}),
    "exchange, then free": Method(ExchangeSearch, fit={"free_inputs": True, "subset_share": 0.2, "free_input_evaluations": 10_000}),
    "FITC, free": Method(
        KMeansSearch, {"objective": "fitc"}, {"free_inputs": True, "subset_share": 0.02, "free_input_evaluations": 10_000}
    ),
    "defaults, then free": Method(ExchangeSearch, fit={"free_inputs": True}),
    "GPyTorch SGPR": Method(KMeansSearch),
    "GPyTorch SGPR, random start": Method(RandomSearch),
}
GREEDY = ["greedy variance, re-selected", "IVM, re-selected"]
OBJECTIVES = ["exchange", "exchange, FITC", "exchange, PP", "Titsias-16", "Titsias-16, FITC", "Titsias-16, PP"]
DISCRETE = [*OBJECTIVES, "CholQR-z16", "random", *GREEDY, "subset of data"]
# Beyond 128 inputs, one subset by 512 candidates each takes several times the budget.
THOROUGH = {m: [*DISCRETE, "Titsias-512"] for m in (16, 32, 64, 128)}
EXACT = {0: ["exact, default"]}
UNSEEN = ["defaults, then free", "GPyTorch SGPR, random start"]
VARIANTS = ["CholQR-z128", "CholQR-z64, OI", "CholQR-z64, AA"]
CONTINUOUS = [
    "exchange, then free", "defaults, then free", "GPyTorch SGPR", "GPyTorch SGPR, random start", "k-means, then free", "exchange",
    "exchange, samples of rows", "CholQR-z16", "Titsias-16", "random",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A data set, the methods that are compared on it, and CPU seconds by number of inducing inputs; 0 of them is an exact regression."""

    data: Callable[[int], Split]
    methods: list[str]
    seconds: dict[int, float]
    others: dict[int, list[str]] = dataclasses.field(default_factory=dict)


EXPERIMENTS = {
    "lipophilicity": Experiment(lipophilicity, DISCRETE, {16: 1.0, 32: 2.0, 64: 3.0, 128: 4.0, 256: 6.0, 512: 10.0}, THOROUGH),
    "esol": Experiment(esol, DISCRETE, {16: 0.5, 32: 0.5, 64: 1.0, 128: 1.5, 256: 2.0, 512: 3.0, 0: math.inf}, THOROUGH | EXACT),
    "thrombin": Experiment(thrombin, DISCRETE, {16: 3.0, 32: 4.0, 64: 6.0, 128: 8.0, 256: 12.0, 512: 20.0, 0: math.inf}, THOROUGH | EXACT),
    "hog": Experiment(
        hog,
        DISCRETE,
        {16: 0.5, 32: 1.0, 64: 1.5, 128: 2.0, 256: 3.0, 512: 4.0, 0: math.inf},
        THOROUGH | {128: [*THOROUGH[128], *VARIANTS]} | EXACT,
    ),
    "kin40k": Experiment(
        kin40k,
        CONTINUOUS,
        {32: 6.0, 128: 15.0, 512: 50.0},
        {32: [*CONTINUOUS, *GREEDY, "subset of data", "exchange, PP", "FITC, free"]},
    ),
    "snelson": Experiment(snelson, ["random", "CholQR-z16", "exchange", "exchange, then free", "FITC, free"], {10: 4.0}),
    "pol": Experiment(pol, UNSEEN, {128: 15.0}),
    "pumadyn32nm": Experiment(pumadyn32nm, UNSEEN, {128: 15.0}),
    "sarcos": Experiment(sarcos, UNSEEN, {128: 15.0, 0: math.inf}, EXACT),
    "photoswitch": Experiment(photoswitch, OBJECTIVES, {16: 0.5, 64: 1.0, 0: math.inf}, EXACT),
}


def scores(split: Split, mean: Tensor, variance: Tensor) -> tuple[float, float]:
    """SMSE, and SNLP (equation 22)."""
    error = (split.y_new - mean).square()
    base = (split.y_new - split.y.mean()).square()
    own = 0.5 * (variance.log() + error / variance)
    trivial = 0.5 * (split.y.var().log() + base / split.y.var())
    return float(error.mean() / split.y_new.var()), float((own - trivial).mean())


def run(name: str, method: str, m: int, seed: int, seconds: float | None = None) -> dict[str, Any]:
    """One run: scores, objective, and CPU seconds used."""
    experiment, options = EXPERIMENTS[name], METHODS[method]
    seconds = experiment.seconds[m] if seconds is None else seconds
    split = experiment.data(seed)
    pyro.set_rng_seed(1000 + seed)
    warm_up()
    generator = torch.Generator().manual_seed(seed)
    start = time.process_time()
    if method.startswith("GPyTorch"):
        mean, variance, value, used = gpytorch_sgpr(split, m, seconds, generator, is_random=method.endswith("random start"))
        return _row(name, method, m, seed, *scores(split, mean, variance), value, used)
    kernel, y = split.kernel(), split.y
    if method == "subset of data":
        rows = torch.randperm(len(y), generator=generator)[:m]
        kernel, y = RestrictedKernel(kernel, rows), y[rows]
    model = SubsetGPRegression(kernel, y, num_inducing=m or None, algorithm=options.search(), generator=generator, **options.model)
    if name == "snelson":
        # Figure 4: all inducing inputs start at the left end.
        model.index.copy_(_leftmost(kernel)[:m])
    with warnings.catch_warnings():
        # A collapse to noise is a result here: it shows in the scores.
        warnings.simplefilter("ignore", AllNoiseWarning)
        # Exact regressions are fitted as they are by default.
        limits = {"max_seconds": seconds, "max_epochs": 10_000} if m else {}
        value = model.fit(clock=time.process_time, **limits, **options.fit)
    used = time.process_time() - start
    return _row(name, method, m, seed, *scores(split, *model.predict(split.new)), value, used)


@functools.cache
def warm_up() -> None:
    """Pays for what torch imports when its first optimiser is made, which is no method's own time."""
    X = torch.linspace(0, 1, 20, dtype=torch.float64)[:, None]
    SubsetGPRegression(smooth_rbf(X), X.squeeze(1).sin(), num_inducing=3).fit(max_epochs=1, free_inputs=True, free_input_evaluations=2)
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])


def _leftmost(kernel: Any) -> Tensor:
    order: Tensor = kernel.inputs.flatten().argsort()
    return order


def _row(name: str, method: str, m: int, seed: int, smse: float, snlp: float, objective: float, seconds: float) -> dict[str, Any]:
    return {
        "experiment": name, "method": method, "m": m, "seed": seed, "smse": smse, "snlp": snlp, "objective": objective, "seconds": seconds,
    }  # fmt: skip


def gpytorch_sgpr(
    split: Split, m: int, seconds: float, generator: torch.Generator, is_random: bool = False
) -> tuple[Tensor, Tensor, float, float]:
    """GPyTorch's SGPR, all parameters by Adam: predictions, objective and seconds.

    From k-means centres, our other methods' start, steps of 0.05 and float32; or from random inputs, its own start, steps of 0.1 and
    float64, which is the stronger one.
    """
    gpytorch = importlib.import_module("gpytorch")
    kernel: Any = split.kernel()
    dtype = torch.float64 if is_random else torch.float32
    X, mean, scale = kernel.inputs.to(dtype), split.y.mean(), split.y.std()
    y = ((split.y - mean) / scale).to(dtype)
    start = time.process_time()

    class Model(gpytorch.models.ExactGP):  # type: ignore[misc, name-defined]
        def __init__(self, likelihood: Any) -> None:
            super().__init__(X, y, likelihood)
            self.mean_module = gpytorch.means.ZeroMean()
            base = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=X.shape[1]))
            inducing = X[torch.randperm(len(X), generator=generator)[:m]]
            if not is_random:
                base.outputscale, base.base_kernel.lengthscale = 1.0, 2 * X.shape[1] ** 0.5
                inducing = k_means(X, inducing)
            self.covar_module = gpytorch.kernels.InducingPointKernel(base, inducing, likelihood)

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    if not is_random:
        likelihood.noise = 0.5
    model = Model(likelihood).to(dtype)
    likelihood.to(dtype)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 if is_random else 0.05)
    model.train(), likelihood.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while time.process_time() - start < seconds:
            optimizer.zero_grad()
            loss = -objective(model(X), y)
            loss.backward()
            optimizer.step()
        used = time.process_time() - start
        value = len(y) * (float(loss.detach()) - 0.5 * math.log(2 * math.pi))
        model.eval(), likelihood.eval()
        with torch.no_grad():
            found = likelihood(model(split.new.to(dtype)))
            return found.mean.double() * scale + mean, found.variance.double() * scale**2, value, used


def jobs_of(names: list[str], splits: int) -> list[tuple[str, str, int, int]]:
    """Splits in the outer loop, so that a run that is cut short leaves whole rows."""
    return [
        (name, method, m, seed)
        for seed in range(splits)
        for name in names
        for m in EXPERIMENTS[name].seconds
        for method in EXPERIMENTS[name].others.get(m, EXPERIMENTS[name].methods)
    ]


def done(output: Path) -> list[dict[str, Any]]:
    """Runs of an output file."""
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def run_all(jobs: list[tuple[str, str, int, int]], output: Path) -> None:
    """Makes all runs that the output file lacks; results are appended as they come."""
    known = {(r["experiment"], r["method"], r["m"], r["seed"]) for r in done(output)}
    has_gpytorch = importlib.util.find_spec("gpytorch") is not None
    for job in jobs:
        if job in known or (job[1].startswith("GPyTorch") and not has_gpytorch):
            continue
        result = run(*job)
        with output.open("a") as file:
            file.write(json.dumps(result) + "\n")


def _cell(values: list[float], digits: int) -> str:
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def table(name: str, results: list[dict[str, Any]]) -> list[str]:
    """Markdown lines: a row per number of inducing inputs and method."""
    rows = [r for r in results if r["experiment"] == name]
    lines = [f"## {name}", "", (EXPERIMENTS[name].data.__doc__ or "").strip(), ""]
    lines += ["| m | method | runs | SMSE | SNLP | objective | CPU seconds |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for m in EXPERIMENTS[name].seconds:
        groups = {method: [r for r in rows if r["m"] == m and r["method"] == method] for method in METHODS}
        groups = {method: group for method, group in groups.items() if group}
        shared = set.intersection(*({r["seed"] for r in group} for group in groups.values())) if groups else set()
        means = {method: statistics.mean(r["smse"] for r in group if r["seed"] in shared) for method, group in groups.items()}
        for method, group in groups.items():
            mark = "**" if means[method] == min(means.values()) else ""
            cells = (_cell([r[key] for r in group], digits) for key, digits in (("smse", 4), ("snlp", 3), ("objective", 0), ("seconds", 1)))
            lines.append(f"| {m or 'all'} | {mark}{method}{mark} | {len(group)} | {' | '.join(cells)} |")
    return [*lines, ""]


SETTINGS = """# Sparse GP regression with an optimised inducing subset (PAMI 2015)

Figures 2 to 5 of the paper as tables. Molecules stand in for BindingDB, HoG features of objects for HumanEva.

| setting | value |
| --- | --- |
| start | noise 0.5 (of standardised targets), unit variance, length-scales 2 sqrt(D) |
| objective | variational free energy unless said, in nats without its constant |
| budget | the same CPU seconds, one thread each; kernel matrices of molecules and histograms are given |
| *CholQR*, *exchange* | the paper's algorithm in this library, and the default |
| *samples of rows* | each alternation looks at 2000 data points or more |
| *free* | inducing inputs follow gradients; GPyTorch's SGPR: float32, Adam 0.05, k-means; *random start*: float64, 0.1, its own hyper-parameters |
| *FITC* | hyper-parameters by the FITC likelihood |
| ± | standard deviations over splits; bold: smallest mean SMSE of each m |
"""


def write_tables(results: list[dict[str, Any]], file: Path, machine: str, remark: str = "") -> None:
    """Writes the results file."""
    lines = [SETTINGS, f"Made on {time.strftime('%Y-%m-%d')}, {machine}, by", "", "    python -m tests.papers.experiments.sparse_gp", ""]
    lines += [remark, ""] if remark else []
    planned = jobs_of(list(EXPERIMENTS), 3)
    known = {(r["experiment"], r["method"], r["m"], r["seed"]) for r in results}
    if missing := [job for job in planned if job not in known]:
        lines += [f"**Incomplete: {len(missing)} of {len(planned)} planned runs have not been made;** see column `runs`.", ""]
    for name in EXPERIMENTS:
        if any(r["experiment"] == name for r in results):
            lines += table(name, results)
    file.write_text("\n".join(lines).rstrip() + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiment", nargs="+", default=list(EXPERIMENTS), choices=list(EXPERIMENTS))
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--method", nargs="+", choices=list(METHODS), help="only these")
    parser.add_argument("--inducing", nargs="+", type=int, help="only these numbers of inducing inputs")
    parser.add_argument("--output", type=Path, default=RESULTS / "sparse_gp.jsonl")
    parser.add_argument("--table", type=Path, default=RESULTS / "sparse_gp.md")
    parser.add_argument("--remark", default="", help="words to put above the tables")
    parser.add_argument("--machine", default=f"a machine of {os.cpu_count()} CPU cores", help="the machine in words")
    parser.add_argument("--only-table", action="store_true", help="write the table of the results already in the output file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.only_table:
        jobs = jobs_of(args.experiment, args.splits)
        run_all([job for job in jobs if job[1] in (args.method or METHODS) and job[2] in (args.inducing or {job[2]})], args.output)
    write_tables(done(args.output), args.table, args.machine, args.remark)


if __name__ == "__main__":
    main()
