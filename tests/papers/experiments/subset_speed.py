"""Milliseconds per accepted swap of inducing inputs, the default search beside the published algorithm, and a fit to 100 000 inputs.

    python -m tests.papers.experiments.subset_speed

Each line runs both searches from the same random subset on the same data, one thread, CPU time, building the factors not counted.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch

from pyro_truncated.gp import ExchangeSearch, SubsetGPRegression, smooth_rbf
from tests.benchmarks.test_subset_speed import per_swap, problem, surface
from tests.papers.baselines.cholqr import CholQRSearch

RESULTS = Path(__file__).parents[1] / "results"
# Number of inputs, of inducing inputs and of information pivots; whether the published algorithm is run as well.
CASES = [
    (10_000, 32, 16, True),
    (10_000, 128, 16, True),
    (10_000, 128, 128, True),
    (10_000, 512, 16, True),
    (10_000, 512, 128, True),
    (100_000, 128, 16, True),
    (100_000, 512, 128, False),
]
LARGE = (100_000, 512)


def run(n: int, m: int, z: int, published: bool) -> dict[str, Any]:
    """One line of the table."""
    data = problem(n)
    row: dict[str, Any] = {"n": n, "m": m, "z": z}
    searches = {"exchange": (ExchangeSearch(z, max(16, z // 2)), 8)} | ({"published": (CholQRSearch(z), 6)} if published else {})
    for name, (search, attempts) in searches.items():
        per_accepted, per_attempt, fell, swaps = per_swap(search, data, m, attempts)
        row |= {name: {"ms_per_swap": per_accepted, "ms_per_attempt": per_attempt, "swaps": swaps, "attempts": attempts, "fell": fell}}
    return row


def run_large(n: int, m: int, seconds: float) -> dict[str, Any]:
    """A whole fit: subset, hyper-parameters on samples of rows verified on all, predictions."""
    X, y = surface(n + 2000)
    model = SubsetGPRegression(smooth_rbf(X[:n]), y[:n], num_inducing=m, generator=torch.Generator().manual_seed(0))
    start = time.process_time()
    value = model.fit(max_seconds=seconds, clock=time.process_time)
    used = time.process_time() - start
    mean, _ = model.predict(X[n:])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    smse = float((mean - y[n:]).square().mean() / y[n:].var())
    history = [(round(s), phase, round(v)) for s, phase, v in model.history]
    return {"n": n, "m": m, "fit": True, "smse": smse, "objective": value, "seconds": used, "peak_gib": peak, "history": history}


def done(output: Path) -> list[dict[str, Any]]:
    """Rows of an earlier run."""
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def write_table(rows: list[dict[str, Any]], file: Path, machine: str, remark: str = "", date: str | None = None) -> None:
    """Writes the results file."""
    lines = ["# Speed of choosing inducing inputs", "", (__doc__ or "").split("\n\n")[-1].strip(), ""]
    lines += [
        "*Published* is the algorithm of Cao et al. (PAMI 2015): one member out, a ranking by `z` information pivots, one candidate in.",
        "",
    ]
    lines += [f"Made on {date or time.strftime('%Y-%m-%d')}, {machine}, by", "", "    python -m tests.papers.experiments.subset_speed", ""]
    lines += [remark, ""] if remark else []
    lines += ["| n | m | z | exchange: ms per swap (swaps / attempts) | published: ms per swap (swaps / attempts) | ratio | fall of F |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for r in rows:
        if "fit" in r:
            continue
        cells, falls = [], []
        for name in ("exchange", "published"):
            found = r.get(name)
            cells.append("" if found is None else f"{found['ms_per_swap']:.1f} ({found['swaps']} / {found['attempts']})")
            falls.append("" if found is None else f"{found['fell']:.0f}")
        ratio = f"{r['published']['ms_per_swap'] / r['exchange']['ms_per_swap']:.1f}" if "published" in r else ""
        lines.append(f"| {r['n']} | {r['m']} | {r['z']} | {cells[0]} | {cells[1]} | {ratio} | {falls[0]} / {falls[1] or '-'} |")
    for r in rows:
        if "fit" in r:
            lines += [
                "",
                f"A fit to {r['n']} inputs with {r['m']} inducing inputs and its predictions: {r['seconds']:.0f} CPU seconds, SMSE",
            ]
            lines += [
                f"{r['smse']:.3f}, objective {r['objective']:.0f}; peak memory of the process {r['peak_gib']:.1f} GiB. By second, phase and"
            ]
            lines += ["objective of all data: " + ", ".join(f"{s} {phase} {value}" for s, phase, value in r["history"]) + "."]
    file.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="CPU seconds of the fit to 100 000 inputs")
    parser.add_argument("--output", type=Path, default=RESULTS / "subset_speed.jsonl")
    parser.add_argument("--table", type=Path, default=RESULTS / "subset_speed.md")
    parser.add_argument("--machine", default="2 cores of a shared x86 server, no GPU", help="the machine in words")
    parser.add_argument("--date", help="when the runs were made; default: today")
    parser.add_argument("--remark", default="", help="words to put above the table")
    parser.add_argument("--only-table", action="store_true", help="write the table of the results already in the output file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    known = {(r["n"], r["m"], r.get("z")) for r in done(args.output)}
    if not args.only_table:
        for case in CASES:
            if case[:3] not in known:
                _append(args.output, run(*case))
        if (*LARGE, None) not in known:
            _append(args.output, run_large(*LARGE, args.seconds))
    write_table(done(args.output), args.table, args.machine, args.remark, args.date)


def _append(output: Path, row: dict[str, Any]) -> None:
    with output.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
