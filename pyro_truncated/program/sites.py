"""Discrete latent sites of a Pyro model, and their levels.

It also lists the sites of a trace.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import Independent

WRAPPERS = (MaskedDistribution, ExpandedDistribution, Independent)


@dataclasses.dataclass(frozen=True)
class DiscreteSite:
    """One discrete latent site, seen from one data point."""

    name: str  # the site's name in the model
    kind: str  # "boolean", "integer" or "one_hot"
    # (dim, size) of the plates around the site other than the data plates, outermost (most negative
    # dim) first.
    plates: tuple[tuple[int, int], ...]
    event_shape: tuple[int, ...]  # shape of the value's event, without the one-hot dimension
    low: int  # smallest value (0 but for integer intervals that start elsewhere)
    cardinalities: tuple[int, ...]  # number of values of each latent, in the order of (*plates, *event_shape)
    frames: tuple[Any, ...]  # the site's plates, for the guide to enter
    dtype: torch.dtype  # type of the site's values in the prototype run

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a data point's latents: inner plates, then the event."""
        return (*(size for _, size in self.plates), *self.event_shape)

    @property
    def num_latents(self) -> int:
        """Number of discrete latents at the site, per data point."""
        return len(self.cardinalities)

    @cached_property
    def highest(self) -> Tensor:
        """Largest values, with plates before the event."""
        highest = torch.tensor(self.cardinalities) + (self.low - 1)
        if len(set(self.cardinalities)) == 1:
            return highest[0]
        sizes = dict(self.plates)
        return highest.reshape(*(sizes.get(dim, 1) for dim in range(-self.depth, 0)), *self.event_shape)

    @property
    def depth(self) -> int:
        """Number of batch dimensions that the site's plates take up."""
        return max((-frame.dim for frame in self.frames if frame.vectorized), default=0)

    @property
    def event_dim(self) -> int:
        """Number of event dimensions of the value Pyro sees."""
        return len(self.event_shape) + (self.kind == "one_hot")

    def in_plates(self, plates: Collection[str]) -> DiscreteSite:
        """The same site seen from a member of data plates."""
        frames = {frame.dim: frame.name for frame in self.frames if frame.vectorized}
        sizes = {frame.dim: frame.full_size or frame.size for frame in self.frames if frame.vectorized}
        inner = tuple((dim, sizes[dim]) for dim in sorted(frames) if frames[dim] not in plates)
        if inner == self.plates:
            return self
        # Data plates before this call have one cardinality for all members; those that become data plates get the largest.
        inner_sizes = dict(self.plates)
        table = torch.tensor(self.cardinalities).reshape(*(inner_sizes.get(dim, 1) for dim in sorted(frames)), *self.event_shape)
        for position, dim in enumerate(sorted(frames)):
            size = dict(inner).get(dim, 1)
            if table.shape[position] != size:
                table = table.amax(position, keepdim=True).expand(*(size if at == position else -1 for at in range(table.dim())))
        return dataclasses.replace(self, plates=inner, cardinalities=tuple(table.flatten().tolist()))

    def to_values(self, levels: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Turns levels ``0 .. cardinality - 1`` into the values Pyro sees."""
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
        """Inverse of :meth:`to_values`, as int64."""
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


def sample_nodes(trace: poutine.Trace) -> dict[str, Any]:
    """Returns a trace's sample sites by name, without subsamples of plates."""
    return {name: node for name, node in trace.nodes.items() if node["type"] == "sample" and not site_is_subsample(node)}


def latent_nodes(trace: poutine.Trace) -> list[Any]:
    """The latent sample sites of a trace."""
    return [node for node in sample_nodes(trace).values() if not node["is_observed"]]


def site_shapes(trace: poutine.Trace) -> dict[str, torch.Size | None]:
    """Returns the shapes of a run's latents; ``None`` for what it observes.

    Those in sequential plates of which it takes some members are left out.
    """
    return {
        name: None if node["is_observed"] else node["fn"].shape()
        for name, node in sample_nodes(trace).items()
        if not any(is_subsampled(frame) and not frame.vectorized for frame in node["cond_indep_stack"])
    }


def recorded_names(nodes: Mapping[str, Any]) -> set[str]:
    """The sample sites that only record a value, as by ``pyro.deterministic``."""
    return {name for name, node in nodes.items() if node["infer"].get("_deterministic", False)}


def density_nodes(nodes: Mapping[str, Any]) -> dict[str, Any]:
    """The sample sites that have a density of their own."""
    recorded = recorded_names(nodes)
    return {name: node for name, node in nodes.items() if name not in recorded and (node["is_observed"] or family(node["fn"]) != "Delta")}


def log_density(nodes: Iterable[Any], device: torch.device | None = None) -> Tensor:
    """Returns the summed log densities of sample sites in float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for node in nodes:
        log_prob = node["fn"].log_prob(node["value"], *node["args"], **node["kwargs"])
        total = total.to(log_prob.device) + scale_and_mask(log_prob, node["scale"], node["mask"]).sum()
    return total


def trim(value: Tensor, event_dim: int, depth: int) -> Tensor:
    """Drops leading batch dimensions of size one beyond the site's own plates."""
    while value.dim() - event_dim > depth and value.shape[0] == 1:
        value = value.squeeze(0)
    return value


def is_subsampled(frame: Any) -> bool:
    """Whether a run takes some members of a plate only."""
    return bool(frame.full_size is not None and frame.full_size != frame.size)


def scale_beyond_subsamples(node: Mapping[str, Any]) -> float | Tensor:
    """The part of a site's scale that comes from no subsampling."""
    share: float = math.prod(frame.size / (frame.full_size or frame.size) for frame in node["cond_indep_stack"])
    return node["scale"] * share


def has_stock_density(fn: Any) -> bool:
    """Whether the density is torch's or Pyro's, not of a user's class."""
    return str(type(fn).log_prob.__module__).startswith(("torch.", "pyro."))


def strip_events(fn: Any) -> tuple[Any, int]:
    """Returns a distribution without ``to_event``, and how many dimensions that took.

    A user's wrapper with a density of its own stays.
    """
    number = 0
    while isinstance(fn, Independent) and has_stock_density(fn):
        number, fn = number + fn.reinterpreted_batch_ndims, fn.base_dist
    return fn, number


def unwrap(fn: Any) -> tuple[Any, list[tuple[Any, int]]]:
    """Returns a distribution without wrappers, and its masks.

    Masks come with the event dimensions of what they mask. A user's wrapper with a density of its own stays.
    """
    masks = []
    while isinstance(fn, WRAPPERS) and has_stock_density(fn):
        if isinstance(fn, MaskedDistribution):
            masks.append((fn._mask, fn.event_dim))
        fn = fn.base_dist
    return fn, masks


def without_masks(fn: Any) -> Any:
    """Returns a distribution without its masks, those under ``to_event`` too."""
    if isinstance(fn, MaskedDistribution):
        return without_masks(fn.base_dist)
    return without_masks(fn.base_dist).to_event(fn.reinterpreted_batch_ndims) if isinstance(fn, Independent) else fn


def family(fn: Any) -> str:
    """Returns the name of a distribution without its wrappers."""
    while hasattr(fn, "base_dist") and not hasattr(fn, "transforms"):
        fn = fn.base_dist
    return type(fn).__name__
