"""Plates that several programs share: those that the model opens, and those that a surrounding trace has opened already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer.autoguide import AutoContinuous, AutoGuideList
from pyro.infer.autoguide.guides import AutoCallable
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.trace_messenger import TraceMessenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_truncated.guide.siblings import parts_of
from pyro_truncated.utils.isolation import free_plate_dims, spare_random_numbers


class SharedPlates(Messenger):
    """Effect handler under which a plate that a surrounding trace has recorded is that plate again, with the same subsample.

    Raises:
        ValueError: if the plate asks for other data points than those.
    """

    def _pyro_sample(self, msg: Any) -> None:
        if not site_is_subsample(msg):
            return
        recorded = _recorded(msg)
        if recorded is None:
            return
        if msg["value"] is not None and not torch.equal(torch.as_tensor(msg["value"]), torch.as_tensor(recorded)):
            raise ValueError(f"plate '{msg['name']}' is open with other data points than those that a guide asks for with subsample=...")
        msg["value"], msg["done"], msg["stop"] = recorded, True, True


def recorded_subsamples(names: Iterable[str]) -> dict[str, Tensor]:
    """Subsamples of the named plates that surrounding traces have recorded."""
    found = {name: _recorded({"type": "sample", "name": name, "is_observed": False, "infer": {}, "value": None}) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _recorded(msg: Any) -> Tensor | None:
    """The value of a site in the innermost trace that would see it."""
    for handler in reversed(_PYRO_STACK):
        if isinstance(handler, BlockMessenger) and handler.hide_fn(msg):
            return None
        if isinstance(handler, TraceMessenger) and msg["name"] in handler.trace.nodes:
            node: Any = handler.trace.nodes[msg["name"]]
            value: Tensor = node["value"]
            return value
    return None


def open_plates(dims: Mapping[str, int]) -> dict[str, Any]:
    """The named plates that are open around whoever asks.

    Args:
        dims: the dimensions that they must have, by name.

    Raises:
        ValueError: if a plate is open at another dimension.
    """
    found = {plate.name: plate for plate in _PYRO_STACK if isinstance(plate, pyro.plate) and plate.name in dims}
    for name, plate in found.items():
        if plate.dim != dims[name]:
            raise ValueError(f"AutoTruncated was called in plate '{name}' at dimension {plate.dim}; the model has it at {dims[name]}")
    return found


class _AllOpenError(Exception):
    """Stops a model that has opened all plates of interest."""


class _OpenedPlates(Messenger):
    """Effect handler that notes what plates are asked for, and stops the program after the last of the names."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.missing = set(names)
        self.requests: dict[str, dict[str, Any]] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if not site_is_subsample(msg) or msg["name"] not in self.missing:
            return
        size, number, subsample = msg["fn"].size, msg["fn"].subsample_size, msg["value"]
        self.requests[msg["name"]] = {"size": size, "subsample_size": number, "subsample": subsample}
        self.missing.remove(msg["name"])
        if not self.missing:
            raise _AllOpenError
        if subsample is None:
            msg["value"] = torch.arange(size if number is None else min(number, size), device=msg["fn"].device)


def model_plates(model: Callable[..., Any], frames: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """New plates as the model opens them for these arguments, with the subsample that it is given or a fresh one of the size it asks for.

    The model runs only until it has opened the last of them.

    Args:
        model: the model.
        frames: plates of an earlier run, by name.
        args: the model's positional arguments.
        kwargs: its keyword arguments.
    """
    opened = _OpenedPlates(frames)
    if not frames:
        return {}
    with spare_random_numbers(), torch.no_grad(), poutine.block(), free_plate_dims(), suppress(_AllOpenError), opened:
        model(*args, **kwargs)
    return {name: pyro.plate(name, dim=frames[name].dim, **request) for name, request in opened.requests.items()}


def share_plates(guide_list: AutoGuideList, truncated: Any) -> None:
    """Lets the guides in a list that open plates of their own, functions above all, reuse those of the list."""
    for part in parts_of(guide_list):
        opens_its_own = isinstance(part, AutoCallable) or not type(part).forward.__module__.startswith("pyro.")
        if part is not truncated and opens_its_own and "forward" not in vars(part):
            part.forward = SharedPlates()(part.forward)


def refuse_subsampled_latents(guide_list: AutoGuideList, plates: Mapping[str, Any]) -> None:
    """Checks that no guide that has one vector of all its latents is asked for those of some of the data points.

    Raises:
        ValueError: naming the guide, the latents and the plate.
    """
    partial = {name for name, plate in plates.items() if len(plate.indices) < plate.size}
    for part in parts_of(guide_list):
        if not partial or not isinstance(part, AutoContinuous) or part.prototype_trace is None:
            continue
        for name, site in part.prototype_trace.iter_stochastic_nodes():
            inside = partial & {frame.name for frame in site["cond_indep_stack"]}
            if inside:
                raise ValueError(
                    f"{type(part).__name__} holds one vector for all latents it has seen and cannot take the latent '{name}' for a "
                    f"subsample of plate '{min(inside)}'. Give latents of data points to AutoNormal or AutoDelta, which keep them by "
                    "position in the data, or to a function of the data (an amortised guide), or train without minibatches."
                )
