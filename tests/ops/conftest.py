"""Tests that take ``kind`` run on the compiled kernels and on those of plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyro_truncated import ops


@pytest.fixture(params=["compiled", "vectorised"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Makes the public functions use one of the two kinds of kernels."""
    with ops.use(request.param):
        yield request.param
