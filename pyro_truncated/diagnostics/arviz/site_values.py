"""Single values on their way to ArviZ: names, types, dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from pyro_truncated.diagnostics.arviz.roles import hidden_entries, is_computed
from pyro_truncated.program.sites import DiscreteSite


def is_discrete(fn: Any) -> bool:
    """Whether a distribution is known to be one of integers.

    Likelihoods of one's own may have no support.
    """
    try:
        return bool(fn.support.is_discrete)
    except (NotImplementedError, AttributeError):
        return False


def variable_name(site: str) -> str:
    """Returns a site's name as files and ArviZ allow it."""
    return f"{site}_site" if site in ("chain", "draw") else site.replace("/", ".")


def event_dim_of(node: Mapping[str, Any], shape: Sequence[int]) -> int:
    """Event dimensions of a site's values of this shape.

    ``pyro.deterministic`` takes all dimensions for an event's unless told otherwise, those of the plates around it
    too. So leading dimensions that have the sizes of the plates are the plates'.
    """
    event_dim: int = node["fn"].event_dim
    if not is_computed(node) or event_dim < len(shape):
        return event_dim
    sizes = {frame.dim: frame.size for frame in node["cond_indep_stack"] if frame.vectorized}
    depth = max((-dim for dim in sizes), default=0)
    is_batch = 0 < depth <= len(shape) and all(shape[depth + dim] == size for dim, size in sizes.items())
    return len(shape) - depth if is_batch else event_dim


def without_hidden(node: Mapping[str, Any]) -> Tensor:
    """The value of an observed site, NaN where a mask hides it."""
    value: Tensor = node["value"]
    hidden = hidden_entries(node)
    if hidden is None:
        return value
    batch = node["fn"].batch_shape
    hidden = hidden.expand(torch.broadcast_shapes(hidden.shape, batch)).reshape((*batch, *(1,) * node["fn"].event_dim))
    value = value if value.is_floating_point() else value.to(torch.get_default_dtype())
    return torch.where(hidden, torch.nan, value)


def is_same(value: Tensor, other: Tensor) -> bool:
    """Whether an argument is the observed value or a copy of it."""
    if value.shape != other.shape:
        return False
    return value.data_ptr() == other.data_ptr() or bool(torch.equal(value.nan_to_num(), other.to(value).nan_to_num()))


def as_array(values: Tensor) -> np.ndarray:
    """Values on the CPU; Boolean ones as integers."""
    values = values.detach().cpu()
    return (values.to(torch.int8) if values.dtype == torch.bool else values).numpy()


def level_type(bounds: Sequence[int]) -> torch.dtype:
    """Returns the smallest signed type for values below all bounds.

    ArviZ plots neither bool nor unsigned types.
    """
    return next(dtype for dtype in (torch.int8, torch.int16, torch.int32, torch.int64) if max(bounds) - 1 <= torch.iinfo(dtype).max)


def value_type(site: DiscreteSite) -> torch.dtype:
    """Smallest type for the values of a discrete site."""
    return level_type([site.low + max(site.cardinalities)]) if site.kind != "one_hot" else torch.int8


def labels_of(name: str, shape: Sequence[int]) -> list[str]:
    """Names of the entries of a site."""
    return [f"{name}[{','.join(map(str, position))}]" if shape else name for position in np.ndindex(*shape)]


def training_dataset(records: Mapping[str, Any]) -> xr.Dataset:
    """Training records, ``(steps,)`` or ``(restarts, steps)``, as a dataset.

    Raises:
        ValueError: if they differ in shape.
    """
    arrays = {name: np.atleast_2d(as_array(v) if torch.is_tensor(v) else np.asarray(v, dtype=float)) for name, v in records.items()}
    shapes = {name: array.shape for name, array in arrays.items()}
    if any(len(shape) != 2 for shape in shapes.values()) or len(set(shapes.values())) > 1:
        raise ValueError(f"training records must all have the same dimensions, (step,) or (restart, step); got {shapes}")
    return xr.Dataset({name: (("restart", "step"), array) for name, array in arrays.items()})
