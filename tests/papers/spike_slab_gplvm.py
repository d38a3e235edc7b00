"""Reproduces the experiments of "Spike and slab Gaussian process latent variable models" (2015).

    python -m tests.papers.spike_slab_gplvm --experiments signals digits retrieval

Finished runs are appended to the output file; a run that it holds is not made again.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.papers import spike_slab_signals

RESULTS = Path(__file__).parent / "results"


def signal_jobs(seeds: int) -> Iterator[dict[str, Any]]:
    """All settings of section 5.1, seeds in the outer loop."""
    settings = itertools.product(range(seeds), ("linear", "rbf"), ("SSGPLVM", "SSMRD"), (0.01, 0.1), ("pca", "random"))
    for seed, kernel, model, noise, start in settings:
        yield {"model_name": model, "kernel": kernel, "noise": noise, "start": start, "seed": seed}


def key_of(experiment: str, job: dict[str, Any]) -> str:
    return json.dumps({"experiment": experiment, **job}, sort_keys=True)


def run_all(jobs: list[tuple[str, Callable[..., dict[str, Any]], dict[str, Any]]], output: Path) -> None:
    """Makes the runs that the output file does not hold yet, one line each."""
    output.parent.mkdir(parents=True, exist_ok=True)
    done = {json.loads(line)["key"] for line in output.read_text().splitlines()} if output.exists() else set()
    for experiment, function, job in jobs:
        key = key_of(experiment, job)
        if key in done:
            continue
        result = {"key": key, **function(**job)}
        with output.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print({name: value for name, value in result.items() if not isinstance(value, list) and name != "key"}, flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--experiments", nargs="+", default=["signals"], choices=["signals"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--kernels", nargs="+", default=["linear", "rbf"], choices=["linear", "rbf"])
    parser.add_argument("--output", type=Path, default=Path("report/spike_slab_gplvm.jsonl"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    jobs = [("signals", spike_slab_signals.run, job) for job in signal_jobs(args.seeds) if job["kernel"] in args.kernels]
    run_all(jobs, args.output)


if __name__ == "__main__":
    main()
