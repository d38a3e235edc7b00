"""Plots of parameters and predictions.

Each function draws into the axes it is given and returns them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from pyro_truncated.diagnostics.pages.tensor_plots import ACCENT, COLOUR, GAPS, tidy
from pyro_truncated.diagnostics.prediction.cross_validation import cross_validate
from pyro_truncated.diagnostics.prediction.predictive_checks import loo_pit, observed_name
from pyro_truncated.utils import arviz_compat as compat
from pyro_truncated.utils.arviz_compat import get_dataset, group_names


def plot_predictive_check(idata: Any, ax: Axes, *, group: str = "posterior_predictive", name: str | None = None, draws: int = 30) -> Axes:
    """Distribution of all observed values beside those of drawn data sets (``arviz.plot_ppc``).

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=5.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> idata = to_arviz(model, guide, y, num_samples=25)
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> ax = plot_predictive_check(idata, ax, group="marginal_predictive")

    Args:
        idata: from :func:`~pyro_truncated.to_arviz`.
        ax: where to draw.
        group: predictive group.
        name: observed site; needed if there are several.
        draws: number of data sets.
    """
    compat.draw_predictive_check(idata, group, name or observed_name(idata, group), ax, draws)
    return tidy(ax)


def plot_pareto_k(idata: Any, ax: Axes, *, var_name: str | None = None) -> Axes:
    """Plots Pareto tail indices of PSIS-LOO (``arviz.plot_khat``).

    They belong to the marginal likelihood. Above 0.7 a data point is too influential.

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=5.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> idata = to_arviz(model, guide, y, num_samples=25)
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> with warnings.catch_warnings(action="ignore"):  # parameters are point estimates
        ...     ax = plot_pareto_k(idata, ax)
    """
    compat.draw_pareto_k(cross_validate(idata, var_name=var_name).pareto_k, ax)
    return tidy(ax)


def plot_loo_pit(idata: Any, ax: Axes, *, name: str | None = None, features: Sequence[int] | None = None, level: float = 0.05) -> Axes:
    """Distribution functions of the leave-one-out transforms of each feature, less the uniform's.

    The band holds the curve of a feature whose transforms are uniform with probability ``1 - level``. It is wide
    enough for all features together (Dvoretzky-Kiefer-Wolfowitz, Bonferroni). A curve like an S shows predictions
    that are too narrow or too wide, a bow biased ones. Where observations are missing, the band is that of the
    feature seen least often. Each coloured curve left its own band.

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=5.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> idata = to_arviz(model, guide, y, num_samples=25)
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> with warnings.catch_warnings(action="ignore"):  # parameters are point estimates
        ...     ax = plot_loo_pit(idata, ax)
    """
    transforms = loo_pit(idata, name=name)
    chosen = list(features) if features is not None else list(range(transforms.shape[1]))
    seen = [column[np.isfinite(column)] for column in transforms[:, chosen].T]
    seen = [np.sort(column) for column in seen if len(column)]
    grid = np.linspace(0, 1, 201)
    bands = [math.sqrt(math.log(2 * len(seen) / level) / (2 * len(column))) for column in seen]
    ax.fill_between(grid, -max(bands), max(bands), color=GAPS, alpha=0.4, linewidth=0, label=f"uniform, {1 - level:.0%}")
    for column, band in zip(seen, bands, strict=True):
        curve = np.searchsorted(column, grid, side="right") / len(column) - grid
        is_outside = np.abs(curve).max() > band
        ax.plot(grid, curve, color=ACCENT if is_outside else COLOUR, linewidth=1.0, alpha=0.8)
    ax.set(xlabel="leave-one-out PIT", ylabel="ECDF - uniform")
    ax.legend(frameon=False, loc="upper right")
    return tidy(ax)


def plot_forest(idata: Any, ax: Axes, *, var_names: Sequence[str] | None = None, most: int = 30) -> Axes:
    """Intervals of global latents (weights, scales) from their draws (``arviz.plot_forest``).

    Example:
        >>> def model(y):
        ...     level = pyro.sample("level", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(level, 1.0), obs=y)
        >>> y, guide = torch.randn(20), AutoNormal(model)
        >>> loss = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO()).step(y)
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> ax = plot_forest(to_arviz(model, guide, y), ax)

    Args:
        idata: from :func:`~pyro_truncated.to_arviz`.
        ax: where to draw.
        var_names: variables of ``posterior``; default: those of no data point.
        most: entries shown of each variable.

    Raises:
        ValueError: if there is nothing to show.
    """
    names = list(var_names) if var_names is not None else global_names(idata)
    if not names:
        raise ValueError("the posterior has no global latents; parameters are point estimates, which have no intervals")
    data = get_dataset(idata, "posterior")[names]
    parts = {}
    for name, variable in data.data_vars.items():
        inner = [dim for dim in variable.dims if dim not in ("chain", "draw")]
        entry = f"{name}_entry"
        parts[name] = variable.stack({entry: inner}).isel({entry: slice(0, most)}).drop_vars([entry, *inner]) if inner else variable
    compat.draw_forest(data.drop_dims([dim for dim in data.dims if dim not in ("chain", "draw")]).assign(parts), ax)
    return tidy(ax)


def global_names(idata: Any) -> list[str]:
    """Returns continuous latents of no data point, and values computed from them."""
    data = get_dataset(idata, "posterior")
    plates = set(_data_dims(idata))
    return [
        str(name)
        for name, variable in data.data_vars.items()
        if not plates & set(variable.dims) and np.issubdtype(variable.dtype, np.floating)
    ]


def _data_dims(idata: Any) -> list[Any]:
    """Names of the dimensions along which the data points lie."""
    groups = group_names(idata)
    if "truncated_posterior" in groups:
        return [dim for dim in get_dataset(idata, "truncated_posterior")["free_energy"].dims if dim != "chain"]
    local = str(get_dataset(idata, "posterior").attrs.get("latents_of_data_points", ""))
    names = [name for name in local.split(", ") if name in get_dataset(idata, "posterior")]
    return [dim for name in names for dim in get_dataset(idata, "posterior")[name].dims if dim not in ("chain", "draw")]


def plot_comparison(table: Any, ax: Axes) -> Axes:
    """Models by expected log predictive density (``arviz.plot_compare``), from :func:`~pyro_truncated.diagnostics.compare_models`.

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=5.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> idata = to_arviz(model, guide, y, num_samples=25)
        >>> smaller = BinarySparseCoding(9, 3).initialize(y)
        >>> other = to_arviz(smaller, AutoTruncated(smaller, 8).infer(y, ExhaustiveSearch(), steps=1), y, num_samples=25)
        >>> with warnings.catch_warnings(action="ignore"):  # parameters are point estimates
        ...     table = compare_models({"six": idata, "three": other})
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> ax = plot_comparison(table, ax)
    """
    compat.draw_comparison(table, ax)
    return tidy(ax)
