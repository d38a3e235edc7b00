"""Draws from a fitted guide of any kind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyro
import pyro.poutine as poutine
from pyro.infer.autoguide import AutoGuideList

from pyro_truncated.diagnostics.arviz.drawn import Draws
from pyro_truncated.diagnostics.arviz.guide_draws import draw_from_guide, guide_trace_of
from pyro_truncated.diagnostics.arviz.truncated_draws import draw_jointly, draw_states
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.program.sites import sample_nodes
from pyro_truncated.utils.isolation import spare_random_numbers


def draw(model: Callable[..., Any], guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_draws: int) -> Draws:
    """Draws latents from a guide.

    Raises:
        TypeError: if the guide cannot be called.
        ValueError: if the model subsamples, the guide has several ``AutoTruncated`` parts, or latents have no distribution but their prior.
    """
    if not callable(guide):
        raise TypeError(f"guide must be a Pyro guide: an autoguide, a list of them, or a function; got {type(guide).__name__}")
    if isinstance(guide, AutoTruncated) and guide.master is None:
        guide.setup(*args, **kwargs)
        if not guide.layout.other_latents and guide.layout.plates and guide.product is None:
            return draw_states(model, guide, args, kwargs, num_draws)
    with _plates_like_the_model(guide, model, args, kwargs):
        part = _truncated_part(model, guide, args, kwargs)
        if part is None or part.product is not None:
            return draw_from_guide(model, guide, args, kwargs, num_draws)
        return draw_jointly(model, guide, part, args, kwargs, num_draws)


def _truncated_part(model: Callable[..., Any], guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AutoTruncated | None:
    """Returns the truncated guide that takes part when a guide runs.

    It announces itself at its index site.
    """
    with spare_random_numbers():
        nodes = sample_nodes(guide_trace_of(model, guide, args, kwargs)).values()
    marks: list[Any] = [mark for node in nodes if (mark := node["infer"].get("truncated")) is not None]
    parts: list[AutoTruncated] = list(dict.fromkeys(mark["guide"]() for mark in marks))
    if len(parts) > 1:
        raise ValueError(f"to_arviz converts guides with one AutoTruncated part; this one has {len(parts)}")
    return parts[0] if parts else None


@contextlib.contextmanager
def _plates_like_the_model(guide: Any, model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """A context in which a guide list takes all data.

    Otherwise it remembers the minibatches that it was set up with.
    """
    if not isinstance(guide, AutoGuideList) or guide.prototype_trace is None or guide.create_plates is not None:
        yield
        return
    with spare_random_numbers(), poutine.block():
        nodes = poutine.trace(model).get_trace(*args, **kwargs).nodes.values()
    full = {frame.name: frame for node in nodes if node["type"] == "sample" for frame in node["cond_indep_stack"] if _takes_all(frame)}
    guide.create_plates = lambda *_, **__: [pyro.plate(name, frame.size, dim=frame.dim) for name, frame in full.items()]
    try:
        yield
    finally:
        guide.create_plates = None


def _takes_all(frame: Any) -> bool:
    return bool(frame.vectorized and frame.size == (frame.full_size or frame.size))
