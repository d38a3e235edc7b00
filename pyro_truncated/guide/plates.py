"""Plates that several programs share.

The model opens them, or a surrounding trace has already opened them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.trace_messenger import TraceMessenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_truncated.program.call import Call
from pyro_truncated.utils.parameter_store import free_plate_dims, spare_random_numbers

# `_PYRO_STACK` is private, but no message says what the traces around have recorded, nor which plates (with their subsamples) are open.


class SharedPlates(Messenger):
    """Effect handler that reuses plates of a surrounding trace."""

    def _pyro_sample(self, msg: Any) -> None:
        if not site_is_subsample(msg):
            return
        subsample = _record(msg)
        if subsample is None:
            return
        if msg["value"] is not None and not torch.equal(torch.as_tensor(msg["value"]), torch.as_tensor(subsample)):
            raise ValueError(f"plate '{msg['name']}' and the guide have different data points; give both the same subsample=...")
        msg["value"], msg["done"], msg["stop"] = subsample, True, True


def recorded_subsamples(names: Iterable[str]) -> dict[str, Tensor]:
    """Subsamples of the named plates that surrounding traces have recorded."""
    subsamples = {name: _record({"type": "sample", "name": name, "is_observed": False, "infer": {}, "value": None}) for name in names}
    return {name: value for name, value in subsamples.items() if value is not None}


def _record(msg: Any) -> Tensor | None:
    """Returns a site's value in the innermost trace that sees it."""
    for handler in reversed(_PYRO_STACK):
        if isinstance(handler, BlockMessenger) and handler.hide_fn(msg):
            return None
        if isinstance(handler, TraceMessenger) and msg["name"] in handler.trace.nodes:
            node: Any = handler.trace.nodes[msg["name"]]
            value: Tensor = node["value"]
            return value
    return None


def open_plates(dims: Mapping[str, int]) -> dict[str, Any]:
    """The named plates that are open around whoever asks."""
    plates = {plate.name: plate for plate in _PYRO_STACK if isinstance(plate, pyro.plate) and plate.name in dims}
    for name, plate in plates.items():
        if plate.dim != dims[name]:
            raise ValueError(f"AutoTruncated was called in plate '{name}' at dimension {plate.dim}; the model has it at {dims[name]}")
    return plates


class _AllOpenError(Exception):
    """Stops a model that has opened all plates of interest."""


class _OpenedPlates(Messenger):
    """Effect handler that records requested plates."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.missing = set(names)
        self.requests: dict[str, dict[str, Any]] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if not site_is_subsample(msg):
            # Of plates that were made outside of the model.
            for frame in msg["cond_indep_stack"]:
                if frame.name in self.missing:
                    self._record(frame.name, frame.size)
            return
        if msg["name"] not in self.missing:
            return
        size, number, subsample = msg["fn"].size, msg["fn"].subsample_size, msg["value"]
        self._record(msg["name"], size, number, subsample)
        if subsample is None:
            msg["value"] = torch.arange(size if number is None else min(number, size), device=msg["fn"].device)

    def _record(self, name: str, size: int, number: int | None = None, subsample: Tensor | None = None) -> None:
        self.requests[name] = {"size": size, "subsample_size": number, "subsample": subsample}
        self.missing.remove(name)
        if not self.missing:
            raise _AllOpenError


def model_plates(call: Call, frames: Mapping[str, Any]) -> dict[str, Any]:
    """Returns new plates as the model opens them for these arguments.

    They have the given subsample, or a fresh one of the model's size.

    The model runs only until it has opened the last of them.
    """
    recorder = _OpenedPlates(frames)
    if not frames:
        return {}
    with spare_random_numbers(), torch.no_grad(), poutine.block(), free_plate_dims(), suppress(_AllOpenError), recorder:
        call()
    return {name: pyro.plate(name, dim=frames[name].dim, **request) for name, request in recorder.requests.items()}


def recreate_plates(plates: Mapping[str, Any], subsamples: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """Creates the same plates again, for the recording trace."""
    indices = plate_subsamples(plates) | dict(subsamples or {})
    return {name: pyro.plate(name, plate.size, subsample=indices[name], dim=plate.dim) for name, plate in plates.items()}


def plate_subsamples(plates: Mapping[str, Any]) -> dict[str, Any]:
    """Positions of the data points in plates, by name."""
    return {name: plate.indices for name, plate in plates.items()}


def refuse_other_size(num_populations: int, size: int, plates: Iterable[str]) -> None:
    """Checks that data are as many as those that populations are of."""
    if num_populations != size:
        raise ValueError(
            f"the guide holds populations of {num_populations} data points, but the model's data plate {list(plates)} now has {size}. "
            "For other data use guide.infer(new_data, search, steps); for minibatches pass pyro.plate(name, num_data, subsample=positions)."
        )


def enter(stack: ExitStack, plate: Any) -> None:
    """Opens a plate that is not open already."""
    if not any(handler is plate for handler in _PYRO_STACK):
        stack.enter_context(plate)
