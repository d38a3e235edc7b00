"""Random structured programs against brute force and whole states: with ``make nightly``."""

from __future__ import annotations

import pyro
import pytest
import torch

from tests.foreign.random_graphs import check_graph


def check_all(start: int, number: int) -> None:
    """Full sets are exact, and no bound exceeds the evidence."""
    for seed in range(start, start + number):
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        found = check_graph(seed)
        assert found.exact < 1e-8, (seed, found)
        assert found.excess < 1e-8, (seed, found)


@pytest.fixture(autouse=True)
def _in_double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.slow
def test_some_random_graphs_equal_brute_force():
    check_all(0, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("start", range(0, 1000, 20))
def test_a_thousand_random_graphs_equal_brute_force(start):
    check_all(start, 20)
