"""Training on minibatches: natural-gradient steps for the inducing variables, Adam for everything else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from pyro_truncated.distributed.shards import draw_alike
from pyro_truncated.distributed.world import agree, failing_together
from pyro_truncated.gplvm.spike_slab.bound import Views
from pyro_truncated.gplvm.spike_slab.inducing_posterior import InducingPosterior
from pyro_truncated.gplvm.spike_slab.model import SpikeSlabMRD
from pyro_truncated.gplvm.spike_slab.shared_minibatch import Minibatch, add_gradients, drawn, is_part, latents_of_owners
from pyro_truncated.gplvm.spike_slab.switches import NEARLY_ON
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.arrays import takes_arrays
from pyro_truncated.utils.counts import check_count

_INDUCING = (".mean", ".scale_tril")
_TURNS = 20
# Adam's steps are about as long as its learning rate, in latents of unit variance and logarithms.
_FASTEST = 10.0


@names_arguments
@takes_arrays
def natural_step(model: SpikeSlabMRD, y: Views, index: Tensor | slice = slice(None), rate: float = 1.0) -> None:
    r"""Moves the posteriors of the inducing variables along the natural gradient, estimated from some data points.

    With :math:`\Lambda = S^{-1}` and :math:`\eta = \Lambda m` of the whitened inducing variables,
    :math:`\Lambda \leftarrow (1 - \rho) \Lambda + \rho (I + \beta \bar\Psi_2)` and
    :math:`\eta \leftarrow (1 - \rho) \eta + \rho (\beta\Psi_1^\top Y)`, sums scaled up to all data and, with missing outputs, the
    difference between an output's :math:`\Psi_2` and their mean taken to the right. With all data and :math:`\rho = 1` this is the optimum
    if nothing is missing.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> natural_step(explicit_copy(model, y), y)

    Args:
        model: a model with ``collapsed=False``.
        y: all data.
        index: the data points to use.
        rate: :math:`\rho`, above 0 and at most 1.

    Raises:
        ValueError: if the model is collapsed or the rate is out of range.

    Reference:
        Hensman, Fusi and Lawrence, "Gaussian processes for big data" (2013).
    """
    if model.collapsed:
        raise ValueError("the inducing variables of a collapsed model are at their optimum already; use collapsed=False")
    if not 0 < rate <= 1:
        raise ValueError(f"rate must lie in (0, 1]; got {rate}")
    views = model.check_data(y)
    _natural_step(model, Minibatch(index, index, model.num_data / len(views[0][index])), views, rate)


@torch.no_grad()
def _natural_step(model: SpikeSlabMRD, batch: Minibatch, views: list[Tensor], rate: float) -> None:
    for c, (view, outputs) in enumerate(zip(model.views, views, strict=True)):
        posterior, data = view.explicit(), outputs[batch.rows]
        with torch.enable_grad():
            mean, covariance = (v.detach().requires_grad_() for v in (posterior.mean, posterior.covariance))
            moved = InducingPosterior(posterior.cholesky.detach(), mean, covariance)
            expected = 0.0 * (mean.sum() + covariance.sum())
            if len(data):
                expected = expected + batch.scale * view.log_likelihood(model.inputs(c, batch.positions), data, moved).sum()
            by_mean, by_covariance = batch.total(torch.autograd.grad(expected, (mean, covariance)))
        # Twice the curvature of the expected log likelihood of one output: the precision that the data add.
        gain = -(by_covariance + by_covariance.mT) / view.num_functions
        precision = torch.cholesky_inverse(view.scale_tril.double())
        eta = precision @ posterior.mean
        precision = (1 - rate) * precision + rate * (torch.eye(len(gain), dtype=gain.dtype, device=gain.device) + gain)
        eta = (1 - rate) * eta + rate * (by_mean + gain @ posterior.mean)
        factor = torch.linalg.cholesky(precision)
        view.mean = torch.cholesky_solve(eta, factor).to(view.mean).contiguous()
        view.scale_tril = torch.linalg.cholesky(torch.cholesky_inverse(factor)).to(view.scale_tril)


@names_arguments
@takes_arrays
def fit_minibatches(
    model: SpikeSlabMRD,
    y: Views,
    steps: int,
    *,
    batch_size: int = 256,
    learning_rate: float = 0.02,
    rate: float = 0.3,
    switches_from: float = 0.3,
    generator: torch.Generator | None = None,
    callback: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Trains a model on minibatches, from where it is: for data of any size.

    Data may be shared out to several processes (:func:`pyro_truncated.distributed.shard`), all of which have the model of all data,
    initialised alike: gradients of what belongs to no data point are summed, each process moves the latents of its own data points, and in
    the end all have all latents.

    Every step draws data points without replacement, takes a natural-gradient step for the inducing variables and an Adam step for all
    other parameters, whose rate falls to a tenth over the last half. Switches are held on for a share of the steps.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> bounds = fit_minibatches(explicit_copy(model, y), y, steps=3, batch_size=10)

    Args:
        model: a model with ``collapsed=False``, initialised.
        y: its data.
        steps: number of steps.
        batch_size: data points per step.
        learning_rate: of Adam.
        rate: of the natural gradient, at the start; it falls likewise.
        switches_from: share of the steps after which the switches are free.
        generator: source of randomness of the minibatches.
        callback: called with the number of each step and its estimate of the bound.

    Returns:
        The estimates of the bound.

    Raises:
        ValueError: if the model is collapsed, or a number is out of range.
    """
    steps, batch_size = check_count("steps", steps, least=0), check_count("batch_size", batch_size)
    if not 0 < learning_rate <= _FASTEST:
        raise ValueError(f"learning_rate must be a positive number of at most {_FASTEST:g}; got {learning_rate!r}")
    views = model.check_data(y, takes_shards=True)
    model.check_batch(batch_size)
    free_from, estimates = int(switches_from * steps), []
    with failing_together() if is_part(views) else nullcontext():
        if is_part(views):
            model.load_state_dict(agree(model.state_dict()))
            draw_alike(generator)
        parameters = [p for name, p in model.named_parameters() if p.requires_grad and not any(part in name for part in _INDUCING)]
        optimizer = torch.optim.Adam(parameters, lr=learning_rate)
        for step in range(steps):
            decay = 0.1 ** max(0.0, 2 * step / steps - 1)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * decay
            batch = drawn(model, views, batch_size, generator)
            if step == free_from > 0:
                with torch.no_grad():
                    model.logits = torch.full_like(model.logits, NEARLY_ON)
            with model.holding(1.0) if step < free_from else nullcontext():
                estimates.append(_step(model, batch, views, rate * decay, optimizer))
            if callback is not None:
                callback(step, estimates[-1])
        if is_part(views):
            latents_of_owners(model, views)
    return estimates


def _step(model: SpikeSlabMRD, batch: Minibatch, views: list[Tensor], rate: float, optimizer: torch.optim.Optimizer) -> float:
    _natural_step(model, batch, views, rate)
    model.zero_grad()
    bound = model.bound_of([data[batch.rows] for data in views], model.latents(batch.positions), batch.scale, batch.share)
    (-bound / model.num_data).backward()
    add_gradients(model, batch)
    optimizer.step()
    return float(batch.total([bound.detach()])[0])


@names_arguments
@takes_arrays
def explicit_copy(model: SpikeSlabMRD, y: Views) -> SpikeSlabMRD:
    """A collapsed model with its inducing variables made explicit, at their optimum: to go on with minibatches.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> copy = explicit_copy(model, y)  # fit_minibatches trains it
    """
    duplicate = copy.deepcopy(model)
    duplicate.collapsed = False
    for view in duplicate.views:
        view.make_explicit()
    # Local bounds of labels follow the inducing variables, and those follow them: a few turns.
    for _ in range(1 if all(view.likelihood is None for view in duplicate.views) else _TURNS):
        natural_step(duplicate, y)
    return duplicate
