"""Some of the bad arguments that ``python -m tests.faults.fuzz`` tries, from a seed: those of calls that take next to no time."""

from __future__ import annotations

import pytest
import torch

from tests.faults import fuzz, more_calls
from tests.faults.calls import CALLS

QUICK = (
    "StateSpace", "cooling", "check_counts", "check_observable", "LinearSuperposition", "MaximumSuperposition", "NoisyOrSuperposition",
    "SpikeSlabSuperposition", "Positions", "OccludedScene", "IdentityKernel", "PyroKernel", "growing", "Patches",
    "SASDecoder.condition_", "SASDecoder.predict", "SASDecoder.infer",
)  # fmt: skip
# Finite numbers, but their squares are not.
OVERFLOWING = ("huge", "1e300")


@pytest.mark.parametrize("name", QUICK)
def test_bad_arguments_work_or_are_named(name):
    assert more_calls.__name__
    tried = fuzz.findings([name], torch.Generator().manual_seed(0), 0.4)
    found = [str(one) for one in tried if one is not None and one.value not in OVERFLOWING]
    assert not found


def test_what_is_silent_or_has_no_name_is_found(monkeypatch):
    def careless(size, scale):
        return torch.ones(3)[size] * scale

    monkeypatch.setitem(CALLS, "careless", lambda: (careless, {"size": 1, "scale": 2.0}))
    found = {(one.argument, one.value): one.what for one in fuzz.findings(["careless"]) if one is not None}
    assert found["scale", "nan"] == "returns NaN"
    assert found["size", "2.5"].startswith("IndexError")
    assert ("scale", "-1") not in found
