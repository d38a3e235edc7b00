"""Runs a Pyro program in isolation from the handlers around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _DIM_ALLOCATOR


class Assign(Messenger):
    """Effect handler that gives sample statements values without observing them.

    Subsamples of plates are included.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.values and not msg["is_observed"]:
            msg["value"] = self.values[msg["name"]]


@contextmanager
def isolated() -> Iterator[None]:
    """Hides sample statements from outer handlers, such as a guide's trace.

    Parameters stay visible, as SVI must see them.
    """
    with poutine.block(hide_fn=lambda msg: msg["type"] != "param"), free_plate_dims():
        yield


@contextmanager
def free_plate_dims() -> Iterator[None]:
    """Lets plates take the dimensions they would take without open plates.

    Parallel predictive draws open one, for example.

    Plates ask one private allocator for their dimensions, which no handler can stand in for, so that it is set aside here.
    """
    held, _DIM_ALLOCATOR._stack = _DIM_ALLOCATOR._stack, []
    try:
        yield
    finally:
        _DIM_ALLOCATOR._stack = held


def spare_random_numbers() -> AbstractContextManager[None]:
    """Restores random states after a look at a program.

    Otherwise a resumed run would draw other numbers than an uninterrupted one.
    """
    return torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else [])
