"""Groups of several guides as chains, and their common attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import pyro
import xarray as xr

from pyro_truncated.diagnostics.arviz.groups import ON_DATA

_BY_CHAIN = ("posterior", "sample_stats", "log_prior", "prior", *ON_DATA[1:])
_SHARED = ("observed_data", "constant_data")


def side_by_side(chains: list[dict[str, xr.Dataset]]) -> dict[str, xr.Dataset]:
    """Guides side by side along ``chain``."""
    names = [name for name in chains[0] if all(name in chain for chain in chains)]
    joined = {}
    for name in names:
        parts = [chain[name] for chain in chains]
        if len({tuple(part.sizes.items()) for part in parts}) > 1:
            raise ValueError(f"the guides do not go together: {name} has the sizes {[dict(part.sizes) for part in parts]}")
        if name in _SHARED:
            joined[name] = parts[0]
            continue
        numbers = xr.DataArray(np.arange(len(parts)), dims="chain", name="chain")
        if name in _BY_CHAIN:
            parts = [part.assign_coords(chain=[number]) for number, part in enumerate(parts)]
            joined[name] = xr.concat(parts, dim="chain", combine_attrs="override")
        else:
            joined[name] = xr.concat(parts, dim=numbers, combine_attrs="override")
    return joined


def named_like(arrays: Mapping[str, np.ndarray], data: xr.Dataset) -> xr.Dataset:
    """Names arrays ``(N,)`` like the free energy of the data points."""
    like = data["free_energy"]
    for name, values in arrays.items():
        if values.size != like.size:
            raise ValueError(f"checks are of {values.size} data points ({name}); these are {like.size}")
    return xr.Dataset({name: (like.dims, values.reshape(like.shape)) for name, values in arrays.items()})


def attributes_of(guides: list[Any], datasets: Mapping[str, xr.Dataset], seed: int | None) -> dict[str, Any]:
    """What every group says of where it comes from."""
    attributes: dict[str, Any] = {
        "created_at": datetime.now(UTC).isoformat(),
        "inference_library": "pyro",
        "inference_library_version": pyro.__version__,
        "inference_method": "variational",
        "guide": getattr(guides[0], "__name__", type(guides[0]).__name__),
        "num_restarts": len(guides),
        "point_estimates_only": datasets["posterior"].attrs["point_estimates_only"],
    }
    if "truncated_posterior" in datasets:
        attributes |= {"inference_method": "truncated variational", "num_states": datasets["truncated_posterior"].attrs["num_states"]}
    with contextlib.suppress(PackageNotFoundError):
        attributes["creation_library_version"] = version("pyro-truncated")
    return attributes if seed is None else {**attributes, "seed": seed}
