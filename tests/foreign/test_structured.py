"""Every structured program against brute force."""

from __future__ import annotations

import pytest

from tests.foreign import structured_networks, structured_plates, structured_sequences  # noqa: F401
from tests.foreign.structured import PROGRAMS, as_first_program, compare


def test_there_are_enough_programs_and_each_names_its_subject():
    assert len(PROGRAMS) >= 50
    assert all(make.__doc__ for make in PROGRAMS.values())


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROGRAMS)
def test_structured_programs_equal_brute_force(name):
    check(name)


def check(name: str) -> None:
    """Full sets are exact, fewer states are a bound, and a moderate search finds sets within 0.05 nats."""
    with as_first_program(name) as case:
        found = compare(case)
    assert found.worst < 1e-6, found
    # Of draws: false alarms in one of two million runs.
    assert found.draws < 5, found
    assert found.gap < 0.05, found
    assert case.nodes in (None, found.nodes), found
