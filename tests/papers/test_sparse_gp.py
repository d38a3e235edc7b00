"""The tables of sparse regression say what the runs found, and the runs find what the paper claims for discrete inputs."""

from __future__ import annotations

import json
import math
import statistics

import pytest
import torch

from tests.papers.experiments import sparse_gp as paper
from tests.papers.experiments import subset_speed


def row(method: str, m: int, seed: int, smse: float) -> dict[str, object]:
    return {"experiment": "esol", "method": method, "m": m, "seed": seed, "smse": smse, "snlp": -1.0, "objective": 7.0, "seconds": 2.0}


def test_table_marks_the_smallest_mean_error(tmp_path):
    results = [row("random", 16, 0, 0.1), row("random", 16, 1, 0.5), row("exchange", 16, 0, 0.2), row("exchange", 16, 1, 0.2)]
    lines = paper.table("esol", results)
    assert "| 16 | **exchange** | 2 | 0.2000 ± 0.0000 | -1.000 ± 0.000 | 7 ± 0 | 2.0 ± 0.0 |" in lines
    assert any(line.startswith("| 16 | random | 2 | 0.3000 ± 0.2828 |") for line in lines)
    paper.write_tables(results, tmp_path / "table.md", "a machine", "Loud machine.")
    text = (tmp_path / "table.md").read_text()
    assert "Loud machine." in text
    assert "**Incomplete:" in text


def test_runs_that_the_output_holds_are_not_made_again(tmp_path, monkeypatch):
    output = tmp_path / "runs.jsonl"
    output.write_text(json.dumps(row("random", 16, 0, 0.1)) + "\n")
    made = []
    monkeypatch.setattr(paper, "run", lambda *job: made.append(job) or row(job[1], job[2], job[3], 0.1))
    jobs = [("esol", "random", 16, 0), ("esol", "random", 16, 1)]
    paper.run_all(jobs, output)
    paper.run_all(jobs, output)
    assert made == [("esol", "random", 16, 1)]


def test_jobs_go_through_all_methods_before_the_next_split():
    jobs = paper.jobs_of(["hog"], 2)
    assert len(jobs) == len(set(jobs))
    seeds = [seed for _, _, _, seed in jobs]
    assert seeds == sorted(seeds)


def test_scores():
    y = torch.tensor([0.0, 2.0])
    split = paper.Split(lambda: None, y, None, y)
    smse, snlp = paper.scores(split, torch.ones(2), torch.full((2,), 2.0))
    # Predicting the mean of the training targets with their variance scores zero; the variance of two values has one degree of freedom.
    assert smse == pytest.approx(0.5)
    assert snlp == pytest.approx(0.0)
    assert paper.scores(split, y, torch.full((2,), 0.5))[1] == pytest.approx(0.5 * math.log(0.25) - 0.25)


def test_speed_table(tmp_path):
    found = {"ms_per_swap": 2.0, "ms_per_attempt": 3.0, "swaps": 4, "attempts": 5, "fell": 6.0}
    rows = [
        {"n": 9, "m": 3, "z": 2, "exchange": found, "published": found | {"ms_per_swap": 30.0}},
        {"n": 9, "m": 3, "fit": True, "smse": 0.1, "objective": 1.0, "seconds": 2.0, "peak_gib": 3.0, "history": [[1, "start", 5]]},
    ]
    subset_speed.write_table(rows, tmp_path / "table.md", "a machine", "Loud machine.", "2026-11-21")
    text = (tmp_path / "table.md").read_text()
    assert "Made on 2026-11-21, a machine" in text
    assert "Loud machine." in text
    assert "| 9 | 3 | 2 | 2.0 (4 / 5) | 30.0 (4 / 5) | 15.0 | 6 / 6 |" in text
    assert "peak memory of the process 3.0 GiB" in text


def test_stored_runs_say_what_the_table_says():
    cells: dict[tuple[object, ...], dict[str, dict[str, float]]] = {}
    for found in paper.done(paper.RESULTS / "sparse_gp.jsonl"):
        cells.setdefault((found["experiment"], found["m"], found["seed"]), {})[found["method"]] = found
    assert len(cells) > 20
    assert {(*cell, method) for cell, methods in cells.items() for method in methods} >= {
        (name, m, seed, method) for name, method, m, seed in paper.jobs_of(list(paper.EXPERIMENTS), 3)
    }
    bound = {"exchange", "random", "Titsias-16", "Titsias-512", "CholQR-z16", *paper.GREEDY}
    for (name, m, _), methods in cells.items():
        if name == "kin40k" and "GPyTorch SGPR" in methods:
            assert methods["exchange, then free"]["smse"] < methods["GPyTorch SGPR"]["smse"], m
        if name in {"kin40k", "pol", "pumadyn32nm"}:
            ours, theirs = methods["defaults, then free"], methods["GPyTorch SGPR, random start"]
            assert ours["smse"] < theirs["smse"], (name, m)
            assert ours["snlp"] < theirs["snlp"], (name, m)
        elif m and name in {"lipophilicity", "esol", "hog", "thrombin", "photoswitch"}:
            objectives = {method: found["objective"] for method, found in methods.items() if method in bound}
            if name == "hog" and m == 16:
                # Too few: no method gets noticeably below what calling all 734 targets noise costs.
                assert min(objectives.values()) > 734 / 2 - 0.5
                continue
            assert min(objectives, key=lambda method: objectives[method]) == "exchange", (name, m)


def test_stored_errors_on_discrete_inputs_are_lowest_for_exchange():
    """Mean over splits, by the objective that is for means alone."""
    errors: dict[tuple[object, ...], dict[str, list[float]]] = {}
    for found in paper.done(paper.RESULTS / "sparse_gp.jsonl"):
        if found["m"] and found["experiment"] in {"lipophilicity", "esol", "hog", "thrombin", "photoswitch"}:
            errors.setdefault((found["experiment"], found["m"]), {}).setdefault(found["method"], []).append(found["smse"])
    assert len(errors) == 26
    for cell, methods in errors.items():
        means = {method: statistics.mean(values) for method, values in methods.items() if len(values) >= 3}
        assert min(means, key=lambda method: means[method]) == "exchange, PP", cell


@pytest.mark.paper
@pytest.mark.parametrize("m", [32, 128])
def test_exchange_explains_molecules_better_than_the_published_algorithm_and_the_greedy_one(m):
    values = {method: paper.run("lipophilicity", method, m, 0) for method in ("exchange", "CholQR-z16", "Titsias-16", "random")}
    best = min(values, key=lambda method: values[method]["objective"])
    assert best == "exchange"
    assert values["exchange"]["smse"] < min(found["smse"] for method, found in values.items() if method != "exchange")
