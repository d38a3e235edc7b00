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
