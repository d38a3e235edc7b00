"""The only place that knows which ArviZ is installed.

========  =======================  =========================
ArviZ     container of groups      a group
========  =======================  =========================
0.20-0.x  ``arviz.InferenceData``  ``xarray.Dataset``
1.x       ``xarray.DataTree``      node of the tree
========  =======================  =========================

The version is read from the package's metadata, since merely naming ``arviz.InferenceData`` warns in 1.x.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import xarray as xr

ARVIZ_V1 = int(version("arviz").split(".")[0]) >= 1


def _arviz() -> Any:
    """ArviZ, imported where it is needed: it takes seconds."""
    import arviz

    return arviz


def _tree() -> Any:
    """The tree of xarray, which takes half a second to import."""
    import xarray

    return xarray.DataTree


def make_idata(**datasets: xr.Dataset) -> Any:
    """Joins datasets, one group each, to ``InferenceData`` or a ``DataTree``."""
    if ARVIZ_V1:
        return _tree().from_dict(dict(datasets))
    return _arviz().InferenceData(**datasets)


def get_dataset(idata: Any, group: str) -> xr.Dataset:
    """The dataset of one group."""
    groups = group_names(idata)
    if group not in groups:
        raise ValueError(f"the data have no group {group}, only {groups}; see to_arviz for what makes it")
    node = idata[group]
    return node.to_dataset() if isinstance(node, _tree()) else node


def group_names(idata: Any) -> list[str]:
    """Names of the groups, in order."""
    if not isinstance(idata, _tree()) and not hasattr(idata, "groups"):
        raise TypeError(f"idata must be what to_arviz returns, or read back from a file; got {type(idata).__name__}")
    return list(idata.children) if isinstance(idata, _tree()) else list(idata.groups())


def read_netcdf(path: str | Path) -> Any:
    """Converted data that were saved with their method ``to_netcdf``."""
    return _arviz().from_netcdf(str(path))


def pareto_smooth(log_ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Smoothed log weights ``(N, M)`` of log ratios, and tail indices ``(N,)``."""
    ratios = np.asarray(log_ratios, dtype=float)
    lowest = np.min(ratios, where=np.isfinite(ratios), initial=0.0)
    # Impossible draws are far from the tail that is fitted, but infinite logs would spoil the sorting.
    ratios = np.where(np.isfinite(ratios), ratios, lowest - 1000.0)
    weights, shapes = np.full(ratios.shape, -np.log(ratios.shape[1])), np.zeros(len(ratios))
    # Ratios that are equal but for rounding have no tail.
    varies = np.ptp(ratios, axis=1) > 1e-10 * (1 + np.abs(ratios).max(axis=1))
    if varies.any():
        weights[varies], shapes[varies] = _smooth_rows(ratios[varies]) if ARVIZ_V1 else _arviz().psislw(ratios[varies], reff=1.0)
    return weights, shapes


def _smooth_rows(ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same by ArviZ 1.x, which refuses a tail of equal values."""
    from arviz_stats.base import array_stats  # type: ignore[import-not-found, unused-ignore]

    # Releases differ in whether they take log ratios or, as for cross-validation, log likelihoods, which are their negatives.
    probe = np.arange(100.0)
    sign = 1 if array_stats.psislw(probe, r_eff=1.0)[0].argmax() == probe.argmax() else -1
    weights, shapes = ratios - np.logaddexp.reduce(ratios, axis=1, keepdims=True), np.full(len(ratios), np.inf)
    for row, values in enumerate(sign * ratios):
        with contextlib.suppress(ValueError):
            weights[row], shapes[row] = array_stats.psislw(values, r_eff=1.0)
    return weights, shapes


def loo(idata: Any, var_name: str) -> tuple[float, float, float, np.ndarray, np.ndarray]:
    """ArviZ's ``loo``: density, its error, effective parameters, terms, tail indices."""
    result = _loo(idata, var_name)
    names = ("elpd", "p", "elpd_i") if ARVIZ_V1 else ("elpd_loo", "p_loo", "loo_i")
    elpd, p_loo, pointwise = (getattr(result, name) for name in names)
    return float(elpd), float(result.se), float(p_loo), np.asarray(pointwise).ravel(), np.asarray(result.pareto_k).ravel()


def compare(idatas: Mapping[str, Any], var_names: Mapping[str, str]) -> Any:
    """ArviZ's table that compares models by leave-one-out cross-validation."""
    results = {name: _loo(idata, var_names[name]) for name, idata in idatas.items()}
    with quiet():
        if not ARVIZ_V1:
            return _arviz().compare(results, ic="loo")
        # Some releases round unless told not to, others cannot be told.
        options = {"round_to": "none"} if "round_to" in inspect.signature(_arviz().compare).parameters else {}
        return _arviz().compare(results, **options)


def _loo(idata: Any, var_name: str) -> Any:
    """ArviZ's own result, with weights computed here where it refuses."""
    options: dict[str, Any] = {"pointwise": True, "var_name": var_name, "reff": 1.0}
    if ARVIZ_V1:
        likelihood = get_dataset(idata, "log_likelihood")[var_name].transpose("chain", "draw", ...)
        draws = likelihood.values.reshape(likelihood.sizes["chain"] * likelihood.sizes["draw"], -1)
        log_weights, shapes = pareto_smooth(-draws.T)
        options["log_weights"] = likelihood.copy(data=log_weights.T.reshape(likelihood.shape))
        options["pareto_k"] = likelihood.isel(chain=0, draw=0, drop=True).copy(data=shapes.reshape(likelihood.shape[2:]))
    with quiet():
        return _arviz().loo(idata, **options)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences ArviZ's deprecations and its warnings of tail indices."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*shape parameter of Pareto distribution.*")
        warnings.filterwarnings("ignore", message=".*alias_mapping.*")
        warnings.filterwarnings("ignore", category=FutureWarning, module="arviz")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="arviz")
        yield


@functools.singledispatch
def convert_owner(owner: Any, *args: Any, **options: Any) -> Any:
    """Converts an object's posterior by the function registered for its class.

    Functions are registered by ``@convert_owner.register(Class)``. They are called with the object, the model's arguments, and the options
    ``num_samples``, ``num_chains`` and ``seed``.

    Example:
        >>> class Mine:
        ...     posterior = {"x": [[1.0, 2.0]]}
        >>> from pyro_truncated.diagnostics import convert_owner
        >>> @convert_owner.register
        ... def _(owner: Mine, y, **options):
        ...     return az.from_dict(posterior=owner.posterior)
        >>> idata = to_arviz(Mine(), torch.zeros(2))

    Raises:
        TypeError: if there is none.
    """
    raise TypeError(f"no function is registered that converts a {type(owner).__name__} to ArviZ data (convert_owner.register)")


def find_converter(owner: Any) -> Callable[..., Any] | None:
    """The function registered for an object's class or bases, if any."""
    converter = convert_owner.dispatch(type(owner))
    return None if converter is convert_owner.dispatch(object) else converter
