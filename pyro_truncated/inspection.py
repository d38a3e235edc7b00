"""Looking at models and guides from outside: hidden latents, dependencies, the values of other latents."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer.autoguide import AutoGuide, AutoGuideList
from pyro.infer.autoguide.guides import AutoCallable
from pyro.infer.inspect import get_dependencies
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.trace_messenger import TraceMessenger

from pyro_truncated.isolation import spare_random_numbers as spare_random_numbers
from pyro_truncated.sites import latent_nodes


def hidden_latents(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Latent sites that block handlers around the model hide from whoever runs it."""
    hidden: list[str] = []
    while isinstance(model, functools.partial) and len(model.args) >= 2 and isinstance(model.args[0], Messenger):
        handler, model = model.args[:2]
        if isinstance(handler, BlockMessenger):
            with poutine.block(), torch.no_grad():
                nodes = latent_nodes(poutine.trace(model).get_trace(*args, **kwargs))
            hidden += [node["name"] for node in nodes if handler.hide_fn(node)]
    return hidden


def refuse_hidden_latents(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Checks that no block handler around the model hides latent sites.

    Raises:
        ValueError: naming the sites.
    """
    hidden = hidden_latents(model, args, kwargs)
    if hidden:
        raise ValueError(
            f"the model given to AutoTruncated hides its latents {hidden} (poutine.block), so they would be drawn anew from the prior "
            "whenever a state is scored. Give AutoTruncated the whole model: it takes the discrete sites and leaves the others to "
            "other guides."
        )


def dependents(model: Callable[..., Any], names: set[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[str]:
    """Sites downstream of the named ones, through any number of others."""
    # Whether the data are possible is checked elsewhere, where the message can name what is not.
    with poutine.block(), pyro.validation_enabled(False):
        found: Any = get_dependencies(model, args, dict(kwargs))
    upstream = found["prior_dependencies"]
    below = set(names)
    grown = True
    while grown:
        more = {site for site, parents in upstream.items() if below & set(parents)} - below
        below |= more
        grown = bool(more)
    return below - names


def plates_around(own: Container[str]) -> list[Any]:
    """The vectorised plates that are open and not the model's own: those of parallel particles and predictive draws."""
    return [handler for handler in _PYRO_STACK if isinstance(handler, pyro.plate) and handler.dim is not None and handler.name not in own]


def recorded_values(names: Collection[str], own: Container[str], depth: int) -> dict[str, Any]:
    """Values of the named sites in the traces that are being recorded.

    Args:
        names: the sites.
        own: names of the model's plates.
        depth: number of their dimensions. Plates around the guide that take one of these (a guide may have fewer than the model) have
            it moved to the left of all.
    """
    found: dict[str, Any] = {}
    outer = [plate.dim for plate in plates_around(own) if plate.dim >= -depth]
    for handler in _PYRO_STACK:
        if isinstance(handler, TraceMessenger):
            nodes: dict[str, Any] = {name: handler.trace.nodes[name] for name in names if name in handler.trace.nodes}
            found.update({name: _moved_left(node["value"], node["fn"].event_dim, outer, depth) for name, node in nodes.items()})
    return found


def _moved_left(value: Any, event_dim: int, dims: Sequence[int], depth: int) -> Any:
    """A value with the given batch dimensions (negative) moved to the left of ``depth`` others, where it has them."""
    for target, dim in enumerate(sorted(dims, reverse=True), start=depth + 1):
        if value.dim() - event_dim < -dim:
            continue
        padding = max(0, target - (value.dim() - event_dim))
        value = value[(None,) * padding].transpose(dim - event_dim, -target - event_dim)
    return value


def sibling_values(
    parts: Sequence[Any], guide: Any, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any], median: bool = False
) -> dict[str, Any]:
    """Draws (or medians) of the named latents from the parts before a guide in its guide list, outside of any trace.

    Raises:
        ValueError: if some of the latents belong to parts after the guide.
    """
    position = parts.index(guide)
    found: dict[str, Any] = {}
    with poutine.block(), torch.no_grad():
        for part in parts[:position]:
            found.update((part.median if median else part)(*args, **kwargs) or {})
    missing = [name for name in names if name not in found]
    prototypes = [part.prototype_trace for part in parts[position + 1 :]]
    late = [name for name in missing if any(trace is None or name in trace.nodes for trace in prototypes)]
    if late:
        raise ValueError(
            f"AutoTruncated scores states given draws of the latents {late}, but the guides of these come after it in the "
            "AutoGuideList; append AutoTruncated last"
        )
    return {name: found[name] for name in names if name in found}


def values_for_new_data(guide: Any, new: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Draws, for data that a guide list was not trained on, of the latents that the parts before a truncated guide take care of.

    Args:
        guide: the truncated guide in its list.
        new: a truncated guide that has been set up on the new data.
        args: the model's positional arguments, with the new data.
        kwargs: the model's keyword arguments.

    Raises:
        ValueError: if a part has parameters for each data point it was trained on, so that it knows nothing of the new ones.
    """
    nodes = {node["name"]: node for node in latent_nodes(new.prototype_trace)}
    plates = set(new.layout.plates)
    local = [name for name in new.layout.other_latents if plates & {frame.name for frame in nodes[name]["cond_indep_stack"]}]
    fixed = [part for part in guide.master().modules() if _has_parameters_of_its_own(part)]
    unknown = {name for name in local if any(name in part.prototype_trace for part in fixed)}
    if unknown:
        raise ValueError(
            f"infer() cannot know the latents {sorted(unknown)} of the new data points: their guide has parameters for each data point it "
            "was trained on. Give AutoTruncated a conditional=... that samples them given the states, or append to the AutoGuideList a "
            "guide that computes them from the model's arguments (an amortised one)."
        )
    master = guide.master()
    kept = getattr(master, "plates", {})
    frames = new._prototype_frames.values()
    master.plates = {frame.name: pyro.plate(frame.name, frame.full_size or frame.size, dim=frame.dim) for frame in frames}
    try:
        return sibling_values(list(master), guide, new.layout.other_latents, args, kwargs)
    finally:
        master.plates = kept


def refuse_subsampling(guide: Any) -> None:
    """Checks that the model took all data points when a guide was set up.

    Raises:
        ValueError: naming the plate of which it took only some.
    """
    for name in guide.layout.plates:
        frame = guide._prototype_frames[name]
        if frame.size != (frame.full_size or frame.size):
            raise ValueError(
                f"infer() needs all {frame.full_size} data points of plate '{name}' at once; the model subsampled {frame.size} of them"
            )


def _has_parameters_of_its_own(part: Any) -> bool:
    """Whether a module is one of Pyro's automatic guides, which do not look at the model's arguments, and has been set up."""
    if not isinstance(part, AutoGuide) or part.prototype_trace is None or isinstance(part, (AutoGuideList, AutoCallable)):
        return False
    return type(part).forward.__module__.startswith("pyro.")
