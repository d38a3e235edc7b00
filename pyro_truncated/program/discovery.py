"""Converts sample statements to discrete sites.

A site has a kind of values, their number, and plates.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.program.dependencies import Dependencies
from pyro_truncated.program.sites import DiscreteSite, family, is_delta
from pyro_truncated.program.support_bounds import widest_support
from pyro_truncated.program.supports import HUGE, INTEGER, Bounds, elementwise, value_bounds


def refuse_partial_sequence(node: Mapping[str, Any]) -> None:
    """Checks that a discrete site is in no subsampled sequential plate.

    Raises:
        NotImplementedError: naming the site and the plate.
    """
    for frame in node["cond_indep_stack"]:
        if not frame.vectorized and frame.full_size is not None and frame.full_size != frame.size:
            raise NotImplementedError(
                f"discrete latent site '{node['name']}' lies in the sequential plate '{frame.name}', of which the model takes "
                f"{frame.size} of {frame.full_size} members, so that its sites change. Iterate over all, or vectorise it: "
                f"`with pyro.plate('{frame.name}', ...):` instead of `for i in pyro.plate('{frame.name}', ...):`."
            )


def is_subsampled(frame: Any) -> bool:
    """Whether a run takes some members of a vectorised plate only."""
    return bool(frame.vectorized and frame.full_size is not None and frame.full_size != frame.size)


def refuse_partial_plates(site: DiscreteSite, data_plates: Collection[str]) -> None:
    """Checks that a discrete site is in no subsampled inner plate.

    Only data plates may be subsampled.

    Raises:
        NotImplementedError: naming the site and the plate.
    """
    for frame in site.frames:
        if frame.name not in data_plates and is_subsampled(frame):
            raise NotImplementedError(
                f"discrete latent site '{site.name}' lies in the subsampled plate '{frame.name}', which is no data plate: "
                "its members share a posterior, so all are needed"
            )


def refuse_unplated(nodes: Iterable[Mapping[str, Any]], names: set[str], dependencies: Dependencies | None) -> None:
    """Checks that batch dimensions are those of plates.

    It concerns latent sites and all that depends on discrete latents.

    What follows from other sites (``Delta``), and observations and factors that are the same for all states, may have others.

    Args:
        nodes: the sample sites of a model.
        names: of its discrete latent sites.
        dependencies: which densities depend on which latents; asked only if the answer matters.

    Raises:
        ValueError: naming a site and the dimension that is not.
    """
    below: set[str] | None = None
    for node in nodes:
        if is_delta(node):
            continue
        shape = tuple(node["fn"].batch_shape)
        plated = {frame.dim for frame in node["cond_indep_stack"] if frame.vectorized}
        for dim in range(-1, -len(shape) - 1, -1):
            if shape[dim] > 1 and dim not in plated:
                if node["is_observed"]:
                    below = (dependencies.dependents(names) if dependencies is not None else set()) if below is None else below
                    if node["name"] not in below:
                        break
                raise ValueError(
                    f"site '{node['name']}' ({family(node['fn'])}) has batch shape {shape}, dimension {dim} of which lies in no plate. "
                    f"Sample it inside `with pyro.plate('name', {shape[dim]}, dim={dim}):` if its parts are independent, data points for "
                    f"example; if they belong together, write .to_event({-dim})"
                )


def discrete_site(node: Any, data_plates: Sequence[str], low: Tensor, high: Tensor) -> DiscreteSite:
    """A discrete site as seen from one data point.

    Args:
        node: the site in a run of the model.
        data_plates: names of the data plates.
        low: its lowest values.
        high: its highest values. Where they differ between data points, the site has those of the largest.

    Raises:
        ValueError: if the number of its values may differ between data points and only some have been seen.
    """
    inner = sorted((f for f in node["cond_indep_stack"] if f.vectorized and f.name not in data_plates), key=lambda f: f.dim)
    kind = _kind(node)
    lowest = int(low.min())
    cardinality = high - lowest + 1
    event_shape: tuple[int, ...] = tuple(node["fn"].event_shape)
    event_shape = event_shape[:-1] if kind == "one_hot" else event_shape
    plates = tuple((frame.dim, frame.size) for frame in inner)
    shape = (*(size for _, size in plates), *event_shape)
    uniform = cardinality.numel() == 1
    cardinalities = (int(cardinality),) * math.prod(shape) if uniform else _per_latent(cardinality, node, data_plates, shape)
    return DiscreteSite(
        node["name"], kind, plates, event_shape, lowest, cardinalities, tuple(node["cond_indep_stack"]), node["value"].dtype
    )


def _per_latent(cardinality: Tensor, node: Any, data_plates: Sequence[str], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns cardinalities by latent.

    Where they differ between data points, they are the largest; higher values have probability
    zero.
    """
    full = cardinality.expand(node["fn"].batch_shape + node["fn"].event_shape)
    for frame in node["cond_indep_stack"]:
        if frame.name in data_plates:
            if frame.full_size is not None and frame.full_size != frame.size and not _is_common(node, frame.dim):
                raise ValueError(
                    f"the number of values of site '{node['name']}' may differ between data points, and only a subsample has been seen; "
                    "call the guide (the whole list, if it is in one) once with arguments for which the model takes all data"
                )
            full = full.amax(frame.dim - len(node["fn"].event_shape), keepdim=True)
    return tuple(int(v) for v in full.reshape(shape).flatten())


def _is_common(node: Any, dim: int) -> bool:
    """Whether a site's largest value is the same for all plate members.

    It is then only expanded to the shape of other parameters.
    """
    high = getattr(elementwise(node["fn"].support), "upper_bound", None)
    position = dim - len(node["fn"].event_shape)
    return not torch.is_tensor(high) or high.dim() < -position or high.shape[position] == 1 or high.stride(position) == 0


def _kind(node: Any) -> str:
    """What the values of a discrete site are."""
    support = elementwise(node["fn"].support)
    if support is constraints.boolean:
        return "boolean"
    if support is constraints.one_hot:
        return "one_hot"
    if not isinstance(support, (constraints.integer_interval, type(constraints.nonnegative_integer), type(INTEGER))):
        raise NotImplementedError(
            f"discrete latent site '{node['name']}' ({family(node['fn'])}) has a support that is no product of its entries' values. "
            "Write it with Bernoulli, Categorical, OneHotCategorical or count sites."
        )
    return "integer"


def reachable_bounds(
    node: Any,
    trace: poutine.Trace,
    sites: Mapping[str, DiscreteSite],
    max_count: int | Mapping[str, int] | None,
    dependencies: Dependencies | None,
) -> Bounds:
    """Returns a discrete site's lowest and highest values.

    They are over all values of what they depend on, and at most ``max_count``.

    Args:
        node: the site in a run of the model.
        trace: of that run.
        sites: the discrete sites before it.
        max_count: upper bound, for all sites or by site name.
        dependencies: which supports depend on which latents; none are taken to do so without it.

    Raises:
        ValueError: if there is no bound.
        NotImplementedError: if the site's entries depend on each other by its support.
    """
    name, kind = node["name"], _kind(node)
    low, high = value_bounds(node["fn"])
    limit = max_count.get(name) if isinstance(max_count, Mapping) else max_count
    upstream = dependencies.upstream(name) if dependencies is not None else set()
    if dependencies is not None and upstream:
        known: dict[DiscreteSite, Any] = {site: trace.nodes[site.name]["value"] for site in sites.values() if site.name in upstream}
        widest = widest_support(node, known, dependencies) if len(known) == len(upstream) or not dependencies.parents[name] else None
        if widest is not None:
            low, high = widest
        elif dependencies.parents[name]:
            low, high = _limited(node, dependencies, limit)
    if kind != "integer":
        return low, high
    if int(high.max()) >= HUGE and limit is None:
        raise ValueError(
            f"discrete latent site '{name}' ({family(node['fn'])}) has infinite support and no bound. "
            f"Give one: AutoTruncated(model, max_count={{'{name}': 20}}), or learn(model, y, max_count={{'{name}': 20}})."
        )
    return low, high if limit is None else high.clamp(max=limit)


def _limited(node: Any, dependencies: Dependencies, limit: int | None) -> Bounds:
    """Returns bounds up to a limit, for sites with many dependencies.

    Not all of these can be enumerated.
    """
    name = node["name"]
    if limit is None or name in dependencies.lower_varies:
        raise ValueError(
            f"the support of discrete latent site '{name}' ({family(node['fn'])}) depends on {sorted(dependencies.parents[name])}, so "
            "its largest value cannot be found: they take too many joint values, or continuous ones. "
            f"Give a bound: AutoTruncated(model, max_count={{'{name}': 20}}), or learn(model, y, max_count={{'{name}': 20}})."
        )
    return value_bounds(node["fn"])[0].min(), torch.tensor(limit)
