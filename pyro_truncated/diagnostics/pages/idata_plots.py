"""Plots of training and truncation.

Each function draws into the axes it is given and returns them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pyro_truncated.diagnostics.pages import tensor_plots as plots
from pyro_truncated.diagnostics.pages.tensor_plots import ACCENT, COLOUR, GAPS, tidy
from pyro_truncated.diagnostics.truncation.findings import COVERED_LIMIT
from pyro_truncated.utils.arviz_compat import get_dataset


def plot_restarts(idata: Any, ax: Axes) -> Axes:
    """Plots free energy over training steps, one curve per restart.

    The best one is coloured.

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=5.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16)
        >>> training = fit(SVI(model, guide, ClosedForm(model), Truncated_ELBO(ExhaustiveSearch())), y, steps=5, progress=False)
        >>> idata = to_arviz(model, guide, y, training=training.record, num_samples=25)
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> ax = plot_restarts(idata, ax)
    """
    curves = get_dataset(idata, "training")["free_energy"].values
    ends = np.array([next(iter(curve[np.isfinite(curve)][::-1]), -np.inf) for curve in curves])
    steps = np.arange(1, curves.shape[1] + 1)
    for position in np.argsort(ends):
        is_best = position == ends.argmax()
        label = f"restart {position}: {ends[position]:.6g}" if len(curves) > 1 else None
        ax.plot(steps, curves[position], color=COLOUR if is_best else GAPS, linewidth=1.8 if is_best else 1.2, label=label)
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
    """Plots upper bounds on covered posterior mass, in increasing order.

    The worst data points are named.

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=5.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> checks = check_truncation(guide, y, steps=2, num_samples=100, warn=False)
        >>> idata = to_arviz(model, guide, y, checks=checks)
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> ax = plot_covered_mass(idata, ax)
    """
    bound = get_dataset(idata, "truncated_posterior")["support_mass_bound"]
    values, names = bound.values.ravel(), _names(bound)
    order = values.argsort()
    ax.plot(np.arange(len(values)), values[order], color=COLOUR, marker="." if len(values) < 80 else None)
    ax.axhline(COVERED_LIMIT, color=ACCENT, linestyle=":", linewidth=1.2)
    shown = order[:worst]
    lines = [f"{names[point]}: {values[point]:.3g}" for point in shown]
    ax.plot(np.arange(len(shown)), values[shown], "o", color=ACCENT, markersize=4)
    ax.text(0.98, 0.04, "\n".join(["least covered", *lines]), transform=ax.transAxes, ha="right", va="bottom", fontsize=8)
    ax.set(xlabel="data points, least covered first", ylabel="covered mass, at most", ylim=(min(0.0, values.min()), 1.03))
    return tidy(ax)


def plot_effective_states(idata: Any, ax: Axes) -> Axes:
    """Plots a histogram of effective states per data point.

    The number kept is marked.

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=5.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> idata = to_arviz(model, guide, y, num_samples=25)
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> ax = plot_effective_states(idata, ax)
    """
    data = get_dataset(idata, "truncated_posterior")
    kept = data.sizes["state"]
    ax.hist(data["effective_states"].values.ravel(), bins=np.linspace(1, max(kept, 2), 31).tolist(), color=COLOUR)
    ax.axvline(kept, color=ACCENT, linestyle=":", label=f"{kept} kept")
    ax.set(xlabel="effective number of states", ylabel="data points")
    ax.legend(frameon=False)
    return tidy(ax)


def plot_gap(idata: Any, ax: Axes) -> Axes:
    """Plots what the bound lacks of each data point's log evidence.

    It shows the estimate with its interval, and the exact gap where it is known.

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=5.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> checks = check_truncation(guide, y, steps=2, num_samples=100, warn=False)
        >>> idata = to_arviz(model, guide, y, checks=checks)
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> ax = plot_gap(idata, ax)

    Raises:
        ValueError: if the data hold no checks.
    """
    data = get_dataset(idata, "truncated_posterior")
    if "log_evidence" not in data and "log_evidence_exact" not in data:
        raise ValueError("no log evidence in truncated_posterior; convert with to_arviz(..., checks=check_truncation(...))")
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

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=5.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> idata = to_arviz(model, guide, y, num_samples=25)
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> ax = plot_activations(idata, ax)
    """
    values = get_dataset(idata, "truncated_posterior")["activation_prob"].values
    return plots.plot_activations(torch.from_numpy(values.reshape(-1, values.shape[-1])), ax)


def plot_marginals(idata: Any, ax: Axes, *, rows: int = 40) -> Axes:
    """Activation probabilities of the first data points (rows) and all latents (columns).

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=5.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> idata = to_arviz(model, guide, y, num_samples=25)
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> ax = plot_marginals(idata, ax)
    """
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
