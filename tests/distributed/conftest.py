"""One crew of processes for all tests: starting them takes longer than what they do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.crew import Crew


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts processes runs nightly."""
    for item in items:
        if "crew" in getattr(item, "fixturenames", ()):
            item.add_marker("nightly")


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    """Four processes, of which some form a group."""
    crew = Crew(4)
    yield crew
    crew.end()
