"""Runs that are killed at any moment go on from their last checkpoint, to the numbers of runs that were not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyro_truncated import fit
from tests.faults import runs

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


def kill(*options: str, timeout: float) -> str:
    """Runs in a process of its own: children are forked, which a process with threads had better not do."""
    command = [sys.executable, "-m", "tests.faults.kills", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_killed_runs_lose_nothing():
    table = kill("--kills", "8", "--inside", "4", "--modes", "incremental", timeout=300)
    kills, inside, *_ = map(int, table.splitlines()[-1].split()[1:])
    assert kills >= 8
    assert inside >= 2


def test_a_finished_run_that_is_merely_loaded_has_learned_the_same(tmp_path):
    states = []
    for _ in range(2):
        svi, args = runs.make("full")
        fit(svi, *args, steps=2, progress=False, checkpoint=tmp_path / "run.pt", checkpoint_seconds=0.0)
        states.append(runs.state(svi))
    runs.assert_same(*states)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_two_hundred_kills_of_each_mode_lose_nothing():
    rows = [row.split() for row in kill("--kills", "200", "--inside", "56", timeout=7000).splitlines()[1:]]
    assert [row[0] for row in rows] == list(runs.MODES)
    for _, kills, inside, *_ in rows:
        assert int(kills) >= 200
        assert int(inside) >= 50
