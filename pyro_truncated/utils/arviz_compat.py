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
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

ARVIZ_V1 = int(version("arviz").split(".")[0]) >= 1


def _arviz() -> Any:
    """ArviZ, imported where it is needed: it takes seconds."""
    import arviz

    return arviz


def make_idata(**datasets: xr.Dataset) -> Any:
    """Joins datasets, one group each, to ``InferenceData`` or a ``DataTree``."""
    if ARVIZ_V1:
        return xr.DataTree.from_dict(dict(datasets))
    return _arviz().InferenceData(**datasets)


def get_dataset(idata: Any, group: str) -> xr.Dataset:
    """The dataset of one group."""
    node = idata[group]
    return node.to_dataset() if isinstance(node, xr.DataTree) else node


def group_names(idata: Any) -> list[str]:
    """Names of the groups, in order."""
    return list(idata.children) if isinstance(idata, xr.DataTree) else list(idata.groups())


def read_netcdf(path: str | Path) -> Any:
    """Converted data that were saved with their method ``to_netcdf``."""
    return _arviz().from_netcdf(str(path))


def pareto_shapes(log_ratios: np.ndarray) -> np.ndarray:
    """Pareto tail indices ``(N,)`` of log importance ratios ``(N, M)``."""
    return _smooth(log_ratios)[1]


def smoothed_weights(log_ratios: np.ndarray) -> np.ndarray:
    """Pareto-smoothed, normalised log weights ``(N, M)`` of log ratios."""
    return _smooth(log_ratios)[0]


def _smooth(log_ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ratios = np.asarray(log_ratios, dtype=float)
    lowest = np.min(ratios, where=np.isfinite(ratios), initial=0.0)
    # Impossible draws are far from the tail that is fitted, but infinite logs would spoil the sorting.
    ratios = np.where(np.isfinite(ratios), ratios, lowest - 1000.0)
    weights, shapes = np.full(ratios.shape, -np.log(ratios.shape[1])), np.zeros(len(ratios))
    # Ratios that are equal but for rounding have no tail.
    varies = np.ptp(ratios, axis=1) > 1e-10 * (1 + np.abs(ratios).max(axis=1))
    if varies.any():
        smooth = _smooth_rows if ARVIZ_V1 else _smooth_all
        weights[varies], shapes[varies] = smooth(ratios[varies])
    return weights, shapes


def _smooth_all(ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    weights, shapes = _arviz().psislw(ratios, reff=1.0)
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


@dataclasses.dataclass(frozen=True)
class LooResult:
    """Leave-one-out cross-validation by Pareto-smoothed importance sampling.

    Attributes:
        elpd: expected log predictive density of all observations.
        se: its standard error.
        p_loo: effective number of parameters.
        pointwise: the terms, one per observation.
        pareto_k: tail indices of them.
    """

    elpd: float
    se: float
    p_loo: float
    pointwise: np.ndarray
    pareto_k: np.ndarray


def loo(idata: Any, var_name: str) -> LooResult:
    """ArviZ's ``loo`` of independent draws, pointwise."""
    result = _loo(idata, var_name)
    names = ("elpd", "p", "elpd_i") if ARVIZ_V1 else ("elpd_loo", "p_loo", "loo_i")
    elpd, p_loo, pointwise = (getattr(result, name) for name in names)
    return LooResult(float(elpd), float(result.se), float(p_loo), np.asarray(pointwise).ravel(), np.asarray(result.pareto_k).ravel())


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
        log_weights, shapes = _smooth(-draws.T)
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


# --- drawing: by ArviZ where it draws into given axes (0.x); 1.x makes figures of its own, so the same content is drawn here ---


def draw_pareto_k(shapes: np.ndarray, ax: Axes) -> None:
    """Tail indices of the observations."""
    if not ARVIZ_V1:
        with quiet():
            _arviz().plot_khat(shapes, ax=ax, show_hlines=True, textsize=9)
        return
    ax.plot(np.arange(len(shapes)), shapes, "+", color="C0")
    # Unreliable above 0.7; above 1 the weights have no mean.
    for level, style in ((0.7, "--"), (1.0, "-.")):
        ax.axhline(level, linestyle=style, color="grey", linewidth=0.8)
    ax.set(xlabel="Data Point", ylabel="Shape parameter k")


def draw_predictive_check(idata: Any, group: str, name: str, ax: Axes, draws: int) -> None:
    """Plots distributions of observed and drawn values, or shares of integers."""
    observed = get_dataset(idata, "observed_data")[[name]]
    predicted = get_dataset(idata, group)[[name]]
    predicted = predicted.isel(draw=slice(0, max(1, draws // predicted.sizes["chain"])))
    if np.isnan(observed[name].values).any():
        # Of both only what was observed.
        index = np.flatnonzero(~np.isnan(observed[name].values.ravel()))
        observed = xr.Dataset({name: ("entry", observed[name].values.ravel()[index])})
        rows = predicted[name].values
        predicted = xr.Dataset({name: (("chain", "draw", "entry"), rows.reshape(*rows.shape[:2], -1)[..., index])})
    are_whole = all(_holds_integers(data[name].values) for data in (observed, predicted))
    if are_whole:
        observed, predicted = observed.astype(np.int64), predicted.astype(np.int64)
    # ArviZ's histograms put whole numbers between themselves and the next.
    if not ARVIZ_V1 and not are_whole:
        part = make_idata(posterior_predictive=predicted, observed_data=observed)
        state = np.random.get_state()  # noqa: NPY002
        with quiet():
            # It shuffles the draws by the global generator, which is put back.
            _arviz().plot_ppc(
                part,
                ax=ax,
                num_pp_samples=predicted.sizes["chain"] * predicted.sizes["draw"],
                random_seed=0,
                mean=False,
                legend=False,
                textsize=9,
            )
        np.random.set_state(state)  # noqa: NPY002
        _name_lines(ax)
        return
    values = observed[name].values.ravel()
    bins = _bins(values, predicted[name].values)
    for row in predicted[name].values.reshape(-1, values.size):
        ax.plot(*_outline(row, bins), color="C0", alpha=0.25, linewidth=0.8)
    ax.plot(*_outline(values, bins), color="black")
    ax.set(xlabel=name, yticks=[])
    _name_lines(ax)


def _name_lines(ax: Axes) -> None:
    ax.legend([Line2D([], [], color="C0"), Line2D([], [], color="black")], ["drawn", "observed"], frameon=False, fontsize=8)


def _holds_integers(values: np.ndarray) -> bool:
    """Whether all values are whole numbers that an integer holds."""
    return bool((np.isfinite(values) & (np.abs(values) < 2**53)).all() and (values == np.round(values)).all())


def _bins(observed: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Edges that hold all observed and drawn values."""
    low, high = min(observed.min(), predicted.min()), max(observed.max(), predicted.max())
    if np.issubdtype(observed.dtype, np.integer):
        width = max(1, (high - low) // 50)  # about 50 bins
        return np.arange(low, high + 1 + width, width) - 0.5
    count = len(np.histogram_bin_edges(observed, "auto", (low, high)))
    return np.linspace(low, high, min(max(count, 11), 101))


def _outline(values: np.ndarray, bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    heights, edges = np.histogram(values[np.isfinite(values)], bins=bins, density=True)
    return (edges[1:] + edges[:-1]) / 2, heights


def draw_forest(data: xr.Dataset, ax: Axes) -> None:
    """Intervals of the variables of a dataset of draws."""
    if not ARVIZ_V1:
        with quiet():
            _arviz().plot_forest(data, combined=True, ax=ax, textsize=8)
        return
    rows = []
    for name, variable in data.data_vars.items():
        entries = variable.stack(sample=("chain", "draw")).transpose(..., "sample")
        for position in np.ndindex(*entries.shape[:-1]):
            label = f"{name}[{', '.join(map(str, position))}]" if position else str(name)
            rows.append((label, np.quantile(entries.values[position], [0.03, 0.25, 0.5, 0.75, 0.97])))
    for height, (_, (low, left, middle, right, high)) in enumerate(reversed(rows)):
        ax.plot([low, high], [height] * 2, color="C0", linewidth=1)
        ax.plot([left, right], [height] * 2, color="C0", linewidth=3)
        ax.plot(middle, height, "o", color="white", markeredgecolor="C0", markersize=4)
    ax.set_yticks(range(len(rows)), [label for label, _ in reversed(rows)], fontsize=8)


def draw_comparison(table: Any, ax: Axes) -> None:
    """Expected log predictive densities of the models of a comparison."""
    if not ARVIZ_V1:
        with quiet():
            _arviz().plot_compare(table, ax=ax, textsize=9, insample_dev=False)
        return
    heights = np.arange(len(table))[::-1]
    ax.errorbar(table["elpd"].astype(float), heights, xerr=table["se"].astype(float), fmt="o", color="black", capsize=2)
    ax.set_yticks(heights, list(table.index))
    ax.set_xlabel("elpd")


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
