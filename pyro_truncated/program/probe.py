"""One run of a Pyro model as a probe.

It tells which data points are selected, what is observed of them, and their scale.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_truncated.program.call import Call
from pyro_truncated.program.changing_sites import ChangingSitesError, changing_sites, describe_changes
from pyro_truncated.program.discovery import refuse_other_events, refuse_other_plates, refuse_other_values
from pyro_truncated.program.known_levels import KnownLevels, find_idle
from pyro_truncated.program.layout import Layout
from pyro_truncated.program.operations import BroadcastParts, Shape
from pyro_truncated.program.sites import family, is_subsampled, log_density, sample_nodes, scale_beyond_subsamples
from pyro_truncated.utils.console import note_once


class AllObservedError(ValueError):
    """The model observes all discrete sites of the guide."""

    def __init__(self, sites: Iterable[str], nodes: Mapping[str, Any]) -> None:
        self.values, self.nodes = {name: nodes[name]["value"] for name in sites}, nodes
        super().__init__(f"the model observes all its discrete sites {list(self.values)} with these arguments: there is nothing to infer")


def _members_of_outer_plates(nodes: Iterable[Any], known: Collection[str]) -> dict[str, Tensor]:
    """All members of the plates that were made outside of a run."""
    frames = {f.name: f for node in nodes for f in node["cond_indep_stack"] if f.vectorized and f.name not in known}
    if subsampled := next(filter(is_subsampled, frames.values()), None):
        raise ValueError(
            f"plate '{subsampled.name}' was made outside of the model, where it has drawn its subsample once and for all. Make it in the "
            "model."
        )
    return {name: torch.arange(frame.size) for name, frame in frames.items()}


class Probe:
    """The data points of one (sub)batch that a run selects.

    Attributes:
        call: the Pyro model and its arguments.
        layout: its discrete sites.
        nodes: the sample sites of the run by name.
        subsamples: the subsamples of plates by name.
        values: fixed values while states are scored. They are the given values, the subsamples, and
            draws of the latents that no guide has given a value.
        uncovered_latents: the latents that nobody has given a value.
        observed_sites: the discrete sites that are observed in this call.
        idle: by discrete site, the entries of its batch that a mask switches off: they have one value.
        masked_sites: the other discrete sites with masks: these count in sums, but not in densities of the model.
        known_levels: the levels that observed and idle latents have, ``None`` where all are free.
        frames: the data plates, from left to right.
        dtypes: types of the discrete sites' values.
        device: where they are.
        scale: what the discrete sites are scaled by: the objective is this times the sum over data points.
        depth: number of plate dimensions, with those of other latents' draws.
        inside: the sites that count for each data point, ``None`` for those that lie in all data plates.
        is_vectorized: whether there are such (vectorised particles), so that scores gain dimensions.
    """

    inside: Collection[str] | None = None

    def __init__(self, call: Call, layout: Layout, values: Mapping[str, Any] | None = None) -> None:
        self.call, self.layout = call, layout
        values = dict(values or {})
        trace = self.first_run(values)
        self.nodes = sample_nodes(trace)
        self.subsamples: dict[str, Any] = {name: node["value"] for name, node in trace.nodes.items() if site_is_subsample(node)}
        latents = [self.nodes[name] for name in (*layout.sites, *layout.other_latents) if name in self.nodes]
        self.subsamples |= _members_of_outer_plates(latents, self.subsamples)
        observed = {name for name, node in self.nodes.items() if node["is_observed"]}
        self.observed_sites = [name for name in layout.sites if name in observed]
        self._check_structure()
        self._check_values()
        others = {name: self.nodes[name]["value"] for name in layout.other_latents if name in self.nodes}
        self.values: dict[str, Any] = values | self.subsamples | others
        self.uncovered_latents = set(layout.other_latents) - values.keys() - observed
        first = self.nodes[next(iter(layout.sites))]
        self.frames: list[Any] = sorted((f for f in first["cond_indep_stack"] if f.name in layout.plates), key=lambda frame: frame.dim)
        self.dtypes: dict[str, torch.dtype] = {name: self.nodes[name]["value"].dtype for name in layout.sites}
        self.device: torch.device = first["value"].device
        self.scale: float | Tensor = first["scale"]
        for scale in {self.nodes[name]["scale"] for name in layout.sites}:
            if torch.as_tensor(scale).numel() != 1 or float(scale) <= 0:
                raise ValueError(f"discrete sites must have one positive scale for all data points (poutine.scale); got {scale}")
        extra = (self.values[name].dim() - node["fn"].event_dim for name, node in self.nodes.items() if name in self.values)
        self.depth: int = max([layout.depth, *extra])
        self.is_vectorized = self.depth > layout.depth
        # Those of latent discrete sites that switch some entries off.
        masks = {name: self.nodes[name]["mask"] for name in layout.sites if name not in observed}
        masks = {name: torch.as_tensor(mask, device=self.nodes[name]["value"].device) for name, mask in masks.items() if mask is not None}
        masks = {name: mask for name, mask in masks.items() if not bool(mask.all())}
        self.idle = find_idle(self.nodes, masks, layout)
        self.masked_sites = [name for name in masks if name not in self.idle]
        labels = {name: self.nodes[name]["value"] for name in self.observed_sites}
        self.known_levels = KnownLevels.from_run(layout, self.sizes, labels, self.idle, self.device)

    def first_run(self, values: Mapping[str, Any]) -> poutine.Trace:
        """The run that says what the model selects and observes."""
        return self.run(values) if values or self.call.first is None else self.call.first

    def run(self, values: Mapping[str, Any]) -> poutine.Trace:
        """A run with given values of sites and subsamples of plates."""
        if not self.layout.broadcasts_parts:
            return self.call.run(values)
        depth, sites = self.layout.depth, self.layout.sites
        latents = ((values.get(name), Shape(site.depth + site.event_dim, depth + site.event_dim)) for name, site in sites.items())
        parts = [(value, shape) for value, shape in latents if isinstance(value, Tensor)]
        with BroadcastParts(parts, fills_plates=self.layout.broadcasts_parts == "plates"):
            return self.call.run(values)

    def _check_common_scale(self, sites: Iterable[str]) -> None:
        """Refuses latents of one posterior that are scaled differently."""
        scales = {name: self.nodes[name]["scale"] for name in sites if name not in self.observed_sites}
        first, scale = next(iter(scales.items()), ("", 1.0))
        for name, other in scales.items():
            differs = other is not scale and other != scale
            if differs is not False and bool(torch.as_tensor(differs).any()):
                frames = (frame for site in (first, name) for frame in self.nodes[site]["cond_indep_stack"] if is_subsampled(frame))
                plate = next((frame.name for frame in frames), None)
                advice = f"take all members of the plate '{plate}', which is subsampled" if plate else "give both the same poutine.scale"
                raise ValueError(
                    f"the latents '{first}' and '{name}' share a posterior, but have the scales {scale} and {other}: {advice}."
                )

    def _check_structure(self) -> None:
        missing = [name for name in self.layout.sites if name not in self.nodes]
        expected = {*self.layout.sites, *self.layout.other_latents}
        latents = {name: node for name, node in self.nodes.items() if not node["is_observed"] and name not in expected}
        new = [name for name, node in latents.items() if family(node["fn"]) != "Delta"]
        if (missing or new) and (sites := changing_sites(self.call, self.run(self.subsamples))):
            raise ChangingSitesError(describe_changes(sites))
        if missing:
            raise ValueError(
                f"the model must sample the discrete sites {missing}, as when the guide was set up. For data of another shape take "
                "guide.infer(data), for another model a new guide."
            )
        if new:
            raise ValueError(
                f"the model now has the latents {new}, which it had not (or observed) when the guide was set up. First call "
                "guide.setup(*args) so that the model observes no latent; data of another shape take guide.infer(data), draws of data "
                "Predictive(poutine.uncondition(model), guide=guide)"
            )
        if len(self.observed_sites) == len(self.layout.sites):
            raise AllObservedError(self.layout.sites, self.nodes)

    def _check_values(self) -> None:
        layout = self.layout
        for node in self.nodes.values():
            if node["is_observed"]:
                refuse_other_events(node)
        for name, site in layout.sites.items():
            refuse_other_plates(self.nodes[name], site)
            # Of supports that depend on latents, draws may be beyond the counts that are kept.
            if name not in self.observed_sites and name not in layout.conditional_sites:
                refuse_other_values(self.nodes[name], site, layout.limits.get(name), may_be_fewer=name in layout.sites_to_check)

    def is_inside(self, node: Any) -> bool:
        """Whether a site is :attr:`inside`, or lies in all data plates."""
        if self.inside is not None:
            return node["name"] in self.inside
        return set(self.layout.plates) <= {frame.name for frame in node["cond_indep_stack"]}

    # --- which data points, and how much they count ---

    @cached_property
    def indices(self) -> Tensor | None:
        """:attr:`plate_indices`, where the states are."""
        return None if self.plate_indices is None else self.plate_indices.to(self.device, non_blocking=True)

    @cached_property
    def plate_indices(self) -> Tensor | None:
        """Returns positions ``(N,)`` of this batch's data points, or ``None``.

        ``None`` stands for all in order. They are where the plates have them: on the CPU, mostly, where nobody waits for them.
        """
        positions: Tensor | None = None
        whole = True
        for frame in self.frames:
            size = int(frame.full_size or frame.size)
            members = torch.as_tensor(self.values[frame.name])
            if len(members) and not 0 <= int(members.min()) <= int(members.max()) < size:
                got = f"{int(members.min())} .. {int(members.max())}"
                raise ValueError(f"subsample indices of plate '{frame.name}' must lie in 0 .. {size - 1}; got {got}")
            whole &= len(members) == size and torch.equal(members, torch.arange(size, device=members.device))
            positions = members if positions is None else (positions.unsqueeze(-1) * size + members).flatten()
        return None if whole else positions

    @property
    def num_data(self) -> int:
        """Number of data points in this batch, ``N``."""
        return math.prod(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the data plates in this batch."""
        return tuple(int(frame.size) for frame in self.frames)

    @property
    def full_size(self) -> int:
        """Number of data points in the full data set."""
        return math.prod(int(frame.full_size or frame.size) for frame in self.frames)

    def scale_beyond_subsamples(self, site: str) -> float | Tensor:
        """The part of a site's scale that comes from no subsampling."""
        return scale_beyond_subsamples(self.nodes[site])

    # --- what is observed ---

    def observations(self, nodes: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Returns observed values inside the data plate by site name.

        Data points come first, then inner plates, then the event.

        They are those of the probe, or of the sample sites of another run of the model on the same data points.
        """
        values = {}
        dims = self.layout.dims
        for name, node in (self.nodes if nodes is None else nodes).items():
            if node["is_observed"] and torch.is_tensor(node["value"]) and self.is_inside(node):
                value, event_dim = node["value"], node["fn"].event_dim
                if dims and value.dim() >= event_dim - dims[0]:
                    value = value.movedim(tuple(dim - event_dim for dim in dims), tuple(range(len(dims))))
                    values[name] = value.flatten(0, len(dims) - 1) if value.shape[: len(dims)] == self.sizes else value
        return values

    def outside(self, *, with_parameters: bool = True, share: float = 1.0, own_share: float = 1.0) -> Tensor:
        """Returns the scaled log probability of observations that are not inside."""
        nodes = [node for node in self.nodes.values() if with_parameters or not node["infer"].get("of_parameters", False)]
        nodes = [node for node in nodes if not self.is_inside(node) and (node["is_observed"] or family(node["fn"]) == "Delta")]
        return self.shared_density(nodes, share, own_share)

    def shared_density(self, nodes: Sequence[Any], share: float, own_share: float = 1.0) -> Tensor:
        """Returns the log density of nodes.

        It counts a share of those without a row for each data point, and another one of those with one.
        """
        if share == own_share == 1.0:
            return log_density(nodes, self.device)
        has_rows = [self._counts_by_row(node) for node in nodes]
        parts = [[node for node, has_own in zip(nodes, has_rows, strict=True) if has_own is is_per_row] for is_per_row in (True, False)]
        return own_share * log_density(parts[0], self.device) + share * log_density(parts[1], self.device)

    def _counts_by_row(self, node: Any) -> bool:
        """Whether a site lies in a plate over this process's rows."""
        sizes = {frame.name: int(frame.full_size or frame.size) for frame in node["cond_indep_stack"] if frame.vectorized}
        size = int(self.frames[0].full_size or self.frames[0].size)
        twin = next((name for name in sizes if sizes[name] == size), None)
        if self.layout.plates[0] not in sizes and twin is not None:
            note_once(
                f"plate '{twin}' has as many members as plate '{self.layout.plates[0]}' has in this process: what is observed in it counts "
                "as data of this process's rows, not as what all processes share"
            )
        return self.layout.plates[0] in sizes or twin is not None

    def insert_observed_values(self, words: Tensor) -> Tensor:
        """Returns distinct states ``(N, S, num_words)`` with observed values inserted."""
        return words if self.known_levels is None else self.known_levels.put_into(words)
