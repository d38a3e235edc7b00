"""Bad arguments that ``python -m tests.faults.fuzz`` tries: of Gaussian processes all, of other quick calls some, from a seed."""

from __future__ import annotations

import pytest
import torch

from tests.faults import fuzz, more_calls
from tests.faults.calls import CALLS

QUICK = (
    "StateSpace", "cooling", "check_counts", "check_observable", "LinearSuperposition", "MaximumSuperposition", "NoisyOrSuperposition",
    "SpikeSlabSuperposition", "Positions", "OccludedScene", "IdentityKernel", "PyroKernel", "linear_growth", "Patches",
    "SASDecoder.condition_", "SASDecoder.predict", "SASDecoder.infer",
)  # fmt: skip
# All of them.
GAUSSIAN_PROCESSES = (
    "RestrictedKernel", "SpikeSlabInputs", "LowRankCovariance", "DenseCovariance", "FunctionKernel", "LinearARD", "pivoted_cholesky",
    "PrecomputedKernel", "InducingSubset", "CoregionalizedGPRegression", "LeaveOneOutRegression.fit", "LeaveOneOutRegression.predict",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("LeaveOneOutRegression", "switch_log_odds", "SubsetGPRegression.fit")),
)  # fmt: skip
# Finite numbers, but their squares are not.
OVERFLOWING = ("huge", "1e300")


@pytest.mark.parametrize("name", QUICK)
def test_bad_arguments_work_or_are_named(name):
    assert more_calls.__name__
    tried = fuzz.findings([name], torch.Generator().manual_seed(0), 0.4)
    found = [str(one) for one in tried if one is not None and one.value not in OVERFLOWING]
    assert not found


@pytest.mark.nightly(keep=5)
@pytest.mark.filterwarnings("ignore::pyro_truncated.gp.AllNoiseWarning")
@pytest.mark.parametrize("name", GAUSSIAN_PROCESSES)
def test_bad_arguments_of_gaussian_processes_work_or_are_named(name):
    found = [str(one) for one in fuzz.findings([name]) if one is not None and one.value not in OVERFLOWING]
    assert not found


def test_what_is_silent_or_has_no_name_is_found(monkeypatch):
    def careless(size, scale):
        return torch.ones(3)[size] * scale

    monkeypatch.setitem(CALLS, "careless", lambda: (careless, {"size": 1, "scale": 2.0}))
    found = {(one.argument, one.value): one.what for one in fuzz.findings(["careless"]) if one is not None}
    assert found["scale", "nan"] == "returns NaN"
    assert found["size", "2.5"].startswith("IndexError")
    assert ("scale", "-1") not in found
