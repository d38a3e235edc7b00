"""The only place that knows which ArviZ is installed.

========  =======================  =========================
ArviZ     container of groups      a group
========  =======================  =========================
0.20-0.x  ``arviz.InferenceData``  ``xarray.Dataset``
1.x       ``xarray.DataTree``      node of the tree
========  =======================  =========================

Everything else builds :class:`xarray.Dataset` objects, which are the same for both. The version is read from the package's metadata,
since merely naming ``arviz.InferenceData`` warns in 1.x.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import xarray as xr

ARVIZ_V1 = int(version("arviz").split(".")[0]) >= 1


def make_idata(**datasets: xr.Dataset) -> Any:
    """Puts datasets together, one group each: an ``InferenceData``, or a ``DataTree`` from ArviZ 1.0 on."""
    if ARVIZ_V1:
        return xr.DataTree.from_dict(dict(datasets))
    import arviz

    container: Any = arviz.InferenceData
    return container(**datasets)


def get_dataset(idata: Any, group: str) -> xr.Dataset:
    """The dataset of one group.

    Raises:
        KeyError: if there is no such group.
    """
    node = idata[group]
    return node.to_dataset() if isinstance(node, xr.DataTree) else node


def group_names(idata: Any) -> list[str]:
    """Names of the groups, in order."""
    return list(idata.children) if isinstance(idata, xr.DataTree) else list(idata.groups())


def pareto_shapes(log_ratios: np.ndarray) -> np.ndarray:
    """Tail indices ``(N,)`` of log importance ratios ``(N, M)`` by Pareto smoothing; zero where the ratios do not vary."""
    return _smoothed(log_ratios)[1]


def smoothed_weights(log_ratios: np.ndarray) -> np.ndarray:
    """Pareto-smoothed, normalised log weights ``(N, M)`` of log importance ratios ``(N, M)``; uniform where the ratios do not vary."""
    return _smoothed(log_ratios)[0]


def _smoothed(log_ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ratios = np.asarray(log_ratios, dtype=float)
    lowest = np.min(ratios, where=np.isfinite(ratios), initial=0.0)
    # Impossible draws are far from the tail that is fitted, but infinite logs would spoil the sorting.
    ratios = np.where(np.isfinite(ratios), ratios, lowest - 1000.0)
    weights, shapes = np.full(ratios.shape, -np.log(ratios.shape[1])), np.zeros(len(ratios))
    varies = np.ptp(ratios, axis=1) > 1e-10 * (1 + np.abs(ratios).max(axis=1))
    if varies.any():
        if ARVIZ_V1:
            from arviz_stats.base import array_stats  # type: ignore[import-not-found, unused-ignore]

            weights[varies], shapes[varies] = array_stats.psislw(ratios[varies], r_eff=1.0)
        else:
            import arviz

            psislw: Any = arviz.psislw
            weights[varies], shapes[varies] = psislw(ratios[varies], reff=1.0)
    return weights, shapes
