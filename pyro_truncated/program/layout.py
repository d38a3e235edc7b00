"""Data plates and discrete sites of a model.

The joint values of the sites inside data plates are a data point's states. Plate nesting says how many plate dimensions Pyro must count.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.poutine.indep_messenger import IndepMessenger
from torch import Tensor

from pyro_truncated.program.dependencies import Dependencies
from pyro_truncated.program.discovery import (
    discrete_site,
    reachable_bounds,
    refuse_plates,
    refuse_unknown_values,
    refuse_unplated_dims,
)
from pyro_truncated.program.inspection import plates_around
from pyro_truncated.program.sites import DiscreteSite, family, latent_nodes, recorded_names, sample_nodes, trim
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.arguments import check_count


class SiteLayout:
    """Discrete sites and data plates, with conversions of states.

    States become values of sites, and values become states.

    Attributes:
        sites: the discrete sites by name.
        plates: names of the data plates, by dimension from left to right.
        dims: their dimensions (negative).
        full_sizes: their sizes.
        num_data: number of data points: product of the data plates' full sizes.
        space: the joint state space of one data point.
        slices: where the latents of each site are in a state.
        depth: number of plate dimensions in the model.
    """

    def __init__(self, sites: Mapping[str, DiscreteSite], frames: Sequence[Any], depth: int) -> None:
        self.sites: dict[str, DiscreteSite] = dict(sites)
        self.plates: tuple[str, ...] = tuple(frame.name for frame in frames)
        self.dims: tuple[int, ...] = tuple(frame.dim for frame in frames)
        self.full_sizes: tuple[int, ...] = tuple(frame.full_size or frame.size for frame in frames)
        self.num_data: int = math.prod(self.full_sizes)
        self.space = StateSpace([v for site in self.sites.values() for v in site.cardinalities])
        ends = itertools.accumulate(site.num_latents for site in self.sites.values())
        self.slices = {name: slice(end - site.num_latents, end) for (name, site), end in zip(self.sites.items(), ends, strict=True)}
        self.depth = depth

    def part(self, names: Sequence[str], plates: Collection[str]) -> SiteLayout:
        """Returns the layout of some of the sites."""
        frames = {f.name: f for name in names for f in self.sites[name].frames if f.vectorized and f.name in plates}
        sites = {name: self.sites[name].in_plates(plates) for name in names}
        return SiteLayout(sites, sorted(frames.values(), key=lambda frame: frame.dim), self.depth)

    def spread(self, sizes: Sequence[int], depth: int | None = None) -> tuple[int, ...]:
        """Returns a batch shape of ``depth`` dimensions with given data plates.

        The default depth goes up to the left-most data plate.
        """
        shape = [1] * (max((-dim for dim in self.dims), default=0) if depth is None else depth)
        for dim, size in zip(self.dims, sizes, strict=True):
            shape[dim] = size
        return tuple(shape)

    def decode(self, levels: Tensor, depth: int, dtypes: Mapping[str, torch.dtype] | None = None) -> dict[str, Tensor]:
        """Site values ``(*batch with inner plates filled in, *event_shape)`` of states ``(*batch, L)``.

        ``batch`` has the data plates at their dimensions and size 1 at every inner plate. Ones pad it up to ``depth`` plate dimensions.
        """
        batch = (1,) * (depth + 1 - levels.dim()) + tuple(levels.shape[:-1])
        return {
            name: site.decode(levels[..., self.slices[name]], batch, None if dtypes is None else dtypes[name])
            for name, site in self.sites.items()
        }

    def site_values(self, levels: Tensor, sizes: Sequence[int], dtypes: Mapping[str, torch.dtype] | None = None) -> dict[str, Tensor]:
        """Returns site values of one unpacked state ``(N, L)`` per data point."""
        values = self.decode(levels.reshape(*self.spread(sizes), -1), self.depth, dtypes)
        return {name: trim(values[name], site.event_dim, site.depth) for name, site in self.sites.items()}

    def split(self, levels: Tensor) -> dict[str, Tensor]:
        """Returns site values ``(*batch, *site.shape)`` of unpacked states ``(*batch, L)``."""
        parts = {name: levels[..., own].reshape(*levels.shape[:-1], *self.sites[name].shape) for name, own in self.slices.items()}
        return {name: self.sites[name].to_values(part) for name, part in parts.items()}

    def encode_values(self, values: Mapping[str, Tensor], sizes: Sequence[int]) -> Tensor:
        """Inverse of :meth:`site_values`: returns unpacked states ``(N, L)``."""
        return torch.cat([self.encode_site(name, values[name], sizes) for name in self.sites], -1)

    def encode_site(self, name: str, value: Tensor, sizes: Sequence[int]) -> Tensor:
        """Returns one site's levels ``(N, L)`` from its value."""
        site = self.sites[name]
        return site.to_levels(self.expand_to_rows(name, value, sizes)).reshape(math.prod(sizes), site.num_latents)

    def expand_to_rows(self, name: str, value: Tensor, sizes: Sequence[int]) -> Tensor:
        """Expands a tensor shaped like a site to ``(N, *site shape)``.

        Data points are in front; one-hot sites have their values last.
        """
        site = self.sites[name]
        batch = [1] * (self.depth - len(self.spread(sizes))) + list(self.spread(sizes))
        for dim, size in site.plates:
            batch[dim] = size
        value = value.reshape((1,) * (self.depth - value.dim() + site.event_dim) + tuple(value.shape))
        value = value.expand((*batch, *site.event_shape, *[-1] * (site.kind == "one_hot")))
        if self.dims:
            value = value.movedim(tuple(dim - site.event_dim for dim in self.dims), tuple(range(len(self.dims))))
        return value.reshape(math.prod(sizes), *site.shape, *value.shape[value.dim() - 1 :] * (site.kind == "one_hot"))

    def encode(self, values: Mapping[str, Tensor]) -> Tensor:
        """Unpacked states ``(*batch, L)`` from site values ``(*batch, *site.shape)``."""
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


class Layout(SiteLayout):
    """A model's discrete latents: its *data plates*, and sites inside them.

    The data plates hold all discrete latent sites and everything that depends on them, so that their members have independent posteriors.
    A member of all of them counts as a data point. Without a data plate, all discrete latents form the one state of a single "data
    point".

    Attributes:
        other_latents: names of the model's other latent sites, without ``Delta`` sites.
        nesting: number of plate dimensions that Pyro must count to compare model and guide.
        names: the names that the model gives to sites, plates and parameters.
        limits: by site name, the largest count that is kept (``max_count``).
        cut_sites: names of the sites with larger counts than these.
        conditional_sites: names of the sites whose supports depend on discrete latents.
        sites_to_check: names of the sites that give probability zero to some states outside of a support.
        dependents: names of the sites whose densities depend on discrete latents.
        read: names of the sites whose values the model's Python code looks at.
        clamped_sites: on a device, names of the sites that give something probability zero, as torch clamps it.
        is_linear: whether all observations are normal around a linear function of the discrete site.
        coupled_site: a site whose density at a data point depends on the states of others, so that their posteriors are not independent.
        takes_shared_states: whether the model takes states of size one at the data plates.
        broadcasts_parts: how what the model stacks, gathers or multiplies is broadcast first, one of ``BROADCASTS``.
        idle_sites: names of the sites whose entries have one value where masks switch them off, if they change no density there.
        readers: by discrete site, the other sites whose densities depend on it.
        varying_masks: names of the sites whose masks depend on discrete latents.
    """

    def __init__(self, trace: poutine.Trace, dependencies: Dependencies, max_count: int | Mapping[str, int] | None = None) -> None:
        nodes = [node for node in latent_nodes(trace) if node["fn"].support.is_discrete]
        if not nodes:
            refuse_unknown_values(latent_nodes(trace))
            others = ", ".join(f"'{node['name']}' ({family(node['fn'])})" for node in latent_nodes(trace)) or "none"
            raise ValueError(
                f"the model has no discrete latent site, so AutoTruncated has nothing to infer; its latents are: {others}. If it observes "
                "the discrete sites in this call, first call guide.setup(*args) with arguments for which it does not."
            )
        frames = _data_plates(trace, nodes, dependencies)
        plates = [frame.name for frame in frames]
        refuse_unplated_dims(sample_nodes(trace).values(), {node["name"] for node in nodes}, dependencies, plates)
        for node in nodes:
            refuse_plates(node, trace.nodes)
        _check_bounds(max_count, [node["name"] for node in nodes])
        sites: dict[str, DiscreteSite] = {}
        limits: dict[str, int] = {}
        cut_sites: list[str] = []
        sites_to_check = set()
        for node in nodes:
            name = node["name"]
            limit = max_count.get(name) if isinstance(max_count, Mapping) else max_count
            low, high, is_cut = reachable_bounds(node, trace.nodes, sites, limit, dependencies)
            if limit is not None:
                limits[name] = limit
            if is_cut:
                cut_sites.append(name)
            sites[name] = discrete_site(node, plates, low, high)
            if high.numel() > 1 and bool((high != high.flatten()[0]).any()):
                sites_to_check.add(name)
        every = [frame for node in sample_nodes(trace).values() for frame in node["cond_indep_stack"]]
        super().__init__(sites, frames, max((-frame.dim for frame in every if frame.vectorized), default=0))
        self.names = frozenset(trace.nodes)
        self.limits: Mapping[str, int] = limits
        self.cut_sites: Sequence[str] = cut_sites
        self.conditional_sites = frozenset(dependencies.conditional(set(self.sites)))
        self.sites_to_check = self.conditional_sites | sites_to_check
        self.dependents = frozenset(dependencies.dependents(set(self.sites)))
        self.read = frozenset(self.sites) & dependencies.read
        rest = (node for node in latent_nodes(trace) if node["name"] not in self.sites)
        self.other_latents = [node["name"] for node in rest if family(node["fn"]) != "Delta"]
        self.idle_sites: frozenset[str] = frozenset()
        self.readers: dict[str, frozenset[str]] = dict.fromkeys(self.sites, frozenset())
        self.varying_masks: frozenset[str] = frozenset()
        self.clamped_sites: frozenset[str] = frozenset()
        self.is_linear = False
        self.coupled_site: str | None = None
        self.takes_shared_states, self.broadcasts_parts = False, ""
        self.nesting: int = sufficient_nesting(latent_nodes(trace), self.depth)

    def note_readers(self, dependencies: Dependencies) -> None:
        """Notes which densities and masks of a call depend on which sites.

        Where that is not known, no site is idle.
        """
        scopes = dependencies.scopes
        if scopes is None or dependencies.read & self.sites.keys():
            self.idle_sites = frozenset()
            return
        self.varying_masks |= {name for name, latents in dependencies.masked.items() if latents & self.sites.keys()}
        self.idle_sites -= self.varying_masks
        for name, readers in self.readers.items():
            self.readers[name] = readers | {reader for reader, scope in scopes.items() if name in scope and reader != name}

    @property
    def left_out(self) -> str:
        """What sums over all states leave out, in words."""
        parts = [f"max_count leaves out '{name}' beyond {self.limits[name]}" for name in self.cut_sites]
        if self.coupled_site is not None:
            parts.append(f"'{self.coupled_site}' of a data point depends on the states of others")
        return ", and ".join(parts)

    def find_problems(self, marginals: Mapping[str, Tensor], indices: Tensor | None = None) -> list[tuple[str, str]]:
        """What makes posteriors wrong whatever the states, and what to change.

        Data points may depend on each other, and ``max_count`` may cut counts off.
        Where a hundredth of the mass lies on the largest count that is kept, the next ones would have some, too.
        """
        findings = []
        if self.coupled_site is not None:
            problem = (
                f"Site '{self.coupled_site}' of a data point depends on the states of other data points, which are taken to be independent."
            )
            findings.append((problem, "Compute within data points, or make the plate an event."))
        for name in self.cut_sites:
            if len(marginals[name]) == 0:
                continue
            mass = marginals[name][..., -1].nan_to_num(0.0).reshape(len(marginals[name]), -1).amax(1)
            worst = int(mass.argmax())
            if float(mass[worst]) > 0.01:
                limit, place = self.limits[name], f" (data point {worst if indices is None else int(indices[worst])})"
                problem = f"Of the posterior of '{name}', {float(mass[worst]):.2g} lies on {limit}, the largest count that is kept"
                problem += f"{place if self.plates else ''}: larger counts are left out."
                findings.append((problem, f"Keep more: max_count={{'{name}': {2 * limit}}}, until next to nothing lies there."))
        return findings

    def extra_plates_for(self, site: DiscreteSite, batch_dim: int) -> AbstractContextManager[Any]:
        """A context in which Pyro's ELBOs count enough plate dimensions.

        They take the left-most plate of a run without enumeration. See :func:`sufficient_nesting`.
        """
        if self.nesting <= self.depth:
            return nullcontext()
        plate_depths = [-frame.dim for frame in plates_around((), site.name)]
        is_enumerated = batch_dim > max([site.depth, *plate_depths])
        if is_enumerated and site.depth < batch_dim - 1 < site.depth + site.event_dim and pyro.settings.get("validate_infer"):
            warnings.warn(
                f"with max_plate_nesting={batch_dim - 1} Pyro cuts the shape of site '{site.name}' wrongly, and finds that model and guide "
                f"disagree. Pass max_plate_nesting={self.nesting} to the ELBO, or leave it to find the number by itself: "
                f"TraceEnum_ELBO(max_plate_nesting={self.nesting}).",
                stacklevel=2,
            )
        # To Pyro a plate of any size, which it does not expand sites to.
        return nullcontext() if is_enumerated or self.nesting in plate_depths else IndepMessenger(_NAME, -1, dim=-self.nesting)


def _check_bounds(max_count: int | Mapping[str, int] | None, names: Sequence[str]) -> None:
    bounds = max_count if isinstance(max_count, Mapping) else {"": max_count}
    unknown = set(bounds) - {"", *names}
    if unknown:
        raise ValueError(f"max_count bounds {sorted(unknown)}, but the model's discrete sites are {list(names)}")
    for bound in bounds.values():
        if bound is not None:
            check_count("max_count, or each of its entries by site,", bound)


def _data_plates(trace: poutine.Trace, nodes: Sequence[Mapping[str, Any]], dependencies: Dependencies) -> list[Any]:
    """Returns plates around all discrete sites and their dependents."""
    stacks = [[frame for frame in node["cond_indep_stack"] if frame.vectorized] for node in nodes]
    # A plate that is opened anew with another size or dimension is another plate.
    same = set.intersection(*({(frame.name, frame.dim, frame.size) for frame in stack} for stack in stacks))
    shared = {name for name, _, _ in same}
    names, sites = {node["name"] for node in nodes}, sample_nodes(trace)
    others = {name: {frame.name for frame in sites[name]["cond_indep_stack"]} for name in sites.keys() - names - recorded_names(sites)}
    if any(not shared <= plates for plates in others.values()):
        below = dependencies.dependents(names)
        others = {name: plates for name, plates in others.items() if name in below}
        shared = shared.intersection(*others.values())
    return sorted((frame for frame in stacks[0] if frame.name in shared), key=lambda frame: frame.dim)


_NAME = "room for events"


def sufficient_nesting(latents: Iterable[Any], depth: int) -> int:
    """Returns the least sufficient plate nesting, at least ``depth``.

    Pyro then compares given latent sites of a model with a guide correctly.
    ``pyro.util.check_model_guide_match`` cuts the shape of a site that is longer than
    ``max_plate_nesting``, from ``len(shape) - max_plate_nesting - event_dim`` on. If the site lies in
    fewer plates than there are and has an event of two dimensions or more, that start is negative and
    counts from the right. The model's shape then loses dimensions that the guide's keeps, as
    enumeration makes it longer. The two seem to disagree. The start should be ``max(0, ...)``. With a
    larger ``max_plate_nesting`` nothing is cut wrongly.
    """
    sizes = [(len(node["fn"].batch_shape), node["fn"].event_dim) for node in latents]
    for batch_dim, event_dim in sorted(sizes, key=sum):
        if batch_dim < depth < batch_dim + event_dim:
            depth = batch_dim + event_dim
    return depth
