"""The sparse coding and mixture experiments of GP-select; half an hour on two cores.

make papers
"""

from __future__ import annotations

import os

import pytest

from tests.papers.experiments import gp_select, gp_select_mixture
from tests.papers.experiments.gp_select_mixture import CASES


@pytest.mark.paper
@pytest.mark.timeout(0)
def test_all_bars_in_nearly_every_run(tmp_path):
    results = gp_select.run_all(gp_select.jobs_of("ABC", 10, ("ours",)), os.cpu_count() or 1, tmp_path / "results.jsonl")
    print("\n".join(gp_select.table(results)))
    for kind in gp_select.MODELS:
        for selection in gp_select.SELECTIONS:
            complete = [r["bars"] == r["of"] for r in results if (r["model"], r["selection"]) == (kind, selection)]
            assert sum(complete) >= 8, (kind, selection)


@pytest.mark.paper
def test_mixture_needs_a_nonlinear_selection():
    worst = {case: min(gp_select_mixture.run(case, seed)["accuracy"] for seed in range(5)) for case in CASES if case.start == "truth"}
    assert all((accuracy > 0.95) == (case.kernel == "rbf") for case, accuracy in worst.items())


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", gp_select.MODELS)
@pytest.mark.parametrize("variant", gp_select.VARIANTS)
def test_experiments_run(kind, variant):
    # Only that the experiments work, on few data.
    selection = "linear" if variant == "paper" else "hand"
    result = gp_select.run(kind, selection, variant, 0, num_data=100, iterations=2, num_starts=2, short_steps=2)
    assert 0 <= result["bars"] <= result["of"] == 10
    assert result["free_energy"] < 0


def test_bars_of_the_three_models_differ_as_they_say():
    import torch

    for kind in gp_select.MODELS:
        bars = gp_select.bars_of(kind, 4000, torch.Generator().manual_seed(0))
        alone = bars.states.sum(1) == 1
        bright = (bars.data[alone].double() * (bars.states[alone].double() @ bars.components.mT.double() > 0)).sum(1) / 5
        # Means over the five pixels of a single bar: amplitude 10, slabs, and a fifth of the noise; three standard errors.
        deviation = (100 * gp_select.SLAB_DEVIATION[kind] ** 2 + 0.4) ** 0.5
        assert abs(float(bright.mean()) - 10) < 3 * deviation / len(bright) ** 0.5
        assert abs(float(bright.std()) - deviation) < 4 * deviation / (2 * len(bright)) ** 0.5


@pytest.mark.nightly
def test_case_of_two_classes_runs():
    assert 1 / 3 <= gp_select_mixture.run(CASES[0], 0, num_data=60, iterations=3)["accuracy"] <= 1
