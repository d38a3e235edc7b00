"""Converts sample statements to discrete sites.

A site has a kind of values, their number, and plates. Where a support depends on other latents, its bounds are those over all their values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pyro
import torch
from pyro.distributions.hmm import HiddenMarkovModel
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, TransformedDistribution, constraints

from pyro_truncated.ops import raise_if
from pyro_truncated.program.call import Call
from pyro_truncated.program.changing_sites import ChangingSitesError, describe_changes
from pyro_truncated.program.dependencies import Dependencies
from pyro_truncated.program.sites import DiscreteSite, family, is_subsampled, unwrap
from pyro_truncated.program.supports import HUGE, INTEGER, Bounds, elementwise, get_support, is_discrete, possible_values, value_bounds
from pyro_truncated.utils.parameter_store import Assign, isolate, spare_random_numbers

_WRITE_IT = "Write it with Bernoulli, Categorical, OneHotCategorical or count sites."


def refuse_unknown_values(nodes: Iterable[Mapping[str, Any]]) -> None:
    """Checks that no latent has an unknown discrete distribution.

    Its support does not say so, but it enumerates its values, or is a transformed discrete one.
    """
    for node in nodes:
        base, _ = unwrap(node["fn"])
        is_transformed = isinstance(base, TransformedDistribution) and is_discrete(base.base_dist)
        if is_transformed or base.has_enumerate_support:
            raise NotImplementedError(
                f"the distribution of discrete latent site '{node['name']}' ({family(base)}) is not supported. {_WRITE_IT}"
            )


def refuse_plates(node: Mapping[str, Any], names: Collection[str]) -> None:
    """Checks the plates of a discrete site."""
    for frame in node["cond_indep_stack"]:
        if is_subsampled(frame) and not frame.vectorized:
            raise NotImplementedError(
                f"discrete latent site '{node['name']}' lies in the sequential plate '{frame.name}', of which the model takes "
                f"{frame.size} of {frame.full_size} members, so that its sites change. Iterate over all, or vectorise it: "
                f"`with pyro.plate('{frame.name}', ...):` instead of `for i in pyro.plate('{frame.name}', ...):`."
            )

        if frame.vectorized and frame.name not in names and any(name.endswith(f"/{frame.name}") for name in names):
            raise NotImplementedError(
                f"discrete latent site '{node['name']}' lies in the plate '{frame.name}', whose subsample has another name. A handler "
                "renames it, such as scope of pyro.contrib.autoname: leave it out, or open the plate outside of it."
            )


def refuse_partial_plates(sites: Iterable[DiscreteSite], data_plates: Collection[str]) -> None:
    """Checks that discrete sites are in no subsampled inner plate."""
    for site in sites:
        for frame in site.frames:
            if frame.name not in data_plates and is_subsampled(frame) and frame.vectorized:
                raise NotImplementedError(
                    f"discrete latent site '{site.name}' lies in the subsampled plate '{frame.name}', whose members share a "
                    "posterior. Take all of them: leave subsample_size out."
                )


def refuse_unplated_dims(nodes: Iterable[Mapping[str, Any]], names: set[str], dependencies: Dependencies, plates: Collection[str]) -> None:
    """Checks that batch dimensions are those of plates.

    It concerns latent sites and all that depends on discrete latents.

    What follows from other sites (``Delta``) may have others. So may observations and factors outside of the data plates that are the
    same for all states.
    """
    below: set[str] | None = None
    for node in nodes:
        if family(node["fn"]) == "Delta":
            continue
        fn, value = node["fn"], node["value"]
        shape, value_shape = tuple(fn.batch_shape), tuple(value.shape[: value.dim() - fn.event_dim])
        dim, observed_dim = (_unplated_dim(sizes, node["cond_indep_stack"]) for sizes in (shape, value_shape))
        if dim is None and observed_dim is None:
            continue
        if node["is_observed"] and not {frame.name for frame in node["cond_indep_stack"]}.issuperset(plates):
            below = dependencies.dependents(names) if below is None else below
            if node["name"] not in below:
                continue
        if dim is None:
            raise ValueError(
                f"site '{node['name']}' ({family(fn)}) has shape {tuple(fn.shape())}, but its values have {tuple(value.shape)}, "
                f"dimension {observed_dim} of which lies in no plate. Give it values of shape {tuple(fn.shape())}"
            )
        raise ValueError(
            f"site '{node['name']}' ({family(fn)}) has batch shape {shape}, dimension {dim} of which lies in no plate. "
            f"Sample it inside `with pyro.plate('name', {shape[dim]}, dim={dim}):` if its parts are independent; "
            f"if they belong together, write .to_event({-dim})"
        )


def _unplated_dim(sizes: Sequence[int], frames: Iterable[Any]) -> int | None:
    """The last batch dimension of several entries that is no plate's."""
    plate_dims = {frame.dim for frame in frames if frame.vectorized}
    return next((dim for dim in range(-1, -len(sizes) - 1, -1) if sizes[dim] > 1 and dim not in plate_dims), None)


def discrete_site(node: Any, data_plates: Sequence[str], low: Tensor, high: Tensor) -> DiscreteSite:
    """A discrete site as seen from one data point."""
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
    high = getattr(elementwise(node["fn"].support), "upper_bound", None)
    for frame in node["cond_indep_stack"]:
        if frame.name in data_plates:
            position = frame.dim - len(node["fn"].event_shape)
            # Expanded, or no tensor, it is the same for all members of the plate.
            is_common = not torch.is_tensor(high) or high.dim() < -position or high.shape[position] == 1 or high.stride(position) == 0
            if is_subsampled(frame) and not is_common:
                raise ValueError(
                    f"the number of values of site '{node['name']}' may differ between data points, and only a subsample has been seen. "
                    "Call the guide, or its whole list, once with arguments for which the model takes all data."
                )
            full = full.amax(position, keepdim=True)
    return tuple(int(v) for v in full.reshape(shape).flatten())


def _kind(node: Any) -> str:
    """What the values of a discrete site are."""
    support = elementwise(node["fn"].support)
    if support is constraints.boolean:
        return "boolean"
    if support is constraints.one_hot:
        return "one_hot"
    is_infinite = isinstance(support, type(constraints.nonnegative_integer))
    # Of events in an infinite support values can be listed only if they depend on each other.
    is_listed = is_infinite and node["fn"].has_enumerate_support and node["fn"].event_dim > 0
    if is_listed or not (is_infinite or isinstance(support, (constraints.integer_interval, type(INTEGER)))):
        raise NotImplementedError(
            f"discrete latent site '{node['name']}' ({family(node['fn'])}) has a support that is no product of its entries' values. "
            f"{_WRITE_IT}"
        )
    return "integer"


def refuse_other_plates(node: Mapping[str, Any], site: DiscreteSite) -> None:
    """Checks that inner plates have as many members as in the set-up."""
    inner = dict(site.plates)
    known = {frame.dim: frame.full_size or frame.size for frame in site.frames if frame.vectorized and frame.dim in inner}
    for frame in node["cond_indep_stack"]:
        size = frame.full_size or frame.size
        if frame.vectorized and known.get(frame.dim, size) != size:
            raise ValueError(
                f"the plate '{frame.name}' of discrete latent site '{site.name}' now has {size} members, but {known[frame.dim]} when the "
                "guide was set up. Make a guide for these data (guide.infer, or a new AutoTruncated), or mask members that are not in use."
            )


def refuse_other_events(node: Mapping[str, Any]) -> None:
    """Refuses observed events of another size than a distribution's."""
    inner, shape = unwrap(node["fn"])[0], torch.as_tensor(node["value"]).shape
    # Steps of hidden Markov models that are alike are counted as one, and a user's own distribution may take events of any size.
    is_exact = type(inner).__module__.startswith(("torch.", "pyro.", "pyro_truncated.")) and not isinstance(inner, HiddenMarkovModel)
    if is_exact and len(inner.event_shape) == 1 and shape[-1:] != inner.event_shape:
        raise ValueError(
            f"site '{node['name']}' observes values of shape {tuple(shape)}, but an event of its distribution {type(inner).__name__} has "
            f"shape {tuple(inner.event_shape)}: give data the columns that the model has"
        )


def refuse_other_values(node: Mapping[str, Any], site: DiscreteSite, limit: int | None, *, may_be_fewer: bool) -> None:
    """Checks that a discrete site has the values of the set-up.

    Every run is checked, so that shapes are compared where they tell. Totals of counts may be smaller.
    """
    fn = node["fn"]
    event_shape = (*site.event_shape, site.cardinalities[0]) if site.kind == "one_hot" else site.event_shape
    if fn.event_shape != event_shape:
        raise ValueError(_other_values(node, f"events of shape {tuple(fn.event_shape)}", f"of shape {tuple(event_shape)}"))
    base, _ = unwrap(fn)
    if isinstance(base, (Bernoulli, Categorical)):
        number = base.param_shape[-1] if isinstance(base, Categorical) else 2
        kept = number if limit is None else min(number, limit + 1)
        expected = site.cardinalities[0]
        if kept > expected or (kept < expected and not may_be_fewer):
            raise ValueError(_other_values(node, f"{number} values", str(expected)))
    elif site.kind != "one_hot":
        low, high = value_bounds(fn)
        # Along an expanded dimension all are alike.
        high = high[tuple(slice(1 if stride == 0 else None) for stride in high.stride())]
        high = high if limit is None else high.clamp(max=limit)
        known = site.highest.to(high.device)
        raise_if(((high > known) | (low < site.low)).any(), lambda: _other_counts(node, site, low, high, known))


def _other_values(node: Mapping[str, Any], now: str, before: str) -> str:
    return (
        f"discrete latent site '{node['name']}' ({family(node['fn'])}) now has {now}, but {before} when the guide was set up. Make a new "
        "guide for these arguments, or give the site as many values in every call (probability zero for those that are not in use)."
    )


def _other_counts(node: Mapping[str, Any], site: DiscreteSite, low: Tensor, high: Tensor, known: Tensor) -> str:
    high, known = (bound.flatten() for bound in torch.broadcast_tensors(high, known))
    worst = int((high - known).argmax())
    return (
        f"discrete latent site '{node['name']}' ({family(node['fn'])}) now has values in {int(low.min())} .. {int(high[worst])}, but "
        f"{site.low} .. {int(known[worst])} when the guide was set up. Make a new guide for these arguments, or first call "
        "guide.setup(*args) with arguments for the largest values."
    )


def refuse_wider_support(
    nodes: Mapping[str, Any], sites: Mapping[str, DiscreteSite], name: str, limit: int | None, dependencies: Dependencies
) -> None:
    """Checks a support that depends on latents, over all their values."""
    site = sites[name]
    low, high, _ = reachable_bounds(nodes[name], nodes, sites, limit, dependencies)
    known = site.highest.to(high.device)
    if bool((high > known).any() | (low < site.low).any()):
        raise ValueError(_other_counts(nodes[name], site, low, high, known))


def reachable_bounds(
    node: Any,
    nodes: Mapping[str, Any],
    sites: Mapping[str, DiscreteSite],
    limit: int | None,
    dependencies: Dependencies,
) -> tuple[Tensor, Tensor, bool]:
    """Returns a site's lowest and highest values, and whether ``limit`` cuts some."""
    name, kind = node["name"], _kind(node)
    low, high = value_bounds(node["fn"])
    if upstream := dependencies.upstream(name):
        parents: dict[DiscreteSite, Any] = {site: nodes[site.name]["value"] for site in sites.values() if site.name in upstream}
        widest = widest_support(node, parents, dependencies) if len(parents) == len(upstream) or not dependencies.parents[name] else None
        if widest is not None:
            low, high = widest
        elif dependencies.parents[name]:
            low, high = _limit_bounds(node, dependencies, limit)
    if kind != "integer":
        return low, high, False
    if int(high.max()) >= HUGE and limit is None:
        raise ValueError(
            f"discrete latent site '{name}' ({family(node['fn'])}) has infinite support and no bound. "
            f"Give one: AutoTruncated(model, max_count={{'{name}': 20}}), or learn(model, y, max_count={{'{name}': 20}})."
        )
    return (low, high, False) if limit is None else (low, high.clamp(max=limit), bool((high > limit).any()))


def _limit_bounds(node: Any, dependencies: Dependencies, limit: int | None) -> Bounds:
    """Returns bounds up to a limit, for sites with many dependencies."""
    name = node["name"]
    if limit is None or name in dependencies.lower_varies:
        raise ValueError(
            f"the support of discrete latent site '{name}' ({family(node['fn'])}) depends on {sorted(dependencies.parents[name])}, "
            "whose values are too many to try, or continuous. "
            f"Give a bound: AutoTruncated(model, max_count={{'{name}': 20}}), or learn(model, y, max_count={{'{name}': 20}})."
        )
    return value_bounds(node["fn"])[0].min(), torch.tensor(limit)


def widest_support(node: Mapping[str, Any], parents: Mapping[DiscreteSite, Tensor], dependencies: Dependencies) -> Bounds | None:
    """Returns a site's widest support over other sites' joint values."""
    runs = _JointRuns(dependencies.call, node, parents)
    if runs.number > 4096:  # runs of the model, at most
        return None
    leaked = dependencies.leaked[node["name"]] & {site.name for site in parents}
    with torch.no_grad(), spare_random_numbers(), isolate(), pyro.validation_enabled(False):
        # Few values are run singly; the runs of many at once are verified by eight single ones.
        at_once = runs.joint_bounds() if runs.number > 64 and not leaked else None
        low, high = at_once or runs.singly(range(runs.number))
    dims = len(node["fn"].batch_shape) + len(node["fn"].event_shape)
    return _drop_leading_ones(low, dims), _drop_leading_ones(high, dims)


class _JointRuns:
    """Runs of a model up to a site, under joint values.

    They are those of the sites that its support depends on. Members of a plate that holds both a site and the other one are independent,
    so that all get the same value.
    """

    def __init__(self, call: Call, node: Mapping[str, Any], parents: Mapping[DiscreteSite, Tensor]) -> None:
        self._call, self._node, self._parents = call, node, parents
        shared = {frame.dim for frame in node["cond_indep_stack"] if frame.vectorized}
        self._own = {site: torch.tensor(site.cardinalities).reshape(site.shape) for site in parents}
        self._sizes = {}
        for site, cardinality in self._own.items():
            same = [position for position, (dim, _) in enumerate(site.plates) if dim in shared]
            self._sizes[site] = cardinality.amax(same, keepdim=True) if same else cardinality
        self.number = math.prod(int(size) for sizes in self._sizes.values() for size in sizes.flatten())
        self._depth = max([-dim for dim in shared] + [site.depth for site in parents], default=0)

    def joint_bounds(self) -> Bounds | None:
        """Returns bounds over all joint values at once, or ``None``."""
        try:
            bounds = self._run_to_node(self._select(torch.arange(self.number))).bounds(self._depth)
        except Exception:  # whatever a program raises, as by an assertion
            return None
        for number in range(0, self.number, math.ceil(self.number / 8)):
            single = self.singly([number])
            for one, many in zip(single, bounds, strict=True):
                if not torch.equal(*torch.broadcast_tensors(one, many[min(number, len(many) - 1)])):
                    return None
        return bounds[0].amin(0), bounds[1].amax(0)

    def singly(self, numbers: Sequence[int]) -> Bounds:
        """Bounds over the chosen joint values, one after the other."""
        low, high = torch.tensor(HUGE), torch.tensor(-HUGE)
        for number in numbers:
            values = self._select(torch.tensor([number]))
            # In the shapes of the model's own values.
            own = self._parents.items()
            bounds = self._run_to_node({s.name: _drop_leading_ones(values[s.name], v.dim()).expand(v.shape) for s, v in own}).bounds()
            low, high = torch.minimum(low, bounds[0]), torch.maximum(high, bounds[1])
        return low, high

    def _run_to_node(self, values: Mapping[str, Tensor]) -> _StopAt:
        stop = _StopAt(self._node, values)
        try:
            with stop, Assign(values):
                self._call()
        except _ReachedError:
            return stop
        raise ChangingSitesError(describe_changes([self._node["name"]], sorted(values)))

    def _select(self, numbers: Tensor) -> dict[str, Tensor]:
        """Some joint values, in the dimension left of all plates."""
        values, rest = {}, numbers
        for site, sizes in self._sizes.items():
            levels = []
            for size in sizes.flatten().tolist():
                levels.append(rest % size)
                rest = rest // size
            own = torch.stack(levels, -1).reshape(len(numbers), *sizes.shape)
            own = torch.minimum(own, self._own[site] - 1).to(next(iter(self._parents.values())).device)
            values[site.name] = site.decode(own, (len(numbers),) + (1,) * self._depth)
        return values


def _drop_leading_ones(tensor: Tensor, dims: int) -> Tensor:
    """Drops left-most dimensions of size one above a given number."""
    return tensor.reshape(tensor.shape[max(0, tensor.dim() - dims) :])


class _ReachedError(Exception):
    """Ends a run of a model."""


class _StopAt(Messenger):
    """Ends a run at a site and keeps its distribution."""

    def __init__(self, node: Mapping[str, Any], values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.node, self.values = node, values
        self.fn: Any = None
        self.possible: list[Tensor] = []

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.values:
            self.possible.append(possible_values(msg["fn"], self.values[msg["name"]]))
        if msg["name"] == self.node["name"]:
            self.fn = msg["fn"]
            raise _ReachedError

    def bounds(self, depth: int | None = None) -> Bounds:
        """Returns the support's bounds, with plates by their left-most dimension."""
        fn, expected = self.fn, self.node["fn"]
        if fn.event_shape != expected.event_shape or get_support(fn) is None:
            raise NotImplementedError(
                f"the shape of discrete latent site '{self.node['name']}' depends on {sorted(self.values)}: {tuple(fn.event_shape)} for "
                f"some values, {tuple(expected.event_shape)} for others. Make it as long as the longest and mask what is not used."
            )
        low, high = value_bounds(fn)
        possible = torch.ones((), dtype=torch.bool, device=high.device)
        for check in self.possible:
            # Possible for some data point, or some member of a plate.
            possible = possible & (check.any() if depth is None or check.dim() <= depth else check.flatten(1).any(1))
        if depth is not None:
            dims = 1 + depth + len(fn.event_shape)
            low, high = (bound.reshape((1,) * (dims - bound.dim()) + tuple(bound.shape)) for bound in (low, high))
            possible = possible.reshape(-1, *(1,) * (dims - 1))
        return torch.where(possible, low, HUGE), torch.where(possible, high, -HUGE)
