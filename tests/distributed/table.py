"""The long table: free energies of one to four processes over a hundred steps.

Run as ``python -m tests.distributed.table RESULTS.md``; names of models or their beginnings after the file take these alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.distributed.crew import Crew
from tests.distributed.runs import Run, losses
from tests.models.configurations import CLOSED_FORM, CONFIGURATIONS

NUMBERS = (2, 3, 4)


def runs() -> Iterator[Run]:
    """All data, minibatches and gradients; entries are missing where the model takes that."""
    for name in CLOSED_FORM:
        missing = CONFIGURATIONS[name].takes_missing
        dependent = getattr(CONFIGURATIONS[name].make(torch.float64), "statistics_depend_on_parameters", False)
        yield Run(name, missing=missing, num_data=40, steps=100)
        # Covariances of five data points in five dimensions have few digits left.
        size = 20 if name.startswith("GaussianMixture") else 5
        yield Run(name, missing=missing, minibatch="online" if dependent else "incremental", num_data=40, steps=100, size=size)
    for name in ("BinarySparseCoding-offset", "SpikeSlabSparseCoding-offset", "MaximalCauses", "NoisyOr", "GaussianMixture-full"):
        yield Run(name, missing=CONFIGURATIONS[name].takes_missing, driver="gradient", num_data=40, steps=100)
    yield Run("BinarySparseCoding", missing=True, mutation="sparseflips", num_data=40, steps=100)
    # One data point on every process; fewer than a multiple of the processes.
    yield Run("BinarySparseCoding-offset", num_data=4, steps=100)
    yield Run("NoisyOr", num_data=5, steps=100)


def line(run: Run, crew: Crew) -> str:
    """A row of the table: the largest relative difference of a free energy, and the largest of a parameter, for every number."""
    start = time.monotonic()
    expected, parameters = losses(run)
    cells = []
    for number in NUMBERS:
        ranks = crew.results(number, losses, run)
        free = max(abs(a - b) / abs(a) for found, _ in ranks for a, b in zip(expected, found, strict=True))
        distance = max(float((value - found[name]).abs().max()) for _, found in ranks for name, value in parameters.items())
        cells.append(f"{free:.1e} ({distance:.0e})")
    mode = run.driver if run.driver == "gradient" else run.minibatch or "full batch"
    print(run, cells, f"{time.monotonic() - start:.0f} s", flush=True)
    return f"| {run.model} | {run.num_data} | {'yes' if run.missing else 'no'} | {mode}, {run.mutation} | {' | '.join(cells)} |"


if __name__ == "__main__":
    file, *wanted = sys.argv[1:]
    crew = Crew(4, limit=1800)
    head = "| model | N | missing | M-steps, search | " + " | ".join(f"K = {number}" for number in NUMBERS) + " |"
    with Path(file).open("w") as table:
        table.write(f"{head}\n{'| --- ' * (4 + len(NUMBERS))}|\n")
        for run in runs():
            if run.model.startswith(tuple(wanted) or ""):
                table.write(f"{line(run, crew)}\n")
                table.flush()
    crew.end()
