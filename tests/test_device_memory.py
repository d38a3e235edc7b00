"""Blocks are as large as the memory that is free on a device lets them be, and results do not depend on that."""

from __future__ import annotations

from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO
from pyro_truncated.models import BinarySparseCoding, MaximalCauses, SpikeSlabSparseCoding
from pyro_truncated.utils import budget
from tests.pretended_device import DEVICE, PretendedDevice, here, there

# Few, but enough for several blocks.
NUM_DATA = {BinarySparseCoding: 400, SpikeSlabSparseCoding: 100, MaximalCauses: 200}


def run(model: type, free: int | None, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[list[float], Tensor, int, int]:
    """Losses of two steps, the populations, the budget of a scorer, and the number of launches."""
    monkeypatch.setattr(budget, "free_memory", lambda device: free if device == DEVICE else None)
    pyro.clear_param_store()
    pyro.set_rng_seed(3)
    y = 3 * torch.randn(NUM_DATA[model], 12, dtype=torch.float64)
    y = y.abs() if model is MaximalCauses else y
    made = model(12, 10, dtype=torch.float64).initialize(y, torch.Generator().manual_seed(1))
    with PretendedDevice() as device:
        made, y = there(made), there(y)
        guide = AutoTruncated(made, 16, **options)
        svi = SVI(made, guide, ClosedForm(made), Truncated_ELBO(EvolutionarySearch(3, 2, 1)))
        losses = [svi.step(y) for _ in range(2)]
        return losses, here(guide.words), guide.make_scorer(y).memory_budget, sum(device.launches.values())


@pytest.mark.nightly
@pytest.mark.parametrize("model", NUM_DATA)
def test_blocks_follow_the_memory_and_results_do_not(model: type, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(model, 2**31, monkeypatch)
    blocks = run(model, 2**21, monkeypatch)
    assert whole[2] == 2**28
    assert blocks[2] == 2**18
    assert blocks[3] > 1.4 * whole[3]
    assert torch.equal(blocks[1], whole[1])
    assert blocks[0] == pytest.approx(whole[0], rel=1e-12)


@pytest.mark.slow
def test_what_the_user_says_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(BinarySparseCoding, 2**20, monkeypatch, memory_budget=2**22)[2] == 2**22


def test_memory_of_the_cpu_is_not_asked_for() -> None:
    assert budget.free_memory(torch.device("cpu")) is None
    assert budget.budget_on(torch.device("cpu")) == budget.DEFAULT_BUDGET == 2**28
