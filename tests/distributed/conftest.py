"""One crew of processes for all tests: starting them takes longer than what they do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.crew import Crew


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    """Four processes, of which some form a group."""
    crew = Crew(4)
    yield crew
    crew.end()
