"""The tables of the active sets paper say what the runs found."""

from __future__ import annotations

import json

import pytest

from tests.papers.experiments import active_set_studies as studies
from tests.papers.experiments import stochastic_active_sets as paper


def test_bias_vanishes_where_one_point_is_left_and_is_negative_before():
    rows = [line for line in studies.bias_table(5, 40) if line.startswith("| 0")]
    assert len(rows) == 3
    for row in rows:
        means = [float(cell.split("±")[0]) for cell in row.split("|")[2:-1]]
        assert means[-1] == 0
        assert means[0] < means[1] < 0


def stored(**changes):
    """A run as the output file holds it."""
    scores = {"rmse": 0.2, "mae": 0.1, "nlpd": -0.2}
    shared = {"data": "mnist", "method": "bayesian-sas", "active": 100, "num_train": 50, "epochs": 3, "random": scores, "half": scores}
    shared |= {"chosen": scores | {"rmse": 0.19}, "all": scores, "knn": 0.5, "logistic": 0.4, "seconds": 12.0, "seed": 0}
    return shared | changes


def written(rows, tmp_path, *options):
    output = tmp_path / "runs.jsonl"
    output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = paper.parse_args(["--only-table", "--output", str(output), "--table", str(tmp_path / "table.md"), *options])
    paper.write_tables(paper.done(output), args)
    return (tmp_path / "table.md").read_text()


def test_table_has_means_and_spreads_over_seeds_beside_the_paper(tmp_path):
    rows = [stored(seed=seed, all={"rmse": rmse, "mae": 0.1, "nlpd": -0.2}) for seed, rmse in enumerate((0.16, 0.18))]
    text = written(rows, tmp_path, "--remark", "Loud machine.")
    assert "| bayesian-sas | 100 | 50 | 3 | 2 | 0.200 ± 0.000 / 0.190 ± 0.000 / 0.170 ± 0.014 |" in text
    assert "0.216, 0.111, 0.233 |" in text
    assert "Loud machine." in text


def test_studies_are_written_beside_the_tables(tmp_path):
    curve = [{"epoch": n, "cpu": 60.0 * n, "wall": 90.0 * n, "nlpd": nlpd} for n, nlpd in enumerate((0.0, -0.2, -0.245, -0.248, -0.25))]
    row = {str(rest or "all"): (-0.01, 0.002) for rest in studies.REST} | {"active": 100}
    growth = {"sizes": [5, 10], "seconds": [1, 2], "bytes": [3e6, 3e6], "exponent": 1.0}
    text = written(
        [
            stored(),
            {"study": "all of mnist", "active": 400, "peak_gib": 1.5, "curve": curve},
            {"study": "estimator", "exact": 0.3, "noise": 0.8, "rows": [row]},
            {"study": "kept", "rows": {"100 at random": {"rmse": 0.2, "mae": 0.1, "nlpd": -0.1}}},
            {"study": "growth", "base": {"N": 5}, "rows": {"N": growth}},
        ],
        tmp_path,
    )
    # -0.245 is the first value within two per cent of -0.25.
    assert "epoch 3, 2.0 CPU minutes" in text
    assert "| 100 | -0.0100 ± 0.0020 |" in text
    assert "| 100 at random | 0.2000 | -0.100 |" in text
    assert "| N | 5, 10 | 1.000, 2.000 | 3.00, 3.00 | 1.00 |" in text


def test_runs_that_the_output_holds_are_not_made_again(tmp_path, monkeypatch):
    output = tmp_path / "runs.jsonl"
    made = []

    def run(name, method, active, seed, num_train, num_test, epochs):
        made.append((method, active, seed))
        return stored(data=name, method=method, active=active, seed=seed, num_train=num_train, epochs=epochs)

    monkeypatch.setattr(paper, "run", run)
    monkeypatch.setitem(paper.STUDIES, "kept", lambda: made.append("kept") or {"rows": {}})
    args = ["--methods", "sas", "vae", "--active", "10", "20", "--seeds", "2", "--studies", "kept", "--output", str(output)]
    paper.run_all(paper.parse_args(args))
    assert made == [("sas", 10, 0), ("sas", 20, 0), ("vae", 0, 0), ("sas", 10, 1), ("sas", 20, 1), ("vae", 0, 1), "kept"]
    paper.run_all(paper.parse_args(args))
    assert len(made) == 7


@pytest.mark.slow
def test_estimates_on_trained_latents_are_below_the_exact_value_and_come_closer(monkeypatch, real_data):
    """The bias of the whole rest is negative and shrinks with the active set; with all points but one there is none."""
    real_data("mnist_train")
    monkeypatch.setattr(studies, "ACTIVE", (10, 40, 99))
    monkeypatch.setattr(studies, "REST", (20, None))
    found = studies.estimator(num_train=100, active=20, epochs=3, draws=8)
    means = [row["all"][0] for row in found["rows"]]
    assert means[0] < means[1] < 0
    assert means[2] == pytest.approx(0.0, abs=1e-9)
    assert found["rows"][0]["20"][1] > found["rows"][0]["all"][1] > 0


def test_stored_runs_say_what_the_table_says():
    """With jumps and 200 active points or more, every run predicts better than both baselines, and better than the paper's row."""
    runs = [run for run in paper.done(paper.RESULTS / "stochastic_active_sets.jsonl") if run.get("num_train") in {3000, 5000}]
    baselines = {}
    for run in runs:
        if run["method"] in {"gplvm", "vae"}:
            baselines.setdefault((run["data"], run["seed"]), []).append(run["all"])
    assert {data for data, _ in baselines} == {"mnist", "fashion", "cifar10"}
    compared = 0
    for run in runs:
        if run["method"].endswith("jumps") and run["active"] >= 200:
            for other in baselines.get((run["data"], run["seed"]), []):
                compared += 1
                assert all(run["all"][score] < other[score] for score in ("rmse", "mae", "nlpd")), run
            rmse, mae, _ = paper.PAPER[run["data"]][run["method"].removesuffix("-jumps")][run["active"]]
            assert run["all"]["rmse"] < rmse
            assert run["all"]["mae"] < mae
    assert compared >= 40


def test_runs_made_once_more_are_those_that_are_stored():
    """Given all images, no error moves by more than 0.0004, which is what the remark above the tables says."""
    results = paper.done(paper.RESULTS / "stochastic_active_sets.jsonl")
    again = [row["again"] for row in results if "again" in row]
    assert len(studies.again_table(results)) == len(again) + 8
    for run in again:
        names = ("data", "method", "active", "seed", "num_train", "epochs")
        (stored,) = (row for row in results if "data" in row and all(row[name] == run[name] for name in names))
        assert all(run["all"][score] == pytest.approx(stored["all"][score], abs=4.5e-4) for score in ("rmse", "mae"))


@pytest.mark.paper
@pytest.mark.parametrize("method", [method for method in paper.METHODS if method != "gpytorch-gplvm"])
def test_every_method_runs_and_beats_the_mean_image(method):
    found = paper.run("mnist", method, 50, 0, 500, 50, epochs=20)
    assert found["all"]["rmse"] < 0.25
