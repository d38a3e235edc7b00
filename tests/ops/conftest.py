"""Tests that take ``kind`` run on the compiled kernels and on those of plain torch, in one block and in several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyro_truncated import ops
from pyro_truncated.states import StateSpace

# Where states that do not fit the memory are taken in another order, too.
IN_BLOCKS = {"test_maximum", "test_maximum_score", "test_spike_slab"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The kinds of kernels, and blocks of almost no memory."""
    is_given = any("kind" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "kind" in metafunc.fixturenames and not is_given:
        blocks = ["blocks"] if metafunc.module.__name__.rpartition(".")[2] in IN_BLOCKS else []
        metafunc.parametrize("kind", ["compiled", "vectorised", *blocks], indirect=True)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Makes the public functions use one of the two kinds of kernels, those of plain torch also in blocks."""
    kind = "compiled" if request.param == "compiled" else "vectorised"
    with ops.use_backend(kind), ops.memory_budget(2**12 if request.param == "blocks" else None):
        yield kind


@pytest.fixture(params=[1, 8, 64, 70, 130])
def space(request: pytest.FixtureRequest) -> StateSpace:
    """Spaces that end inside a word, fill it to the sign bit, and need several words."""
    return StateSpace([2] * request.param)
