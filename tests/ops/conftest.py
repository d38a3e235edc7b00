"""Tests that take ``kind`` run on the compiled kernels and on those of plain torch, in one block and in several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyro_truncated import ops
from pyro_truncated.states import StateSpace


@pytest.fixture(params=["compiled", "vectorised", "blocks"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Makes the public functions use one of the two kinds of kernels; those of plain torch also in blocks of almost no memory."""
    kind = "compiled" if request.param == "compiled" else "vectorised"
    with ops.use(kind), ops.memory_budget(2**12 if request.param == "blocks" else None):
        yield kind


@pytest.fixture(params=[1, 8, 64, 70, 130])
def space(request: pytest.FixtureRequest) -> StateSpace:
    """Spaces that end inside a word, fill it to the sign bit, and need several words."""
    return StateSpace([2] * request.param)
