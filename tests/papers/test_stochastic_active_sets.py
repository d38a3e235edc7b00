"""The tables of the active sets paper say what the runs found."""

from __future__ import annotations

import json

import pytest

from tests.papers import stochastic_active_sets as paper


def test_bias_vanishes_where_one_point_is_left_and_is_negative_before():
    rows = [line for line in paper.bias_table(5, 40) if line.startswith("| 0")]
    assert len(rows) == 3
    for row in rows:
        means = [float(cell.split("±")[0]) for cell in row.split("|")[2:-1]]
        assert means[-1] == 0
        assert means[0] < means[1] < 0


def test_table_has_means_and_spreads_over_seeds_beside_the_paper(tmp_path):
    scores = {"rmse": 0.2, "mae": 0.1, "nlpd": -0.2}
    shared = {"data": "mnist", "method": "bayesian-sas", "active": 100, "num_train": 50, "epochs": 3, "random": scores, "half": scores}
    shared |= {"random_spread": scores, "knn": 0.5, "logistic": 0.4, "seconds_per_epoch": 1.0}
    rows = [shared | {"seed": seed, "all": scores | {"rmse": rmse}} for seed, rmse in enumerate((0.19, 0.21))]
    output = tmp_path / "runs.jsonl"
    output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = paper.parse_args(["--only-table", "--output", str(output), "--table", str(tmp_path / "table.md"), "--remark", "Loud machine."])
    paper.write_tables(paper.done(output), args)
    text = (tmp_path / "table.md").read_text()
    assert "| bayesian-sas | 100 | 50 | 3 | 2 | 0.200 ± 0.000 / 0.200 ± 0.014 |" in text
    assert "0.216, 0.111, 0.233 |" in text
    assert "Loud machine." in text


def test_runs_that_the_output_holds_are_not_made_again(tmp_path, monkeypatch):
    output = tmp_path / "runs.jsonl"
    made = []

    def run(name, method, active, seed, num_train, num_test, epochs):
        made.append((method, active, seed))
        return {"data": name, "method": method, "active": active, "seed": seed, "num_train": num_train, "epochs": epochs}

    monkeypatch.setattr(paper, "run", run)
    args = paper.parse_args(["--methods", "sas", "vae", "--active", "10", "20", "--seeds", "2", "--output", str(output)])
    paper.run_all(args)
    assert made == [("sas", 10, 0), ("sas", 20, 0), ("vae", 0, 0), ("sas", 10, 1), ("sas", 20, 1), ("vae", 0, 1)]
    paper.run_all(args)
    assert len(made) == 6


@pytest.mark.paper
@pytest.mark.parametrize("method", paper.METHODS)
def test_every_method_runs_and_beats_the_mean_image(method):
    found = paper.run("mnist", method, 50, 0, 500, 50, epochs=20)
    assert found["all"]["rmse"] < 0.25
