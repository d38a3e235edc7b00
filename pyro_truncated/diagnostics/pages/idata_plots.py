"""Plots of converted data: training, truncation, parameters, predictions.

Each function draws into the axes it is given and returns them. ``idata`` is what :func:`~pyro_truncated.to_arviz` makes of a trained
guide::

    checks = check_truncation(guide, y)
    idata = to_arviz(model, guide, y, training=training.record, checks=checks)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from pyro_truncated.diagnostics.pages import tensor_plots as plots
from pyro_truncated.diagnostics.pages.tensor_plots import ACCENT, COLOUR, GAPS, tidy
from pyro_truncated.diagnostics.prediction import cross_validate, loo_pit, observed_name
from pyro_truncated.diagnostics.truncation.thresholds import COVERED_LIMIT
from pyro_truncated.utils.arguments import check_count, check_kinds, names_arguments
from pyro_truncated.utils.arviz_compat import get_dataset, group_names


def plot_restarts(idata: Any, ax: Axes) -> Axes:
    """Plots free energy over training steps, one curve per restart.

    Example::

        ax = plot_restarts(idata, Figure().subplots())
    """
    curves = get_dataset(idata, "training")["free_energy"].values
    ends = np.array([next(iter(curve[np.isfinite(curve)][::-1]), -np.inf) for curve in curves])
    steps = np.arange(1, curves.shape[1] + 1)
    for position in np.argsort(ends):
        is_best = position == ends.argmax()
        label = f"restart {position}: {ends[position]:.6g}" if len(curves) > 1 else None
        ax.plot(steps, curves[position], color=COLOUR if is_best else GAPS, linewidth=1.8 if is_best else 1.2, label=label)
    # The axis shows the last four fifths, with room below and above.
    late = curves[:, curves.shape[1] // 5 :]
    late = late[np.isfinite(late)]
    if late.size and np.ptp(late) > 0:
        ax.set_ylim(late.min() - 0.15 * np.ptp(late), late.max() + 0.1 * np.ptp(late))
    ax.set(xlabel="step", ylabel="free energy")
    if len(curves) > 1:
        handles, labels = ax.get_legend_handles_labels()
        ax.legend(handles[::-1][:6], labels[::-1][:6], frameon=False, fontsize=8)
    return tidy(ax)


def plot_covered_mass(idata: Any, ax: Axes, *, worst: int = 5) -> Axes:
    """Plots upper bounds on covered posterior mass; names the worst points.

    Example::

        ax = plot_covered_mass(idata, Figure().subplots())

    Args:
        idata: results of :func:`~pyro_truncated.to_arviz`.
        ax: axes to draw on.
        worst: number of data points that are named.
    """
    worst = check_count("worst", worst, 0)
    bound = get_dataset(idata, "truncated_posterior")["support_mass_bound"]
    values, names = bound.values.ravel(), _names(bound)
    order = values.argsort()
    ax.plot(np.arange(len(values)), values[order], color=COLOUR, marker="." if len(values) < 80 else None)
    ax.axhline(COVERED_LIMIT, color=ACCENT, linestyle=":", linewidth=1.2)
    points = order[:worst]
    lines = [f"{names[point]}: {values[point]:.3g}" for point in points]
    ax.plot(np.arange(len(points)), values[points], "o", color=ACCENT, markersize=4)
    ax.text(0.98, 0.04, "\n".join(["least covered", *lines]), transform=ax.transAxes, ha="right", va="bottom", fontsize=8)
    ax.set(xlabel="data points, least covered first", ylabel="covered mass, at most", ylim=(min(0.0, values.min()), 1.03))
    return tidy(ax)


def plot_effective_states(idata: Any, ax: Axes) -> Axes:
    """Plots a histogram of effective states per data point.

    Example::

        ax = plot_effective_states(idata, Figure().subplots())
    """
    data = get_dataset(idata, "truncated_posterior")
    num_states = data.sizes["state"]
    ax.hist(data["effective_states"].values.ravel(), bins=np.linspace(1, max(num_states, 2), 31).tolist(), color=COLOUR)
    ax.axvline(num_states, color=ACCENT, linestyle=":", label=f"{num_states} kept")
    ax.set(xlabel="effective number of states", ylabel="data points")
    ax.legend(frameon=False)
    return tidy(ax)


def plot_gap(idata: Any, ax: Axes) -> Axes:
    """Plots what the bound lacks of each data point's log evidence.

    Example::

        ax = plot_gap(idata, Figure().subplots())

    Raises:
        ValueError: if the data hold no checks.
    """
    data = get_dataset(idata, "truncated_posterior")
    if "log_evidence" not in data and "log_evidence_exact" not in data:
        names = sorted(map(str, data.data_vars))
        raise ValueError(f"no log evidence in truncated_posterior, only {names}; convert with to_arviz(..., checks=check_truncation(...))")
    bound = data["free_energy_checked" if "free_energy_checked" in data else "free_energy"].values.ravel()
    if "log_evidence" in data:
        centre, lower, upper = (data[f"log_evidence{end}"].values.ravel() - bound for end in ("", "_lower", "_upper"))
        order = centre.argsort()
        errors = np.maximum(0.0, np.stack([centre - lower, upper - centre]))[:, order]
        ax.errorbar(
            np.arange(len(order)), centre[order], yerr=errors, fmt=".", color=COLOUR, ecolor=GAPS, label="estimated, with its interval"
        )
    if "log_evidence_exact" in data:
        exact = data["log_evidence_exact"].values.ravel() - bound
        order = order if "log_evidence" in data else exact.argsort()
        ax.plot(np.arange(len(order)), exact[order], "_", color=ACCENT, label="exact")
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set(xlabel="data points, in order of the gap", ylabel="log evidence - bound, nats")
    ax.legend(frameon=False)
    return tidy(ax)


def plot_activations(idata: Any, ax: Axes) -> Axes:
    """Histogram of the expected number of active latents per data point.

    Example::

        ax = plot_activations(idata, Figure().subplots())
    """
    values = get_dataset(idata, "truncated_posterior")["activation_prob"].values
    return plots.plot_activations(torch.from_numpy(values.reshape(-1, values.shape[-1])), ax)


def plot_marginals(idata: Any, ax: Axes, *, rows: int = 40) -> Axes:
    """Activation probabilities of the first data points (rows) and all latents (columns).

    Example::

        ax = plot_marginals(idata, Figure().subplots())

    Args:
        idata: results of :func:`~pyro_truncated.to_arviz`.
        ax: axes to draw on.
        rows: number of data points shown.
    """
    rows = check_count("rows", rows)
    values = get_dataset(idata, "truncated_posterior")["activation_prob"].values
    picture = ax.imshow(values.reshape(-1, values.shape[-1])[:rows], cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    ax.figure.colorbar(picture, ax=ax, label="probability to be active")
    ax.set(xlabel="latent", ylabel="data point")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return ax


def _names(values: Any) -> list[str]:
    """Labels of the entries by their coordinates."""
    labels = []
    for position in np.ndindex(*values.shape):
        parts = [str(values[dim].values[i]) if dim in values.coords else str(i) for dim, i in zip(values.dims, position, strict=True)]
        labels.append(f"{', '.join(map(str, values.dims))} {', '.join(parts)}" if parts else "all data")
    return labels


@names_arguments
def plot_predictive_check(idata: Any, ax: Axes, *, group: str = "posterior_predictive", name: str | None = None, draws: int = 30) -> Axes:
    """Distribution of all observed values beside those of drawn data sets.

    Example::

        ax = plot_predictive_check(idata, Figure().subplots(), group="marginal_predictive")

    Args:
        idata: from :func:`~pyro_truncated.to_arviz`.
        ax: where to draw.
        group: predictive group.
        name: observed site; needed if there are several.
        draws: number of data sets.
    """
    draws, name = check_count("draws", draws), name or observed_name(idata, group)
    values, predicted = get_dataset(idata, "observed_data")[name].values.ravel(), get_dataset(idata, group)[name]
    rows = predicted.isel(draw=slice(0, max(1, draws // predicted.sizes["chain"]))).values.reshape(-1, values.size)
    # Of both only what was observed.
    values, rows = values[~np.isnan(values)], rows[:, ~np.isnan(values)]
    every = np.concatenate([values, rows.ravel()])
    every = every[np.isfinite(every)]
    low, high = every.min().item(), every.max().item()
    if (every == np.round(every)).all():
        width = max(1, (high - low) // 50)  # about 50 bins
        bins = np.arange(low, high + 1 + width, width) - 0.5
    else:
        # Of Freedman and Diaconis's width. NumPy would make all edges, however many heavy tails need.
        quartiles = np.quantile(values[np.isfinite(values)].astype(float), [0.25, 0.75])
        width = max(2 * np.ptp(quartiles) / values.size ** (1 / 3), (high - low) / 100)
        bins = np.linspace(low, high, 1 + (max(10, int((high - low) / width)) if width else 10))
    for row in rows:
        ax.plot(*_outline(row, bins), color="C0", alpha=0.25, linewidth=0.8)
    ax.plot(*_outline(values, bins), color="black")
    ax.set(xlabel=name, yticks=[])
    ax.legend([Line2D([], [], color="C0"), Line2D([], [], color="black")], ["drawn", "observed"], frameon=False, fontsize=8)
    return tidy(ax)


def _outline(values: np.ndarray, bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    heights, edges = np.histogram(values[np.isfinite(values)], bins=bins, density=True)
    return (edges[1:] + edges[:-1]) / 2, heights


def plot_pareto_k(idata: Any, ax: Axes, *, var_name: str | None = None) -> Axes:
    """Plots Pareto tail indices of PSIS-LOO.

    Example::

        ax = plot_pareto_k(idata, Figure().subplots())

    Args:
        idata: results of :func:`~pyro_truncated.to_arviz`.
        ax: axes to draw on.
        var_name: the observed site. Default: the only one.
    """
    shapes = cross_validate(idata, var_name=var_name).pareto_k
    ax.plot(np.arange(len(shapes)), shapes, "+", color="C0")
    # Unreliable above 0.7; above 1 the weights have no mean.
    for level, style in ((0.7, "--"), (1.0, "-.")):
        ax.axhline(level, linestyle=style, color="grey", linewidth=0.8)
    ax.set(xlabel="data point", ylabel="tail index")
    return tidy(ax)


def plot_loo_pit(idata: Any, ax: Axes, *, name: str | None = None, features: Sequence[int] | None = None, level: float = 0.05) -> Axes:
    """Distribution functions of the leave-one-out transforms of each feature, less the uniform's.

    The band holds the curve of a feature whose transforms are uniform with probability ``1 - level``, for all features together
    (Dvoretzky-Kiefer-Wolfowitz, Bonferroni). A curve like an S shows predictions that are too narrow or too wide, a bow biased ones. Each
    coloured curve left its own band.

    Example::

        ax = plot_loo_pit(idata, Figure().subplots())

    Args:
        idata: results of :func:`~pyro_truncated.to_arviz`.
        ax: axes to draw on.
        name: the observed site. Default: the only one.
        features: which features are drawn. Default: all.
        level: probability that a curve leaves the band by chance.
    """
    check_kinds(plot_loo_pit, level=level)
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1; got {level}")
    transforms = loo_pit(idata, name=name)
    columns = list(features) if features is not None else list(range(transforms.shape[1]))
    samples = [column[np.isfinite(column)] for column in transforms[:, columns].T]
    samples = [np.sort(column) for column in samples if len(column)]
    grid = np.linspace(0, 1, 201)
    bands = [math.sqrt(math.log(2 * len(samples) / level) / (2 * len(column))) for column in samples]
    ax.fill_between(grid, -max(bands), max(bands), color=GAPS, alpha=0.4, linewidth=0, label=f"uniform, {1 - level:.0%}")
    for column, band in zip(samples, bands, strict=True):
        curve = np.searchsorted(column, grid, side="right") / len(column) - grid
        is_outside = np.abs(curve).max() > band
        ax.plot(grid, curve, color=ACCENT if is_outside else COLOUR, linewidth=1.0, alpha=0.8)
    ax.set(xlabel="leave-one-out PIT", ylabel="ECDF - uniform")
    ax.legend(frameon=False, loc="upper right")
    return tidy(ax)


def plot_forest(idata: Any, ax: Axes, *, var_names: Sequence[str] | None = None, most: int = 30) -> Axes:
    """Intervals of global latents (weights, scales): quartiles and 94 % of their draws.

    Example::

        ax = plot_forest(idata, Figure().subplots())

    Args:
        idata: from :func:`~pyro_truncated.to_arviz`.
        ax: where to draw.
        var_names: variables of ``posterior``. Default: those of no data point.
        most: entries shown of each variable.

    Raises:
        ValueError: if there is nothing to show.
    """
    names = list(var_names) if var_names is not None else global_names(idata)
    if not names:
        raise ValueError("the posterior has no global latents; parameters are point estimates, which have no intervals")
    rows = []
    for name, variable in get_dataset(idata, "posterior")[names].data_vars.items():
        entries = variable.stack(sample=("chain", "draw")).transpose(..., "sample")
        for position in itertools.islice(np.ndindex(*entries.shape[:-1]), most):
            label = f"{name}[{', '.join(map(str, position))}]" if position else str(name)
            rows.append((label, np.quantile(entries.values[position], [0.03, 0.25, 0.5, 0.75, 0.97])))
    for height, (_, (low, left, middle, right, high)) in enumerate(reversed(rows)):
        ax.plot([low, high], [height] * 2, color="C0", linewidth=1)
        ax.plot([left, right], [height] * 2, color="C0", linewidth=3)
        ax.plot(middle, height, "o", color="white", markeredgecolor="C0", markersize=4)
    ax.set_yticks(range(len(rows)), [label for label, _ in reversed(rows)], fontsize=8)
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
    """Models by expected log predictive density, from :func:`~pyro_truncated.diagnostics.compare_models`.

    Example::

        table = compare_models({"six": idata, "three": other})
        ax = plot_comparison(table, Figure().subplots())

    Raises:
        TypeError: for anything but that table, data that are not compared yet for example.
    """
    if not hasattr(table, "columns"):
        raise TypeError(f"table must be what compare_models returns of several models; got {type(table).__name__}")
    # ArviZ 0.2x calls it otherwise.
    elpd = table["elpd_loo" if "elpd_loo" in table else "elpd"].astype(float)
    heights = np.arange(len(table))[::-1]
    ax.errorbar(elpd, heights, xerr=table["se"].astype(float), fmt="o", color="black", capsize=2)
    ax.set_yticks(heights, list(table.index))
    ax.set_xlabel("elpd")
    return tidy(ax)
