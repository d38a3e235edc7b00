"""Tests that take ``kind`` run on the compiled kernels and on those of plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyro_truncated import ops
from pyro_truncated.states import StateSpace


@pytest.fixture(params=["compiled", "vectorised"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Makes the public functions use one of the two kinds of kernels."""
    with ops.use(request.param):
        yield request.param


@pytest.fixture(params=[1, 8, 64, 70, 130])
def space(request: pytest.FixtureRequest) -> StateSpace:
    """Spaces that end inside a word, fill it to the sign bit, and need several words."""
    return StateSpace([2] * request.param)
