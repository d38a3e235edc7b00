"""Pictures of spike-and-slab GP-LVMs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.gplvm.spike_slab.inference import Posterior
from pyro_truncated.gplvm.spike_slab.model import SpikeSlabMRD
from pyro_truncated.utils.arguments import names_arguments


@names_arguments
@torch.no_grad()
def plot_latents(
    posterior: Posterior, ax: Any, *, view: int = 0, labels: Tensor | None = None, dims: tuple[int, int] | None = None, resolution: int = 40
) -> Any:
    """Plots latent means in two dimensions over a view's predictive deviation.

    It is dark where the model has seen no data.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> ax = plot_latents(Posterior(model, y), ax, dims=(0, 1), resolution=10)

    Args:
        posterior: the trained model.
        ax: matplotlib axes.
        view: the view whose uncertainty is shown.
        labels: classes of the data points, for their colours.
        dims: the dimensions. Default: the view's two most relevant ones.
        resolution: points of the background per side; the other dimensions are at zero.

    Returns:
        The axes.
    """
    model = posterior.model
    if dims is None:
        first, second = model.relevance()[view].argsort(descending=True)[:2].tolist()
        dims = (first, second)
    loc = model.loc.detach()[:, list(dims)]
    low, high = loc.amin(0), loc.amax(0)
    margin = 0.15 * (high - low)
    axes = [torch.linspace(float(a), float(b), resolution, dtype=loc.dtype) for a, b in zip(low - margin, high + margin, strict=True)]
    grid = torch.zeros(resolution**2, model.num_latents, dtype=loc.dtype)
    grid[:, list(dims)] = torch.cartesian_prod(*axes)
    deviation = posterior.predict(grid.to(model.loc.device), view).variance.mean(1).clamp(min=0).sqrt().reshape(resolution, resolution)
    ax.pcolormesh(axes[0].numpy(), axes[1].numpy(), deviation.mT.cpu().numpy(), cmap="Greys", shading="auto", rasterized=True)
    points = loc.cpu().numpy()
    if labels is None:
        ax.scatter(points[:, 0], points[:, 1], s=6, color="tab:blue")
    else:
        labels = torch.as_tensor(labels)
        for number, label in enumerate(labels.unique().tolist()):
            chosen = (labels == label).cpu().numpy()
            ax.scatter(points[chosen, 0], points[chosen, 1], s=6, color=f"C{number}", label=str(label))
        ax.legend(frameon=True, markerscale=2, fontsize=8)
    ax.set(xlabel=f"latent {dims[0]}", ylabel=f"latent {dims[1]}")
    return ax


@names_arguments
@torch.no_grad()
def plot_relevance(model: SpikeSlabMRD, ax: Any, *, view: int = 0) -> Any:
    """Plots weights of the kernel and switches for a view's dimensions.

    Bars to the left are relevances (see ``SpikeSlabMRD.relevance``) without the switches, divided by the largest: what one would put a
    threshold to. Bars to the right are the probabilities of the switches.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> ax = plot_relevance(model, ax)

    Args:
        model: the trained model.
        ax: matplotlib axes.
        view: the view.

    Returns:
        The axes.
    """
    gamma = model.probability[view].detach()
    with model.holding(1.0):
        weight = model.relevance()[view]
    order = weight.argsort(descending=True)
    weights, switches = (v[order].double().cpu().numpy() for v in (weight / weight.max(), gamma))
    positions = torch.arange(len(order)).numpy()
    ax.bar(positions - 0.2, weights, width=0.4, color="0.6", label="relevance by the kernel (largest = 1)")
    ax.bar(positions + 0.2, switches, width=0.4, color="tab:green", label="probability of the switch")
    ax.set_xticks(positions, [str(q) for q in order.tolist()])
    ax.set(xlabel="latent dimension", ylim=(0, 1.3))
    ax.legend(frameon=False, fontsize=8)
    return ax


@names_arguments
@torch.no_grad()
def plot_switches(model: SpikeSlabMRD, ax: Any, *, names: Sequence[str] | None = None) -> Any:
    """Plots probabilities of all views' switches for each dimension.

    It shows which dimensions are shared and which private.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> ax = plot_switches(model, ax)

    Args:
        model: the trained model.
        ax: matplotlib axes.
        names: names of the views. Default: "view 1", "view 2", ...

    Returns:
        The axes.

    Raises:
        ValueError: if the number of names is not that of the views.
    """
    labels = [f"view {c + 1}" for c in range(model.num_views)] if names is None else list(names)
    if len(labels) != model.num_views:
        raise ValueError(f"names must name each of the {model.num_views} views; got {labels}")
    positions = torch.arange(model.num_latents).numpy()
    width = 0.8 / model.num_views
    for c, (label, row) in enumerate(zip(labels, model.probability.cpu().numpy(), strict=True)):
        ax.bar(positions + width * (c - (model.num_views - 1) / 2), row, width=width, color=f"C{c}", label=label)
    if bool((model.prior == model.prior[0, 0]).all()):
        ax.axhline(float(model.prior[0, 0]), color="0.5", linewidth=1, linestyle="dashed", label="prior")
    ax.set(xlabel="latent dimension", xticks=positions, ylim=(0, 1.3))
    ax.legend(frameon=False, fontsize=8, ncols=3)
    return ax
