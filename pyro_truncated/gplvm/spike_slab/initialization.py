"""Starting points of latent variable models: from the data, or at random."""

from __future__ import annotations

from collections.abc import Callable

import torch
from pyro.contrib.gp import kernels
from torch import Tensor

from pyro_truncated.gp.kernels.linear_ard import LinearARD
from pyro_truncated.gplvm.principal_components import principal_components
from pyro_truncated.gplvm.spike_slab.bound import Views
from pyro_truncated.gplvm.spike_slab.model import SpikeSlabMRD
from pyro_truncated.gplvm.spike_slab.view import View
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.arrays import takes_arrays
from pyro_truncated.utils.generators import device_of

Start = str | Tensor | Callable[[list[Tensor]], Tensor]
STARTS = ("pca", "random")
_NOISE_SHARE = 0.01
_START_SCALE = 0.3


@names_arguments
@takes_arrays
@torch.no_grad()
def initialize(model: SpikeSlabMRD, y: Views, start: Start = "pca", generator: torch.Generator | None = None) -> None:
    """Sets all parameters to a starting point.

    Outputs are centred. Latent means are standardised principal components of all views side by side, each view divided by its standard
    deviation and the square root of its number of outputs so that none drowns the others; or draws from the prior. Inducing inputs are
    latent means of random data points. The noise starts at a hundredth of the variance of the data, kernels at that variance. Switches
    start at their prior odds.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> initialize(model, y, start="random", generator=torch.Generator().manual_seed(0))

    Args:
        model: the model.
        y: its data.
        start: ``"pca"``, ``"random"``, latent means ``(N, Q)``, or a function that makes them from the views (centred, complete).
        generator: source of randomness.

    Raises:
        ValueError: if the start is unknown or misshapen, or a view is constant.
    """
    views = model.check_data(y)
    complete = [_prepare(c, view, data) for c, (view, data) in enumerate(zip(model.views, views, strict=True))]
    loc = _latent_means(start, complete, model.num_latents, generator)
    if loc.shape != (model.num_data, model.num_latents) or not bool(loc.isfinite().all()):
        expected = model.num_data, model.num_latents
        raise ValueError(f"start must give finite latent means of shape {expected}; got {tuple(loc.shape)}")
    # Copies: training goes on in place, and the user's start must stay one for the next run.
    model.set_latents(loc, torch.full_like(loc, _START_SCALE))
    model.logits = model.prior.logit()
    model.num_steps.zero_()
    for view, data in zip(model.views, complete, strict=True):
        _start_view(view, model.loc.detach(), data.square().mean(), generator)


def _prepare(c: int, view: View, y: Tensor) -> Tensor:
    """Centres a view; returns its data with zeros (the means) for missing entries."""
    numbers = y if view.likelihood is None else view.likelihood.as_numbers(y)
    mean = numbers.nanmean(0).nan_to_num()
    view.center = (mean if view.likelihood is None else view.likelihood.base(y)).to(view.center)
    centred = (numbers - mean).double().nan_to_num()
    if not bool((centred != 0).any()):
        raise ValueError(f"view {c} of y does not vary (its outputs are constant, or all missing): there is nothing to learn from it")
    return centred


def _latent_means(start: Start, views: list[Tensor], num_latents: int, generator: torch.Generator | None) -> Tensor:
    if isinstance(start, Tensor):
        return start
    if callable(start):
        return start(views)
    if start == "pca":
        return principal_components(torch.cat([v / (v.square().mean() * v.shape[1]).sqrt() for v in views], 1), num_latents, generator)
    if start == "random":
        return _randn(len(views[0]), num_latents, views[0], generator)
    raise ValueError(f"start must be one of {STARTS}, latent means (N, Q), or a function that makes them; got {start!r}")


def _start_view(view: View, loc: Tensor, variance: Tensor, generator: torch.Generator | None) -> None:
    if view.likelihood is None:
        view.noise = (_NOISE_SHARE * variance).to(view.noise)
    elif view.collapsed:
        view.point = view.center.double().expand_as(view.point).clone()
    # Functions of labels are log odds or the like, whatever the variance of the labels.
    _start_kernel(view.kernel, variance if view.likelihood is None else torch.ones_like(variance))
    if not isinstance(view.kernel, LinearARD):
        chosen = torch.randperm(len(loc), generator=generator, device=device_of(generator))
        rows = loc[chosen[: len(view.inducing)].to(loc.device)]
        view.inducing = rows + 1e-2 * _randn(len(rows), rows.shape[1], rows, generator).to(rows)


def _start_kernel(kernel: kernels.Kernel, variance: Tensor) -> None:
    """Gives a single kernel the variance of the data; one that the user has put together stays as it is."""
    value = getattr(kernel, "variance", None)
    if isinstance(value, Tensor):
        kernel.variance = (variance / value.numel()).to(value).expand(value.shape).clone()


def _randn(rows: int, columns: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    device = like.device if generator is None else generator.device
    return torch.randn(rows, columns, generator=generator, device=device, dtype=torch.float64).to(like.device)
