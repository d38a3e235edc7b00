"""The discrete latent sites of a Pyro model, and how their values map to a :class:`~pyro_truncated.states.StateSpace`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.program.supports import HUGE, INTEGER, Bounds, Dependencies, bounds_of, elementwise
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.counts import check_count


@dataclasses.dataclass(frozen=True)
class DiscreteSite:
    """One discrete latent site, seen from one data point.

    Attributes:
        name: the site's name in the model.
        kind: ``"boolean"``, ``"integer"`` or ``"one_hot"``.
        plates: ``(dim, size)`` of the plates around the site other than the data plates, outermost (most negative ``dim``) first.
        event_shape: shape of the value's event, without the one-hot dimension.
        low: smallest value (0 but for integer intervals that start elsewhere).
        cardinalities: number of values of each latent, in the order of ``(*plates, *event_shape)``.
        frames: the site's plates, for the guide to enter.
        dtype: type of the site's values in the prototype run.
    """

    name: str
    kind: str
    plates: tuple[tuple[int, int], ...]
    event_shape: tuple[int, ...]
    low: int
    cardinalities: tuple[int, ...]
    frames: tuple[Any, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the site's latents for one data point: inner plates, then the event."""
        return (*(size for _, size in self.plates), *self.event_shape)

    @property
    def num_latents(self) -> int:
        """Number of discrete latents at the site, per data point."""
        return len(self.cardinalities)

    @property
    def depth(self) -> int:
        """Number of batch dimensions that the site's plates take up."""
        return max((-frame.dim for frame in self.frames if frame.vectorized), default=0)

    @property
    def event_dim(self) -> int:
        """Number of event dimensions of the value Pyro sees."""
        return len(self.event_shape) + (self.kind == "one_hot")

    def to_values(self, levels: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Turns levels ``0 .. cardinality - 1`` into the values Pyro sees; one-hot sites gain a last dimension."""
        dtype = self.dtype if dtype is None else dtype
        if self.kind == "one_hot":
            return torch.nn.functional.one_hot(levels.long(), self.cardinalities[0]).to(dtype)
        values = levels.to(dtype)
        return values + self.low if self.low else values

    def decode(self, levels: Tensor, batch: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Values ``(*batch with inner plates filled in, *event_shape)`` of levels ``(*batch, *shape)``, plates at their dimensions."""
        part = levels.reshape((*batch, *self.shape))
        for position, (dim, _) in enumerate(self.plates):
            part = part.transpose(len(batch) + dim, len(batch) + position)
        return self.to_values(part.reshape((*part.shape[: len(batch)], *self.event_shape)), dtype)

    def to_levels(self, values: Tensor) -> Tensor:
        """Inverse of :meth:`to_values`, as int64.

        Raises:
            ValueError: if a value is not in the site's support.
        """
        if self.kind == "one_hot":
            levels = values.argmax(-1)
            valid = bool((self.to_values(levels, values.dtype) == values).all())
        else:
            values = values.to(torch.uint8) if values.dtype == torch.bool else values
            levels = (values - self.low).round().long()
            high = torch.tensor(self.cardinalities, device=values.device).reshape(self.shape)
            valid = bool(((levels + self.low == values) & (levels >= 0) & (levels < high)).all())
        if not valid:
            raise ValueError(
                f"states for site '{self.name}' hold values outside its support "
                f"({self.kind}, {max(self.cardinalities)} values from {self.low})"
            )
        return levels


class Layout:
    """Where a model's discrete latents live: its *data plates*, and the sites inside them.

    The data plates are those that hold all discrete latent sites and everything that depends on them, so that their members have
    independent posteriors; mostly it is one, where there are more a member of all of them counts as a data point. Where there is none (a
    site outside every plate; feature selectors whose observations lie in another plate), all discrete latents form the one state of a
    single "data point".

    Args:
        trace: a trace of the model (one value per site).
        max_count: upper bound of counts with infinite support, for all such sites or by site name.
        dependents: returns the names of the sites that depend on the given ones; asked only where the plates leave it open.
        dependencies: which supports depend on which latents; none are taken to do so without it.

    Attributes:
        sites: the discrete sites by name.
        plates: names of the data plates, by dimension from left to right.
        dims: their dimensions (negative).
        full_sizes: their sizes.
        num_data: number of data points: product of the data plates' full sizes.
        space: the joint state space of one data point.
        other_latents: names of the model's other latent sites, without ``Delta`` sites, which follow from the rest.
        depth: number of plate dimensions in the model.
        checked: names of the sites that give probability zero to some states because these lie outside of a support: values of a latent
            that other latents or other data points do not allow, observations that a latent does not allow.

    Raises:
        ValueError: if there is no discrete latent site, or one of them has infinite support and no bound, or one that depends on
            continuous latents or on too many others, or a bound is none.
        NotImplementedError: for a subsampled sequential plate, a subsampled plate other than a data plate that holds a discrete latent,
            or a site whose entries depend on each other by its support (multinomial counts).
    """

    def __init__(
        self,
        trace: poutine.Trace,
        max_count: int | Mapping[str, int] | None = None,
        dependents: Callable[[set[str]], set[str]] | None = None,
        dependencies: Dependencies | None = None,
    ) -> None:
        nodes = [node for node in latent_nodes(trace) if node["fn"].support.is_discrete]
        if not nodes:
            raise ValueError(
                "the model has no discrete latent site; AutoTruncated has nothing to infer. If it observes them in "
                "this call, show the guide one in which it does not, first: guide.setup(*args)"
            )
        for node in nodes:
            _refuse_partial_sequence(node)
        _check_bounds(max_count, [node["name"] for node in nodes])
        frames = _data_plates(trace, nodes, dependents)
        self.plates: tuple[str, ...] = tuple(frame.name for frame in frames)
        self.dims: tuple[int, ...] = tuple(frame.dim for frame in frames)
        self.full_sizes: tuple[int, ...] = tuple(frame.full_size or frame.size for frame in frames)
        self.num_data: int = math.prod(self.full_sizes)
        self.sites: dict[str, DiscreteSite] = {}
        checked = set()
        for node in nodes:
            name = node["name"]
            low, high = _bounds(node, trace, self.sites, max_count, dependencies)
            self.sites[name] = _describe(node, self.plates, low, high)
            if high.numel() > 1 and bool((high != high.flatten()[0]).any()):
                checked.add(name)
        self.checked = frozenset(checked | (dependencies.conditional(set(self.sites)) if dependencies is not None else set()))
        self.other_latents = [node["name"] for node in latent_nodes(trace) if node["name"] not in self.sites and not is_delta(node)]
        self.space = StateSpace([v for site in self.sites.values() for v in site.cardinalities])
        frames = [frame for node in sample_nodes(trace).values() for frame in node["cond_indep_stack"]]
        self.depth: int = max((-frame.dim for frame in frames if frame.vectorized), default=0)

    def spread(self, sizes: Sequence[int], depth: int | None = None) -> tuple[int, ...]:
        """Batch shape of ``depth`` dimensions (default: up to the left-most data plate) with the given sizes at the data plates."""
        shape = [1] * (max((-dim for dim in self.dims), default=0) if depth is None else depth)
        for dim, size in zip(self.dims, sizes, strict=True):
            shape[dim] = size
        return tuple(shape)

    def decode(self, levels: Tensor, depth: int, dtypes: Mapping[str, torch.dtype] | None = None) -> dict[str, Tensor]:
        """Site values of states.

        Args:
            levels: unpacked states ``(*batch, L)``; ``batch`` has the data plates at their dimensions and size 1 at every inner plate.
            depth: number of plate dimensions; ``batch`` is padded with ones up to it.
            dtypes: value types by site; default: those of the prototype.

        Returns:
            Values ``(*batch with inner plates filled in, *event_shape)`` by site name.
        """
        values, start = {}, 0
        batch = (1,) * (depth + 1 - levels.dim()) + tuple(levels.shape[:-1])
        for site in self.sites.values():
            part = levels[..., start : start + site.num_latents]
            start += site.num_latents
            values[site.name] = site.decode(part, batch, None if dtypes is None else dtypes[site.name])
        return values

    def site_values(self, levels: Tensor, sizes: Sequence[int], dtypes: Mapping[str, torch.dtype] | None = None) -> dict[str, Tensor]:
        """Values, in exactly the shapes the model's sites have, of one unpacked state ``(N, L)`` for each data point of a batch."""
        values = self.decode(levels.reshape(*self.spread(sizes), -1), self.depth, dtypes)
        return {name: trim(values[name], site.event_dim, site.depth) for name, site in self.sites.items()}

    def split(self, levels: Tensor) -> dict[str, Tensor]:
        """Site values ``(*batch, *site.shape)`` of unpacked states ``(*batch, L)``, in the prototype's types, plates before the event."""
        values, start = {}, 0
        for site in self.sites.values():
            part = levels[..., start : start + site.num_latents].reshape(*levels.shape[:-1], *site.shape)
            values[site.name] = site.to_values(part)
            start += site.num_latents
        return values

    def encode_values(self, values: Mapping[str, Tensor], sizes: Sequence[int]) -> Tensor:
        """Inverse of :meth:`site_values`: unpacked states ``(N, L)`` from values in the shapes of the model's sites."""
        found = {}
        for name, site in self.sites.items():
            value, event_dim = values[name], site.event_dim
            value = value.reshape((1,) * (self.depth - value.dim() + event_dim) + tuple(value.shape))
            if self.dims:
                value = value.movedim(tuple(dim - event_dim for dim in self.dims), tuple(range(len(self.dims))))
            event = (site.cardinalities[0],) if site.kind == "one_hot" else ()
            found[name] = value.reshape(math.prod(sizes), *site.shape, *event)
        return self.encode(found)

    def encode(self, values: Mapping[str, Tensor]) -> Tensor:
        """Unpacked states ``(*batch, L)`` from site values ``(*batch, *site.shape)``.

        Raises:
            ValueError: for a missing or unknown site, a wrong shape, or values outside the support.
        """
        if set(values) != set(self.sites):
            raise ValueError(f"states are needed for the sites {sorted(self.sites)}; got {sorted(values)}")
        parts = []
        for site in self.sites.values():
            value = torch.as_tensor(values[site.name])
            expected = (*site.shape, site.cardinalities[0]) if site.kind == "one_hot" else site.shape
            if len(expected) and tuple(value.shape[-len(expected) :]) != expected:
                raise ValueError(f"states for site '{site.name}' must end in the dimensions {expected}; got shape {tuple(value.shape)}")
            levels = site.to_levels(value)
            parts.append(levels.reshape(*levels.shape[: levels.dim() - len(site.shape)], site.num_latents))
        return torch.cat(parts, -1)


def sample_nodes(trace: poutine.Trace) -> dict[str, Any]:
    """The sample sites of a trace by name, without the subsamples of plates."""
    return {name: node for name, node in trace.nodes.items() if node["type"] == "sample" and not site_is_subsample(node)}


def latent_nodes(trace: poutine.Trace) -> list[Any]:
    """The latent sample sites of a trace."""
    return [node for node in sample_nodes(trace).values() if not node["is_observed"]]


def trim(value: Tensor, event_dim: int, depth: int) -> Tensor:
    """Drops leading batch dimensions of size one beyond the site's own plates."""
    while value.dim() - event_dim > depth and value.shape[0] == 1:
        value = value.squeeze(0)
    return value


def is_delta(node: Mapping[str, Any]) -> bool:
    """Whether a site's distribution is a point mass."""
    return family(node["fn"]) == "Delta"


def _refuse_partial_sequence(node: Mapping[str, Any]) -> None:
    for frame in node["cond_indep_stack"]:
        if not frame.vectorized and frame.full_size is not None and frame.full_size != frame.size:
            raise NotImplementedError(
                f"discrete latent site '{node['name']}' lies in the sequential plate '{frame.name}', of which the model takes "
                f"{frame.size} of {frame.full_size} members, so that its sites change. Iterate over all, or vectorise it: "
                f"`with pyro.plate('{frame.name}', ...):` instead of `for i in pyro.plate('{frame.name}', ...):`."
            )


def _check_bounds(max_count: int | Mapping[str, int] | None, names: Sequence[str]) -> None:
    bounds = max_count if isinstance(max_count, Mapping) else {"": max_count}
    unknown = set(bounds) - {"", *names}
    if unknown:
        raise ValueError(f"max_count bounds {sorted(unknown)}, but the model's discrete sites are {list(names)}")
    for bound in bounds.values():
        if bound is not None:
            check_count("max_count, or each of its entries by site,", bound)


def _data_plates(trace: poutine.Trace, nodes: Sequence[Mapping[str, Any]], dependents: Callable[[set[str]], set[str]] | None) -> list[Any]:
    """Plates around all discrete sites and whatever depends on them, by dimension from left to right."""
    stacks = [[frame for frame in node["cond_indep_stack"] if frame.vectorized] for node in nodes]
    # A plate that is opened anew with another size or dimension is another plate.
    same = set.intersection(*({(frame.name, frame.dim, frame.size) for frame in stack} for stack in stacks))
    shared = {name for name, _, _ in same}
    names = {node["name"] for node in nodes}
    others = {
        node["name"]: {frame.name for frame in node["cond_indep_stack"]}
        for node in sample_nodes(trace).values()
        if node["name"] not in names
    }
    if dependents is not None and any(not shared <= plates for plates in others.values()):
        below = dependents(names)
        others = {name: plates for name, plates in others.items() if name in below}
        shared = shared.intersection(*others.values())
    return sorted((frame for frame in stacks[0] if frame.name in shared), key=lambda frame: frame.dim)


def _describe(node: Any, data_plates: Sequence[str], low: Tensor, high: Tensor) -> DiscreteSite:
    inner = sorted((f for f in node["cond_indep_stack"] if f.vectorized and f.name not in data_plates), key=lambda f: f.dim)
    for frame in inner:
        if frame.full_size is not None and frame.full_size != frame.size:
            raise NotImplementedError(
                f"discrete latent site '{node['name']}' lies in the subsampled plate '{frame.name}', which is no data plate: "
                "its members share a posterior, so all are needed"
            )
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
    """Cardinalities that differ between latents; where they differ between data points, the largest (the rest has probability zero)."""
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
    """Whether a site's largest value is one number for all members of a plate, only expanded to the shape of other parameters."""
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


def _bounds(
    node: Any,
    trace: poutine.Trace,
    sites: Mapping[str, DiscreteSite],
    max_count: int | Mapping[str, int] | None,
    dependencies: Dependencies | None,
) -> Bounds:
    """Lowest and highest values of a discrete site, over all values of what they depend on, none above ``max_count``."""
    name, kind = node["name"], _kind(node)
    low, high = bounds_of(node["fn"])
    limit = max_count.get(name) if isinstance(max_count, Mapping) else max_count
    upstream = dependencies.upstream(name) if dependencies is not None else set()
    if dependencies is not None and upstream:
        known: dict[DiscreteSite, Any] = {site: trace.nodes[site.name]["value"] for site in sites.values() if site.name in upstream}
        widest = dependencies.reach(node, known) if len(known) == len(upstream) or not dependencies.parents[name] else None
        if widest is not None:
            low, high = widest
        elif dependencies.parents[name]:
            low, high = _limited(node, dependencies, limit)
    if kind != "integer":
        return low, high
    if int(high.max()) >= HUGE and limit is None:
        raise ValueError(
            f"discrete latent site '{name}' ({family(node['fn'])}) has infinite support and no bound. "
            f"Give one: AutoTruncated(model, max_count={{'{name}': 20}})."
        )
    return low, high if limit is None else high.clamp(max=limit)


def _limited(node: Any, dependencies: Dependencies, limit: int | None) -> Bounds:
    """Bounds up to a limit, for a site whose own depend on too much to look at all of it."""
    name = node["name"]
    if limit is None or name in dependencies.lower_varies:
        raise ValueError(
            f"the support of discrete latent site '{name}' ({family(node['fn'])}) depends on {sorted(dependencies.parents[name])}, which "
            "take too many joint values, or continuous ones, to find its largest value. "
            f"Give one: AutoTruncated(model, max_count={{'{name}': 20}})."
        )
    return bounds_of(node["fn"])[0].min(), torch.tensor(limit)


def family(fn: Any) -> str:
    """Name of a distribution without its wrappers."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return type(fn).__name__
