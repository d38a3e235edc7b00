"""The bars tests and natural patches of Evolutionary EM; hours on two cores.

make papers
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.papers.experiments import natural_patches
from tests.papers.experiments.evolutionary_em import EXPERIMENTS, jobs_of, run, run_all, write_tables

RESULTS = Path(__file__).parent / "results"


@pytest.mark.paper
@pytest.mark.timeout(0)
def test_all_bars_in_every_run_of_the_best_configuration(tmp_path):
    jobs = jobs_of(list(EXPERIMENTS), None, None, ("ours", "paper"), "cpu")
    results = run_all(jobs, os.cpu_count() or 1, tmp_path / "results.jsonl")
    write_tables(results, RESULTS / "evolutionary_em.md", f"a machine of {os.cpu_count()} CPU cores")
    ours = [r for r in results if r["variant"] == "ours"]
    assert all(r["bars"] == r["of"] for r in ours)


@pytest.mark.paper
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", ["bsc", "noisy_or"])
def test_natural_patches(name, real_data, tmp_path):
    real_data("vanhateren_one")
    _, summary = natural_patches.run(name, 5000, 100, "cpu")
    assert summary["last"] > summary["first"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("variant", ["paper", "ours"])
def test_experiments_run(name, variant):
    # Only that the experiments work: two iterations on their full size take seconds.
    small = {"num_starts": 1, "iterations": 2, "num_states": 30}
    result = run(name, "fitparents-cross-sparseflips", variant, 0, **small)
    assert result["free_energy"] < 0
