"""Pyro's parameter store, set aside while a kernel is evaluated as a function of its own parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyro


@contextmanager
def empty_store() -> Iterator[None]:
    """Within it Pyro's parameter store is empty; afterwards it is what it was.

    Kernels register their parameters by names such as ``"variance"``, which a model may use as well. Pyro's own ``scope()`` serves between
    runs, not inside of one: it takes from unconstrained parameters the mark by which :class:`~pyro.infer.SVI` recognises those that the
    step it is recording has read.
    """
    store = pyro.get_param_store()
    held = store._params, store._param_to_name, store._constraints
    store._params, store._param_to_name, store._constraints = {}, {}, {}
    try:
        yield
    finally:
        store._params, store._param_to_name, store._constraints = held
