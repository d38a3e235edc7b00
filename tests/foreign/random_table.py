"""Checks many random models and writes RANDOM.md: ``python -m tests.foreign.random_table [number]``."""

from __future__ import annotations

import collections
import dataclasses
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from tests.foreign.random_check import Finding, check, seeded
from tests.foreign.random_draws import draw
from tests.foreign.random_models import LAYOUTS, Program

PATH = Path(__file__).parent / "RANDOM.md"
TOLERANCE = 1e-8
_HEAD = """\
# Random models

Written by `python -m tests.foreign.random_table {number}` in {minutes:.0f} minutes of CPU time. Each model is one of
`tests/foreign/random_draws.py` in float64, and is compared with brute force: one plain run of the model, in stock distributions, for every
joint state.

- *Wrong*: the loss with all states (by `Truncated_ELBO`, with and without gradients, and by `TraceEnum_ELBO` where it can enumerate the
  model), its gradient in any parameter of model or guide, the posterior marginals, or the loss with half of the states after a search,
  from the brute force over these very states, is off by more than {tolerance:g}, relative to one or to the size of a gradient or bound.
- *Above*: models with a bound above the evidence by more than {tolerance:g}. *Worst*: the largest error of all.
- *Refused*: by a message of ours. *Errors*: anything else.

{models} models, {states} joint states: {wrong} wrong, {above} above the evidence, {refused} refused, {errors} errors. Worst error:
{worst:.0e}.

| kind | models | wrong | above | worst | refused | errors |
| --- | --- | --- | --- | --- | --- | --- |
"""


@dataclasses.dataclass
class Tally:
    """What came of the models of one kind."""

    models: int = 0
    wrong: int = 0
    above: int = 0
    worst: float = 0.0
    refused: int = 0
    errors: int = 0
    states: int = 0

    def add(self, outcome: Finding | Exception) -> None:
        """Counts one more."""
        self.models += 1
        if isinstance(outcome, Exception):
            is_ours = isinstance(outcome, (ValueError, NotImplementedError))
            self.refused, self.errors = self.refused + is_ours, self.errors + (not is_ours)
            return
        self.wrong += not outcome.worst < TOLERANCE
        self.above += not outcome.excess < TOLERANCE
        self.worst = max(self.worst, outcome.worst)
        self.states += outcome.states


def kinds(program: Program) -> Iterator[str]:
    """The lines of the table that a model counts in."""
    yield "all"
    yield f"layout: {next(name for name, layout in LAYOUTS.items() if layout is program.layout)}"
    yield from {f"discrete: {statement.kind}" for statement in program.discrete}
    yield from {f"observed: {statement.kind}" for statement in program.observed}
    hidden = {statement.hidden for statement in (*program.discrete, *program.observed)}
    names = {"points": "masked data points", "entries": "NaN or masked entries", "imputed": "imputed (`obs_mask`)"}
    yield from (f"missing: {text}" for name, text in names.items() if name in hidden)
    if program.continuous == "collapsed":
        yield "continuous: exact `conditional`"
    elif program.continuous is not None:
        yield f"continuous: {program.continuous}, {program.part}{', scaled' if program.scale != 1 else ''}"
    if program.subsample is not None or program.is_minibatch:
        yield f"minibatch: {'drawn by the model' if program.is_minibatch else 'given'}"
    if program.has_factor:
        yield "factor"
    style = {None: "vectorised", "left": "shapes from the left", "branch": "Python's `if`"}[program.style]
    yield f"style: {style}, vectorize={program.vectorize}"
    yield f"search: {program.search}"


def outcome(seed: int) -> tuple[Program, Finding | Exception]:
    """The model of a seed and what came of it."""
    with seeded(seed, torch.float64):
        program = draw(seed)
        try:
            return program, check(program)
        except Exception as error:
            return program, error


def table(tallies: Mapping[str, Tally], number: int, seconds: float) -> str:
    """The page."""
    total = dataclasses.asdict(tallies["all"])
    lines = [
        f"| {kind} | {one.models} | {one.wrong} | {one.above} | {one.worst:.0e} | {one.refused} | {one.errors} |"
        for kind, one in sorted(tallies.items())
    ]
    return _HEAD.format(number=number, minutes=seconds / 60, tolerance=TOLERANCE, **total) + "\n".join(lines) + "\n"


def main(number: int) -> None:
    """Checks the models of that many seeds; says which are not well, and writes the table from time to time."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    tallies: dict[str, Tally] = collections.defaultdict(Tally)
    start = time.process_time()
    for seed in range(number):
        program, found = outcome(seed)
        for kind in kinds(program):
            tallies[kind].add(found)
        if isinstance(found, Exception) or not found.worst < TOLERANCE:
            print(seed, repr(found)[:300], flush=True)
        if (seed + 1) % 100 == 0 or seed + 1 == number:
            PATH.write_text(table(tallies, seed + 1, time.process_time() - start))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
