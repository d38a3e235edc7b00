"""What is said of a guide whose data points are spread over processes: the first one brings them together."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pytest
import torch

from pyro_truncated import check_truncation, distributed, to_arviz
from pyro_truncated.diagnostics import TruncationWarning, estimate_evidence, population_growth
from pyro_truncated.search import EvolutionarySearch
from tests.distributed.test_guide_lists import list_of_guides
from tests.distributed.test_together import data, made

GROUPS = ("truncated_posterior", "log_likelihood", "observed_data", "posterior")


def trust_nothing(ask: Callable[[], Any]) -> Any:
    """What it says, whether that can be relied on or not."""
    with warnings.catch_warnings(action="ignore", category=TruncationWarning):
        return ask()


def looked_at(is_list: bool) -> tuple[Any, dict[str, Any] | None, Any]:
    y = distributed.shard(data(17))
    svi = list_of_guides() if is_list else made(y)[1]
    for _ in range(3):
        svi.step(y)
    search = EvolutionarySearch(3, 2)
    pyro.set_rng_seed(1)
    growth = population_growth(svi.guide, y, search=search, steps=2).doubled
    pyro.set_rng_seed(1)
    report = check_truncation(svi.guide, y, search=search, steps=2, num_samples=30, warn=False)
    pyro.set_rng_seed(2)
    # Of data points of this process, of which all get the evidence of all.
    states = {"s": torch.zeros(len(y), 6)} if not is_list else None
    evidence = trust_nothing(lambda: estimate_evidence(svi.guide, y, num_samples=30, exact_states=states))
    state = torch.get_rng_state()
    idata = to_arviz(svi.model, svi.guide, y, num_samples=5, seed=3, checks=report)
    assert distributed.size() == 1 or torch.equal(torch.get_rng_state(), state)
    # A step after it is that of all.
    losses = svi.step(y)
    # Copies: to send a tensor moves its memory.
    values = None if idata is None else {f"{group}.{name}": np.array(value) for group in GROUPS for name, value in idata[group].items()}
    return report, values, (growth, losses, dataclasses.asdict(evidence))


@pytest.mark.parametrize("is_list", [False, True])
def test_reports_and_conversions_are_those_of_one_process(is_list, crew):
    expected, values, (growth, loss, evidence) = looked_at(is_list)
    assert values is not None
    for number in (2, 3):
        found = crew.results(number, looked_at, is_list)
        for report, _, (_, own_loss, own_evidence) in found:
            assert str(report) == str(expected)
            torch.testing.assert_close(own_evidence, evidence, rtol=1e-9, atol=1e-9, equal_nan=True)
            assert own_loss == pytest.approx(loss, rel=1e-12)
            for name, array in expected.arrays().items():
                np.testing.assert_allclose(report.arrays()[name], array, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(torch.cat([own for _, _, (own, *_) in found]), growth, rtol=1e-9, atol=1e-9)
        assert [own is None for _, own, _ in found] == [False] + [True] * (number - 1)
        assert found[0][1].keys() == values.keys()
        for name, array in values.items():
            np.testing.assert_allclose(found[0][1][name], array, rtol=1e-9, atol=1e-9, err_msg=name)
