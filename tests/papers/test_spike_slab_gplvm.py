"""The experiments of the spike-and-slab GP-LVM paper; an hour on one core.

make papers
"""

from __future__ import annotations

import json

import pytest

from tests.papers.experiments import spike_slab_digits, spike_slab_retrieval, spike_slab_signals
from tests.papers.experiments.spike_slab_gplvm import is_curved, main


@pytest.mark.paper
@pytest.mark.timeout(0)
def test_signals_are_recovered(tmp_path):
    main(["--output", str(tmp_path / "runs.jsonl"), "--table", str(tmp_path / "table.md")])
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert len(runs) == 160
    missed = [r for r in runs if not (r["gamma_pattern"] and r["gamma_correlation"] > spike_slab_signals.CORRELATION)]
    # With RBF kernels SSMRD may explain the second view by the shared dimension alone, at a higher bound.
    assert all(is_curved(r) for r in missed)
    assert len(missed) <= 9


@pytest.mark.paper
@pytest.mark.timeout(0)
def test_retrieval_beats_the_average_of_the_paper(real_data):
    real_data("wiki_crossmodal_train")
    assert spike_slab_retrieval.run()["average"] > spike_slab_retrieval.PAPER["SSMRD (paper)"][2]


@pytest.mark.paper
@pytest.mark.timeout(0)
def test_digits_keep_their_classes_in_the_dimensions_that_are_on(real_data):
    real_data("mnist_train")
    result = spike_slab_digits.run()
    assert result["accuracy"] > max(result["by_threshold"]) - 0.02
    assert result["accuracy"] > result["pixels"] - 0.02
    assert result["error"] < 0.5 * result["spread"]


@pytest.mark.slow
def test_experiments_run():
    # Only that the experiments work: a few iterations.
    result = spike_slab_signals.run("SSMRD", "linear", 0.1, "pca", 0, steps=2, warm_up=2, rounds=1)
    assert result["bound"] < 1e6


def test_score_tells_right_from_wrong_patterns():
    import torch

    from pyro_truncated.gplvm import SpikeSlabMRD

    model = SpikeSlabMRD(50, [12, 12], 5, kernel="linear")
    with torch.no_grad():
        model.loc[:, :3] = spike_slab_signals.signals()
    right = torch.tensor([[1, 0, 1, 0, 0], [0, 1, 1, 0, 0]]).bool()
    assert spike_slab_signals.score(model, right) == {"pattern": True, "correlation": pytest.approx(1.0), "private_1": pytest.approx(1.0)}
    assert not spike_slab_signals.score(model, torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 0, 0]]).bool())["pattern"]
    assert spike_slab_signals.score(model, right.flip(0))["correlation"] < 0.5
