"""Running a Pyro program on the side: what surrounds it neither sees it nor reaches into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _DIM_ALLOCATOR


class Assign(Messenger):
    """Effect handler that gives sample statements (plates' subsamples too) the values it is told, without observing them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.values and not msg["is_observed"]:
            msg["value"] = self.values[msg["name"]]


@contextmanager
def isolated() -> Iterator[None]:
    """Hides sample statements from the handlers outside (a guide's trace, its plates) but not parameters, which SVI must see."""
    with poutine.block(hide_fn=lambda msg: msg["type"] != "param"), free_plate_dims():
        yield


@contextmanager
def free_plate_dims() -> Iterator[None]:
    """Lets plates take the dimensions they would take if no plate were open (parallel predictive draws open one, say).

    Plates ask one private allocator for their dimensions, which no handler can stand in for, so that it is set aside here.
    """
    held, _DIM_ALLOCATOR._stack = _DIM_ALLOCATOR._stack, []
    try:
        yield
    finally:
        _DIM_ALLOCATOR._stack = held


def spare_random_numbers() -> AbstractContextManager[None]:
    """For looking at a program once: a run that resumes from a checkpoint would otherwise draw other numbers than one that went on."""
    return torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else [])
